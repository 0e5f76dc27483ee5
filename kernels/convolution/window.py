"""The frames that a convolution reads, in one block of memory."""

from torch import Tensor


def joined(
    x: Tensor,
    tail: Tensor | None = None,
    padding: tuple[int, int] = (0, 0),
    channels: int | None = None,
) -> Tensor:
    """Return `x` after `tail`, with a border and further channels of zeros; `x` itself if none.

    Args:
        x: `[B, C, T, H, W]`, or `[N, C, H, W]` without a tail.
        tail: `[B, C, K, H, W]`, or None.
        padding: Rows and columns of the border.
        channels: Channels of the result; None: those of `x`.

    Returns:
        `[B, channels, K + T, H + 2 * rows, W + 2 * columns]`, channels-last, or without frames.
    """
    batch, count, *frames, height, width = x.shape
    channels = count if channels is None else channels
    plain = not any(padding) and count == channels
    if tail is None and plain:
        return x
    known = 0 if tail is None else tail.shape[2]
    rows, columns = padding
    shape = (
        batch, *(known + each for each in frames),
        height + 2 * rows, width + 2 * columns, channels,
    )  # fmt: skip
    whole = (x.new_empty if plain else x.new_zeros)(shape).movedim(-1, 1)
    inner = whole[:, :count, ..., rows : rows + height, columns : columns + width]
    if tail is not None:
        inner[:, :, :known] = tail
        inner = inner[:, :, known:]
    inner.copy_(x)
    return whole
