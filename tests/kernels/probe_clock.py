"""A stand-in for the clock of the probes, and processes that start anew."""

import importlib

import pytest

from fast_video_vae.kernels import errors
from fast_video_vae.kernels.probes import measure, probe
from fast_video_vae.kernels.ready import facts
from fast_video_vae.lora import break_even

# The attribute of `kernels` with this name is the function.
gpu_config_module = importlib.import_module("fast_video_vae.kernels.devices.gpu_config")


class Clock:
    """Seconds of a device whose layers have the constants `constants`, in place of measured ones.

    `asked` has the names of the timed calls, a list for each measurement; `does` is called in each.
    """

    def __init__(self, monkeypatch, folder):
        self._monkeypatch = monkeypatch
        self.constants, self.scale, self.asked = [2.0, 2.0, 2.0], 1.0, []
        self.does = lambda: None
        monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(folder))
        monkeypatch.setattr(measure, "seconds", self.seconds)
        self.restart()

    def restart(self):
        """Begin with the state of a new process."""
        self._monkeypatch.setattr(gpu_config_module, "_known", {})
        self._monkeypatch.setattr(errors, "_logged", set())
        self._monkeypatch.setattr(facts, "_opened", {})
        self.asked.clear()

    def seconds(self, calls, device, **_):
        """Return the seconds of each call."""
        self.asked.append(list(calls))
        self.does()
        sizes = probe._ON_CPU if device.type == "cpu" else probe._ON_GPU
        taken = {"product": 0.01, "bypass": 0.01}
        found = {}
        for name, n in calls:
            stream = 0.01 * break_even(*sizes.layers[n], self.constants[n]) / sizes.tokens
            found[name, n] = self.scale * taken.get(name, stream)
        return found


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Replace the clock and the folder of the results."""
    return Clock(monkeypatch, tmp_path / "cache")
