"""Nodes that the server of the tests loads in addition to this pack's.

One outputs any value as any type, as nodes of other packs can; one lists the threads of the server;
and one patches a VAE.
"""

import copy
import fractions
import runpy
import threading
from pathlib import Path

import torch

# A weight that is patched; ComfyUI has no node for it.
PATCHED = "decoder.upsamples.4.residual.2.weight"


NODE_CLASS_MAPPINGS = {}


def node(kind, returns, /, **required):
    """Make a function a node with one output; `required` has the type and options of each input."""

    def made(function):
        NODE_CLASS_MAPPINGS[kind] = type(
            kind,
            (),
            {
                "CATEGORY": "tests",
                "FUNCTION": "run",
                "RETURN_TYPES": (returns,),
                "INPUT_TYPES": classmethod(lambda cls: {"required": required}),
                "run": lambda self, **given: (function(**given),),
            },
        )
        return function

    return made


class Anything(str):
    """A type that equals every other type in ComfyUI's comparison."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


@node("Test_Value", Anything("*"), name=("STRING", {}))
def value(name):
    return (BAD | GOOD)[name]()


@node("Test_Threads", "STRING", run=("INT", {}))
def threads(run):
    return ", ".join(thread.name for thread in threading.enumerate())


@node("Test_Clip", "CLIP")
def tiny_clip():
    """umT5 with the channels that Wan takes, and random weights."""
    encoders = runpy.run_path(str(Path(__file__).parents[1] / "encoders.py"))
    return encoders["encoder"]("wan", d_model=4096)


class Encoder:
    """A replacement for a CLIP."""

    def tokenize(self, text):
        return {"words": [text]}

    def encode_from_tokens_scheduled(self, tokens):
        return [[torch.zeros(1, 8, 4096), {}]]


def clip(**changed):
    from comfy_api.latest import InputImpl, Types

    parts = {
        "images": torch.full((1, 16, 16, 3), 0.5),
        "audio": None,
        "frame_rate": fractions.Fraction(16),
    }
    return InputImpl.VideoFromComponents(Types.VideoComponents(**parts | changed))


def clip_file(name):
    from comfy_api.latest import InputImpl

    return InputImpl.VideoFromFile(name)


def nested():
    import comfy.nested_tensor

    return comfy.nested_tensor.NestedTensor([])


def latent(*shape, **options):
    return {"samples": torch.zeros(*(shape or (1, 16, 1, 2, 2)), **options)}


def sound(**changed):
    return {"waveform": torch.zeros(1, 2, 800), "sample_rate": 8000} | changed


GOOD = {
    "latent": latent,
    "small latent": lambda: latent(1, 16, 1, 8, 8),
    "image": lambda: torch.full((1, 16, 16, 3), 0.5),
    "audio": sound,
    "video": clip,
    "clip": Encoder,
    "conditioning": lambda: [[torch.zeros(1, 8, 4096), {}]],
    "sigmas": lambda: torch.tensor([1.0, 0.5, 0.0]),
}

# Values that every input of the pack's nodes refuses, except for the exceptions of a test.
BAD = {
    "None": lambda: None,
    "empty list": list,
    "list": lambda: [1, "two", None],
    "empty dict": dict,
    "dict": lambda: {"images": 1},
    "object": object,
    "text": lambda: "nonsense",
    "NUL": lambda: "a\0b",
    "lines": lambda: "one\ntwo",
    "long text": lambda: "9" * 6000,
    "half a character": lambda: "\ud800",
    "out of the folder": lambda: "../../../tmp/x",
    "NaN": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "huge": lambda: 10**30,
    "fraction": lambda: 0.123,
    "bytes": lambda: b"\0" * 1000,
    "samples of None": lambda: {"samples": None},
    "samples of a list": lambda: {"samples": [[0.0]]},
    "flat latent": lambda: latent(16, 4),
    "latent of no frames": lambda: latent(1, 16, 0, 2, 2),
    "latent of integers": lambda: latent(1, 16, 1, 2, 2, dtype=torch.int64),
    "latent of NaN": lambda: {"samples": torch.full((1, 16, 1, 2, 2), torch.nan)},
    "latent of 5 channels": lambda: latent(1, 5, 1, 2, 2),
    "latent of 6 dimensions": lambda: latent(1, 16, 1, 2, 2, 2),
    "sparse latent": lambda: {"samples": latent()["samples"].to_sparse()},
    "latent without memory": lambda: latent(1, 16, 1, 2, 2, device="meta"),
    "nested latent of nothing": lambda: {"samples": nested()},
    "latent with a mask of text": lambda: latent() | {"noise_mask": "all"},
    "flat image": lambda: torch.zeros(16, 16),
    "no image": lambda: torch.zeros(0, 16, 16, 3),
    "image of no channels": lambda: torch.zeros(1, 16, 16, 0),
    "image of integers": lambda: torch.zeros(1, 16, 16, 3, dtype=torch.uint8),
    "image of NaN": lambda: torch.full((1, 16, 16, 3), torch.nan),
    "image of one pixel": lambda: torch.zeros(1, 1, 1, 3),
    "sparse image": lambda: torch.zeros(1, 16, 16, 3).to_sparse(),
    "complex": lambda: torch.zeros(1, 16, 16, 3, dtype=torch.complex64),
    "nested images": lambda: torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 2)]),
    "array": lambda: torch.zeros(1, 16, 16, 3).numpy(),
    "sound of a list": lambda: sound(waveform=[0.0, 1.0]),
    "sound of None": lambda: sound(waveform=None),
    "flat sound": lambda: sound(waveform=torch.zeros(800)),
    "sound of no channels": lambda: sound(waveform=torch.zeros(1, 0, 800)),
    "sound of integers": lambda: sound(waveform=torch.zeros(1, 2, 800, dtype=torch.int16)),
    "sound of NaN": lambda: sound(waveform=torch.full((1, 2, 800), torch.nan)),
    "sound of a rate of text": lambda: sound(sample_rate="fast"),
    "sound of a rate of NaN": lambda: sound(sample_rate=float("nan")),
    "sound of no rate": lambda: sound(sample_rate=0),
    "video of a list": lambda: clip(images=[1, 2]),
    "video of no frames": lambda: clip(images=torch.zeros(0, 16, 16, 3)),
    "video of no rate": lambda: clip(frame_rate=fractions.Fraction(0)),
    "video of a sound of text": lambda: clip(audio={"waveform": "x", "sample_rate": 1}),
    "video of a file that is gone": lambda: clip_file("gone.mp4"),
    "conditioning of a list": lambda: [[1, 2]],
    "conditioning of None": lambda: [None],
    "conditioning of NaN": lambda: [[torch.full((1, 8, 4096), torch.nan), {}]],
    "bool": lambda: torch.zeros(3, dtype=torch.bool),
}


@node("Test_PatchVAE", "VAE", vae=("VAE",), amount=("FLOAT", {}))
def patch_vae(vae, amount):
    vae = copy.copy(vae)
    vae.patcher = vae.patcher.clone()
    difference = torch.full(vae.get_sd()[PATCHED].shape, amount)
    if not vae.patcher.add_patches({PATCHED: ("diff", (difference,))}):
        raise ValueError(f"nothing is patched; expected {PATCHED}")
    return vae
