"""How large a tile a program does, and where things lie in memory. No Triton in here.

A tile is some rows of pixels times all channels, in blocks of a power of two: 96 channels are 128
with a mask, so that a quarter of the lanes idles, which costs nothing where memory is the limit.
"""

from torch import Tensor

from ..constraints import DTYPES
from ..errors import Refusal
from .runtime import GRID_LIMIT

# Numbers per program of four warps, by reasoning, not measured: 32 float32 of each thread stay in
# registers, and in 16 bits they are four loads of 16 bytes in flight. Kernels that hold several
# such tiles at a time take half of it.
ELEMENTS = 4096

# More channels than these would spill.
_CHANNEL_LIMIT = 8192

# Offsets inside of a tile are 32 bits wide.
OFFSET_LIMIT = 2**31


def tile(
    channels: int, elements: int = ELEMENTS, *, rows: int | None = None
) -> tuple[int, int, int]:
    """Choose a tile of about `elements` numbers, and no more than `rows`, for rows of channels.

    Returns:
        The rows and the channels of the tile, each a power of two, and the warps of its program.

    Raises:
        Refusal: A row is too long for a program.
    """
    if channels > _CHANNEL_LIMIT:
        raise Refusal(f"there are more than {_CHANNEL_LIMIT} channels")
    block = power_of_two(channels)
    count = max(1, elements // block)
    if rows is not None:
        count = min(count, power_of_two(rows))
    return count, block, 8 if count * block > ELEMENTS else 4


def power_of_two(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(count - 1, 0).bit_length()


def blocks(count: int, size: int) -> int:
    """How many blocks of a size hold so many."""
    return -(-count // size)


def strides(x: Tensor | None) -> tuple[int, int]:
    """Numbers from one video of a batch to the next, and from frame to frame.

    The stride of a dimension of one says nothing, and a strange one would cost the kernel its
    aligned loads: it is 0 here.
    """
    if x is None:
        return 0, 0
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(2) if x.shape[2] > 1 else 0


def vector(values: Tensor | None) -> Tensor | None:
    """Parameters as the kernels read them: dense, in a dtype that they convert."""
    if values is None:
        return None
    return (values if values.dtype in DTYPES else values.float()).contiguous()


def refuse_sizes(x: Tensor) -> None:
    """Refuse more frames, videos or pixels than a grid counts."""
    if x.shape[0] > GRID_LIMIT or x.shape[2] > GRID_LIMIT:
        raise Refusal(f"there are more than {GRID_LIMIT} frames or videos")
    if x.shape[3] * x.shape[4] >= OFFSET_LIMIT:
        raise Refusal("frames have more pixels than 31 bits count")


def refuse_span(*counts: int) -> None:
    """Refuse offsets that do not fit into 32 bits with a sign."""
    if max(counts) >= OFFSET_LIMIT:
        raise Refusal("the numbers of a tile lie too far apart")
