"""Machines with several devices, as ComfyUI reports them."""

import torch


def machine(patch, count, kind="cpu"):
    """Let ComfyUI report `count` devices while `patch`, a pytest.MonkeyPatch, is in force; them.

    With an index, "cpu" is another key than the device of a VAE on the host, and works as it does.
    """
    import comfy.model_management as management

    devices = [torch.device(kind, index) for index in range(count)]
    report = lambda exclude_current=False: devices[exclude_current:]  # noqa: E731
    patch.setattr(management, "get_all_torch_devices", report)
    return devices
