"""The choice of the candidate that runs a convolution on a GPU.

A trial of each shape class, within the budget of `budget.py`, finds the candidates that are right
and precise enough, and their times. The fastest serves if it is enough faster than the plain op,
which is the library's own. `store.py` keeps the times, so that later processes try nothing.

Trials are for what counts. A shape class (`shape_class.py`) holds for similar sizes. Its candidates
are the plain op, comfy-kitchen's kernel and two tiles of Triton; the second tile is left out where
the first one is far too slow. Classes with few products run the plain op, and so does the first
frame of a video, which is the only one that is computed by itself.

A decode of 720 x 1280 x 81 by Wan 2.1 has 26 classes, of which 10 with 99 % of the products are
tried: 20 tiles. A tile takes about 0.7 s, nearly all of it for compilation, so all of them take
about 14 s at most: 7 videos with a budget of 2 s. Other sizes of 512 x 512 to 1024 x 1024 pixels
add none.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import shapes
from ..autotune import is_capturing, log_failure
from ..backends import convolution_order
from ..devices import device_kind
from ..errors import first_line, is_out_of_memory, log_once
from ..warmup_log import preparing
from . import budget, sample, store
from .shape_class import LEAST_PRODUCTS, ShapeClass, class_of
from .trial import Ask, Trial
from .weight import ConvWeight

_logger = logging.getLogger(__name__)

# The plain op is replaced by a candidate that takes at most this part of its time.
_GAIN = 0.98

# Dtypes with kernels as candidates. In float32 none is as precise as the plain op and faster, but
# slices are on kinds of GPUs where the library's `conv3d` can be poor. cuDNN's is not.
_NARROW = (torch.float16, torch.bfloat16)
_SLICED = ("amd", "intel", "apple")
_UNSLICED = ("nvidia",)

# Tiles of Triton that are tried, the first of `convolution_tiles.tiles_for`. A tile takes about a
# second to compile.
_TILES = 2

# Time of the first tile, as a part of the plain op's, from which on no other tile can be faster
# than the plain op: on H200 the best of six took 0.75 to 0.83 of the first one's time.
_TOO_SLOW = 1.35

# The convolutions with most of the products in a decode of Wan 2.1, and a size that is as good as a
# larger one: it fills a GPU. Frames are those of the joined window.
_WIDTHS, _FRAMES, _SIZE = (96, 192, 384), 6, (120, 160)

# Candidates that are compared for `fp16_pays`: the plain op, comfy-kitchen's and the first tile.
# Without sums in float16 a tile is as fast in both dtypes, and is not compiled for this.
_COMPARED = 3

# Decoding in float16 pays from this speed on: it costs a check for overflow.
_PAYS = 1.15

# Most characters of an error in the log.
_REASON_LENGTH = 80

_lock = threading.Lock()
_known: dict[ShapeClass, tuple[str, ...]] = {}
_complete: set[ShapeClass] = set()
_pays: dict[torch.device, bool] = {}


def order(ask: Ask, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the candidates for a call on a GPU, in the order in which to try them.

    Args:
        ask: Runs an op on a candidate.
        op: `conv2d` or `conv3d`.
        args: `x` `[...]`, its `ConvWeight` and perhaps the bias.
        kwargs: The other arguments of the op. Without `out` it is a question for the candidate of
            later calls.

    Returns:
        Names of candidates, variants such as "triton:2" among them; the reference is last.
    """
    x, weight = args[0], args[1]
    kind = device_kind(x.device)
    slices = kind in _SLICED and x.dtype == torch.float32
    if x.dtype not in _NARROW and not (slices and op == "conv3d" and weight.shape[2] > 1):
        return convolution_order(op, kind)
    key = class_of(op, x, weight, kwargs)
    work = budget.current()
    chosen = (_known if work is None else work.chosen).get(key)
    if chosen is not None:
        return chosen
    if work is None or is_capturing(x.device) or not x.numel():
        return _stored(key)
    with _lock:
        if key not in work.chosen:
            work.chosen[key] = _tried(ask, key, args, kwargs, work)
        return work.chosen[key]


def fp16_pays(ask: Ask, device: torch.device) -> bool:
    """Return whether convolutions in float16 are enough faster than in bfloat16.

    Measured once per device with the fastest candidates of both, in half of the budget of the work
    that asks: the other half is for the shapes of that work.

    Args:
        ask: Runs an op on a candidate.
        device: The device.

    Returns:
        False until that is complete.
    """
    known, work = _pays.get(device), budget.current()
    if known is not None or is_capturing(device):
        return bool(known)
    with _lock:
        try:
            kept = store.opened(device)
            known = kept.fact("fp16_pays")
            if known is None and work is not None:
                known = _compared(ask, kept, device, work)
        except Exception as error:
            if is_out_of_memory(error):
                return False
            reason = f"{type(error).__name__}: {first_line(error)}"[:_REASON_LENGTH]
            log_once(f"the speed of float16 on {device} is unknown ({reason}); bfloat16 is used")
            known = False
        if known is not None:
            _pays[device] = known
        return bool(known)


def _stored(key: ShapeClass) -> tuple[str, ...]:
    """Return the order by the trials that there were."""
    found = _known.get(key)
    if found is None:
        found = _known[key] = _ranked(key, store.opened(key.device).times(key.name()))
    return found


def _ranked(key: ShapeClass, times: store.Times) -> tuple[str, ...]:
    plain, *others = _untried(key)
    served = {name: seconds for name, seconds in times.items() if seconds is not None}
    winner = min(served, key=lambda name: served[name], default=plain)
    if plain not in served or served[winner] > _GAIN * served[plain]:
        winner = plain
    return tuple(dict.fromkeys((winner, plain, *others)))


def _untried(key: ShapeClass) -> tuple[str, ...]:
    """Return the order for a shape class without a trial, the plain op first."""
    return convolution_order(key.op, device_kind(key.device))


def _counts(key: ShapeClass, work: budget.TrialBudget) -> bool:
    """Return whether a class is worth a trial in `work`."""
    begins = key.op == "conv2d" and not key.several and not work.picture
    return not begins and key.products() >= LEAST_PRODUCTS


def _tried(
    ask: Ask,
    key: ShapeClass,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    work: budget.TrialBudget,
) -> tuple[str, ...]:
    """Return the order after as many trials as the budget of `work` allows."""
    x: Tensor = args[0]
    kept, shape = store.opened(x.device), key.name()
    if key not in _complete and _counts(key, work):
        names = _candidates(ask, key.op, args, kwargs)
        if set(names) <= kept.times(shape).keys():
            _complete.add(key)
        elif work.left_s > 0:
            start, finished = time.perf_counter(), False
            try:
                with preparing("kernel build", "convolution trials"):
                    asks = kwargs.get("residual") is None and not key.norm
                    finished = _extend(
                        ask, kept, key, names, args, kwargs, work.deadline(), terms=asks
                    )
            except Exception as error:
                log_failure("the trial of", key.op, x, error)
                finished = True
            finally:
                work.spend(time.perf_counter() - start, finished=finished)
            if finished:
                _complete.add(key)
    _known[key] = _ranked(key, kept.times(shape))
    return _known[key]


def _candidates(
    ask: Ask, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of all candidates, the most promising first."""
    x, weight = args[0], args[1]
    kind = device_kind(x.device)
    plain, *_ = convolution_order(op, kind)
    slices = op == "conv3d" and weight.shape[2] > 1 and kind not in _UNSLICED
    library = ("aten", "sliced") if slices else ("aten",)
    others = [name for name in library if name != plain]
    if x.dtype == torch.float32 or kind == "apple":  # no backend has kernels
        return plain, *others
    try:
        count = ask("triton", "variants", x, weight, kwargs["stride"], kwargs["padding"])
    except Exception as error:  # Triton or the op is missing, or a broken installation
        _logger.debug("triton has no variants: %s", error)
        count = 0
    variants = [f"triton:{number}" for number in range(min(count, _TILES))]
    return plain, "kitchen", *variants[:1], *others, *variants[1:]


def _extend(
    ask: Ask,
    kept: store.TrialStore,
    key: ShapeClass,
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    deadline: float,
    *,
    terms: bool = False,
) -> bool:
    """Try the candidates without a result until the deadline; return whether none is left.

    With `terms` the fastest must be right in a call with a residual too, which is of the same
    class.
    """
    op, (plain, *_) = key.op, _untried(key)

    @functools.cache
    def other() -> Trial:
        call = sample.like(op, *sample.with_terms(op, args, kwargs), sample.SIZES[-1])
        return Trial(ask, call, plain)

    for size in sample.SIZES:
        if not sample.fits(op, args, kwargs, size):
            continue
        try:
            # Outside inference mode, so that the trial does not depend on the first caller's mode.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(args[0].device.type, enabled=False),
            ):
                # Without a name, so that a smaller one has its memory.
                return _measured(
                    Trial(ask, sample.like(op, args, kwargs, size), plain),
                    kept,
                    key.name(),
                    names,
                    deadline,
                    other if terms else None,
                )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return False


def _measured(
    trial: Trial,
    kept: store.TrialStore,
    shape: str,
    names: Sequence[str],
    deadline: float,
    other: Callable[[], Trial] | None,
) -> bool:
    """Try the candidates without a result until the deadline; return whether none is left.

    The fastest must serve in the `other` trial too.
    """
    plain = kept.times(shape).get(trial.plain)
    if plain is None:
        plain = trial.plain_seconds()
        kept.put(shape, trial.plain, plain)
    for name in names:
        if name in kept.times(shape):
            continue
        if time.perf_counter() >= deadline:
            return False
        if _is_too_slow(name, kept.times(shape), plain):
            kept.put(shape, name, None)
            continue
        # A kernel that ends the process must not be tried again in the next one.
        kept.put(shape, name, None)
        try:
            share = trial.share(name)
            leads = share is not None and share * plain < _fastest_time(kept, shape)
            if leads and other is not None and not other().serves(name):
                share = None
        except BaseException:
            kept.drop(shape, name)
            raise
        if share is not None:
            kept.put(shape, name, share * plain)
    _log_times(shape, kept.times(shape))
    return True


def _is_too_slow(name: str, times: store.Times, plain: float) -> bool:
    """Return whether the first tile was so slow that another one cannot serve."""
    first = times.get("triton:0")
    return name.startswith("triton:") and first is not None and first > _TOO_SLOW * plain


def _fastest_time(kept: store.TrialStore, shape: str) -> float:
    """Return the seconds of the fastest candidate; the plain op always has some."""
    return min(seconds for seconds in kept.times(shape).values() if seconds is not None)


def _log_times(shape: str, times: store.Times) -> None:
    texts = (f"{name} {'no' if t is None else f'{t * 1e3:.3f} ms'}" for name, t in times.items())
    _logger.debug("%s: %s", shape, ", ".join(texts))


def _compared(
    ask: Ask, kept: store.TrialStore, device: torch.device, work: budget.TrialBudget
) -> bool | None:
    """Return whether float16 pays; None: time ran out before that was known."""
    start = time.perf_counter()
    try:
        return _compared_until(ask, kept, device, start + work.left_s / 2)
    finally:
        work.charge(time.perf_counter() - start)


def _compared_until(
    ask: Ask, kept: store.TrialStore, device: torch.device, deadline: float
) -> bool | None:
    ratios: list[float] = []
    with preparing("kernel build", "comparison of float16 with bfloat16"):
        for channels in _WIDTHS:
            best = []
            for dtype in (torch.bfloat16, torch.float16):
                fastest = _fastest(ask, kept, channels, dtype, device, deadline)
                if fastest is None:
                    return None
                best.append(fastest)
            ratios.append(best[0] / best[1])
    pays = math.prod(ratios) ** (1 / len(ratios)) >= _PAYS
    kept.put_fact("fp16_pays", value=pays)
    _logger.debug("float16 is %s times as fast as bfloat16", ", ".join(f"{r:.2f}" for r in ratios))
    return pays


def _fastest(
    ask: Ask,
    kept: store.TrialStore,
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    deadline: float,
) -> float | None:
    """Return the seconds of the fastest candidate for a convolution; None: time ran out."""
    taps = (channels, channels, 3, 3, 3)
    weight = ConvWeight(taps, dtype, device, lambda: torch.empty(taps, dtype=dtype, device=device))
    x = shapes.new_video(torch.empty(0, dtype=dtype, device=device), (1, channels, _FRAMES, *_SIZE))
    args, kwargs = (x, weight), {"stride": (1, 1, 1), "padding": (1, 1)}
    key = class_of("conv3d", x, weight, kwargs)
    names = _candidates(ask, "conv3d", args, kwargs)[:_COMPARED]
    if names[-1].startswith("triton") and not ask("triton", "sums_in_half", x, weight):
        names = names[:-1]
    if not set(names) <= kept.times(key.name()).keys() and (
        time.perf_counter() >= deadline
        or not _extend(ask, kept, key, names, args, kwargs, deadline, terms=True)
    ):
        return None
    return _fastest_time(kept, key.name())
