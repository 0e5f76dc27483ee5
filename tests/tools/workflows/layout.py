"""Positions of the nodes of a graph by their heights: columns of equal height."""

from collections.abc import Sequence
from typing import NamedTuple

from .graph import Graph

GAP = 64  # below a node: the title of the next node, and free space
COLUMN_GAP = 60  # between columns: the rims of two groups, and room for links
RIM = 20  # of a group around its nodes
HEADER = 74  # of a group above the body of its first node: two titles


class Box(NamedTuple):
    """A rectangle; that of a node excludes its title, which is above it."""

    left: float
    top: float
    width: float
    height: float


def layout(
    graph: Graph, heights: Sequence[float], slots: Sequence[float]
) -> tuple[list[Box], list[Box]]:
    """Stack the nodes of each column; those that stretch fill it up.

    Args:
        graph: Its columns are placed from left to right.
        heights: Of the nodes.
        slots: What a node may need where another renderer draws it; not less than its height.

    Returns:
        The nodes' places, and the groups'.
    """
    sizes = zip(graph.nodes, heights, slots, strict=True)
    size = {id(node): (height, slot) for node, height, slot in sizes}
    bottom = max(
        sum(size[id(node)][1] for node in column.nodes) + _between(column.groups)
        for column in graph.columns
    )
    nodes, groups, left = [], [], 0.0
    for column in graph.columns:
        used = sum(size[id(node)][1] for node in column.nodes) + _between(column.groups)
        stretched = [node for node in column.nodes if node.stretch]
        spare = (bottom - used) / len(stretched) if stretched else 0
        top = 0.0
        for group in column.groups:
            first = top
            for node in group.nodes:
                height, slot = size[id(node)]
                if node.stretch:
                    height = slot = slot + spare
                nodes.append(Box(left, top, column.width, height))
                top += slot + GAP
            end = top - GAP
            height = end - first + HEADER + RIM
            groups.append(Box(left - RIM, first - HEADER, column.width + 2 * RIM, height))
            top = end + RIM + HEADER + RIM
        left += column.width + COLUMN_GAP
    return nodes, groups


def _between(groups: Sequence) -> float:
    """Height of a column in addition to the bodies of its nodes."""
    inside = sum(GAP * (len(group.nodes) - 1) for group in groups)
    return inside + (2 * RIM + HEADER) * (len(groups) - 1)
