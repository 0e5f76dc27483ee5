"""Nodes that the server of the tests loads in addition to this pack's.

One outputs any value as any type, as nodes of other packs can; one lists the threads of the server.
"""

import fractions
import runpy
import threading
from importlib import import_module as module
from pathlib import Path

import torch

NODE_CLASS_MAPPINGS = {}


def node(kind, returns, /, **required):
    """Make a function a node with one output; `required` has the type and options of each input."""

    def made(function):
        members = {"CATEGORY": "tests", "FUNCTION": "run", "RETURN_TYPES": (returns,)}
        members["INPUT_TYPES"] = classmethod(lambda cls: {"required": required})
        members["run"] = lambda self, **given: (function(**given),)
        NODE_CLASS_MAPPINGS[kind] = type(kind, (), members)

    return made


class Anything(str):
    """A type that differs from no other type in ComfyUI's comparison."""

    def __ne__(self, other):
        return False


@node("Test_Value", Anything("*"), name=("STRING", {}))
def value(name):
    return (BAD | GOOD)[name]()


@node("Test_Threads", "STRING")
def threads():
    return ", ".join(thread.name for thread in threading.enumerate())


@node("Test_Clip", "CLIP")
def tiny_clip():
    """umT5 with the channels that Wan takes, and random weights."""
    encoders = runpy.run_path(str(Path(__file__).parents[1] / "encoders.py"))
    return encoders["encoder"]("wan", d_model=4096)


@node("Test_SeedVR2", "MODEL")
def tiny_seedvr2():
    """A SeedVR2 with random weights."""
    return runpy.run_path(str(Path(__file__).parents[1] / "models.py"))["seedvr2_model"]()


class Encoder:
    """A replacement for a CLIP."""

    def tokenize(self, text):
        return {"words": [text]}

    def encode_from_tokens_scheduled(self, tokens):
        return [[torch.zeros(1, 8, 4096), {}]]


def image(value=0.5, **options):
    return torch.full((1, 16, 16, 3), value, **options)


def latent(*shape, **options):
    return {"samples": torch.zeros(*(shape or (1, 16, 1, 2, 2)), **options)}


def sound(*shape, **changed):
    return {"waveform": torch.zeros(shape or (1, 2, 800)), "sample_rate": 8000} | changed


def clip(**changed):
    latest = module("comfy_api.latest")
    parts = {"images": image(), "audio": None, "frame_rate": fractions.Fraction(16)} | changed
    return latest.InputImpl.VideoFromComponents(latest.Types.VideoComponents(**parts))


GOOD = {
    "latent": latent,
    "small latent": lambda: latent(1, 16, 1, 8, 8),
    "image": image,
    "audio": sound,
    "video": clip,
    "clip": Encoder,
    "conditioning": lambda: [[torch.zeros(1, 8, 4096), {}]],
    "sigmas": lambda: torch.tensor([1.0, 0.5, 0.0]),
}

# Values that every input of the pack's nodes refuses, except for the exceptions of a test: those
# that a widget can get, and those of a type of links, next to those of `test_input_checks.py`.
FOR_WIDGETS = {
    "None": lambda: None,
    "list": lambda: [1, "two", None],
    "empty dict": dict,
    "text": lambda: "nonsense",
    "NUL": lambda: "a\0b",
    "half a character": lambda: "\ud800",
    "out of the folder": lambda: "../../../tmp/x",
    "NaN": lambda: float("nan"),
    "huge": lambda: 10**30,
    "fraction": lambda: 0.123,
    "flat image": lambda: torch.zeros(16, 16),
}
BAD = FOR_WIDGETS | {
    "latent of NaN": lambda: {"samples": torch.full((1, 16, 1, 2, 2), torch.nan)},
    "latent of 5 channels": lambda: latent(1, 5, 1, 2, 2),
    "latent without memory": lambda: latent(device="meta"),
    "nested latent of nothing": lambda: {"samples": module("comfy.nested_tensor").NestedTensor([])},
    "image of NaN": lambda: image(torch.nan),
    "image of one pixel": lambda: torch.zeros(1, 1, 1, 3),
    "sparse image": lambda: image().to_sparse(),
    "nested images": lambda: torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
    "sound of NaN": lambda: sound(waveform=torch.full((1, 2, 800), torch.nan)),
    "video of a list": lambda: clip(images=[1, 2]),
    "video of no rate": lambda: clip(frame_rate=fractions.Fraction(0)),
    "video of a sound of text": lambda: clip(audio={"waveform": "x", "sample_rate": 1}),
    "video of a lost file": lambda: module("comfy_api.latest").InputImpl.VideoFromFile("x.mp4"),
    "conditioning of NaN": lambda: [[torch.full((1, 8, 4096), torch.nan), {}]],
}
