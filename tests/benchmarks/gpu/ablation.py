"""Section `ablation`: this pack's decode with one optimisation changed at a time, in turn."""

import functools
from contextlib import nullcontext

from torch import Tensor

from .rows import Case, Results
from .session import Session
from .turns import in_turn, pairs, snr_db, thread
from .vae import Clip
from .variants import Variant, variants


def cases(session: Session) -> list[Case]:
    """Return one case per change, for a video and for a single frame."""
    found = []
    for size in session.pick(((81, 480, 832), (1, 1024, 1024)), ((9, 32, 32), (1, 48, 48))):
        clip = Clip("wan2.1", "decode", *size)
        for variant in variants(session, session.ours("wan2.1")):
            if variant.single_frame or clip.frames > 1:
                run = functools.partial(_compare, session, clip, variant)
                found.append(Case(clip.label, (variant.name,), run))
    return found


def _compare(session: Session, clip: Clip, variant: Variant) -> Results:
    vae = session.ours("wan2.1")
    x = clip.make(session)
    first: dict[str, Tensor] = {}
    with thread() if variant.plans else nullcontext(lambda call: call()) as there:

        def changed() -> Tensor:
            with variant.change():
                return vae.decode(x, chunk=variant.chunk)

        runs = {"as it is": lambda: vae.decode(x), "changed": lambda: there(changed)}
        results = in_turn(session, runs, look=first.__setitem__, shares_memory=True)
    changed_one, base = results["changed"], results["as it is"]
    if error := changed_one.error or base.error:
        raise error
    values = {
        **changed_one.values(),
        "as_it_is_s": base.median_s,
        "times_as_it_is": pairs(results, "changed", "as it is"),
        "as_it_is_peak_gib": base.values()["peak_gib"],
        "snr_db": snr_db(first["changed"], first["as it is"]),
    }
    yield variant.name, values
