"""The workflows that are described here; the two without a download are kept by hand."""

from . import bridge, infinitetalk, qwen_image, seedvr2, wan22_5b, wan22_14b, wan22_stock
from .graph import Graph

_MODULES = [wan22_stock, wan22_14b, wan22_5b, infinitetalk, qwen_image, seedvr2, bridge]


def catalogue() -> dict[str, Graph]:
    """By the name of the file."""
    graphs = [module.graph() for module in _MODULES]
    return {graph.name: graph for graph in graphs}
