"""`--devices` and `--shares`: the commands share a video, with the same files."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fast_video_vae.kernels import errors as errors_module
from fast_video_vae.tests.seedvr2 import random_seedvr2

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.vae.families import STATES  # noqa: E402
from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae import load_vae, validation  # noqa: E402
from fast_video_vae.vae.cli import loading  # noqa: E402
from fast_video_vae.vae.cli.info import WIDTH  # noqa: E402
from fast_video_vae.vae.media import read_video  # noqa: E402


def test_encode_and_decode_write_the_same_files(tmp_path, done):
    clip = write_clip(tmp_path / "clip.mp4", 9, 64, 96)
    latents = [tmp_path / f"{n}.safetensors" for n in range(2)]
    for path, options in zip(latents, ((), ("--devices", "cpu,cpu")), strict=True):
        lines = done("encode", clip, "-o", path, *options)
    assert any("on cpu, cpu" in line for line in lines)
    one, two = (load_file(path)["latent"] for path in latents)
    assert torch.equal(one, two)
    movies = [tmp_path / f"{n}.mkv" for n in range(2)]
    for path, options in zip(movies, ((), ("--devices", "cpu, cpu,cpu")), strict=True):
        lines = done("decode", latents[0], "-o", path, *options)
    assert any("on cpu, cpu, cpu" in line for line in lines)
    one, two = (torch.cat(list(read_video(path).pieces()), dim=2) for path in movies)
    assert torch.equal(one, two)


def test_info_lists_the_bands_and_their_memory(run, vae_path):
    code, lines, _ = run("info", vae_path, "--devices", "cpu,cpu,cpu", "--limit", "6")
    assert code == 0
    text = " ".join(" ".join(lines).split())
    assert "bands of columns: cpu 0-" in text
    assert text.count("MiB)") + text.count("MiB, ") >= 3 * 10
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("size")) :]
    assert max(map(len, table)) <= WIDTH


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--devices", "cpu,gpu9"), 1, "device 'gpu9' is unknown"),
        (("--devices", "cpu,,cpu"), 2, "'cpu,,cpu' is not a list"),
        (("--devices", ""), 2, "is not a list"),
    ],
)
def test_wrong_devices_are_one_line(run, vae_path, arguments, code, message):
    found, _, errors = run("info", vae_path, *arguments)
    assert found == code
    assert message in errors[-1]


@pytest.mark.parametrize(
    ("device", "refused"),
    [("cuda", False), ("cuda:1", False), (None, False), ("cuda:0", True), ("cpu", True)],
)
def test_the_device_is_one_of_the_devices(monkeypatch, device, refused):
    """A GPU without an index is the current one, here the second."""
    empty, made = torch.empty, []

    def on_current(*size, device=None, **options):
        device = torch.device(device or "cpu")
        if device.type == "cpu":
            return empty(*size, **options)
        return SimpleNamespace(
            device=torch.device("cuda", 1 if device.index is None else device.index)
        )

    def load(path, *, device, **options):
        made.append(device)
        return load_vae(STATES["wan2.1"](), **options)

    names = ["cpu", *(f"cuda:{index}" for index in range(3))]
    monkeypatch.setattr(validation, "available_devices", lambda: names)
    monkeypatch.setattr(torch, "empty", on_current)
    monkeypatch.setattr(loading, "load_vae", load)
    args = SimpleNamespace(device=device, devices=["cuda:1"], dtype=None, encode_dtype=None)
    if refused:
        with pytest.raises(ValueError, match=f"device is '{device}'; expected one of"):
            loading.load_named(args, Path("vae"))
    else:
        loading.load_named(args, Path("vae"))
        assert [each.type for each in made] == ["cuda"]


def test_devices_of_info_need_a_file(run):
    code, _, errors = run("info", "--devices", "cpu,cpu")
    assert code == 2
    assert "--devices needs a FILE" in errors[-1]


def test_seedvr2_is_decoded_by_its_own_device(run, tmp_path, monkeypatch):
    monkeypatch.setattr(errors_module, "_logged", set())
    vae, latents = tmp_path / "vae.safetensors", tmp_path / "l.safetensors"
    save_file(random_seedvr2(), vae)
    save_file({"latent": torch.randn(1, 16, 1, 4, 4)}, latents)
    movie = tmp_path / "d.mp4"
    arguments = ("decode", latents, "--vae", vae, "-o", movie, "--devices", "cpu,cpu")
    code, _, errors = run(*arguments, "--dtype", "fp32")
    assert code == 0
    assert movie.exists()
    (note,) = (line for line in errors if line.startswith("note: "))
    assert "alone: the norms of SeedVR2" in note


def bands_of(lines):
    """The columns of the first plan that `info` prints."""
    (first, *_) = re.findall(r"cpu (\d+)-(\d+)", " ".join(lines))
    return int(first[1]) - int(first[0]) + 1


def test_shares_divide_the_work(run, vae_path):
    widths = {}
    for shares in ("1,1", "3,1", "memory"):
        options = "--devices", "cpu,cpu", "--shares", shares, "--limit", "6"
        code, lines, _ = run("info", vae_path, *options)
        assert code == 0
        widths[shares] = bands_of(lines)
    assert widths["3,1"] > widths["1,1"] == widths["memory"]  # both are the same device


@pytest.mark.parametrize(
    ("shares", "code", "message"),
    [
        ("2", 1, "shares are [2.0]; expected 2 positive numbers"),
        ("2,1,1", 1, "expected 2 positive numbers"),
        ("2,0", 1, "expected 2 positive numbers"),
        ("2,much", 2, "'2,much' is not a list such as 2,1"),
    ],
)
def test_wrong_shares_are_one_line(run, vae_path, shares, code, message):
    found, _, errors = run("info", vae_path, "--devices", "cpu,cpu", "--shares", shares)
    assert found == code
    assert message in errors[-1]
    assert len(errors) == 1
