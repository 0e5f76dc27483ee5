"""The route of a convolution: the candidate that runs a layer at a size, and what it fuses.

A route is computed once for a layer, a size and what is known (`token`), and kept with the layer.
The table of measured chips decides, on other chips a proof; the library runs the rest, and all of
it until the kernels of a tile are built and right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import CONVOLUTIONS, TRIED, convolution_order, forced
from .convolution.fused import Fused
from .convolution.weight import ConvWeight
from .devices import device_kind
from .modules import module_of
from .ready import facts, serving
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


@dataclass(frozen=True)
class Route:
    """What runs the calls of a layer at a size."""

    candidates: tuple[str, ...]  # in order: the next one runs what one refuses
    kernel: str | None  # one of ours, with its variant, which serves once it is built and right
    fused: Fused  # what the kernel, or the first candidate, does in its own pass
    proves: "ProofKey | None" = None  # what a tile would be proved for on this chip


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


@dataclass(frozen=True)
class Proof:
    """What a proof has shown."""

    plain_ms: float  # of the library's call
    ms: float  # of the tile's
    right: bool  # the results are equal but for rounding


# Proofs of this process with their number; those of the disk have the number 0.
_proofs: dict[ProofKey, tuple[int, Proof]] = {}


def token() -> tuple[object, ...]:
    """Return what the routes of this thread depend on in addition to their layer and size."""
    made = serving.recorder()
    return forced(), serving.snapshot(), made and (made.device, made.tiles)


def route_of(
    x: Tensor,
    weight: ConvWeight,
    stride: tuple[int, ...],
    padding: tuple[int, int],
    *,
    norm: bool,
) -> Route:
    """Return the route of a layer at the size of `x`, with the frames before it or without."""
    op, device, chosen = f"conv{x.ndim - 2}d", serving.device_of(x), forced()
    if chosen in CONVOLUTIONS:
        names, kernel, proves = (str(chosen),), None, None
    else:
        names, kernel, proves = _chosen(op, x, weight, stride, device)
    fused = module_of(kernel or names[0]).fuses(x, weight, stride, padding, norm=norm)
    return Route(names, kernel, fused, proves)


def _chosen(
    op: str, x: Tensor, weight: ConvWeight, stride: tuple[int, ...], device: torch.device
) -> tuple[tuple[str, ...], str | None, ProofKey | None]:
    kind = device_kind(device)
    library = convolution_order(op, kind)
    plays = serving.recorder()
    none_serves = plays is not None and not plays.tiles
    if kind not in TRIED or x.dtype not in _NARROW or not x.numel() or none_serves:
        return library, None, None
    found = _kind_of(op, x, weight, stride)
    chip = chip_of(device)
    entries = KERNELS.get(chip)
    if entries is not None:
        kernel = entries.get(found)
        return library, kernel if serving.has_tile(op, x, weight, stride) else None, None
    key = ProofKey(device, found, torch.float16 if chip in SUMS_IN_HALF else x.dtype)
    if not tiles_of(chip, key.dtype, found.outputs):
        return library, None, None
    proof = proof_of(key)
    if proof is None:
        return library, None, key
    # A tile in float16 that was proved next to a library in bfloat16 serves calls in float16.
    serves = proof.right and proof.ms <= _GAIN * proof.plain_ms and key.dtype == x.dtype
    serves = serves and serving.has_tile(op, x, weight, stride)
    return library, "triton:0" if serves else None, None


def _kind_of(op: str, x: Tensor, weight: ConvWeight, stride: tuple[int, ...]) -> Kind:
    taps = weight.shape[2:]
    # A step of a video can have a single frame, but a picture has no frames before it.
    video = op == "conv3d" or x.shape[0] > 1
    alone = (1,) * (3 - len(taps))
    return Kind(x.shape[1], weight.shape[0], (*alone, *taps), (*alone, *stride), video)


def proof_of(key: ProofKey) -> Proof | None:
    """Return what is proved of `key`, as this thread sees it; None: nothing yet."""
    if key not in _proofs:
        kept = _parsed(facts.of_kernels(key.device).get(key.name()))
        if kept is None:
            return None
        _proofs[key] = 0, kept
    since, proof = _proofs[key]
    seen = serving.snapshot()
    return proof if seen is None or since <= seen.proofs else None


def _parsed(kept: object) -> Proof | None:
    """Return the proof that the store has; None: it has none."""
    try:
        return Proof(float(kept["plain_ms"]), float(kept["ms"]), kept["right"] is True)  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None


def keep_proof(key: ProofKey, proof: Proof) -> None:
    """Keep the `proof` of `key` for later videos."""
    kept = {"plain_ms": proof.plain_ms, "ms": proof.ms, "right": proof.right}
    facts.of_kernels(key.device).put(key.name(), kept)
    _proofs[key] = serving.next_number(proof=True), proof


def fp16_pays(device: torch.device) -> bool:
    """Return whether a decode in float16 is enough faster than in bfloat16 on `device`."""
    # Not on chips that sum in float16 no faster, and not until that is proved.
    if device_kind(device) != "nvidia" or chip_of(device) not in SUMS_IN_HALF:
        return False
    known = [
        proof
        for name, value in facts.of_kernels(device).named(_PROOF).items()
        if name.endswith("float16") and (proof := _parsed(value)) is not None and proof.right
    ]
    seconds = [sum(getattr(each, name) for each in known) for name in ("plain_ms", "ms")]
    return len(known) >= _WIDTHS and seconds[0] >= _PAYS * seconds[1]


def table_entry(device: torch.device) -> list[str]:
    """Return what is proved on `device` as text to post: one line per kind of convolutions."""
    proofs = facts.of_kernels(device).named(_PROOF)
    return [
        f"{name.removeprefix(_PROOF)}: library {proof.plain_ms:.3f} ms, tile {proof.ms:.3f} ms, "
        f"{'right' if proof.right else 'wrong'}"
        for name, value in sorted(proofs.items())
        if (proof := _parsed(value)) is not None
    ]
