"""Results of probes, kept on disk, so that each process takes the same decisions."""

from collections.abc import Callable

import torch

from .. import cache
from ..ready import facts
from . import environment
from .probe import GRID, RATES, Probe

_NAME = "probe"

# Another process that probes is waited for this long. It takes about a second.
_WAIT_S = 5.0


def kept(device: torch.device, dtype: torch.dtype, probe: Callable[[], Probe]) -> Probe:
    """Return the result for `device` and `dtype` from the disk, or from `probe`.

    Args:
        device: The device.
        dtype: Dtype of the products.
        probe: Measures; its errors are raised, and nothing is written then.

    Returns:
        The result.
    """
    store = facts.kept(environment.of_products(device, dtype))
    found = _parsed(store.get(_NAME))
    if found is not None:
        return found
    # One lock for all devices and dtypes: probes at the same time would disturb one another.
    with cache.alone(store.path.with_name("probes"), _WAIT_S):
        store.read()
        found = _parsed(store.get(_NAME)) or probe()
        store.put(_NAME, list(found))
    return found


def _parsed(value: object) -> Probe | None:
    """Return the result that the store has; None: it has none that is possible."""
    try:
        rate, c = value  # type: ignore[misc]
        valid = type(rate) is type(c) is float and RATES[0] <= rate <= RATES[1] and c in GRID
        return Probe(rate, c) if valid else None
    except (TypeError, ValueError):
        return None
