"""The sound of a file in step with its frames: pauses in its times, and changes of its layout."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from fast_video_vae.tests.nodes.video.clips import from_file
from fast_video_vae.tests.videos import moving_clip

av = pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = pytest.mark.comfyui

RATE = 48000


def written(path, blocks, codec="pcm_s16le", layout="stereo"):
    """A file with 32 frames, and blocks of sound that each click at their start."""
    with av.open(str(path), "w") as file:
        video = file.add_stream("ffv1", rate=16)
        video.height, video.width, video.pix_fmt = 16, 16, "bgr0"
        sound = file.add_stream(codec, rate=RATE, layout=layout)
        for number, picture in enumerate(moving_clip(32, 16, 16).numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 16)
            file.mux(video.encode(frame))
        file.mux(video.encode(None))
        for begin, seconds in blocks:
            samples = np.zeros((1, 2 * round(seconds * RATE)), np.int16)
            samples[:, :960] = 20000
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
            frame.sample_rate, frame.time_base = RATE, Fraction(1, RATE)
            frame.pts = round(begin * RATE)
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))
    return path


def clicks(blocks):
    loud = torch.cat([*blocks], dim=1).abs().amax(0) > 0.3
    starts = loud & ~torch.cat([torch.zeros(1, dtype=torch.bool), loud[:-1]])
    return [round(at / RATE, 2) for at in starts.nonzero().flatten().tolist()]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([(0.25, 0.5), (0.75, 0.5)], [0.25, 0.75]),  # starts late
        ([(0, 0.5), (1.25, 0.5)], [0, 1.25]),  # a pause
        ([(0, 0.5), (0.503, 0.5)], [0, 0.5]),  # a time that is rounded
    ],
)
def test_sound_keeps_the_times_of_the_file(blocks, expected, comfyui, tmp_path):
    from fast_video_vae.nodes.video.source import Fit
    from fast_video_vae.nodes.video.videos import source_of

    source = source_of(from_file(written(tmp_path / "a.mkv", blocks)))
    assert clicks(source.track(Fit()).blocks()) == expected
    assert clicks([source.sound(Fit())["waveform"][0]]) == expected
    part = source.track(Fit(limit=4))  # a quarter of a second
    assert sum(block.shape[1] for block in part.blocks()) <= RATE // 4


def test_sound_keeps_its_layout_when_that_of_the_file_changes(comfyui, tmp_path):
    from fast_video_vae.nodes.video.source import Fit
    from fast_video_vae.nodes.video.videos import source_of

    path = tmp_path / "a.ts"
    path.touch()
    for layout, count in (("stereo", 2), ("5.1", 6)):
        part = tmp_path / f"{count}.ts"
        with av.open(str(part), "w", format="mpegts") as file:
            video = file.add_stream("mpeg2video", rate=25)
            video.height, video.width, video.pix_fmt = 64, 64, "yuv420p"
            sound = file.add_stream("ac3", rate=RATE, layout=layout)
            for number, picture in enumerate(moving_clip(25, 64, 64).numpy()):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 25)
                file.mux(video.encode(frame))
            file.mux(video.encode(None))
            wave = np.full((count, RATE), 0.5, np.float32)
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = RATE, 0
            file.mux([*sound.encode(frame), *sound.encode(None)])
        path.write_bytes(path.read_bytes() + part.read_bytes())
    track = source_of(from_file(path)).track(Fit())
    blocks = [*track.blocks()]
    assert {len(block) for block in blocks} == {track.channels} == {2}
    assert sum(block.shape[1] for block in blocks) > RATE  # those of both parts
