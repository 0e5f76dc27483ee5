"""Checks of node inputs in this process: values that HTTP cannot carry, and file names."""

import contextlib
import re
from unittest.mock import Mock

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.extra_nodes import Encoder
from fast_video_vae.tests.nodes.vae.pairs import ours

pytestmark = pytest.mark.comfyui

LATENT = {"samples": torch.zeros(1, 16, 1, 2, 2)}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"samples": [1, 2]}, "samples: got a list of 2; expected a LATENT"),
        ({"samples": {"x": 1}}, "samples: got a dict with 'x'; expected a LATENT"),
        ({"samples": {"samples": "zeros"}}, "samples: its 'samples' are 'zeros'; expected"),
        ({"chunk": 10**5000}, "chunk: got a number of 16610 bits; expected a whole number"),
        ({"chunk": 1.5}, "chunk: got 1.5; expected a whole number from -1 to 4096"),
        ({"dtype": "int8"}, "dtype: got 'int8'; expected one of: auto, fp32, bf16, fp16"),
        ({"vae": {}}, "vae: got a dict with nothing in it; expected a VAE"),
        ({"vae": None}, "vae: got None; expected a VAE. The checkpoint has none: load it from its"),
    ],
)
def test_the_message_names_the_value_and_the_expected_type(fast, inputs, message):
    with refused(f"^{re.escape(message)}"):
        ours("Decode", **{"samples": LATENT, "vae": fast} | inputs)


RATE = {"sample_rate": 8000}
PAIR = [torch.zeros(1, 8, 8), {}]
WAVE, FEW, ZEROS = torch.zeros(1, 2, 9), torch.zeros(2, 2), torch.zeros


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("IMAGE", [None, FEW, ZEROS(1, 2, 2, 3).int(), ZEROS(0, 2, 2, 3)]),
        ("LATENT", [{"samples": FEW}, {"samples": torch.full((1, 1, 2, 2), torch.nan)}]),
        ("LATENT", [{**LATENT, "noise_mask": 3}, {"samples": ZEROS(1, 1, 1, 1, 1, 1)}]),
        ("AUDIO", [{"waveform": WAVE}, {"waveform": FEW, **RATE}]),
        ("AUDIO", [{"waveform": each, **RATE} for each in (ZEROS(1, 0, 9), WAVE.int())]),
        ("AUDIO", [{"waveform": WAVE, "sample_rate": rate} for rate in (0, 768_001, "8")]),
        ("VIDEO", ["x"]), ("VAE", [{}, "x"]), ("MODEL", [None, {}]), ("CLIP", [{}, None]),
        ("CONDITIONING", [PAIR, [[FEW]], [[torch.tensor([torch.inf]), {}]], [["x", {}]]]),
        ("SIGMAS", [FEW, FEW[0].bool(), FEW[0].cfloat(), 1.0]),
        ("FASTVAE_LORA_STACK", [[1], "x"]),
    ],
)  # fmt: skip
def test_every_type_refuses_what_is_not_of_it(comfyui, kind, wrong):
    from fast_video_vae.nodes.host.input_checks import TYPES

    for value in wrong:
        with refused("expected"):
            TYPES[kind](value)
    good = {
        "IMAGE": torch.zeros(1, 2, 2, 3), "LATENT": {"samples": torch.zeros(1, 16, 2, 2)},
        "AUDIO": {"waveform": torch.zeros(1, 2, 0), "sample_rate": 768_000},
        "CONDITIONING": [PAIR, [None, {}]], "SIGMAS": torch.zeros(0, dtype=torch.int64),
    }  # fmt: skip
    assert kind not in good or TYPES[kind](good[kind]) is good[kind]


def test_numbers_of_other_types_are_accepted(fast):
    from fast_video_vae.nodes.text.nodes import TextEncode

    images, _ = ours("Decode", samples=LATENT, vae=fast, chunk=1.0).args
    assert images.shape == (1, 16, 16, 3)
    given = {"clip": [Encoder()], "positive": [1.5], "negative": ["x"]}
    assert len(TextEncode.execute(**given).args[0]) == 1


def test_an_error_of_another_vae_is_one_line_if_it_is_not_one_of_comfyuis(comfyui):
    from comfy.model_management import InterruptProcessingException

    vae, text = Mock(spec=["encode", "decode"]), "Given groups=1\nweight of size [1, 2]\n" * 50
    vae.decode.side_effect = RuntimeError(text)  # with ComfyUI's methods but not its class
    with refused(r"^samples: this VAE, .*RuntimeError: Given"):
        ours("Decode", samples=LATENT, vae=vae)
    for kind in (InterruptProcessingException, torch.OutOfMemoryError):
        vae.decode.side_effect = kind(text)
        with pytest.raises(kind, match=r"^Given groups=1\n"):
            ours("Decode", samples=LATENT, vae=vae)


@pytest.mark.parametrize(
    ("prefix", "windows", "reason"),
    [
        ("a\0b", False, "with a control character"),
        ("\ud800", False, "with half a character"),
        ("é" * 120, False, "240 bytes long"),
        ("a/../../x", False, "which leads out of it"),
        ("file/x", False, "with a file in place of a folder"),
        ("COM1.txt/x", True, "with a name that is reserved on Windows"),
        ("a:b", True, "with a character that Windows does not allow"),
        ("nul/x", False, None),
        ("con", True, None),  # the file is con_00001_.mp4
        ("Füchse/%year%-%month%/%width%/été 2", False, None),
    ],
)
def test_an_invalid_file_prefix_is_refused(comfyui, tmp_path, prefix, windows, reason):
    from fast_video_vae.nodes.host.numbering import check_prefix

    (tmp_path / "file").touch()
    with refused("^filename_prefix is ", reason) if reason else contextlib.nullcontext():
        check_prefix(prefix, tmp_path, windows=windows)


def test_names_are_numbered_past_those_that_exist(output):
    from fast_video_vae.nodes.host.api import io
    from fast_video_vae.nodes.host.numbering import saved, unused_names

    (output / "a" / "b").mkdir(parents=True)
    (output / "a" / "b" / "x64_00007_.png").touch()
    names = unused_names("a/b/x%width%", io.FolderType.output, ".mp4", 32, 64)
    first, second = next(names), next(names)
    assert (first.name, second.name) == ("x64_00008_.mp4", "x64_00009_.mp4")
    shown = saved(second, io.FolderType.output)
    assert (shown.filename, shown.subfolder, shown.type) == (second.name, "a/b", "output")
