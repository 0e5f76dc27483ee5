"""Calls that take the fastest candidates of measured rows, whatever the pack would choose."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor

from fast_video_vae.kernels import ConvWeight, dispatch, routes
from fast_video_vae.vae.layers import conv


@contextlib.contextmanager
def routed(rows: Iterable[Mapping[str, Any]] = ()) -> Iterator[None]:
    """Let the `ms` of rows with a `route` and no terms decide, else the library."""
    times: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row.get("route") and row.get("terms", "bare") == "bare":
            key = tuple(row["taps"]) if "taps" in row else row.get("op", "attention")
            times.setdefault(key, {})[row["route"]] = row["ms"]

    def names(key: Any, *plain: str) -> tuple[str, ...]:
        known = times.get(key, {})
        return (*sorted(known, key=lambda name: known[name]), *plain, "reference")

    def chosen(_: str, __: Tensor, weight: ConvWeight, *___: object) -> tuple[Any, ...]:
        return names(tuple(weight.shape), "aten"), None, None

    with (
        mock.patch.object(dispatch, "_order", lambda op, *_: names(op, "triton", "cuda")),
        mock.patch.object(routes, "_chosen", chosen),
        mock.patch.object(conv, "route_token", return_value=times),
    ):
        yield
