"""The device that a user names, or one line that says which ones there are."""

import torch


def device_named(name: str | None) -> torch.device:
    """The device of a name.

    Args:
        name: Such as "cpu", "cuda:1" or "mps"; None or empty: CUDA where there is one, else the
            CPU.

    Returns:
        A device that this machine has.

    Raises:
        ValueError: There is no such device.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    there = available_devices()
    try:
        device = torch.device(name)
    except RuntimeError:
        message = f"device {name!r} is unknown; this PyTorch has {', '.join(there)}"
        raise ValueError(message) from None
    # Without an index it is the current one. PyTorch keeps 8 bits of an index: 256 becomes 0.
    indexed = name if device.index is not None else f"{device.type}:0"
    if indexed not in there and indexed != "cpu:0":
        raise ValueError(f"device is {name!r}; this PyTorch has {', '.join(there)}")
    # PyTorch holds `cpu` and `cpu:0` for two devices.
    return torch.device("cpu") if device.type == "cpu" else device


def available_devices() -> list[str]:
    """The CPU, and each device of the accelerator that PyTorch works with, such as "cuda:0"."""
    found = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        if kind is not None:
            found += [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found
