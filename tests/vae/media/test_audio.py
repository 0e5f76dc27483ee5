"""The audio track of a video: in sync with the frames, and cut at their end."""

import itertools
import logging

import numpy as np
import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.videos import av, moving_clip, stacked, write
from fast_video_vae.vae.media import Audio, read_audio


def sine(samples, rate, channels=2):
    t = torch.arange(samples, dtype=torch.float64) / rate
    tones = [0.4 * torch.sin(2 * torch.pi * (300 + 200 * index) * t) for index in range(channels)]
    return torch.stack(tones).float()


def heard(path):
    """Return the audio of a file, `[channels, samples]`, and its rate in Hz, read with PyAV."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        frames = itertools.chain(container.decode(stream), [None])
        out = [x.to_ndarray() for frame in frames for x in resampler.resample(frame)]
        return torch.from_numpy(np.concatenate(out, axis=1)), stream.rate


@pytest.mark.parametrize(
    ("codec", "suffix", "name", "rate", "channels", "seconds"),
    [
        ("h264", ".mp4", "aac", 32000, 2, 1),  # shorter than the video
        ("ffv1", ".mkv", "flac", 44100, 6, 3),
        ("vp9", ".webm", "opus", 44100, 2, 3),  # Opus does not support this rate
        ("prores", ".mov", "pcm_s16le", 32000, 1, 3),
    ],
)
def test_audio_is_written_and_ends_with_the_video(
    tmp_path, codec, suffix, name, rate, channels, seconds
):
    wave = sine(rate * seconds, rate, channels)
    path = tmp_path / f"a{suffix}"
    write(path, moving_clip(48), 24, codec=codec, audio=Audio(wave, rate))
    assert len(stacked(path)) == 48
    with av.open(str(path)) as container:
        context = container.streams.audio[0].codec_context
        assert (context.name.removeprefix("lib"), context.channels) == (name, channels)
    sound, found_rate = heard(path)
    expected = min(2, seconds)
    # An AAC packet has 1024 samples, and the last one is padded.
    assert expected - 0.001 <= sound.shape[1] / found_rate <= expected + 2048 / found_rate
    if found_rate == rate:
        part = slice(2048, expected * rate - 4096)  # after the encoder's start-up transient
        heard_well = [0, 1, 2, 4, 5] if channels == 6 else slice(None)  # 3: LFE, below 120 Hz
        error = (sound[:, part] - wave[:, part])[heard_well].square().mean().sqrt()
        # One level of 16 bits, or about 20 dB below the tones, whose RMS is 0.28.
        assert error < (1 / 32768 if name in ("flac", "pcm_s16le") else 0.03)


def test_audio_is_read_from_a_time_on(tmp_path):
    wave = sine(48_000, 32_000, 2)
    path = write(tmp_path / "a.mkv", moving_clip(36), codec="ffv1", audio=Audio(wave, 32_000))
    whole, part = read_audio(path), read_audio(path, 0.5)
    assert (whole.sample_rate, part.channels) == (32_000, 2)
    assert (whole.waveform - wave).abs().max() < 1e-4
    assert torch.equal(part.waveform, whole.waveform[:, 16_000:])
    for name, start, message in (
        ("a.mkv", 1.5, "has no audio at 1.5 s or later"),
        ("b.mp4", 0, "has no audio; expected a file with an audio stream"),
        ("c.txt", 0, "cannot be read as audio"),
    ):
        write(tmp_path / "b.mp4", moving_clip(2))
        (tmp_path / "c.txt").write_text("x")
        with refused(message, name):
            read_audio(tmp_path / name, start)


def test_audio_and_frames_are_interleaved(tmp_path):
    path = tmp_path / "a.mkv"
    write(path, moving_clip(120, 16, 16), audio=Audio(sine(240_000, 48000), 48000))
    reached = {"video": 0.0, "audio": 0.0}
    apart = []
    with av.open(str(path)) as container:
        for packet in container.demux():
            if packet.dts is not None:
                reached[packet.stream.type] = float(packet.dts * packet.time_base)
                apart.append(abs(reached["video"] - reached["audio"]))
    assert max(apart) < 0.5


def test_invalid_audio_is_refused_and_audio_without_samples_ignored(tmp_path):
    for wave, rate, message in (
        ([0.0, 0.5], 8000, "audio is a list; expected a tensor"),
        (torch.zeros(8), 8000, r"audio is \[8\] torch.float32; expected \[channels, samples\]"),
        (torch.zeros(1, 8, dtype=torch.int16), 8000, "int16; expected"),
        (torch.zeros(3, 8), 8000, "audio has 3 channels; expected 1, 2, 4, 6 or 8"),
        (torch.zeros(1, 8), 0, "audio has 0 samples per second"),
        (torch.tensor([[0.0, torch.nan]]), 8000, "not finite"),
    ):
        with refused(message):
            Audio(wave, rate)
    path = write(tmp_path / "a.mp4", moving_clip(2), audio=Audio(torch.zeros(2, 0), 48000))
    with av.open(str(path)) as container:
        assert not container.streams.audio


def test_loud_audio_is_clipped(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for gain in (2.5, 1e30):  # 2.5: just within range
        loud = sine(48_000, 48_000) * gain
        given, sound = loud.clone(), Audio(loud, 48_000)
        path = write(tmp_path / "a.mkv", moving_clip(24, 16, 16), codec="ffv1", audio=sound)
        assert sum("the audio peaks at" in each for each in caplog.messages) == (gain > 3)
        assert (heard(path)[0] - loud.clamp(-1, 1)).abs().max() < 1e-4  # FLAC is lossless
        assert torch.equal(loud, given)
