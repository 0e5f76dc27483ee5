"""Machines with several devices, as ComfyUI reports them."""

import torch


def machine(patch, count, kind="cpu"):
    """Let ComfyUI report `count` devices while `patch`, a pytest.MonkeyPatch, is in force; them.

    With an index, "cpu" is another key than the device of a VAE on the host, and works as it does.
    """
    import comfy.model_management as management

    devices = known(patch, [torch.device(kind, index) for index in range(count)])
    report = lambda exclude_current=False: devices[exclude_current:]  # noqa: E731
    patch.setattr(management, "get_all_torch_devices", report)
    return devices


def known(patch, devices):
    """Let this pack use devices that PyTorch does not list; them."""
    from fast_video_vae.vae import validation

    names = ["cpu", *map(str, devices)]
    patch.setattr(validation, "available_devices", lambda: names, raising=False)
    return devices
