"""Sound that is written beside a video, in step with its frames.

It is handed to the encoder as the frames come, never ahead of them, so that of the whole there is
only the waveform, and the container interleaves both. It ends with the video.
"""

import itertools
import logging
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import torch
from av.audio.stream import AudioStream
from av.container import OutputContainer
from torch import Tensor

from .av_input import faults_name, open_media

LOG = logging.getLogger(__name__)
# FFmpeg's names of what so many channels are, in the order in which ComfyUI and torchaudio have
# them.
LAYOUTS = {1: "mono", 2: "stereo", 4: "quad", 6: "5.1", 8: "7.1"}
# What Opus and AAC both encode. Another rate is resampled to it by FFmpeg where the encoder
# refuses it.
USUAL_RATE = 48000
# Samples that are handed over at a time: a few packets of any encoder.
BLOCK = 8192


@dataclass(frozen=True)
class Audio:
    """A sound.

    Attributes:
        waveform: `[channels, samples]`, float in [-1, 1], on any device. What is beyond is clipped
            where it is written.
        sample_rate: Samples per second.
    """

    waveform: Tensor
    sample_rate: int

    def __post_init__(self) -> None:
        """Refuse what no encoder takes, before any work is done."""
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
            raise ValueError("audio holds values that are not finite; expected -1 to 1")


def read_audio(path: Path, start: Fraction | float = 0) -> Audio:
    """Read the sound of a file, of a video as well.

    Args:
        path: Any format that FFmpeg reads.
        start: Seconds to leave out before.

    Returns:
        The first sound that the file has; kinds of more than 8 channels are mixed to stereo.

    Raises:
        OSError: There is no such file, or it may not be read.
        ValueError: It has no sound, none after `start`, or is broken.
    """
    with path.open("rb"):  # raises the OSError that names the path
        pass
    blocks: list[Tensor] = []
    with faults_name(path, "cannot be read as sound"), open_media(f"file:{path}") as container:
        # What FFmpeg cannot decode has no context.
        streams = [each for each in container.streams.audio if each.codec_context]
        if not streams:
            raise ValueError(f"{path} has no sound; expected a file with an audio stream")
        channels, rate = streams[0].codec_context.channels, streams[0].codec_context.sample_rate
        layout = LAYOUTS.get(channels, "stereo")
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
        frames = itertools.chain(container.decode(streams[0]), [None])
        for out in itertools.chain.from_iterable(map(resampler.resample, frames)):
            blocks.append(torch.from_numpy(out.to_ndarray()))
        sound = torch.cat(blocks, dim=1)[:, round(start * rate) :] if blocks else torch.empty(1, 0)
        if not sound.shape[1]:
            raise ValueError(f"{path} has no sound at {float(start):g} s or later")
        return Audio(sound, rate)


class SoundTrack:
    """The audio stream of a file that is being written."""

    def __init__(self, audio: Audio, container: OutputContainer, encoder: str) -> None:
        """Add the stream to a file before its first packet; nothing is written yet.

        Raises:
            ValueError: This build of PyAV has no such encoder.
        """
        self._audio = audio
        self._container = container
        self._sent = 0
        self._clipped = False
        rates = av.Codec(encoder, "w").audio_rates
        rate = audio.sample_rate if not rates or audio.sample_rate in rates else USUAL_RATE
        layout = LAYOUTS[audio.waveform.shape[0]]
        self._stream = cast(AudioStream, container.add_stream(encoder, rate=rate, layout=layout))

    def write_until(self, seconds: Fraction) -> None:
        """Encode what sounds before a moment of the video and has not been encoded yet."""
        samples = self._audio.waveform.shape[1]
        end = min(samples, round(seconds * self._audio.sample_rate))
        while self._sent < end:
            stop = min(end, self._sent + BLOCK)
            block = self._audio.waveform[:, self._sent : stop].detach().to("cpu", torch.float32)
            frame = av.AudioFrame.from_ndarray(
                self._within_range(block).contiguous().numpy(),
                format="fltp",
                layout=LAYOUTS[len(block)],
            )
            frame.sample_rate = self._audio.sample_rate
            frame.pts, frame.time_base = self._sent, Fraction(1, self._audio.sample_rate)
            self._container.mux(self._stream.encode(frame))
            self._sent = stop

    def _within_range(self, block: Tensor) -> Tensor:
        """Clip what is too loud, as players do: AAC's encoder takes it for an error."""
        loudest = block.abs().max().item()
        if loudest <= 1:
            return block
        if not self._clipped:
            LOG.info("Fast Video VAE: the sound is louder than 1.0 (%.3g) and is clipped; scale it "
                     "down to keep its shape", loudest)  # fmt: skip
            self._clipped = True
        return block.clamp(-1, 1)

    def close(self) -> None:
        """Let the encoder give what it holds."""
        self._container.mux(self._stream.encode(None))
