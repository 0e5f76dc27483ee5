"""Parts of a video joined to one file without another encode."""

from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.videos import av, moving_clip, stacked
from fast_video_vae.vae.media import Audio, VideoWriter, codec_named, join_parts

RATE = Fraction(30000, 1001)


def parts_of(folder, codec, clips):
    """Files of one clip each."""
    paths = []
    for number, frames in enumerate(clips):
        paths.append(folder / f"{number}{codec_named(codec).suffix}")
        with VideoWriter(paths[-1], RATE, codec=codec) as writer:
            writer.write(frames)
    return paths


# With B-frames, of another process, in Matroska.
@pytest.mark.parametrize("codec", ["h264", "av1", "ffv1"])
def test_a_joined_file_has_the_frames_of_its_parts_in_step(codec, tmp_path):
    lengths = [9, 1, 22, 5]  # shorter and longer than the delay of an encoder with B-frames
    parts = parts_of(tmp_path, codec, moving_clip(sum(lengths), 64, 96).split(lengths))
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
    with av.open(str(path)) as file:
        packets = [each for each in file.demux(video=0) if each.size]
        times = sorted(float(each.pts * each.time_base) for each in packets)
    # Matroska rounds to 1 ms.
    assert times == pytest.approx([float(n / RATE) for n in range(sum(lengths))], abs=2e-3)
    with av.open(str(path)) as file:
        assert {key.lower() for key in file.metadata} >= {"title", "prompt"}
        assert abs(float(file.streams.video[0].average_rate) - float(RATE)) < 0.05
        samples = sum(frame.samples for frame in file.decode(audio=0))
    assert abs(samples / 48000 - sum(lengths) / RATE) < 0.05  # cut to the video


def test_parts_of_other_settings_are_refused(tmp_path):
    first, second = parts_of(tmp_path, "h264", [moving_clip(5, 64, 96), moving_clip(5, 64, 64)])
    with pytest.raises(ValueError, match="other settings"):
        join_parts([first, second], tmp_path / "whole.mp4", RATE, codec="h264")
    with pytest.raises(ValueError, match="have 5 frames; expected 6"):
        join_parts([first], tmp_path / "whole.mp4", RATE, codec="h264", frames=6)
    with pytest.raises(ValueError, match="no parts"):
        join_parts([], tmp_path / "whole.mp4", RATE, codec="h264")
    assert not (tmp_path / "whole.mp4").exists()
