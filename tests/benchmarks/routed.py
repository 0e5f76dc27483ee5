"""Calls that take the fastest candidates of measured rows, whatever the pack would choose."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from fast_video_vae.kernels import ConvWeight, Route, WeightForm, backends, dispatch, modules
from fast_video_vae.kernels.backends import Kernel
from fast_video_vae.kernels.convolution.fused import of_ours
from fast_video_vae.kernels.routes import Candidate
from fast_video_vae.vae.layers import conv
from fast_video_vae.vae.models import base


def kernel_of(route: str) -> Kernel:
    """Return what a row names, such as "triton:1" or "aten"."""
    name, _, tile = route.partition(":")
    return Kernel(name, int(tile or 0))


def route_by(
    weight: ConvWeight, stride: tuple[int, int, int], *by: Kernel, form: WeightForm | None = None
) -> Route:
    """Return the route of a convolution that runs some candidates, in order."""
    own = backends.OWN_CONVOLUTIONS
    candidates = [
        Candidate(
            kernel,
            of_ours(weight.shape[0])
            if kernel.backend in own
            else modules.backend(kernel.backend).fuses(weight),
        )
        for kernel in by
    ]
    apart = weight.ndim == 4 or weight.shape[2] <= stride[0] or candidates[0].fused.tail
    return Route(stride, tuple(candidates), form, not apart)


@contextlib.contextmanager
def routed(rows: Iterable[Mapping[str, Any]] = ()) -> Iterator[None]:
    """Let the `ms` of rows with a `route` and no terms decide, else the library."""
    times: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row.get("route") and row.get("terms", "bare") == "bare":
            key = tuple(row["taps"]) if "taps" in row else row.get("op", "attention")
            times.setdefault(key, {})[row["route"]] = row["ms"]
    mark = object()

    def names(key: Any, *plain: str) -> tuple[str, ...]:
        known = times.get(key, {})
        return (*sorted(known, key=lambda name: known[name]), *plain, "reference")

    def route_of(
        weight: ConvWeight, stride: Any, *, form: WeightForm | None = None, **_: object
    ) -> Route:
        return route_by(
            weight, stride, *map(kernel_of, names(tuple(weight.shape), "aten")), form=form
        )

    with (
        mock.patch.object(dispatch, "_order", lambda op, _: (names(op, "triton", "cuda"), False)),
        mock.patch.object(conv, "conv_route", route_of),
        mock.patch.object(base, "route_conditions", return_value=mark),  # keep no other routes
    ):
        yield
