"""The formulas of the ops in float64, and how far a result may be from them.

A result is rounded once to its dtype: half an ulp. Before that stand the roundings of the steps in
float32 (float64 for float64), each of at most `u` of its own result, `u = 2^-24` (`2^-53`). What
they add up to is worked out beside each formula, to first order; a sum of `n` numbers in lanes or
pairs is held to `n / 8 + 8` roundings.
"""

import math

import torch

from fast_video_vae import kernels

# SiLU beyond -87 is below the least normal float32 over and under which `exp` is cut off.
_TINY = 1e-34


def unit(dtype):
    """The largest relative error of one rounding in the dtype that is computed in."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def check(actual, value, error, where=""):
    """A result is its formula, float64, within the one rounding to its dtype and `error`.

    That is what the steps before the last rounding may be off, of the shape of `value`.
    """
    assert actual.shape == value.shape, where
    info, rounded = torch.finfo(actual.dtype), value.to(actual.dtype)
    special = ~rounded.isfinite()
    assert torch.equal(
        actual[special].double().nan_to_num(nan=7.0), rounded[special].double().nan_to_num(nan=7.0)
    ), f"{where}: inf and NaN"
    half_ulp = info.eps / 2 * (value.abs() + error) + info.smallest_normal * info.eps / 2
    excess = ((actual.double() - value).abs() - half_ulp - error - _TINY)[~special]
    if not (excess <= 0).all():  # also where the result is NaN
        worst = excess.nan_to_num(nan=math.inf).max()
        raise AssertionError(f"{where}: {worst:.3e} beyond the bound")


def holds(op, *args, into=None, **options):
    """The result of a call is its formula; `into` is a buffer and the part of it to write."""
    if into is None:
        result = getattr(kernels, op)(*args, **options)
    else:
        buffer, out = into
        assert getattr(kernels, op)(*args, out=out, **options) is out
        result = buffer.take(out)
    told = {name: value for name, value in options.items() if not torch.is_tensor(value)}
    where = f"{op} of {tuple(args[0].shape)}, {told}"
    check(result, *globals()[op](*args, **options), where)


def gated(y, error, u):
    """SiLU of `y` with its error: `y / (1 + exp(-y))`.

    Its derivative carries the error of `y` on; `exp` is within 4 `u` and the error of its reduced
    argument, `|y| u`; then come a sum and a quotient.
    """
    gate = torch.sigmoid(y)
    value = y * gate
    slope = gate * (1 + y.abs() * (1 - gate))
    return value, slope * error + value.abs() * (8 + y.abs()) * u


def rms_norm_silu(x, gamma, *, bias=None, silu=True):
    """`silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)` of `x + bias`.

    The root halves the error of the sum. Root, inverse, the two factors of the scale, and two
    products: 8 more at most. A bias is one rounding of each number, which moves the norm by no more
    than by that of the magnitudes.
    """
    u, channels, wide = unit(x.dtype), x.shape[1], x.double()
    scale = math.sqrt(channels) * gamma.double().flatten().view(-1, 1, 1, 1)
    moved = torch.zeros_like(wide)
    if bias is not None:
        bias = _per_channel(bias).double()
        wide, moved = wide + bias, u * (wide.abs() + bias.abs())
    norm = wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    y = wide / norm * scale
    relative = ((channels / 8 + 8) / 2 + 8) * u
    relative = relative + moved.square().sum(1, keepdim=True).sqrt() / norm
    error = y.abs() * relative + moved / norm * scale.abs()
    return gated(y, error, u) if silu else (y, error)


def group_norm_silu(x, weight, bias, groups, *, eps=1e-6, silu=True, statistics=None):
    """`silu((x - mean) / sqrt(var + eps) * weight + bias)` per frame and group.

    The mean is off by `shift`, 8 `u` of the largest number: its sum, its rounding, and that of the
    difference. That shifts the result, and adds its square to the variance. Beside it stand the
    sum of the squares, halved by the root, and 8 roundings of products and sums. Where statistics
    are given, only these remain, and the mean may be larger than any number.
    """
    u, wide = unit(x.dtype), x.double().unflatten(1, (groups, -1))
    axes = (2, 4, 5)
    magnitude = wide.abs().amax(axes, keepdim=True)
    if statistics is None:
        mean = wide.mean(axes, keepdim=True)
        inverse = ((wide - mean).square().mean(axes, keepdim=True) + eps).rsqrt()
        count = wide[0, 0, :, 0].numel()
        relative = min(count / 16 + 12, 64) * u + (8 * u * magnitude * inverse).square()
    else:
        mean, inverse = statistics.double().permute(2, 0, 3, 1)[..., None, :, None, None]
        magnitude, relative = magnitude.maximum(mean.abs()), 12 * u
    centred = wide - mean
    weight, bias = (v.double().view(1, groups, -1, 1, 1, 1) for v in (weight, bias))
    y = (centred * inverse * weight + bias).flatten(1, 2)
    shift = magnitude * 8 * u
    error = (centred.abs() * relative + shift) * inverse.abs() * weight.abs() + 4 * u * bias.abs()
    error = error.flatten(1, 2)
    return gated(y, error, u) if silu else (y, error)


def group_norm_statistics(x, groups, eps=1e-6):
    """`mean` and `1 / sqrt(var + eps)` per frame and group, `[B, T, 2, groups]`.

    The mean is off by the sum of the deviations and by its own rounding, twice where sums of parts
    are rounded too. The variance is that of the deviations: of a large mean it has no more than the
    square of that rounding.
    """
    u, wide = unit(x.dtype), x.double().unflatten(1, (groups, -1))
    axes = (2, 4, 5)
    mean = wide.mean(axes, keepdim=True)
    centred = wide - mean
    mean, inverse = mean[:, :, 0, :, 0, 0], (centred.square().mean(axes) + eps).rsqrt()
    share = min(wide[0, 0, :, 0].numel() / 16 + 12, 64) * u
    rounding = 2 * u * mean.abs()
    moved = 2 * share * centred.abs().amax(axes) + rounding
    error = torch.stack([moved, (share + (rounding * inverse).square()) * inverse])
    value = torch.stack([mean, inverse])  # [2, B, groups, T]
    return value.permute(1, 3, 0, 2), error.permute(1, 3, 0, 2)


def silu_mul(x, gate):
    """`x * sigmoid(x) * gate`: one product more."""
    u = unit(x.dtype)
    value, error = gated(x.double(), 0.0, u)
    value = value * gate.double()
    return value, error * gate.double().abs() + 2 * u * value.abs() + _TINY * gate.double().abs()


def bias_residual(x, *added):
    """The sum of those that are there; each partial sum is at most the sum of magnitudes."""
    terms = [x.double(), *(_per_channel(term).double() for term in added if term is not None)]
    magnitude = sum(term.abs() for term in terms)
    return sum(terms), magnitude * (len(terms) - 1) * unit(x.dtype)


def _per_channel(term):
    return term if term.ndim == 5 else term.flatten().view(-1, 1, 1, 1)


def attention(q, k, v):
    """`softmax(q k^T / sqrt(d)) v`.

    Scores are off by their own sums of `d` products, and a kernel may round a weight to the dtype
    before it multiplies: both are relative errors of the weights. Their sum, which divides, has
    the same, and the products add up over `N`.
    """
    u, wide = unit(q.dtype), [x.double() for x in (q, k, v)]
    root = math.sqrt(q.shape[-1])
    weights = torch.softmax(wide[0] @ wide[1].transpose(1, 2) / root, -1)
    magnitude = (wide[0].abs() @ wide[1].abs().transpose(1, 2)).max() / root
    steps = q.shape[-1] / 8 + q.shape[1] / 8 + 24
    relative = 2 * magnitude * steps * u + torch.finfo(q.dtype).eps
    return weights @ wide[2], relative * (weights @ wide[2].abs())


def average_down(x, channels, *, times, size):
    """Means of groups of the block's numbers, the finest of them last; frames in front are zeros.

    A sum of `n` numbers and two quotients, which are powers of two or not.
    """
    batch, before, frames, height, width = x.shape
    padded = torch.cat([x.new_zeros(batch, before, -frames % times, height, width), x], dim=2)
    blocks = padded.double().unflatten(4, (-1, size)).unflatten(3, (-1, size))
    blocks = blocks.unflatten(2, (-1, times))  # [B, C, t, p, h, a, w, b]
    fine = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4).unflatten(1, (channels, -1))
    return fine.mean(2), fine.abs().mean(2) * (fine.shape[2] / 8 + 8) * unit(x.dtype)
