"""Latent files: metadata, files saved by ComfyUI, and errors."""

from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import refused
from fast_video_vae.vae.media import load_latent, save_latent


def test_a_latent_is_read_with_its_metadata(tmp_path):
    path = tmp_path / "a.safetensors"
    latent = torch.randn(1, 16, 3, 2, 4, dtype=torch.bfloat16)
    save_latent(path, latent, family="wan2.1", fps=Fraction(30000, 1001), frames=9)
    file = load_latent(path)
    assert file.latent.dtype == torch.float32
    assert torch.equal(file.latent, latent.float())
    assert (file.family, file.fps) == ("wan2.1", Fraction(30000, 1001))


@pytest.mark.parametrize("key", ["samples", "latent_tensor"])
def test_latents_of_comfyui_are_read(tmp_path, key):
    latent = torch.randn(1, 16, 3, 2, 4)
    tensors = {key: latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, tmp_path / "a.latent", {"prompt": "{}"})
    file = load_latent(tmp_path / "a.latent")
    assert torch.equal(file.latent, latent)
    assert (file.family, file.fps) == (None, None)


def stored(shape, **metadata):
    return lambda path: save_file({"latent": torch.zeros(shape)}, path, metadata)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, FileNotFoundError, "No such file"),
        (
            lambda path: save_file({"a\nb": torch.zeros(1)}, path),
            ValueError,
            r"has the tensors .*; expected one named latent",
        ),
        (stored((1, 16, 2, 2)), ValueError, r"is \[1, 16, 2, 2\]; expected \[1, C, t, h, w\]"),
        (stored((2, 16, 1, 2, 2)), ValueError, r"is \[2, 16, 1, 2, 2\]"),  # two videos
        (stored((1, 16, 0, 2, 2)), ValueError, r"is \[1, 16, 0, 2, 2\]; expected"),
        (stored((1, 16, 1, 2, 2), fps="x"), ValueError, "gives its fps as 'x'; expected a number"),
        (stored((1, 16, 1, 2, 2), fps="0"), ValueError, "gives its fps as '0'; expected a number"),
        # Fraction would create a number of a billion digits
        (stored((1, 16, 1, 2, 2), fps="1e999999999"), ValueError, "its fps as '1e999999999'; exp"),
    ],
)
def test_the_error_for_a_bad_latent_file_is_one_line_with_its_name(tmp_path, make, error, message):
    path = tmp_path / "a.safetensors"
    make(path)
    with refused(message, "a.safetensors", error=error):
        load_latent(path)
