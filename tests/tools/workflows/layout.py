"""Positions of the nodes of a graph by their heights: columns of equal height."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .graph import Column, Graph, Group, Node

GAP = 64  # below a node: the title of the next node, and free space
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
    height = {id(node): each for node, each in zip(graph.nodes, heights, strict=True)}
    slot = {id(node): each for node, each in zip(graph.nodes, slots, strict=True)}
    bottom = max(_height(column, slot) for column in graph.columns)
    nodes, groups, left = [], [], 0.0
    for column in graph.columns:
        stretched = sum(node.stretch for node in column.nodes)
        spare = (bottom - _height(column, slot)) / stretched if stretched else 0
        top = 0.0
        for group in column.groups:
            first, widths = top, iter(node_widths(graph, column, group))
            for line in _lines(group):
                room, at = max(slot[id(node)] for node in line), left
                for node in line:
                    if node.stretch:
                        height[id(node)] = room = room + spare
                    nodes.append(Box(at, top, next(widths), height[id(node)]))
                    at += nodes[-1].width + graph.gap
                top += room + GAP
            end = top - GAP
            whole = end - first + HEADER + RIM
            groups.append(Box(left - RIM, first - HEADER, column.width + 2 * RIM, whole))
            top = end + RIM + HEADER + RIM
        left += column.width + graph.gap
    return nodes, groups


def node_widths(graph: Graph, column: Column, group: Group) -> list[float]:
    """Return the widths of the nodes of a group."""
    if not group.row:
        return [column.width] * len(group.nodes)
    given = [node.width for node in group.nodes if node.width is not None]
    rest = column.width - graph.gap * (len(group.nodes) - 1) - sum(given)
    others = len(group.nodes) - len(given)
    return [rest / others if node.width is None else node.width for node in group.nodes]


def _lines(group: Group) -> list[list[Node]]:
    """Return the nodes of a group: lists from top to bottom, each from left to right."""
    return [group.nodes] if group.row else [[node] for node in group.nodes]


def _height(column: Column, slot: Mapping[int, float]) -> float:
    """Return the height of a column from the body of its first node on, by `id` of a node."""
    lines = [_lines(group) for group in column.groups]
    inside = sum(max(slot[id(node)] for node in line) for group in lines for line in group)
    between = sum(GAP * (len(group) - 1) for group in lines)
    return inside + between + (2 * RIM + HEADER) * (len(lines) - 1)
