"""A norm and its convolution in bands of rows, where whole frames need too much memory.

A tile is never exact under a norm over the frame, but a band is: it uses the statistics of the
whole frame, and has one more row on either side for the convolution, zeros outside the picture.
Only the convolution's input is computed band by band, the tail included; it is the largest buffer
of a layer.
"""

import torch
from torch import Tensor

from ...kernels import zero_of
from .causal_conv import CausalConv3d
from .conv import Terms
from .inputs.coding import Fill
from .temporal_cache import TemporalCache

# Bands are used for frames of at least this many times the size of a band, because they are slower.
WORTH_IT = 4


def rows_of(conv: CausalConv3d, x: Tensor, cache: TemporalCache) -> int:
    """Return the rows of a band of about `cache.band_bytes`; the height of an undivided `x`."""
    batch, channels, frames, height, width = x.shape
    if cache.band_bytes is None:
        return height
    frames += 0 if cache.first else conv.context
    row_bytes = max(1, batch * channels * frames * width * x.element_size())
    if row_bytes * height <= WORTH_IT * cache.band_bytes:
        return height
    return max(1, cache.band_bytes // row_bytes - 2 * conv.padding)


def convolve(
    conv: CausalConv3d, fill: Fill, x: Tensor, cache: TemporalCache, rows: int, terms: Terms
) -> Tensor:
    """Convolve `fill(x)` causally, some rows at a time; a residual may become the result.

    `fill` writes the norm and SiLU of some rows, with the statistics of whole frames. The first
    frame of a video is repeated before it, as `replicate` of `conv` says.
    """
    batch, channels, frames, height, width = x.shape
    out = terms.residual
    if out is None:
        out = cache.result((batch, conv.weight.shape[0], frames, height, width), x)
    like, pad, route = conv.like(x, cache), conv.padding, conv.route(x, cache)
    zero, side = zero_of(like.dtype), pad if route.reads_codes else 0  # codes have a border
    tail = None if cache.single_frame else conv.tail(x, cache)
    known = 0 if cache.first else conv.context
    # A band reads the old last rows of the band above; they are replaced after that.
    late: tuple[Tensor, Tensor] | None = None
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        above, below = max(0, top - pad), min(height, bottom + pad)
        shape = (batch, channels, known + frames, bottom - top + 2 * pad, width + 2 * side)
        window = cache.scratch(shape, like)
        columns = window[..., side : side + width]
        inner = columns[:, :, :, above - top + pad : below - top + pad]
        if side:
            window.fill_(zero)
        window[:, :, :, : above - top + pad] = zero
        window[:, :, :, below - top + pad :] = zero
        if tail is not None and known:
            inner[:, :, :known] = tail[:, :, :, above:below]
        if late is not None:
            late[0].copy_(late[1])
            late = None
        _write(fill, x[:, :, :, above:below], inner[:, :, known:])
        if tail is not None:
            last = columns[:, :, -conv.context :, pad : pad + bottom - top]
            last = last.expand(-1, -1, conv.context, -1, -1).clone()
            late = tail[:, :, :, top:bottom], last
        added = terms.of(
            lambda y, band=slice(top, bottom): y[:, :, :, band].clone(
                memory_format=torch.channels_last_3d
            )
        )
        out[:, :, :, top:bottom] = conv.convolve(window, route, (0, pad - side), cache, added)
    if late is not None:
        late[0].copy_(late[1])
    return out


def _write(fill: Fill, x: Tensor, out: Tensor) -> None:
    """Write `fill(x)` into `out`, of the same shape: through a copy if it is not of whole rows."""
    if out.stride(3) == out.shape[4] * out.stride(4):
        fill(x, out=out)
        return
    dense = torch.empty_like(out, memory_format=torch.channels_last_3d)
    fill(x, out=dense)
    out.copy_(dense)
