"""The route of a convolution: the candidate that runs a layer, and what it fuses.

A route is decided once for a layer, a form of its weight and the conditions of a video
(`route_conditions`), and kept with the layer. The table of measured chips decides, on other chips a
proof; the library runs the rest, and all of it until the kernels of a tile are built and right.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .backends import CONVOLUTIONS, OWN_CONVOLUTIONS, TRIED, Kernel, convolution_order, forced
from .convolution.fused import Fused, of_ours
from .convolution.weight import ConvWeight, WeightForm
from .devices import device_kind
from .modules import backend
from .ready import facts, serving
from .ready.seen import Fallback, Snapshot, device_of, fallback, recorder, snapshot
from .tables import KERNELS, SUMS_IN_HALF, Kind
from .triton_ops.convolution_tiles import tiles_of
from .triton_ops.tiles import chip_of

# Dtypes with tiles.
_NARROW = (torch.float16, torch.bfloat16)

# A candidate of a proof serves if it takes at most this part of the library's time, and float16 in
# place of bfloat16 pays from this speed on: it costs a check for overflow.
_GAIN, _PAYS = 0.98, 1.15

# Proofs from which on the speed of float16 is known: the large convolutions have three widths.
_WIDTHS = 3

# Names of proofs in the store begin so.
_PROOF = "proof: "


class Candidate(NamedTuple):
    """What may run the calls of a layer."""

    kernel: Kernel
    fused: Fused  # what it does in its own pass
    is_built: bool = False  # It is one of ours, which serves once it is built and right.


@dataclass(frozen=True)
class Route:
    """All that is decided for the calls of a layer in a video."""

    stride: tuple[int, int, int]  # in frames, rows and columns
    candidates: tuple[Candidate, ...]  # in order: the next one runs what one refuses
    form: WeightForm | None = None  # of the weight; None: the caller has the weight
    joined: bool = True  # the caller joins tail and new frames; otherwise they are apart
    proves: "ProofKey | None" = None  # what a tile would be proved for on this chip

    @property
    def fused(self) -> Fused:
        """What the first candidate does in its own pass."""
        return self.candidates[0].fused

    @property
    def reads_codes(self) -> bool:
        """Whether the input is codes in int8, with a border."""
        return self.form is not None and self.form.dtype == torch.int8


@dataclass(frozen=True)
class ProofKey:
    """A kind of convolutions on a device without an entry in the table."""

    device: torch.device
    kind: Kind
    dtype: torch.dtype  # of the tile; float16 where it may replace bfloat16

    def name(self) -> str:
        """Return the name in the store."""
        inputs, outputs, taps, strides, video = self.kind
        sizes = " ".join("x".join(map(str, each)) for each in ((inputs, outputs), taps))
        words = f"{sizes} stride {'x'.join(map(str, strides))} {'video' if video else 'picture'}"
        return f"{_PROOF}{words} {str(self.dtype).removeprefix('torch.')}"


class Proof(NamedTuple):
    """What a proof has shown."""

    plain_ms: float  # of the library's call
    ms: float  # of the tile's
    right: bool  # the results are equal but for rounding


# Proofs of this process with their number; those of the disk have the number 0.
_proofs: dict[ProofKey, tuple[int, Proof]] = {}


def conv_route(
    weight: ConvWeight, stride: tuple[int, int, int], *, video: bool, form: WeightForm | None = None
) -> Route:
    """Return what runs the convolutions of a layer in a video (or a picture), and what it fuses.

    It decides the cheapest layout of the caller's memory; every layout gives the same result. It
    depends on what the thread sees of the kernels, which is fixed while a video runs.
    """
    device, chosen = device_of(weight), forced()
    names = convolution_order(device_kind(device), weight.ndim - 2)
    kernel, proves, variant = None, None, 0
    if chosen in CONVOLUTIONS:
        names = (str(chosen),)
    elif (wrong := fallback()).convolves:
        names, variant = _instead(wrong, names, weight), int(wrong.contiguous)
    else:
        kernel, proves = _chosen(weight, stride, device, video=video)
    candidates = [Candidate(Kernel(name, variant), _fused(name, weight)) for name in names]
    if kernel is not None:
        candidates.insert(0, Candidate(kernel, of_ours(weight.shape[0]), is_built=True))
    apart = weight.ndim == 4 or weight.shape[2] <= stride[0] or candidates[0].fused.tail
    return Route(stride, tuple(candidates), form, not apart, proves)


def route_conditions(seen: Snapshot) -> tuple[object, ...]:
    """Return what the routes of a layer depend on in a video that sees `seen` of the kernels."""
    return seen, forced(), torch.backends.mkldnn.enabled


def code_route(form: WeightForm, *, joined: bool) -> Route:
    """Return the route of convolutions of codes, which add all terms, with a `form` of weights."""
    candidate = Candidate(Kernel("int8", 0), Fused(sums=True, bias=True))
    return Route((1, 1, 1), (candidate,), form, joined)


def _instead(wrong: Fallback, usual: tuple[str, ...], weight: ConvWeight) -> tuple[str, ...]:
    """Return the candidate in place of the usual ones, of which some forms are wrong."""
    if weight.ndim == 5 and (wrong.sliced or usual[0] == "sliced"):
        return ("sliced",)
    return ("reference",) if wrong.reference or wrong.contiguous else ("aten",)


def _fused(name: str, weight: ConvWeight) -> Fused:
    return of_ours(weight.shape[0]) if name in OWN_CONVOLUTIONS else backend(name).fuses(weight)


def _chosen(
    weight: ConvWeight, stride: tuple[int, int, int], device: torch.device, *, video: bool
) -> tuple[Kernel | None, ProofKey | None]:
    """Return the kernel of ours for a convolution, or what one would be proved for."""
    plays = recorder()
    none_serves = plays is not None and not plays.tiles
    if device_kind(device) not in TRIED or weight.dtype not in _NARROW or none_serves:
        return None, None
    outputs, inputs, *_ = weight.shape
    kind = Kind(inputs, outputs, weight.kernel, stride, video)
    chip = chip_of(device)
    entries = KERNELS.get(chip)
    if entries is not None:
        kernel = entries.get(kind)
        return (kernel if serving.has_tile(weight, stride) else None), None
    key = ProofKey(device, kind, torch.float16 if chip in SUMS_IN_HALF else weight.dtype)
    if not tiles_of(chip, key.dtype, outputs):
        return None, None
    proof = proof_of(key)
    if proof is None:
        return None, key
    # A tile in float16 that was proved next to a library in bfloat16 serves calls in float16.
    serves = proof.right and proof.ms <= _GAIN * proof.plain_ms and key.dtype == weight.dtype
    return (Kernel("triton", 0) if serves and serving.has_tile(weight, stride) else None), None


def proof_of(key: ProofKey) -> Proof | None:
    """Return what is proved of `key`, as this thread sees it; None: nothing yet."""
    if key not in _proofs:
        kept = _parsed(facts.of_kernels(key.device).get(key.name()))
        if kept is None:
            return None
        _proofs[key] = 0, kept
    since, proof = _proofs[key]
    seen = snapshot()
    return proof if seen is None or since <= seen.proofs else None


def _parsed(kept: object) -> Proof | None:
    """Return the proof that the store has; None: it has none."""
    try:
        return Proof(float(kept["plain_ms"]), float(kept["ms"]), kept["right"] is True)  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None


def keep_proof(key: ProofKey, proof: Proof) -> None:
    """Keep the `proof` of `key` for later videos."""
    facts.of_kernels(key.device).put(key.name(), proof._asdict())
    _proofs[key] = serving.next_number(proof=True), proof


def fp16_pays(device: torch.device) -> bool:
    """Return whether a decode in float16 is enough faster than in bfloat16 on `device`."""
    # Not on chips that sum in float16 no faster, and not until that is proved.
    if device_kind(device) != "nvidia" or chip_of(device) not in SUMS_IN_HALF:
        return False
    proofs = _known(device).items()
    known = [proof for name, proof in proofs if name.endswith("float16") and proof.right]
    plain_ms, ms = (sum(getattr(each, name) for each in known) for name in ("plain_ms", "ms"))
    return len(known) >= _WIDTHS and plain_ms >= _PAYS * ms


def table_entry(device: torch.device) -> list[str]:
    """Return what is proved on `device` as text to post: one line per kind of convolutions."""
    return [
        f"{name.removeprefix(_PROOF)}: library {proof.plain_ms:.3f} ms, tile {proof.ms:.3f} ms, "
        f"{'right' if proof.right else 'wrong'}"
        for name, proof in sorted(_known(device).items())
    ]


def _known(device: torch.device) -> dict[str, Proof]:
    proofs = facts.of_kernels(device).named(_PROOF).items()
    return {name: proof for name, kept in proofs if (proof := _parsed(kept)) is not None}
