"""`--precision` of the command line: what runs in int8, the report, and errors before any work."""

import functools
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.kernels.ready import facts  # noqa: E402
from fast_video_vae.tests.vae.families import prepared  # noqa: E402
from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.bench import precision  # noqa: E402
from fast_video_vae.vae.media import read_video  # noqa: E402
from fast_video_vae.vae.streaming import precision as computation  # noqa: E402
from fast_video_vae.vae.streaming.int8 import layers, settings  # noqa: E402


@pytest.fixture(autouse=True)
def supported(monkeypatch, tmp_path):
    """Every machine supports int8, and the measured clip is small."""
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "")
    kept = facts.Facts(tmp_path / "facts.json", {})
    monkeypatch.setattr(layers, "facts_of", lambda _: kept)
    monkeypatch.setattr(precision, "_WIDTH", 32)
    monkeypatch.setattr(precision, "_HEIGHT", 16)


@pytest.fixture
def latents(tmp_path):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "latents.safetensors"
    save_file({"latent": torch.randn(1, 16, 1, 4, 4, generator=generator)}, path)
    return path


def frames_of(path):
    return torch.cat(list(read_video(path).pieces()), dim=2)


def test_decode_says_how_much_runs_in_int8_and_uses_it(tmp_path, done, vae_path, latents):
    results = {}
    for choice in ("auto", "int8"):
        out = tmp_path / f"{choice}.mkv"
        lines = done("decode", latents, "-o", out, "--precision", choice)
        said = [line for line in lines if "in int8" in line]
        assert len(said) == (choice == "int8")
        results[choice] = frames_of(out)
    vae = load_vae(vae_path, dtype=torch.float32)
    layers = vae.int8_layers(torch.float32)
    count = len(layers.names)
    share = f"{layers.share:.0%} of the multiplications"
    assert said == [f"decodes with {share} in int8 ({count} convolutions)"]
    assert not torch.equal(results["int8"], results["auto"])
    vae.precision = "int8"
    expected = prepared(vae).decode(load_file(latents)["latent"]).clamp(-1, 1)
    written = results["int8"].float() / 65535 * 2 - 1
    torch.testing.assert_close(written, expected, rtol=0, atol=1e-4)


def test_an_encode_of_an_older_script_with_int8_is_that_of_auto(tmp_path, done, monkeypatch):
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    clip = write_clip(tmp_path / "clip.mp4", 1)
    found = {}
    for choice in ("auto", "int8"):
        out = tmp_path / f"{choice}.safetensors"
        lines = done("encode", clip, "-o", out, "--precision", choice)
        said = "--precision int8 is for decodes; the encode is not affected"
        assert lines.count(said) == (choice == "int8")
        found[choice] = load_file(out)["latent"]
    assert torch.equal(found["int8"], found["auto"])


@pytest.mark.parametrize("slow", [False, True])
def test_info_has_the_report(run, vae_path, monkeypatch, slow):
    assert "int8" not in "\n".join(run("info", vae_path)[1])
    monkeypatch.setattr(computation, "slow_on_cpu", lambda dtype: slow)
    is_slow = functools.cache(computation._is_slow.__wrapped__)  # it logs once
    monkeypatch.setattr(computation, "_is_slow", is_slow)
    code, lines, errors = run("info", vae_path, "--dtype", "fp32", "--precision", "int8")
    assert code == 0
    note = "no instructions for bfloat16 convolutions; computing in float32"
    assert [note in line for line in errors] == [True] * slow
    text = "\n".join(lines)
    assert re.search(r"^int8 +\d+% of the multiplications \(\d+ of \d+ conv", text, re.MULTILINE)
    narrow = r"^bf16 in fp32 +[\d.]+ dB$" if slow else r"^bf16 +[\d.]+ dB$"
    assert re.search(narrow, text, re.MULTILINE)
    assert re.search(r"^with int8 +[\d.]+ dB, [\d.]+ dB (less|more) than bf16$", text, re.MULTILINE)
    assert re.search(r"^upsamples\.\S+ +[\d.]+% .* (int8|fp32)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", ["decode", "info"])
def test_what_int8_does_not_support_is_one_line_and_leaves_no_file(
    tmp_path, run, vae_path, latents, monkeypatch, command
):
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    before = set(tmp_path.iterdir())
    decode = [latents, "--vae", vae_path, "-o", tmp_path / "a.mp4", "--device", "cpu"]
    given = decode if command == "decode" else [vae_path]
    code, lines, errors = run(command, *given, "--precision", "int8", "--quiet")
    assert (code, lines, len(errors)) == (1, [], 1)
    assert "precision is int8, but this CPU is old; expected auto" in errors[0]
    assert set(tmp_path.iterdir()) == before


def test_a_vae_that_loses_too_much_is_an_error(tmp_path, run, vae_path, latents, monkeypatch):
    monkeypatch.setattr(layers, "LOSS_DB", -100)
    out = tmp_path / "a.mp4"
    options = ("--precision", "int8", "--quiet", "--dtype", "fp32")
    code, _, errors = run("decode", latents, "--vae", vae_path, "-o", out, *options)
    assert (code, len(errors)) == (1, 1)
    assert "every convolution would cost more than 1 dB; expected auto" in errors[0]


def test_a_report_on_int8_needs_a_file(run):
    code, lines, errors = run("info", "--device", "--precision", "int8")
    assert (code, lines, len(errors)) == (2, [], 1)
    assert "--precision needs a FILE" in errors[0]


@pytest.mark.parametrize("command", ["decode", "demo", "info", "encode"])
def test_the_help_names_the_choices_where_they_matter(run, command):
    code, lines, _ = run(command, "--help")
    assert code == 0
    text = " ".join(" ".join(lines).split())
    assert ("--precision {auto,int8}" in text) == (command != "encode")
