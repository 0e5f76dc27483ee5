"""`--precision` of the command line: what runs in int8, the report, and errors before any work."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.vae.families import prepared  # noqa: E402
from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.bench import precision  # noqa: E402
from fast_video_vae.vae.media import read_video  # noqa: E402
from fast_video_vae.vae.streaming import precision as computation  # noqa: E402
from fast_video_vae.vae.streaming.int8 import layers, settings  # noqa: E402


@pytest.fixture(autouse=True)
def small(int8, monkeypatch):
    """The measured clip is small."""
    monkeypatch.setattr(precision, "_WIDTH", 32)
    monkeypatch.setattr(precision, "_HEIGHT", 16)


@pytest.fixture
def latents(tmp_path):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "latents.safetensors"
    save_file({"latent": torch.randn(1, 16, 1, 4, 4, generator=generator)}, path)
    return path


def test_decode_says_how_much_runs_in_int8_and_uses_it(tmp_path, done, vae_path, latents):
    out = tmp_path / "out.mkv"
    assert "int8" not in "".join(done("decode", latents, "-o", out))
    lines = done("decode", latents, "-o", out, "--precision", "int8", "--overwrite")
    vae = load_vae(vae_path, dtype=torch.float32)
    layers = vae.int8_layers(torch.float32)
    share = f"{layers.share:.0%} of the multiplications"
    assert f"decodes with {share} in int8 ({len(layers.names)} convolutions)" in lines
    plain = prepared(vae).decode(load_file(latents)["latent"])
    vae.precision = "int8"
    expected = prepared(vae).decode(load_file(latents)["latent"]).clamp(-1, 1)
    written = torch.cat(list(read_video(out).pieces()), dim=2).float() / 65535 * 2 - 1
    torch.testing.assert_close(written, expected, rtol=0, atol=1e-4)
    assert (written - plain).abs().max() > 1e-3


def test_an_encode_of_an_older_script_with_int8_is_that_of_auto(tmp_path, done, monkeypatch):
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    encode = "encode", write_clip(tmp_path / "clip.mp4", 1), "-o", tmp_path / "a.safetensors"
    said = "--precision int8 is for decodes; the encode is not affected"
    assert said in done(*encode, "--precision", "int8")


def test_info_has_the_report(run, vae_path, monkeypatch):
    monkeypatch.setattr(computation, "slow_on_cpu", lambda dtype: False)
    code, lines, errors = run("info", vae_path, "--dtype", "fp32", "--precision", "int8")
    assert (code, errors) == (0, [])
    assert any(re.fullmatch(r"with int8 +[\d.]+ dB, .* than bf16", line) for line in lines)


def test_where_int8_does_not_serve_is_one_line(tmp_path, run, vae_path, latents, monkeypatch):
    given = latents, "--vae", vae_path, "-o", tmp_path / "a.mp4", "--dtype", "fp32"
    for module, name, value, message in (
        (layers, "LOSS_DB", -100, "convolution would cost more than 1 dB"),
        (settings, "int8_lacks", lambda *_: "this CPU is old", "this CPU is old"),
    ):
        monkeypatch.setattr(module, name, value)
        code, lines, errors = run("decode", *given, "--precision", "int8", "--quiet")
        assert (code, lines, len(errors)) == (1, [], 1)
        assert re.search(f"precision is int8, but .*{message}.*; expected auto", errors[0])
