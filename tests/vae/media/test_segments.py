"""An encoder in a process of its own that hangs or crashes loses no frame."""

import logging
import time
from fractions import Fraction

import av
import pytest
import torch

from fast_video_vae.tests.videos import moving_clip, stacked, write
from fast_video_vae.vae.media import Audio, BackgroundWriter, VideoWriter, segments

pytestmark = pytest.mark.skipif(
    not segments.SegmentEncoder.serves("libsvtav1") or "libsvtav1" not in av.codecs_available,
    reason="this build of PyAV has no SVT-AV1",
)
LENGTH = segments._LEAST_FRAMES

# The process of an encoder with faults: each start takes one from a file, with a number of frames.
FAULTY = """
import os, runpy, time, types
faults = {faults!r}
with open(faults) as file:
    first, *rest = file.read().split() or ["none@0"]
with open(faults, "w") as file:
    file.write(" ".join(rest))
kind, count = first.split("@")
main = runpy.run_path({real!r})["main"]
av, frames = main.__globals__["av"], []
def faulty(*given):
    frames.append(given)
    if len(frames) == int(count):
        os.abort() if kind == "crash" else time.sleep(1000)
    return av.VideoFrame(*given)
main.__globals__["av"] = types.SimpleNamespace(open=av.open, VideoFrame=faulty)
main()
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Plants faults: `hang@5` or `crash@5` for each start, at the fifth frame."""
    path, script = tmp_path / "faults", tmp_path / "process.py"
    script.write_text(FAULTY.format(faults=str(path), real=str(segments._SCRIPT)))
    path.touch()
    monkeypatch.setattr(segments, "_SCRIPT", script)
    monkeypatch.setattr(segments, "PATIENCE_S", (2.0, 4.0, 6.0))
    return lambda *given: path.write_text(" ".join(given))


def test_frames_sound_and_times_pass_the_borders_of_segments(tmp_path):
    clip, fps = moving_clip(2 * LENGTH + 1, 64, 66), Fraction(12)
    sound = Audio(torch.sin(torch.arange(15 * 8000) / 9)[None] / 2, 8000)
    for suffix in (".mp4", ".mkv"):
        path = write(tmp_path / f"a{suffix}", clip, fps, codec="av1", audio=sound)
        difference = stacked(path).float() - clip.float()
        assert 10 * torch.log10(255**2 / difference.square().mean((1, 2, 3))).min() > 38
        with av.open(str(path)) as container:
            frames = list(container.decode(video=0))
            keys = [n for n, frame in enumerate(frames) if frame.key_frame]
            assert keys == [0, LENGTH, 2 * LENGTH]
            times = [frame.time for frame in frames]
            assert times == pytest.approx([n / 12 for n in range(len(clip))], abs=1e-3)
            assert container.streams.video[0].average_rate == fps
        with av.open(str(path)) as container:
            heard = sum(frame.samples / frame.rate for frame in container.decode(audio=0))
            assert heard == pytest.approx(len(clip) / 12, abs=0.2)


def test_a_segment_whose_encoder_hangs_is_encoded_again(tmp_path, faults, caplog):
    clip = moving_clip(2 * LENGTH + 5, 64, 64)
    expected = stacked(write(tmp_path / "whole.mp4", clip, codec="av1"))
    faults("crash@9", "hang@125")  # the second segment begins with frame 120
    with caplog.at_level(logging.INFO):
        found = write(tmp_path / "a.mp4", clip, codec="av1")
    assert torch.equal(stacked(found), expected)
    crashed, hung = (line for line in caplog.messages if "libsvtav1" in line)
    assert crashed.startswith("Fast Video VAE: libsvtav1 at frames 0-119 ended (")
    assert crashed.endswith("; they are encoded again with fewer threads")
    assert "made no progress for 2 s" in hung


def test_a_stop_does_not_wait_for_an_encoder_that_hangs(tmp_path, faults, monkeypatch):
    monkeypatch.setattr(segments, "PATIENCE_S", (60.0, 60.0))
    faults("hang@2")
    begin = time.monotonic()

    def work():
        with (
            VideoWriter(tmp_path / "a.mp4", 24, codec="av1") as writer,
            BackgroundWriter(writer.write, cancel=writer.cancel) as background,
        ):
            background.put(moving_clip(2 * LENGTH, 64, 64))  # a segment
            time.sleep(1)  # it hangs
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - begin < 30
    assert not list(tmp_path.glob("*a.mp4*"))


def test_what_users_have_python_import_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    for name in ("queue", "pathlib", "fractions"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len(stacked(write(tmp_path / "a.mp4", moving_clip(3, 64, 64), codec="av1"))) == 3
