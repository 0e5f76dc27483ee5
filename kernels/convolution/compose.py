"""A whole call of a convolution: its frames in one block, the candidate's pass, what that lacks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fused import Fused
from .weight import ConvWeight


def composed(
    convolve: Callable[..., Tensor],
    fused: Fused,
    run: Callable[..., Tensor],
    x: Tensor,
    weight: ConvWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    gamma: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,  # noqa: ANN401, those of the op
) -> Tensor:
    """Run a candidate with the terms that it adds, and add the others by `run`."""
    # A candidate without `sums` gets no other term than `bias`, no `out`, and returns new memory.
    # The `residual` and `out` of frames can also be `[N, C_out, 1, H', W']`.
    is_video = (x if residual is None else residual).ndim == 5
    if residual is not None and is_video and x.ndim == 4 and fused.sums:
        flat = {"residual": residual.squeeze(2), "out": None if out is None else out.squeeze(2)}
        terms = flat | {"residual_bias": residual_bias, "gamma": gamma}
        return composed(convolve, fused, run, x, weight, bias, **terms, **options).unsqueeze(2)
    if residual is None and residual_bias is not None:
        bias, residual_bias = sum_of(bias, residual_bias, x.dtype), None
    # A norm adds a bias at no cost, and so does a pass for the residual.
    waits = (gamma is not None and not fused.norm) or residual is not None
    if fused.sums:
        terms = {"residual": residual, "residual_bias": residual_bias}
        if gamma is None or fused.norm:
            terms |= {"gamma": gamma, "out": out}
            return convolve(x, weight, bias, **terms, **options)
        y = convolve(x, weight, bias, **terms, **options)
        bias = residual = residual_bias = None
    elif fused.bias and not waits:
        y = convolve(x, weight, bias, **options)
        bias = None
    else:
        y = convolve(x, weight, **options)
    if out is None and bias is residual is gamma is None:
        return y
    terms = bias, _as_video(residual), residual_bias, gamma, _as_video(out)
    result = _finished(run, _as_video(y), *terms)
    result = result if is_video else result.squeeze(2)
    return result if out is None else out


def sum_of(bias: Tensor | None, other: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of two biases `[C]` in float32 or wider; one that is given alone, as it is."""
    if bias is None or other is None:
        return other if bias is None else bias
    wide = torch.promote_types(dtype, torch.float32)
    return bias.flatten().to(wide) + other.flatten().to(wide)


def _finished(
    run: Callable[..., Tensor],
    y: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    gamma: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Add the terms to `y` `[B, C, T, H, W]` in its own memory."""
    target = y if out is None else out
    if residual is not None or (bias is not None and gamma is None):
        into = target if gamma is None else y
        y = run("bias_residual", y, bias, residual, residual_bias, out=into)
        bias = None
    if gamma is not None:
        return run("rms_norm_silu", y, gamma, bias=bias, out=target)
    return y if out is None or y is out else out.copy_(y)


def _as_video(x: Tensor | None) -> Any:  # noqa: ANN401, None for None
    """View `[N, C, H, W]` as `[N, C, 1, H, W]`; videos `[B, C, T, H, W]` and None stay."""
    return x.unsqueeze(2) if x is not None and x.ndim == 4 else x
