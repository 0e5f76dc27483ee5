"""The demo: which part of a video it uses, the names of its files, and its output."""

import os
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from fast_video_vae.tests.builders import module_command, random_state_dict, succeeded

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae.cli import stretch  # noqa: E402
from fast_video_vae.vae.media.video_reader import VideoFile, read_video  # noqa: E402
from fast_video_vae.vae.models.config import read_configs  # noqa: E402

MODULE = "fast_video_vae.vae.cli"
ALL = {"fps": None, "size": None, "start": 0.0, "duration": None, "limit": None}


@pytest.fixture(scope="module")
def config():
    (found, *_) = read_configs({k: tuple(v.shape) for k, v in random_state_dict(8).items()})
    return found


def test_demo_reads_a_range_at_another_size_and_rate(tmp_path, done):
    source = write_clip(tmp_path / "a.mp4", 25)
    options = ("--duration", "0.5", "--size", "64x32", "--fps", "12", "--start", "0.25")
    lines = done("demo", source, "--out", tmp_path, *options)
    decoded = read_video(tmp_path / "a_decoded.mp4")
    assert (decoded.width, decoded.height, decoded.fps) == (64, 32, 12)
    assert decoded.estimated_frames == 5  # half a second is 6 frames; a VAE takes 4 n + 1
    assert not [line for line in lines if "on a CPU" in line]


@pytest.mark.parametrize(
    ("width", "height", "frames", "asked", "changed"),
    [
        (256, 256, 33, {}, {}),  # the bundled clip
        (48, 32, 2001, {}, {}),  # long, but with small frames
        (1280, 720, 132, {}, {"size": (360, 640), "limit": 49}),
        (720, 1280, 9, {}, {"size": (640, 360)}),
        (48, 32, 20_000, {}, {"limit": 7809}),
        (1280, 720, 132, {"size": (720, 1280)}, {"limit": 13}),
        (3840, 2160, 132, {"size": (2160, 3840)}, {"limit": 5}),
        (1280, 720, 132, {"duration": 5.0}, {"size": (360, 640)}),
        (1280, 720, 132, {"limit": 100}, {"size": (360, 640)}),
        (1280, 720, 132, {"size": (720, 1280), "duration": 5.0}, {}),  # size and duration are given
        (640, 360, 132, {"fps": Fraction(6)}, {}),
        (640, 360, None, {}, {"limit": 49}),  # the length is unknown
    ],
)
def test_demo_reduces_a_video_to_half_a_minute_of_cpu_work(
    config, width, height, frames, asked, changed
):
    video = VideoFile(Path("a.mp4"), height, width, Fraction(24), frames)
    wanted = ALL | asked
    taken, note = stretch.affordable(video, config, wanted)
    assert taken == wanted | changed
    assert bool(note) == bool(changed)
    limited = f" of {frames} frames" if frames else "at most 49 frames"
    for key, word in (("size", f" instead of {width}x{height}"), ("limit", limited)):
        assert (word in note) == (key in changed)


def test_dropped_frames_are_reported(tmp_path, done, monkeypatch):
    monkeypatch.setattr(stretch, "CPU_PIXELS", 9 * 32 * 48)
    source = write_clip(tmp_path / "a.mp4", 25)
    lines = done("demo", source, "--out", tmp_path)
    (note,) = (line for line in lines if "on a CPU" in line)
    assert "9 of 25 frames" in note
    assert "--duration" in note
    assert read_video(tmp_path / "a_decoded.mp4").estimated_frames == 9


def test_videos_of_the_same_name_keep_separate_results(tmp_path, done):
    sources = [
        write_clip(tmp_path / "a.mp4", 1),
        write_clip(tmp_path / "a.mkv", 5, codec="ffv1"),
        write_clip(tmp_path / "other" / "a.mp4", 9),
    ]
    out = tmp_path / "out"

    for source in sources:
        done("demo", source, "--out", out)
    names = ("a_decoded.mp4", "a_2_decoded.mp4", "a_3_decoded.mp4")
    assert [read_video(out / name).estimated_frames for name in names] == [1, 5, 9]
    done("demo", sources[2], "--out", out, "--overwrite")
    assert read_video(out / "a_decoded.mp4").estimated_frames == 9
    assert len(list(out.iterdir())) == 6


def test_demo_keeps_files_that_it_did_not_write(tmp_path, done):
    source = write_clip(tmp_path / "a.mp4", 1)
    (tmp_path / "a_decoded.mp4").write_bytes(b"holiday")
    (tmp_path / "a_2_sheet.png").write_bytes(b"holiday")
    done("demo", source, "--out", tmp_path)
    assert (tmp_path / "a_decoded.mp4").read_bytes() == b"holiday"
    assert (tmp_path / "a_2_sheet.png").read_bytes() == b"holiday"
    assert (tmp_path / "a_3_decoded.mp4").exists()


def test_only_the_bundled_vae_is_marked_as_small(tmp_path, run, vae_path):
    from PIL import Image

    sizes = []
    for given in ([], ["--vae", vae_path]):
        code, lines, _ = run(
            "demo", "--out", tmp_path, "--overwrite", "--frames-limit", "1", *given
        )
        assert code == 0
        assert any("small and blurs" in line and "--vae FILE" in line for line in lines) == (
            not given
        )
        with Image.open(tmp_path / "clip_sheet.png") as sheet:
            sizes.append(sheet.size)
    assert sizes[0][1] > sizes[1][1]  # the note is a line of the sheet


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_kernel_build_is_reported_separately(tmp_path, vae_path):
    """The seconds of encode and decode exclude the build; a second run builds nothing.

    Parts of one run that do not overlap take at most its time, however loaded the machine is.
    """
    source = write_clip(tmp_path / "a.mp4", 25)
    # Drop -O3, because optimisation takes most of the build time.
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nfor a; do shift; [ "$a" = -O3 ] || set -- "$@" "$a"; done\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    command = module_command(
        MODULE, "demo", str(source), "--vae", str(vae_path), "--out", str(tmp_path)
    )
    settings = {"CXX": str(compiler), "FAST_VIDEO_VAE_CACHE": str(tmp_path / "cache")}
    said, took = [], []
    for _ in range(2):
        start = time.monotonic()
        done = succeeded(command, env={**os.environ, **settings})
        took.append(time.monotonic() - start)
        said.append(done.stdout)
    if "no native CPU kernels" in done.stderr:
        pytest.skip(done.stderr)
    patterns = (r"kernels built in", "encode", "decode")
    parts = [float(re.search(rf"^{each} +([\d.]+) s", said[0], re.M)[1]) for each in patterns]
    assert parts[0] > 1
    assert sum(parts) < took[0]
    assert "kernels built" not in said[1]
