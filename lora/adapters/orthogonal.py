"""Adapters that rotate the rows of a weight with orthogonal matrices: OFT and BOFT.

A rotation is Cayley's transform of a skew-symmetric matrix, `R = (I + Q)(I - Q)^-1` (Qiu et al.,
"Controlling Text-to-Image Diffusion by Orthogonal Finetuning", arXiv 2306.07280, section 3.2). The
code uses `R - I = 2 (I - Q)^-1 Q`, which keeps its precision for small rotations.

The strength follows ComfyUI's convention: it scales `R - I`, and then the resulting difference of
the weight. So the effect of OFT grows with the square of the strength, -1 and 1 are equal, and only
1 is the trained effect.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Adapter, decompose, misfit_of_dora, spell


@dataclass(frozen=True, eq=False, kw_only=True)
class _Rotation(Adapter):
    """Base of OFT and BOFT: `Q` is the difference of `blocks` and their transposes."""

    blocks: Tensor
    rescale: Tensor | None = None  # a factor per output, applied after the rotation
    # The file's alpha: the largest Frobenius norm of all `Q` together, if it is above 0. ComfyUI
    # ignores a BOFT adapter without alpha.
    constraint: float = 0.0
    dora_scale: Tensor | None = None

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        blocks, size = self.blocks.shape[-3:-1]
        if not shape or blocks * size != shape[0]:
            return f"{blocks} blocks of {size} outputs; the weight is {spell(shape)}"
        if self.rescale is not None and self.rescale.numel() != shape[0]:
            return f"rescale has {self.rescale.numel()} numbers; the weight is {spell(shape)}"
        return misfit_of_dora(self.dora_scale, shape)

    def _changed(self, working: Tensor, strength: float) -> Tensor:
        turned = self._turned(working, strength)
        if self.dora_scale is None:
            return working.lerp_(turned, strength)
        # ComfyUI uses the alpha as a scale if there are magnitudes.
        delta = turned.sub_(working).mul_(self.constraint)
        return decompose(working, delta, self.dora_scale, strength)

    @abstractmethod
    def _turned(self, working: Tensor, strength: float) -> Tensor:
        """Return the weight rotated by `I + strength * (R - I)`, in new memory."""

    def _skew(self, like: Tensor) -> Tensor:
        blocks = self.blocks.to(like.device, like.dtype)
        skew = blocks - blocks.mT
        if self.constraint > 0:
            norm = torch.linalg.vector_norm(skew) + 1e-8
            skew = skew * (self.constraint / norm).clamp(max=1.0)
        return skew


# `blocks` is `[blocks, size, size]`. `rescale` is ignored, as in ComfyUI, for the same pictures.
@dataclass(frozen=True, eq=False, kw_only=True)
class OFT(_Rotation):
    """OFT: each block of rows is multiplied by the transpose of its rotation (arXiv 2306.07280)."""

    kind: ClassVar[str] = "oft"

    def _turned(self, working: Tensor, strength: float) -> Tensor:
        skew = self._skew(working)
        # The transpose of a rotation is the rotation of -Q.
        turn = _rotation_less_one(-skew).mul_(strength)
        rows = working.view(*skew.shape[:2], -1)
        return torch.baddbmm(rows, turn, rows).view_as(working)


# Liu et al., "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization", arXiv
# 2311.06243, section 4. In stage `i` the two halves of each run of `2^i * size` rows are
# interleaved before the blocks are cut, and restored afterwards. `blocks` is `[stages, blocks,
# size, size]` with an even size; `rescale` multiplies the rotated weight.
@dataclass(frozen=True, eq=False, kw_only=True)
class BOFT(_Rotation):
    """BOFT: stages of rotations of different rows, as in a butterfly."""

    kind: ClassVar[str] = "boft"

    def _misfit(self, shape: tuple[int, ...]) -> str | None:
        stages, blocks = self.blocks.shape[:2]
        if blocks % 2 ** (stages - 1):
            return f"{blocks} blocks cannot be halved {stages - 1} times"
        return super()._misfit(shape)

    def _turned(self, working: Tensor, strength: float) -> Tensor:
        skew = self._skew(working)
        turns = _rotation_less_one(skew).mul_(strength)
        blocks, size = skew.shape[1:3]
        rows = working.view(blocks * size, -1)
        for stage, turn in enumerate(turns):
            half = 2**stage * size // 2
            mixed = rows.view(-1, 2, half, rows.shape[1]).transpose(1, 2)
            mixed = mixed.reshape(blocks, size, -1)
            mixed = torch.baddbmm(mixed, turn, mixed)
            mixed = mixed.view(-1, half, 2, rows.shape[1]).transpose(1, 2)
            rows = mixed.reshape(blocks * size, -1)
        if self.rescale is not None:
            rows = rows * self.rescale.to(rows.device, rows.dtype).reshape(-1, 1)
        return rows.view_as(working)


def _rotation_less_one(skew: Tensor) -> Tensor:
    """Return `R - I` of Cayley's rotation for each block."""
    # I - Q is always invertible: the eigenvalues of Q are imaginary.
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(identity - skew, skew).mul_(2)
