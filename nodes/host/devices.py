"""The choice of devices that share a video, in the names of ComfyUI's own nodes.

Select VAE Device calls the devices of `get_all_torch_devices` (0.33) `gpu:0`, `gpu:1` and so on. A
workflow of another machine may name devices that this one lacks; as there, they are left out.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TypeGuard

import comfy.model_management
import torch
from comfy.cli_args import args

from .api import io
from .error_text import described
from .lazy import Later

kernels = Later("kernels")

ONE, ALL = "one", "all"

_NAME = re.compile(r"gpu:([0-9]{1,4})")

# With more devices the widget does not list all selections: 5 have 15.
_MOST_SELECTED = 4


class OpenInput(io.Combo.Input):
    """A choice that also takes other values that `check` returns, such as an older workflow's."""

    def __init__(self, name: str, check: Callable[[object], str], **options: object) -> None:
        super().__init__(name, optional=True, **options)
        self.check = check


def accelerators() -> list[torch.device]:
    """Return the devices that ComfyUI uses; none if its command line puts VAEs on the CPU."""
    return [] if args.cpu_vae else comfy.model_management.get_all_torch_devices()


# It is the last input and optional, so a workflow that was saved with it loads without it, and the
# other way round.
def devices_input() -> list[io.Input]:
    """Return the input for the devices of a VAE; nothing on a machine with one device."""
    count = len(accelerators())
    if count < 2:
        return []
    # Two or more, but not all; of many devices the first two, the first three and so on.
    chosen = functools.partial(itertools.combinations, range(count))
    groups = [group for size in range(2, count) for group in chosen(size)]
    if count > _MOST_SELECTED:
        groups = [tuple(range(size)) for size in range(2, count)]
    return [
        OpenInput(
            "devices",
            check_selection,  # this machine may lack the devices of a workflow
            options=[ONE, ALL, *map(_joined, groups)],
            default=ONE,
            tooltip="Devices that share the work on each video; the result is the same. one: the "
            "device of the VAE, as ComfyUI chooses it. all: every GPU that ComfyUI uses. Names of "
            "GPUs, as in Select VAE Device: these and the device of the VAE. SeedVR2 uses one.",
        )
    ]


def is_selection(value: object) -> TypeGuard[str]:
    """Return whether `value` is `ONE`, `ALL`, or names such as "gpu:0, gpu:2"."""
    return isinstance(value, str) and (value in (ONE, ALL) or bool(_numbers(value)))


def check_selection(value: object) -> str:
    """Return `value` if it is a selection; the devices need not be in this machine."""
    if is_selection(value):
        return value
    raise ValueError(
        f"got {described(value)}; expected {ONE}, {ALL}, or names such as gpu:0, gpu:1"
    )


def selected(selection: str) -> list[torch.device]:
    """Return the devices of a selection; none for `ONE`, which is the VAE's own device.

    What this machine lacks is left out, and named in the log once.
    """
    found = accelerators()
    if selection in (ONE, ALL) or len(found) < 2:
        return found if selection == ALL else []
    wanted = dict.fromkeys(_numbers(selection))
    missing = [number for number in wanted if number >= len(found)]
    if missing:
        kernels.log_once(f"this machine has no {_joined(missing)}; it is left out")
    return [found[number] for number in wanted if number < len(found)]


def names(devices: Sequence[torch.device]) -> str:
    """Return the names of `devices` in ComfyUI's nodes, such as "gpu:0, gpu:1"."""
    found = accelerators()
    return ", ".join(f"gpu:{found.index(each)}" if each in found else str(each) for each in devices)


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(f"gpu:{number}" for number in numbers)


def _numbers(text: str) -> list[int]:
    """Return the numbers of the names in a text; none if a part of it is not a name."""
    matches = [_NAME.fullmatch(part.strip()) for part in text.split(",")]
    return [int(match[1]) for match in matches if match] if all(matches) else []
