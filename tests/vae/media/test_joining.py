"""Parts of a video joined to one file without another encode."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from fast_video_vae.tests.videos import moving_clip, stacked
from fast_video_vae.vae.media import Audio, VideoWriter, codec_named, join_parts

av = pytest.importorskip("av", reason="PyAV is not installed")

RATE = Fraction(30000, 1001)


def parts_of(folder, codec, lengths, size=(64, 96), **options):
    """Files of the frames of one clip."""
    clip, paths = moving_clip(sum(lengths), *size), []
    for number, frames in enumerate(clip.split(lengths)):
        paths.append(folder / f"{number}{codec_named(codec).suffix}")
        with VideoWriter(paths[-1], RATE, codec=codec, **options) as writer:
            writer.write(frames)
    return paths


def times_of(path):
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        return [float(p.pts * p.time_base) for p in file.demux(stream) if p.size]


# With B-frames, of another process, in Matroska.
@pytest.mark.parametrize("codec", ["h264", "av1", "ffv1"])
def test_a_joined_file_has_the_frames_of_its_parts_in_step(codec, tmp_path):
    lengths = [9, 1, 22, 5]  # shorter and longer than the delay of an encoder with B-frames
    parts = parts_of(tmp_path, codec, lengths)
    sound = Audio(torch.sin(torch.arange(48000 * 2) / 20).expand(2, -1) * 0.5, 48000)
    path = tmp_path / f"whole{codec_named(codec).suffix}"
    tags = {"title": "joined", "prompt": "{}"}
    options = {"codec": codec, "audio": sound, "metadata": tags}
    passed = []
    join_parts(parts, path, RATE, **options, frames=sum(lengths), passed=passed.append)
    assert passed == [1] * sum(lengths)
    join_parts(parts, again := path.with_stem("again"), RATE, **options)
    assert again.read_bytes() == path.read_bytes()
    assert torch.equal(stacked(path), torch.cat([stacked(part) for part in parts]))
    times = sorted(times_of(path))
    assert len(times) == sum(lengths)
    assert all(abs(b - a - 1 / RATE) < 2e-3 for a, b in pairwise(times))  # Matroska rounds to 1 ms
    assert abs(times[0]) < 2e-3
    with av.open(str(path)) as file:
        assert {key.lower() for key in file.metadata} >= {"title", "prompt"}
        assert abs(float(file.streams.video[0].average_rate) - float(RATE)) < 0.05
        samples = sum(frame.samples for frame in file.decode(audio=0))
    assert abs(samples / 48000 - sum(lengths) / RATE) < 0.05  # cut to the video


def test_parts_of_other_settings_are_refused(tmp_path):
    (first,), (second,) = (
        parts_of(tmp_path / name, "h264", [5], size)
        for name, size in (("a", (64, 96)), ("b", (64, 64)))
        if (tmp_path / name).mkdir() is None
    )
    with pytest.raises(ValueError, match="other settings"):
        join_parts([first, second], tmp_path / "whole.mp4", RATE, codec="h264")
    with pytest.raises(ValueError, match="have 5 frames; expected 6"):
        join_parts([first], tmp_path / "whole.mp4", RATE, codec="h264", frames=6)
    with pytest.raises(ValueError, match="no parts"):
        join_parts([], tmp_path / "whole.mp4", RATE, codec="h264")
    assert not (tmp_path / "whole.mp4").exists()
