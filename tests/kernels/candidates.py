"""Stand-ins for the candidates of the convolutions, on a clock that only they advance."""

from types import SimpleNamespace

import torch

from fast_video_vae.kernels import Fused, errors, measure, reference, trials
from fast_video_vae.kernels.convolution import budget, choice, store
from fast_video_vae.kernels.convolution.compose import composed
from fast_video_vae.kernels.convolution.weight import ConvWeight
from fast_video_vae.tests.kernels.cases import random, video

PLAIN = ("aten", "reference")
PADDED = {"stride": (1, 1, 1), "padding": (1, 1)}


class Team:
    """Candidates that compute with the reference, on a clock that only they advance.

    `times` has seconds of a call, `costs` those of one that is not timed, with its compilation; a
    function in `does` changes the result of a candidate. `layouts` has the first call of each.
    """

    def __init__(self):
        self.times = {"aten": 4.0, "kitchen": 3.0, "triton:0": 2.0, "triton:1": 1.0, "sliced": 5.0}
        self.costs, self.does, self.fused, self.asked, self.layouts = {}, {}, {}, [], {}
        self.variants, self.halves, self.now, self.measured = 2, True, 0.0, []

    def ask(self, name, op, *args, **kwargs):
        if op == "variants":
            return self.variants
        if op == "sums_in_half":
            return self.halves
        if op == "fuses":
            return self.fused.get(name, Fused())
        self.asked.append(name)
        self.layouts.setdefault(name, (args[0], kwargs))
        self.now += self.costs.get(name, 0.0)
        y = composed(getattr(reference, op), Fused(), self.run, *args, **kwargs)
        return y if name not in self.does else self.does[name](y)

    def run(self, op, *args, **kwargs):
        return getattr(reference, op)(*args, **kwargs)

    def seconds(self, calls, *_, **__):
        self.measured.append(tuple(calls))
        return {name: self.times[name] for name in calls}


def failing(error):
    def fails(y):
        raise error

    return fails


def new_team(monkeypatch, tmp_path):
    """Replace the candidates, the clock and the folder of the store."""
    team = Team()
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "seconds", team.seconds)
    clock = SimpleNamespace(perf_counter=lambda: team.now)
    for module in (budget, choice):
        monkeypatch.setattr(module, "time", clock)
    team.restart = lambda: restart(monkeypatch)
    team.restart()
    return team


def restart(monkeypatch):
    """Begin with the state of a new process, in which small calls are tried too."""
    monkeypatch.setattr(choice, "LEAST_PRODUCTS", 0)
    monkeypatch.setattr(choice, "_known", {})
    monkeypatch.setattr(choice, "_complete", set())
    monkeypatch.setattr(choice, "_pays", {})
    monkeypatch.setattr(store, "_opened", {})
    monkeypatch.setattr(errors, "_logged", set())


def call(channels=16, frames=4, size=(6, 7), dtype=torch.bfloat16, taps=(3, 3, 3), **options):
    """Arguments of a call as `kernels.conv3d` gives them."""
    x = video(1, channels, frames, *size).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    weight = ConvWeight.of(random(channels, channels, *taps).to(dtype))
    rest = dict.fromkeys(("tail", "residual", "residual_bias", "gamma", "out"))
    return (x, weight, random(channels)), PADDED | rest | options


def order(team, *args, op="conv3d", **kwargs):
    return choice.order(team.ask, op, *call(*args, **kwargs))


def tried(team, *args, **kwargs):
    """The order in a block of trials of its own."""
    with trials():
        return order(team, *args, **kwargs)
