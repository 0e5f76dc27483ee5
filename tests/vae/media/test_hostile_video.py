"""Damaged videos and impossible headers give frames, or an error of one line with the name."""

import io
import random
import struct
import time
import zlib
from fractions import Fraction

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import moving_clip, stacked, write, write_with
from fast_video_vae.vae.media import Audio, read_audio, read_video

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
# Damaged times can turn one second into more frames, but never as many as this.
LIMIT = 20_000


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return [
        write_with(
            folder / f"{i}.{suffix}", moving_clip(24, 32, 32), container, codec, options
        ).read_bytes()
        for i, (suffix, container, codec, options) in enumerate(KINDS)
    ]


def damaged(data, rng):
    """Return a copy of the bytes with a random fault, most often in the headers."""
    data, head = bytearray(data), min(len(data), 4096)
    at = rng.randrange(rng.choice([head, len(data)]))
    kind = rng.randrange(5)
    if kind == 0:
        del data[max(at, 1) :]
    elif kind == 1:
        reach = rng.choice([head, len(data)])
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(reach)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
    elif kind == 2:
        data[at : at + 8] = bytes([rng.choice([0, 0xFF])] * 8)
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.randrange(1, 64))
    else:
        del data[at : at + rng.randrange(1, 64)]
    return bytes(data)


def outcomes(path):
    """Yield the error messages of reading all frames, a range at another rate, and the audio."""

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


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda i: f"{KINDS[i][0]}-{i}")
def test_a_damaged_file_is_read_or_a_one_line_error(tmp_path, whole_files, kind):
    for seed in range(3):
        path = tmp_path / f"{seed}.{KINDS[kind][0]}"
        path.write_bytes(damaged(whole_files[kind], random.Random(1000 * kind + seed)))
        begun = time.process_time()
        for error in outcomes(path):
            assert path.name in error
            assert "\n" not in error
            assert len(error) <= 160
        assert time.process_time() - begun < 5, seed


def png(width, height):
    """Return a PNG file whose header declares this size; its data is 9,999 zero bytes."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for part in (header, b"IDAT" + zlib.compress(bytes(9999)), b"IEND"):
        found += struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
    return found


def y4m(head):
    return b"YUV4MPEG2 " + head + b" Ip A0:0\n" + (b"FRAME\n" + bytes(384)) * 9


def test_an_impossible_header_is_a_one_line_error(tmp_path):
    for name, data in {
        "large.png": png(16_000, 16_000),  # FFmpeg would allocate 768 MB
        "none.png": png(0, 0),
        "large.y4m": y4m(b"W100000 H100000 F24:1"),
        "negative.y4m": y4m(b"W-16 H-16 F24:1"),
        "text.mkv": b"not a video " * 99,
        "zeros.avi": bytes(4096),
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        with refused(name, path.name):
            read_video(path)


def test_an_invalid_rate_is_replaced(tmp_path):
    for rate in (b"F0:0", b"F1:0", b"F-24:1", b"F2000000000:1"):
        path = tmp_path / "a.y4m"
        path.write_bytes(y4m(b"W16 H16 " + rate))
        video = read_video(path)
        assert 0 < video.fps < 10_000
        assert 1 <= sum(piece.shape[2] for piece in video.pieces()) <= 9


def test_tags_in_other_encodings_are_read(tmp_path):
    path = tmp_path / "a.mkv"
    wave = torch.sin(torch.arange(8000) / 10).unsqueeze(0) / 2
    write(path, moving_clip(12), audio=Audio(wave, 8000), metadata={"title": "TITLEXX"})
    data = path.read_bytes()
    assert b"TITLEXX" in data
    path.write_bytes(data.replace(b"TITLEXX", b"TITLE\xff\xe9"))
    for source in (path, io.BytesIO(path.read_bytes())):
        assert len(stacked(read_video(source))) == 12
    assert read_audio(path).waveform.abs().max() > 0.3
