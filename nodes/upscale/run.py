"""A run of the upscaler: scene by scene and window by window, from a video into parts of a file.

Each scene is what ComfyUI's graph makes of it: Resize Image, Pre-Process SeedVR2 Input, an encode,
Split SeedVR2 Latent, Apply SeedVR2 Conditioning, KSampler, Merge SeedVR2 Latents, a decode and
Post-Process SeedVR2 Output. But a window is read, sampled, decoded and written before the next one,
and what two windows share is in the latents that the next one is merged with. Facts about ComfyUI
here are from comfy_extras/nodes_seedvr.py and nodes.py of 0.33.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy_extras import nodes_seedvr
from torch import Tensor

from ...vae import media, retried
from ..host import timing
from ..host.oom import in_turn
from ..host.progress import Progress, show_text
from ..vae import pieces as driver
from ..vae.comfy_vae import FastVAE
from .coding import DECODE_WARM_UP, ENCODE_WARM_UP, SceneDecoder, SceneEncoder
from .reader import Reader
from .store import State, Store, file_mark
from .windows import Windows, sampling_bytes


@dataclass(frozen=True)
class Sampling:
    """The values of KSampler's widgets."""

    seed: int
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float

    def sample(self, model: ModelPatcher, latent: Tensor, stepped: Callable[..., None]) -> Tensor:
        """Sample a window as KSampler does, conditioned on itself."""
        given = nodes_seedvr.SeedVR2Conditioning.execute(model, {"samples": latent}).args
        return comfy.sample.sample(
            model,
            comfy.sample.prepare_noise(latent, self.seed),
            self.steps,
            self.cfg,
            self.sampler_name,
            self.scheduler,
            *given,
            latent,
            denoise=self.denoise,
            callback=stepped,
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Upscale:
    """What all windows of a run need."""

    model: ModelPatcher
    vae: FastVAE
    sampling: Sampling
    color: str  # of Post-Process SeedVR2 Output
    size: tuple[int, int]  # of the frames that the VAE takes, multiples of 16
    writer: Callable[[Path], media.VideoWriter]
    suffix: str
    total: int | None  # frames of the video; None: unknown

    def run(self, frames: Reader, originals: Reader, store: Store, state: State) -> list[Path]:
        """Write the parts that are missing, and return all; both readers are of the same video."""
        clock = _Clock(self.total, state.frames)
        while not state.is_done:
            if not state.window:
                frames.seek(state.scene)
            with contextlib.ExitStack() as stack:
                scene = _Scene(self, frames, originals, store, state, clock, stack)
                while scene.advance():
                    pass
        return [store.part(number, self.suffix) for number in range(state.parts)]


class _Scene:
    """A scene from the window `state.window` on."""

    def __init__(
        self,
        job: Upscale,
        frames: Reader,
        originals: Reader,
        store: Store,
        state: State,
        clock: "_Clock",
        stack: contextlib.ExitStack,
    ) -> None:
        self._job, self._frames, self._originals = job, frames, originals
        self._store, self._state, self._clock = store, state, clock
        self._windows = Windows(state.length, state.overlap)
        first = state.window * self._windows.step
        begin = max(0, first - ENCODE_WARM_UP)
        read = functools.partial(self._read, state.scene + 4 * begin)
        encoder = SceneEncoder(job.vae, job.size, read, first - begin)
        self._encoder: Any = stack.enter_context(encoder)
        self._decoder: Any = stack.enter_context(SceneDecoder(job.vae, job.size))
        self._latent: Tensor | None = None  # of the next window, those that are encoded
        self._filled = state.decoded  # latents of the scene that are sampled
        if state.window:
            self._filled = first + state.overlap
            self._warm_up()

    def advance(self) -> bool:
        """Do the next window; return whether the scene goes on."""
        state, windows = self._state, self._windows
        missing = windows.length - (0 if self._latent is None else self._latent.shape[2])
        self._clock.says("encoding")
        found = self._encoder.take(missing)
        parts = [each for each in (self._latent, found) if each is not None]
        latent = torch.cat(parts, dim=2)
        following = self._frames.peek()
        is_last = following is None or following.is_cut
        sampled = self._sampled(latent)
        state.latent = windows.merged(state.latent, sampled)
        self._filled = state.window * windows.step + latent.shape[2]
        final = windows.final(state.window, self._filled, is_last=is_last)
        stop = self._frames.number if is_last else None
        self._write(self._of_scene(state.decoded, final), stop)
        state.decoded, state.window = final, state.window + 1
        self._latent = latent[:, :, windows.step :]
        kept = max(windows.length, DECODE_WARM_UP + self._filled - final)
        state.latent = state.latent[:, :, -kept:].clone()
        if is_last:
            state.scene, state.window, state.decoded = state.frames, 0, 0
            state.latent, state.is_done = state.latent[:, :, :0], following is None
        self._store.save(state)
        return not is_last

    def _of_scene(self, first: int, stop: int) -> Tensor:
        """Return latents of the scene by their numbers, of those that are kept."""
        start = self._filled - self._state.latent.shape[2]
        return self._state.latent[:, :, first - start : stop - start]

    def _warm_up(self) -> None:
        """Let the decoder see what it depends on."""
        done = self._state.decoded
        for _ in self._decoder.frames(self._of_scene(max(0, done - DECODE_WARM_UP), done)):
            pass

    def _read(self, first: int) -> Iterator[Tensor]:
        """Yield frames `[1, 3, 1, H, W]` to the end of the scene, and the last one to fill up."""
        self._frames.seek(first)
        padded, count = None, first - self._state.scene
        while (frame := self._frames.peek()) is not None:
            if frame.is_cut and frame.number > first:
                break
            self._frames.take()
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
        job, device = self._job, self._job.model.load_device
        free = comfy.model_management.get_free_memory(device)
        if device.type != "cpu" and free < sampling_bytes(latent.shape[2], job.size):
            self._park()

        def stepped(step: int, *_: object) -> None:
            self._clock.says(f"step {step + 1} of {job.sampling.steps}")

        def work(is_last: bool) -> Tensor:
            if is_last:
                self._park()
            return job.sampling.sample(job.model, latent, stepped)

        self._clock.says("sampling")
        with timing.span("denoise", device=device):
            return in_turn(device, "a window", work, "with the VAE's memory on the host")

    def _park(self) -> None:
        """Move what the VAE remembers to the host."""
        self._encoder.park()
        self._decoder.park()

    def _write(self, latent: Tensor, stop: int | None) -> None:
        """Decode latents into the next part, up to the frame `stop` of the video."""
        job, state = self._job, self._state
        self._originals.seek(state.frames)
        path = self._store.part(state.parts, job.suffix)
        done = state.frames
        with job.writer(path) as writer:
            dtype = writer.dtype
            with media.BackgroundWriter(writer.write, dtype=dtype, cancel=writer.cancel) as written:
                for images in self._decoder.frames(latent):
                    count = len(images) if stop is None else min(len(images), stop - done)
                    if not count:
                        continue
                    pictures = self._finished(images[:count], self._originals.images(count))
                    written.put(media.convert_pictures(pictures, dtype))
                    done += count
                    self._clock.says("writing", count, pictures)
        state.frames, state.parts = done, state.parts + 1
        state.marks.append(file_mark(path))

    def _finished(self, images: Tensor, originals: Tensor) -> Tensor:
        """Return images with the size and the colors of the originals, cut to even sides."""
        vae, finish = self._job.vae, nodes_seedvr.SeedVR2PostProcessing.execute

        def freed(device: torch.device) -> None:
            self._park()
            driver.release(vae)(device)

        work = lambda: finish(images, originals, self._job.color).args[0]  # noqa: E731
        return retried(work, vae.device, "the colors of a window", freed)


class _Clock:
    """Progress in frames, and the time that is left, by that of the frames of this run."""

    def __init__(self, total: int | None, done: int) -> None:
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
            text += f", {_spoken(seconds)} left"
        show_text(f"{text}: {stage}")


def _spoken(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
