"""A run of the upscaler: scene by scene and window by window, from a video into parts of a file.

Each scene is what ComfyUI's graph makes of it: Resize Image, Pre-Process SeedVR2 Input, an encode,
Split SeedVR2 Latent, Apply SeedVR2 Conditioning, KSampler, Merge SeedVR2 Latents, a decode and
Post-Process SeedVR2 Output. But a window is read, sampled, decoded and written before the next one,
and what two windows share is in the latents that the next one is merged with. Facts about ComfyUI
here are from comfy_extras/nodes_seedvr.py and nodes.py of 0.33.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras import nodes_seedvr
from torch import Tensor
from tqdm import tqdm

from ...vae import media, retried
from ..host import timing
from ..host.oom import in_turn
from ..host.progress import Progress, show_text
from ..vae import pieces as driver
from ..vae.comfy_vae import FastVAE
from ..video.target import VideoTarget
from .coding import DECODE_WARM_UP, ENCODE_WARM_UP, SceneDecoder, SceneEncoder
from .reader import Reader
from .store import State, Store, file_mark
from .wanted import Wanted, padded_size, sampling_bytes


@dataclass
class Run:
    """A run from its state on."""

    wanted: Wanted
    model: ModelPatcher
    vae: FastVAE
    target: VideoTarget  # of which a part is a file
    size: tuple[int, int]  # height and width of the frames
    frames: Reader
    originals: Reader  # of the same video, to finish the frames that are made
    store: Store
    state: State
    clock: "Clock"

    def finish(self) -> list[Path]:
        """Write the parts that are missing, and return all."""
        while not self.state.is_done:
            self._scene()
        return self.store.parts(self.state.parts)

    def _scene(self) -> None:
        """Do a scene from the window `state.window` on."""
        state, size = self.state, padded_size(self.size)
        first = state.window * state.step
        begin = max(0, first - ENCODE_WARM_UP)
        read = functools.partial(self._read, state.scene + 4 * begin)
        with (
            SceneEncoder(self.vae, size, read, first - begin) as encoder,
            SceneDecoder(self.vae, size) as decoder,
        ):
            self._coders: Any = encoder, decoder
            if state.window:  # the decoder has to see what it depends on
                begin = max(0, state.decoded - DECODE_WARM_UP)
                for _ in decoder.frames(self._kept(begin, state.decoded, first + state.overlap)):
                    pass
            latent, is_last = None, False
            while not is_last:
                latent, is_last = self._window(latent)

    def _window(self, latent: Tensor | None) -> tuple[Tensor, bool]:
        """Do the next window, of which some latents are encoded.

        Return those of the one after it, and whether the scene ends.
        """
        state = self.state
        self.clock.says("encoding")
        found = self._coders[0].take(state.length - (0 if latent is None else latent.shape[2]))
        latent = torch.cat([each for each in (latent, found) if each is not None], dim=2)
        following = self.frames.peek()
        is_last = following is None or following.is_cut
        state.latent = self._merged(self._sampled(latent))
        filled = state.window * state.step + latent.shape[2]  # latents of the scene
        # No later window changes these.
        final = filled if is_last else (state.window + 1) * state.step
        stop = self.frames.number if is_last else None
        self._write(self._kept(state.decoded, final, filled), stop)
        state.decoded, state.window = final, state.window + 1
        kept = max(state.length, DECODE_WARM_UP + filled - final)
        state.latent = state.latent[:, :, -kept:].clone()
        if is_last:
            state.scene, state.window, state.decoded = state.frames, 0, 0
            state.latent, state.is_done = state.latent[:, :, :0], following is None
        self.store.save(state)
        return latent[:, :, state.step :], is_last

    def _kept(self, first: int, stop: int, filled: int) -> Tensor:
        """Return latents of the scene by their numbers; the last kept one is `filled - 1`."""
        start = filled - self.state.latent.shape[2]
        return self.state.latent[:, :, first - start : stop - start]

    def _merged(self, latent: Tensor) -> Tensor:
        """Cross-fade the latents of the scene with those of the next window."""
        before, length = self.state.latent, self.state.length
        if not before.shape[2]:
            return latent
        parts = [{"samples": before[:, :, -length:]}, {"samples": latent}]
        merge = nodes_seedvr.SeedVR2TemporalMerge.execute
        joined = merge(parts, [self.state.overlap]).args[0]["samples"]
        return torch.cat([before[:, :, :-length], joined], dim=2)

    def _read(self, first: int) -> Iterator[Tensor]:
        """Yield frames `[1, 3, 1, H, W]` to the end of the scene, and the last one to fill up."""
        self.frames.seek(first)
        padded, count = None, first - self.state.scene
        while (frame := self.frames.peek()) is not None:
            if frame.is_cut and frame.number > first:
                break
            self.frames.take()
            # Single frames, which are padded in space alone.
            given = frame.image().unsqueeze(1)
            padded = nodes_seedvr.SeedVR2Preprocess.execute(given).args[0].movedim(-1, 1)
            count += 1
            yield padded
        while padded is not None and (count - 1) % 4:
            count += 1
            yield padded

    def _sampled(self, latent: Tensor) -> Tensor:
        """Return a window as the model makes it."""
        device = self.model.load_device
        free = comfy.model_management.get_free_memory(device)
        if device.type != "cpu" and free < sampling_bytes(latent.shape[2], padded_size(self.size)):
            self._park()

        def stepped(step: int, *_: object) -> None:
            self.clock.says(f"step {step + 1} of {self.wanted.steps}")

        def work(is_last: bool) -> Tensor:
            if is_last:
                self._park()
            return self.wanted.sampled(self.model, latent, stepped)

        self.clock.says("sampling")
        with timing.span("denoise", device=device):
            return in_turn(device, "a window", work, "with the VAE's memory on the host")

    def _park(self) -> None:
        """Move what the VAE remembers to the host."""
        for each in self._coders:
            each.park()

    def _write(self, latent: Tensor, stop: int | None) -> None:
        """Decode latents into the next part, up to the frame `stop` of the video."""
        state = self.state
        self.originals.seek(state.frames)
        path = self.store.parts(state.parts + 1)[-1]
        done = state.frames
        with self.target.writer(path, overwrite=True) as writer:
            dtype = writer.dtype
            with media.BackgroundWriter(writer.write, dtype=dtype, cancel=writer.cancel) as written:
                for images in self._coders[1].frames(latent):
                    count = len(images) if stop is None else min(len(images), stop - done)
                    if not count:
                        continue
                    pictures = self._finished(images[:count], self.originals.images(count))
                    written.put(media.convert_pictures(pictures, dtype))
                    done += count
                    self.clock.says("writing", count, pictures)
        state.frames, state.parts = done, state.parts + 1
        state.marks.append(file_mark(path))

    def _finished(self, images: Tensor, originals: Tensor) -> Tensor:
        """Return images with the size and the colors of the originals, cut to even sides."""
        finish = nodes_seedvr.SeedVR2PostProcessing.execute

        def freed(device: torch.device) -> None:
            self._park()
            driver.release(self.vae)(device)

        work = lambda: finish(images, originals, self.wanted.color).args[0]  # noqa: E731
        return retried(work, self.vae.device, "the colors of a window", freed)


class Clock:
    """Progress in frames, and the time that is left, by that of the frames of this run."""

    def __init__(self, total: int | None, done: int) -> None:
        """Begin with frames that are done of a total; None: it is unknown."""
        self._total, self._done, self._first = total, done, done
        self._progress = Progress(max(total or 0, done, 1))
        self._progress.passed(done)
        self._begin = time.monotonic()

    def says(self, stage: str, count: int = 0, images: Tensor | None = None) -> None:
        """Count frames that are done, show the state on the node, and check for Stop."""
        self._done += count
        self._progress.passed(count, images)
        text = f"{self._done:,} of {self._total:,} frames" if self._total else f"{self._done:,}"
        own = self._done - self._first
        if own and self._total and self._total > self._done:
            seconds = (time.monotonic() - self._begin) / own * (self._total - self._done)
            text += f", {tqdm.format_interval(seconds)} left"
        show_text(f"{text}: {stage}")
