"""How ranks divide the frames of a video: some rows, or some columns, for each of them."""

import itertools
from collections.abc import Sequence

from ..models.receptive_field import Size

# The dimension of `[B, C, T, H, W]` that is divided, by name.
AXES = {"rows": 3, "columns": 4}


def divide(size: Size, ranks: int, axis: str | None = None) -> tuple[int, tuple[int, ...]]:
    """Divide frames into nearly equal parts.

    Args:
        size: Height and width of a latent.
        ranks: Number of parts.
        axis: "rows" or "columns"; None: of the longer side, so that the shorter lines are sent.

    Returns:
        The divided dimension of `[B, C, T, H, W]`, and where the parts start and end.

    Raises:
        ValueError: There are more ranks than rows or columns.
    """
    height, width = size
    axis = axis or ("columns" if width > height else "rows")
    lines = height if axis == "rows" else width
    if lines < ranks:
        raise ValueError(
            f"the latents have {lines} {axis}, too few for {ranks} ranks; expected at most "
            f"{lines} ranks"
        )
    return AXES[axis], tuple(lines * rank // ranks for rank in range(ranks + 1))


def largest_part(size: Size, dim: int, edges: Sequence[int]) -> Size:
    """Return the size of the largest part with one line of each neighbour, to plan its memory.

    Args:
        size: Height and width of a latent.
        dim: The divided dimension of `[B, C, T, H, W]`.
        edges: Where the parts start and end.

    Returns:
        Height and width of a latent.
    """
    most = most_lines(edges)
    return (most, size[1]) if dim == AXES["rows"] else (size[0], most)


def most_lines(edges: Sequence[int]) -> int:
    """Return the lines of the largest part between `edges`, with one line of each neighbour."""
    return min(edges[-1], 2 + max(stop - start for start, stop in itertools.pairwise(edges)))
