"""The order of the candidates of a convolution, by the times of their trials."""

from collections.abc import Mapping, Sequence

from ..backends import convolution_order

# The plain op is replaced by a candidate that takes at most this part of its time.
_GAIN = 0.98


def plain_ops(op: str, kind: str, taps: Sequence[int]) -> tuple[str, ...]:
    """Return the candidates that call the library, the plain op first; another serves if it fails.

    Args:
        op: `conv2d` or `conv3d`.
        kind: Kind of the device.
        taps: Shape of the weight.

    Returns:
        Names of candidates.
    """
    plain, *_ = convolution_order(op, kind)
    others = ("aten", "sliced") if op == "conv3d" and taps[2] > 1 else ("aten",)
    return tuple(dict.fromkeys((plain, *others)))


def ranked(plain: Sequence[str], times: Mapping[str, float | None]) -> tuple[str, ...]:
    """Return the candidates in the order in which to try them.

    Args:
        plain: `plain_ops` of the shape class.
        times: Seconds by candidate; None: it failed in its trial.

    Returns:
        Names of candidates; the reference is last.
    """
    able = [name for name in plain if times.get(name, 0.0) is not None] or [*plain]
    served = {name: seconds for name, seconds in times.items() if seconds is not None}
    first = [able[0]]
    if served:
        winner = min(served, key=lambda name: served[name])
        if served[winner] <= _GAIN * served.get(able[0], 0.0):
            first = [winner, able[0]]
    return tuple(dict.fromkeys((*first, "aten", "reference")))
