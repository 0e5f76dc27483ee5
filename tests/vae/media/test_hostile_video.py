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

# Damaged times can turn one second into more frames, but never as many as this.
LIMIT = 20_000


def damaged(data, rng):
    """Return a copy of the bytes with a random fault, most often in the headers."""
    at = rng.randrange(1, rng.choice([min(len(data), 4096), len(data)]))
    size, new = rng.randrange(1, 64), rng.randbytes(rng.randrange(1, 64))
    ways = b"", data[at + size :], new + data[at:], new + data[at + len(new) :]
    return data[:at] + rng.choice(ways)


def outcomes(path):
    """Yield the error messages of reading all frames, a range at another rate, and the audio."""
    part = {"start": 0.4, "duration": 0.4, "fps": Fraction(10)}
    for options in ({}, part, None):
        try:
            if options is None:
                read_audio(path)
            else:
                pieces = read_video(path).pieces(limit=LIMIT, **options)
                assert 0 < sum(piece.shape[2] for piece in pieces) < LIMIT
        except (ValueError, OSError) as error:
            yield str(error)


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mp4", "h264", {"movflags": "faststart"}),
        ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
        ("matroska", "h264", {}),
        ("avi", "mpeg4", {}),
        ("mpegts", "mpeg2video", {}),
    ],
)
def test_a_damaged_file_is_read_or_a_one_line_error(tmp_path, container, codec, options):
    path = tmp_path / "a.video"
    whole = write_with(path, moving_clip(24, 32, 32), container, codec, options).read_bytes()
    for seed in range(4):
        path.write_bytes(damaged(whole, random.Random(seed)))
        begun = time.process_time()
        for error in outcomes(path):
            assert path.name in error
            assert "\n" not in error
            assert len(error) <= 160
        assert time.process_time() - begun < 5, seed


def y4m(head):
    return b"YUV4MPEG2 " + head + b" Ip A0:0\n" + (b"FRAME\n" + bytes(384)) * 9


def test_an_impossible_header_is_a_one_line_error(tmp_path):
    header = b"IHDR" + struct.pack(">IIBBBBB", 16_000, 16_000, 8, 2, 0, 0, 0)
    large = b"\x89PNG\r\n\x1a\n"
    for part in (header, b"IDAT" + zlib.compress(bytes(9999)), b"IEND"):
        large += struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part))
    for name, data in {
        "large.png": large,  # FFmpeg would allocate 768 MB
        "large.y4m": y4m(b"W100000 H100000 F24:1"),
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
