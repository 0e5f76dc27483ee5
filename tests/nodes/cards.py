"""Stand-in GPUs: ComfyUI's own memory management, patchers and MultiGPU on the host.

A card is `torch.device("cpu", index)`: another key than the host's. ComfyUI's code is unchanged
except for its questions to the hardware; comfy_aimdo's memory classes only count bytes.
"""

import contextlib
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn

GB = 2**30


def machine(patch, count, kind="cpu"):
    """Let ComfyUI report `count` devices while `patch`, a pytest.MonkeyPatch, is in force; them."""
    import comfy.model_management as management

    from fast_video_vae.vae import validation

    devices = [torch.device(kind, index) for index in range(count)]
    report = lambda exclude_current=False: devices[exclude_current:]  # noqa: E731
    patch.setattr(management, "get_all_torch_devices", report)
    # PyTorch does not list them.
    names = ["cpu", *map(str, devices)]
    patch.setattr(validation, "available_devices", lambda: names, raising=False)
    return devices


class Cards:
    """The cards of a machine while `patch`, a pytest.MonkeyPatch, is in force.

    `events` are what ComfyUI took from models that have a name, and which of them it loaded.
    """

    def __init__(self, patch, count=1, *, dynamic=True):
        import comfy.memory_management
        import comfy.model_management as management
        import comfy.model_patcher as patchers
        import comfy.utils
        import comfy_aimdo.host_buffer
        import comfy_aimdo.model_vbar
        import folder_paths

        self.devices = machine(patch, count)
        self.events, self._total = [], 24 * GB
        self._regions = []  # weak references, the one in use last at the end
        self._names = weakref.WeakKeyDictionary()
        state = {
            "cpu_state": management.CPUState.CPU,
            "vram_state": management.VRAMState.NORMAL_VRAM,
            "current_loaded_models": [],
            "NUM_STREAMS": 0,
            "MAX_PINNED_MEMORY": 0,
            "is_device_cpu": lambda device: False,
            "get_torch_device": lambda: self.devices[0],
            "get_total_memory": lambda device=None, **options: self._total,
            "get_free_memory": self._free_memory,
        }
        for name, value in state.items():
            patch.setattr(management, name, value)
        kind = patchers.ModelPatcherDynamic if dynamic else patchers.ModelPatcher
        patch.setattr(patchers, "CoreModelPatcher", kind)
        patch.setattr(comfy.memory_management, "aimdo_enabled", dynamic)
        patch.setattr(comfy.utils, "load_safetensors", lambda path: (load_file(path), {}))
        patch.setattr(comfy_aimdo.model_vbar, "ModelVBAR", self._region)
        # Memory that is never pinned.
        buffer = lambda size, *_: SimpleNamespace(size=size)  # noqa: E731
        patch.setattr(comfy_aimdo.host_buffer, "HostBuffer", buffer)
        self._record(patch, patchers.ModelPatcher, "detach", "detached")
        for each in (patchers.ModelPatcher, patchers.ModelPatcherDynamic):
            self._record(patch, each, "partially_unload", "unloaded")
        self._record(patch, management, "load_models_gpu", "loaded")
        self._record(patch, management, "ensure_pin_budget", "pinned memory requested")
        # Banks of other tests, if they are in use, have patchers for another machine.
        for file in Path(folder_paths.get_folder_paths("loras")[0]).glob("*.safetensors"):
            file.touch()

    def free(self, device):
        """The bytes of a card that no model takes."""
        import comfy.model_management

        static = sum(
            entry.model_loaded_memory()
            for entry in comfy.model_management.current_loaded_models
            if entry.device == device and entry.model and not entry.model.is_dynamic()
        )
        return self._total - static - sum(region.loaded for region in self._on(device))

    def name(self, patcher, name, size):
        """Give a model a name in `events` and more memory, up to `size` bytes; it."""
        inner = getattr(patcher.model, "diffusion_model", patcher.model)
        inner.ballast = _Ballast(size)
        patcher.size = 0
        model = weakref.ref(patcher.model)
        inner.register_forward_pre_hook(lambda *_: self.call(model()))
        self._names[patcher.model] = name
        return patcher

    def text_encoder(self, size):
        """Return the patcher of a text encoder."""
        import comfy.model_patcher

        host, made = torch.device("cpu"), comfy.model_patcher.CoreModelPatcher
        return self.name(made(nn.Sequential(), self.devices[0], host), "text encoder", size)

    def call(self, model):
        """A model is called: its dynamic weights take what is free or of models before it."""
        for device, region in getattr(model, "dynamic_vbars", {}).items():
            others = self._on(device)
            for other in others[: others.index(region)]:
                missing = region.wanted - region.loaded - self.free(device)
                other.loaded -= max(0, min(other.loaded, missing))
            room = max(0, self.free(device))
            region.loaded += min(room, region.wanted - region.loaded)

    def _free_memory(self, device=None, torch_free_too=False):
        free = self.free(device) if device in self.devices else 64 * GB
        return (free, 0) if torch_free_too else free

    def _on(self, device):
        regions = [reference() for reference in self._regions]
        return [each for each in regions if each is not None and each.device == device]

    def _region(self, size, index):
        region = _Region(self.devices[index], self._regions)
        self._regions.append(weakref.ref(region))
        return region

    def _record(self, patch, owner, method, event):
        """Add the calls of a function on models with names, or on a number, to `events`."""
        real = getattr(owner, method)

        def recorded(first, *args, **kwargs):
            result = real(first, *args, **kwargs)
            models = first if isinstance(first, list) else [first]
            models = [getattr(each, "model", None) for each in models]
            names = [self._names[each] for each in models if each in self._names]
            # Without unpatch_all nothing is unloaded.
            nothing = method == "detach" and False in (*args, *kwargs.values())
            if (names or isinstance(first, int)) and not nothing:
                self.events.append((event, *names))
            return result

        patch.setattr(owner, method, recorded)


@contextlib.contextmanager
def a_prompt(*outputs):
    """ComfyUI's own work before and after a prompt whose nodes have these outputs."""
    import comfy.model_management
    import comfy.model_patcher

    tracker = comfy.model_patcher.PromptModelTracker()
    tracker.start()
    tracker.add(outputs)
    yield
    comfy.model_management.reset_cast_buffers()
    tracker.end()


class _Region:
    """Replaces ModelVBAR: `loaded` of `wanted` bytes are on a card."""

    def __init__(self, device, regions):
        self.device, self._regions = device, regions
        self.wanted = self.loaded = 0

    def alloc(self, size):
        self.wanted += size
        return self, self.wanted - size, size

    def prioritize(self):
        own = next(each for each in self._regions if each() is self)
        self._regions.remove(own)
        self._regions.append(own)

    def loaded_size(self):
        return self.loaded

    def free_memory(self, size):
        freed = min(self.loaded, int(size))
        self.loaded -= freed
        return freed


class _Ballast(nn.Module):
    """A layer that is never called, of any size without memory."""

    comfy_cast_weights = True
    bias = None

    def __init__(self, size):
        super().__init__()
        weight = torch.zeros(1, dtype=torch.int8).expand(1, size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_function, self.bias_function = [], []

    def _apply(self, function, recurse=True):
        return self
