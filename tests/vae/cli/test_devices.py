"""`--devices` and `--shares`: the commands share a video, with the same files."""

import re

import pytest
import torch
from safetensors.torch import load_file

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae.cli.info import WIDTH  # noqa: E402
from fast_video_vae.vae.media import read_video  # noqa: E402


def test_encode_and_decode_write_the_same_files(tmp_path, done):
    clip = write_clip(tmp_path / "clip.mp4", 9, 64, 96)
    latents = [tmp_path / f"{n}.safetensors" for n in range(2)]
    movies = [tmp_path / f"{n}.mkv" for n in range(2)]
    options = ()
    for latent, movie in zip(latents, movies, strict=True):
        encoded = done("encode", clip, "-o", latent, *options)
        decoded = done("decode", latents[0], "-o", movie, *options)
        options = ("--devices", "cpu, cpu")
    assert any("on cpu, cpu" in line for line in encoded)
    assert any("on cpu, cpu" in line for line in decoded)
    assert torch.equal(*(load_file(path)["latent"] for path in latents))
    assert torch.equal(*(torch.cat(list(read_video(path).pieces()), dim=2) for path in movies))


def test_info_lists_the_bands_and_their_memory_by_the_shares(run, vae_path):
    widths = {}
    for shares in ("1,1", "3,1", "memory"):
        options = "--devices", "cpu,cpu", "--shares", shares, "--limit", "6"
        code, lines, _ = run("info", vae_path, *options)
        assert code == 0
        text = " ".join(" ".join(lines).split())
        first, last = re.search(r"bands of columns: cpu (\d+)-(\d+)", text).groups()
        widths[shares] = int(last) - int(first)
        assert text.count("MiB)") + text.count("MiB, ") >= 2 * 10
        table = lines[next(n for n, line in enumerate(lines) if line.startswith("size")) :]
        assert max(map(len, table)) <= WIDTH
    assert widths["3,1"] > widths["1,1"] == widths["memory"]  # both are the same device


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("VAE --devices cpu,gpu9", 1, "device 'gpu9' is unknown"),
        ("VAE --devices cpu,cpu --shares 2", 1, "shares are [2.0]; expected 2 positive numbers"),
        ("VAE --devices cpu,cpu --shares 2,1,1", 1, "expected 2 positive numbers"),
        ("VAE --devices cpu,cpu --shares 2,0", 1, "expected 2 positive numbers"),
    ],
)
def test_wrong_devices_and_shares_are_one_line(run, vae_path, arguments, code, message):
    found, _, errors = run("info", *arguments.replace("VAE", str(vae_path)).split())
    assert (found, len(errors)) == (code, 1)
    assert message in errors[0]
