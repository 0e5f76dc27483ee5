"""Results of probes, kept on disk, so that each process takes the same decisions.

One JSON file for each combination of device, dtype and versions; see `environment.of_products`. A
file that cannot be read counts as absent. A folder that cannot be written costs only the memory of
it.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .. import cache
from ..errors import first_line, log_once
from . import environment
from .probe import GRID, RATES, Probe

_logger = logging.getLogger(__name__)

# Layout of the file and version of the probe; another one is not read.
_FORMAT = 1

# A file has about 400 bytes; a larger one is not ours.
_MOST_BYTES = 1 << 14

# Another process that probes is waited for this long. It takes about a second.
_WAIT_S = 5.0


def kept(device: torch.device, dtype: torch.dtype, probe: Callable[[], Probe]) -> Probe:
    """Return the result for `device` and `dtype` from the disk, or from `probe`.

    Args:
        device: The device.
        dtype: Dtype of the products.
        probe: Measures; its errors are raised, and nothing is written then.

    Returns:
        The result that was written first, by any process.
    """
    made_on = environment.of_products(device, dtype)
    path = cache.path_for("probes", made_on)
    found = _read(path, made_on)
    if found is not None:
        return found
    # One lock for all devices and dtypes: probes at the same time would disturb one another.
    with cache.alone(path.with_name("probes"), _WAIT_S):
        found = _read(path, made_on)
        return found if found is not None else _write(path, made_on, probe())


def _read(path: Path, made_on: Mapping[str, str]) -> Probe | None:
    """Return the result in a file; None: there is none that could be ours."""
    try:
        if not path.is_file():  # opening a pipe would wait for a writer
            return None
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        content = json.loads(data)
        if content["format"] != _FORMAT or content["made_on"] != made_on:
            raise ValueError("it was made elsewhere")
        rate, c = content["products_per_s"], content["stream_c"]
        if not (type(rate) is type(c) is float and RATES[0] <= rate <= RATES[1] and c in GRID):
            raise ValueError("its values are impossible")
        return Probe(rate, c)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _logger.debug("%s is not read: %s", path, first_line(error)[:80])
        return None


def _write(path: Path, made_on: Mapping[str, str], result: Probe) -> Probe:
    """Write a result and return it, or the result that another process has written."""
    first = _read(path, made_on)  # where locks do not work
    if first is not None:
        return first
    content = {
        "format": _FORMAT,
        "made_on": made_on,
        "products_per_s": result.products_per_s,
        "stream_c": result.stream_c,
    }
    try:
        cache.replace(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        first = _read(path, made_on)  # Windows does not replace a file that is open
        if first is not None:
            return first
        log_once(
            f"{path.parent} is not writable ({error.strerror}), so every start measures the device "
            "again; set FAST_VIDEO_VAE_CACHE to a writable folder"
        )
    return result
