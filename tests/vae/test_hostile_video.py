"""Video files that are damaged, or say what cannot be: frames, or one line with the file's name."""

import random
import time
from fractions import Fraction

import pytest

pytest.importorskip("av", reason="PyAV is not installed")

from fast_video_vae.tests.videos import moving_clip, write_with
from fast_video_vae.vae.media import read_video
from fast_video_vae.vae.sound import read_audio

KINDS = [
    ("mp4", "mp4", "h264", {}),
    ("mp4", "mp4", "h264", {"movflags": "faststart"}),
    ("mp4", "mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
    ("mkv", "matroska", "h264", {}),
    ("webm", "webm", "libvpx", {}),
    ("avi", "avi", "mpeg4", {}),
    ("ts", "mpegts", "mpeg2video", {}),
    ("flv", "flv", "h264", {}),
]
# A second of frames may be read as a longer video where its times are damaged, but not endlessly.
LIMIT = 20_000


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return [
        write_with(
            folder / f"{i}.{suffix}", moving_clip(24), container, codec, options
        ).read_bytes()
        for i, (suffix, container, codec, options) in enumerate(KINDS)
    ]


def damaged(data, rng):
    """A copy with a fault of a random kind, most of them in the headers."""
    data = bytearray(data)
    head = min(len(data), 4096)
    at = rng.randrange(rng.choice([head, len(data)]))
    kind = rng.randrange(6)
    if kind == 0:
        del data[max(at, 1) :]
    elif kind == 1:
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(head)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    elif kind == 3:
        data[at : at + 8] = bytes([rng.choice([0, 0xFF])] * 8)
    elif kind == 4:
        data[at:at] = rng.randbytes(rng.randrange(1, 64))
    else:
        del data[at : at + rng.randrange(1, 64)]
    return bytes(data)


def outcomes(path):
    """The errors of reading a file in several ways."""

    def whole():
        video = read_video(path)
        video.estimate(start=0.2)
        assert 0 < sum(piece.shape[2] for piece in video.pieces(limit=LIMIT)) < LIMIT

    def part():
        pieces = read_video(path).pieces(start=0.4, duration=0.4, fps=Fraction(10), limit=LIMIT)
        assert 0 < sum(piece.shape[2] for piece in pieces) < LIMIT

    for way in (whole, part, lambda: read_audio(path)):
        try:
            way()
        except (ValueError, OSError) as error:
            yield str(error)


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda i: f"{KINDS[i][0]}-{i}")
def test_a_damaged_file_is_read_or_told_in_a_line(tmp_path, whole_files, kind, seeds):
    for seed in seeds:
        path = tmp_path / f"{seed}.{KINDS[kind][0]}"
        path.write_bytes(damaged(whole_files[kind], random.Random(1000 * kind + seed)))
        begun = time.perf_counter()
        for error in outcomes(path):
            assert str(path) in error
            assert "\n" not in error
            assert len(error) - len(str(path)) < 250
        assert time.perf_counter() - begun < 5, seed
