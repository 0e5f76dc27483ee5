"""The audio track of a video file, encoded in step with the frames.

Samples go to the encoder as the frames are written, never ahead of them. Memory holds one block of
samples next to the waveform, if that is in memory. The container interleaves both streams. The
track ends with the video.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol, cast

import av
import torch
from av.audio.stream import AudioStream
from av.container import OutputContainer
from torch import Tensor

from .av_input import faults_name, open_media

LOG = logging.getLogger(__name__)
# FFmpeg's layout for each channel count, in the channel order of ComfyUI and torchaudio.
LAYOUTS = {1: "mono", 2: "stereo", 4: "quad", 6: "5.1", 8: "7.1"}
# A rate that both Opus and AAC support. FFmpeg resamples to it when the encoder lacks the rate.
USUAL_RATE = 48000
# Samples per call: a few packets of any encoder.
BLOCK = 8192


class Sound(Protocol):
    """Sound for a file: an `Audio`, or one that is read in blocks, such as that of another file."""

    @property
    def channels(self) -> int:
        """The number of channels, a key of `LAYOUTS`."""
        ...

    @property
    def sample_rate(self) -> int:
        """Samples per second and channel."""
        ...

    def blocks(self) -> Iterator[Tensor]:
        """Yield the sound in order, `[channels, n]` float32 on the CPU each, any `n`."""
        ...


@dataclass(frozen=True)
class Audio:
    """An audio clip; values beyond [-1, 1] are clipped when it is written."""

    waveform: Tensor  # `[channels, samples]`, float, on any device
    sample_rate: int

    def __post_init__(self) -> None:
        """Check the waveform and the rate before any work is done."""
        wave = self.waveform
        if not isinstance(wave, Tensor):
            raise ValueError(f"audio is a {type(wave).__name__}; expected a tensor")
        if wave.ndim != 2 or not wave.is_floating_point():
            raise ValueError(
                f"audio is {list(wave.shape)} {wave.dtype}; expected [channels, samples] float"
            )
        if wave.shape[0] not in LAYOUTS:
            raise ValueError(f"audio has {wave.shape[0]} channels; expected 1, 2, 4, 6 or 8")
        if not 1 <= self.sample_rate <= 768_000:
            raise ValueError(f"audio has {self.sample_rate} samples per second; expected 1-768000")
        if not torch.isfinite(wave).all():
            raise ValueError("audio has values that are not finite; expected -1 to 1")

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.waveform.shape[0]

    def blocks(self) -> Iterator[Tensor]:
        """Yield the sound in blocks `[channels, n]` on the CPU."""
        return (part.detach().to("cpu", torch.float32) for part in self.waveform.split(BLOCK, 1))


def layout_of(channels: int) -> str:
    """Return FFmpeg's layout for files that this pack writes; others are mixed down to stereo."""
    return LAYOUTS.get(channels, "stereo")


def read_audio(path: Path, start: Fraction | float = 0) -> Audio:
    """Read the first audio stream of a file from `start` in seconds on."""
    with path.open("rb"):  # raises the OSError that names the path
        pass
    blocks: list[Tensor] = []
    with faults_name(path, "cannot be read as audio"), open_media(f"file:{path}") as container:
        # FFmpeg has no context for a stream that it cannot decode.
        streams = [each for each in container.streams.audio if each.codec_context]
        if not streams:
            raise ValueError(f"{path} has no audio; expected a file with an audio stream")
        channels, rate = streams[0].codec_context.channels, streams[0].codec_context.sample_rate
        resampler = av.AudioResampler(format="fltp", layout=layout_of(channels), rate=rate)
        frames = itertools.chain(container.decode(streams[0]), [None])
        for out in itertools.chain.from_iterable(map(resampler.resample, frames)):
            blocks.append(torch.from_numpy(out.to_ndarray()))
        sound = torch.cat(blocks, dim=1)[:, round(start * rate) :] if blocks else torch.empty(1, 0)
        if not sound.shape[1]:
            raise ValueError(f"{path} has no audio at {float(start):g} s or later")
        return Audio(sound, rate)


class SoundTrack:
    """The audio stream of a video file that is being written."""

    def __init__(self, audio: Sound, container: OutputContainer, encoder: str) -> None:
        """Add the stream to `container` before its first packet; nothing is written yet."""
        self._rate, self._container, self._blocks = audio.sample_rate, container, audio.blocks()
        self._block = torch.empty(audio.channels, 0)
        self._sent, self._clipped = 0, False
        rates = av.Codec(encoder, "w").audio_rates
        rate = audio.sample_rate if not rates or audio.sample_rate in rates else USUAL_RATE
        layout = LAYOUTS[audio.channels]
        self._stream = cast(AudioStream, container.add_stream(encoder, rate=rate, layout=layout))

    def write_until(self, seconds: Fraction) -> None:
        """Encode the samples before the time `seconds` that are not encoded yet."""
        end = round(seconds * self._rate)
        while self._sent < end:
            while not self._block.shape[1]:
                following = next(self._blocks, None)
                if following is None:
                    return
                self._block = following
            taken = min(end - self._sent, BLOCK)
            block, self._block = self._block[:, :taken], self._block[:, taken:]
            loudest = block.abs().max().item()
            if loudest > 1 and not self._clipped:
                text = "Fast Video VAE: the audio peaks at %.3g and is clipped to 1; lower its "
                LOG.info(text + "volume to avoid this", loudest)
                self._clipped = True
            # As players do; the AAC encoder would fail.
            wave = block.clamp(-1, 1).contiguous().numpy()
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=LAYOUTS[len(block)])
            frame.sample_rate = self._rate
            frame.pts, frame.time_base = self._sent, Fraction(1, self._rate)
            self._container.mux(self._stream.encode(frame))
            self._sent += block.shape[1]

    def close(self) -> None:
        """Flush the encoder."""
        self._container.mux(self._stream.encode(None))
