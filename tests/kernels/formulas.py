"""The formulas of the ops in float64, and the error bounds of their results, to first order.

A result is rounded once to its dtype: half an ulp. Before that, each step in float32 (float64 for
float64) has an error of at most `u = 2^-24` (`2^-53`) of its result. A sum of `n` numbers in lanes
or pairs counts as `n / 8 + 8` roundings.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F

from fast_video_vae import kernels

# SiLU is within 2e-36 of zero below -87, where `exp(-y)` reaches the end of float32.
_TINY = 1e-34


def unit(dtype):
    """Return the largest relative error of one rounding in the dtype of the computation."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def check(actual, value, error, where=""):
    assert actual.shape == value.shape, where
    if error is None:  # it is exact
        assert torch.equal(actual, value), where
        return
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


def holds(op, *args, **options):
    """Compare the result of a call with its formula, and return it."""
    result = getattr(kernels, op)(*args, **options)
    shown = {name: value for name, value in options.items() if not torch.is_tensor(value)}
    where = f"{op} of {tuple(args[0].shape)}, {shown}"
    check(result, *globals()[op](*args, **options), where)
    return result


def gated(y, error, u):
    """Return SiLU of `y`, `y / (1 + exp(-y))`, with its error.

    `exp` adds 4 `u` and the error of its reduced argument, `|y| u`.
    """
    gate = torch.sigmoid(y)
    value = y * gate
    slope = gate * (1 + y.abs() * (1 - gate))
    return value, slope * error + value.abs() * (8 + y.abs()) * u


def rms_norm_silu(x, gamma, *, bias=None, silu=True):
    """`silu(x / max(norm2(x), 1e-12) * sqrt(C) * gamma)` of `x + bias`.

    The root halves the error of the sum, and 8 roundings follow. A bias adds one per number, which
    moves the norm by at most the norm of these roundings.
    """
    u, wide = unit(x.dtype), x.double()
    moved = torch.zeros_like(wide)
    if bias is not None:
        bias = _per_channel(bias).double()
        wide, moved = wide + bias, u * (wide.abs() + bias.abs())
    return _normalised(wide, moved, gamma, u, silu=silu)


def _normalised(wide, moved, gamma, u, *, silu=True):
    """Return the norm of `wide` with its error, `moved` of which `wide` itself has."""
    channels = wide.shape[1]
    scale = math.sqrt(channels) * _per_channel(gamma).double()
    norm = wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    y = wide / norm * scale
    relative = ((channels / 8 + 8) / 2 + 8) * u
    relative = relative + moved.square().sum(1, keepdim=True).sqrt() / norm
    error = y.abs() * relative + moved / norm * scale.abs()
    return gated(y, error, u) if silu else (y, error)


def group_norm_silu(x, weight, bias, groups, *, eps=1e-6, silu=True, statistics=None):
    """`silu((x - mean) / sqrt(var + eps) * weight + bias)` per frame and group.

    The error of the mean, at most 8 `u` of the largest number, shifts the result, and its square is
    added to the variance. The sum of the squares, halved by the root, and 8 roundings follow. With
    given statistics only these 8 remain, and the mean may be larger than any number.
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

    The variance is one of deviations, so a large mean only adds the square of its rounding.
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
    """Return `x * sigmoid(x) * gate`, which has one more product than SiLU, with its error."""
    u = unit(x.dtype)
    value, error = gated(x.double(), 0.0, u)
    value = value * gate.double()
    return value, error * gate.double().abs() + 2 * u * value.abs() + _TINY * gate.double().abs()


def bias_residual(x, *added):
    """Return the sum of the given terms; no partial sum exceeds the sum of magnitudes."""
    terms = [x.double(), *(_per_channel(term).double() for term in added if term is not None)]
    magnitude = sum(term.abs() for term in terms)
    return sum(terms), magnitude * (len(terms) - 1) * unit(x.dtype)


def _per_channel(term):
    return term if term.ndim == 5 else term.flatten().view(-1, 1, 1, 1)


def attention(q, k, v):
    """`softmax(q k^T / sqrt(d)) v`.

    Scores carry the error of their sums of `d` products, and a kernel may round a weight to the
    dtype: both are relative errors of the weights, and of their sum.
    """
    u, wide = unit(q.dtype), [x.double() for x in (q, k, v)]
    root = math.sqrt(q.shape[-1])
    weights = torch.softmax(wide[0] @ wide[1].transpose(1, 2) / root, -1)
    magnitude = (wide[0].abs() @ wide[1].abs().transpose(1, 2)).max() / root
    steps = q.shape[-1] / 8 + q.shape[1] / 8 + 24
    relative = 2 * magnitude * steps * u + torch.finfo(q.dtype).eps
    return weights @ wide[2], relative * (weights @ wide[2].abs())


def average_down(x, channels, *, times, size):
    """Return the means of groups of each block's numbers; missing frames in front are zeros."""
    batch, before, frames, height, width = x.shape
    padded = torch.cat([x.new_zeros(batch, before, -frames % times, height, width), x], dim=2)
    blocks = padded.double().unflatten(4, (-1, size)).unflatten(3, (-1, size))
    blocks = blocks.unflatten(2, (-1, times))  # [B, C, t, p, h, a, w, b]
    fine = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4).unflatten(1, (channels, -1))
    return fine.mean(2), fine.abs().mean(2) * (fine.shape[2] / 8 + 8) * unit(x.dtype)


def interleave_time(x, phases):
    """Place frame `t` of phase `p` at `t * phases + p`."""
    return torch.stack(x.chunk(phases, 1), 3).flatten(2, 3), None


def merge_phases(grid, source=None, times=1, *, bias=None):
    """Place phase `2 a + b` of window `(i + a, j + b)` at `(2 i + a, 2 j + b)`, and add terms."""
    channels, height, width = grid.shape[1] // 4, grid.shape[3] - 1, grid.shape[4] - 1
    out = grid.new_empty(grid.shape[0], channels, grid.shape[2], 2 * height, 2 * width)
    for a, b in product((0, 1), (0, 1)):
        first = (2 * a + b) * channels
        phase = grid[:, first : first + channels]
        out[..., a::2, b::2] = phase[..., a : a + height, b : b + width]
    if source is None and bias is None:
        return out, None
    return bias_residual(out, bias, None if source is None else _repeated(source, out, times))


def _repeated(source, like, times):
    """Return the term that `merge_phases` adds for `source`, one channel at a time."""
    before, channels, frames = source.shape[1], like.shape[1], source.shape[2] * times
    y = like.new_full((like.shape[0], channels, frames, *like.shape[3:]), torch.nan)
    for c, p, a, b in product(range(channels), range(times), (0, 1), (0, 1)):
        index = ((c * times + p) * 4 + 2 * a + b) * before // (4 * times * channels)
        y[:, c, p::times, a::2, b::2] = source[:, index]
    return y[:, :, frames - like.shape[2] :]  # without the first frame's other repetitions


def pixel_shuffle_3d(x, size, order="cthw"):
    """Place every number by its channel index; `order` names the letters slowest first."""
    sizes = dict(zip("thw", size, strict=True))
    sizes["c"] = x.shape[1] // (size[0] * size[1] * size[2])
    strides, stride = {}, 1
    for letter in reversed(order):
        strides[letter], stride = stride, stride * sizes[letter]
    batch, _, frames, height, width = x.shape
    out = x.new_empty(batch, sizes["c"], frames * size[0], height * size[1], width * size[2])
    channels = torch.arange(sizes["c"], device=x.device) * strides["c"]
    for t, h, w in product(*(range(n) for n in size)):
        index = channels + t * strides["t"] + h * strides["h"] + w * strides["w"]
        out[:, :, t :: size[0], h :: size[1], w :: size[2]] = x[:, index]
    return out, None


def frames_to_images(x, *, patch=1, order="cthw", dtype=torch.float32):
    """`clamp((x + 1) / 2, 0, 1)` in float32; uint8 drops the fraction, uint16 rounds to even."""
    x, _ = pixel_shuffle_3d(x, (1, patch, patch), order)
    y = ((x.float() + 1) * 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1).flatten(0, 1)
    if dtype == torch.uint8:
        return (y.nan_to_num(0) * 255).floor().to(dtype), None
    if dtype == torch.uint16:
        return (y.nan_to_num(0) * 65535).double().round().int().to(dtype), None
    return y.to(dtype), None


def conv3d(
    x, weight, bias=None, *, stride=(1, 1, 1), padding=(0, 0), tail=None, residual=None,
    residual_bias=None, gamma=None,
):  # fmt: skip
    """Return the sum of products of the joined and padded frames, and of the terms.

    The sum is rounded to the dtype before terms or a norm follow, and so is that of the biases.
    """
    u, half_ulp = unit(x.dtype), torch.finfo(x.dtype).eps / 2
    weight = weight.unsqueeze(2) if weight.ndim == 4 else weight
    rows, columns = padding
    window = (x if tail is None else torch.cat([tail, x], dim=2)).double()
    window, taps = F.pad(window, (columns, columns, rows, rows)), weight.double()
    value = F.conv3d(window, taps, stride=stride)
    magnitude = F.conv3d(window.abs(), taps.abs(), stride=stride)
    biases = [_per_channel(each).double() for each in (bias, residual_bias) if each is not None]
    terms = biases if residual is None else [*biases, residual.double()]
    error = torch.zeros_like(value)
    if terms or gamma is not None:
        error += half_ulp * sum((each.abs() for each in biases), value.abs())
    for term in terms:
        value, magnitude = value + term, magnitude + term.abs()
    error += (weight[0].numel() / 8 + 8 + len(terms)) * u * magnitude
    if gamma is None:
        return value, error
    return _normalised(value, error + half_ulp * value.abs(), gamma, u)
