"""How ranks divide the frames of a video: some rows, or some columns, for each of them."""

import itertools
from collections.abc import Sequence

from ..models.receptive_field import Size

# The dimension of `[B, C, T, H, W]` that is divided, by name.
AXES = {"rows": 3, "columns": 4}


def divide(size: Size, ranks: int, axis: str | None = None) -> tuple[int, tuple[int, ...]]:
    """Return the divided dimension of `[B, C, T, H, W]`, and where equal parts start and end."""
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
    """Return height and width of the largest part of a latent, with one line of each neighbour."""
    most = most_lines(edges)
    return (most, size[1]) if dim == AXES["rows"] else (size[0], most)


def most_lines(edges: Sequence[int]) -> int:
    """Return the lines of the largest part between `edges`, with one line of each neighbour."""
    return min(edges[-1], 2 + max(stop - start for start, stop in itertools.pairwise(edges)))
