"""Machines with several devices, as ComfyUI reports them: `torch.device("cpu", index)` each."""

import torch


def machine(patch, count):
    """Let ComfyUI report `count` devices while `patch`, a pytest.MonkeyPatch, is in force; them."""
    import comfy.model_management as management

    devices = [torch.device("cpu", index) for index in range(count)]
    report = lambda exclude_current=False: devices[exclude_current:]  # noqa: E731
    patch.setattr(management, "get_all_torch_devices", report)
    return devices
