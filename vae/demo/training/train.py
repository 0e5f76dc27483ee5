"""Trains the bundled VAE: `python -m fast_video_vae.vae.demo.training.train`.

Single frames first, in 2D, then short clips, then larger and longer ones, while the step size
decays to zero along a cosine. The loss is the mean squared error, with noise on the latents and a
penalty on their size. The schedule follows the clock: the seed fixes the initial weights and the
sequence of clips, and the speed of the machine decides how many are used.

An interrupted run resumes from its checkpoint.
"""

import argparse
import copy
import logging
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import VAE_PATH
from .network import TrainingVAE, balanced
from .pictures import HELD_OUT, ClipMaker, cut, load_picture, pyramid

WIDTH = 12
# Added to the latents before decoding, so that their rounding to bf16 does no harm.
LATENT_NOISE = 0.02
# Penalty on the mean square of the latents, which keeps it near 1.
LATENT_PRICE = 1e-4
# Muon for the convolutions: in three minutes on single frames it reached 26.7 dB on the cat at
# 0.02; Adam 19.9 dB at 0.003. Muon was also tried at 0.04 and 0.08, Adam at no other rate.
MUON_RATE, MUON_MOMENTUM = 0.04, 0.95
ADAM_RATE, ADAM_BETAS = 3e-3, (0.9, 0.99)
# Layers at pixels or at the end of a network do not map hidden to hidden channels; they use Adam.
OUTER = ("encoder.conv1.weight", "encoder.head.2.weight", "decoder.head.2.weight")
WARM_UP = 0.02
LONGEST_AVERAGE = 500
SAVE_EVERY_S, MEASURE_EVERY_S = 120.0, 300.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleStage:
    """A part of the schedule, up to a share of the whole time.

    Step sizes are multiplied by its rate. Its batches (clips, frames, side in pixels) are used in
    turn.
    """

    until: float
    rate: float
    batches: tuple[tuple[int, int, int], ...]


STAGES = (
    ScheduleStage(0.15, 1.0, ((16, 1, 64),)),
    ScheduleStage(0.27, 1.0, ((4, 9, 64), (2, 17, 64))),
    # At the full rate the error of the clips stopped falling.
    ScheduleStage(0.60, 0.5, ((4, 9, 64), (2, 17, 64))),
    ScheduleStage(1.00, 0.5, ((4, 9, 64), (1, 9, 128), (2, 17, 64), (1, 17, 96), (1, 5, 160))),
)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised steps (Keller Jordan, 2024).

    A convolution weight counts as a matrix from all inputs and taps to the outputs.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1.0 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"]).flatten(1)
                rows, columns = update.shape
                size = group["lr"] * max(1.0, rows / columns) ** 0.5
                weight.add_(_orthogonal(update).reshape(weight.shape), alpha=-size)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return a nearby matrix with singular values of about 1, by five Newton-Schulz steps."""
    rows, columns = matrix.shape
    x = matrix.mT if rows > columns else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.mT if rows > columns else x


class Trainer:
    """One run: its duration, and the paths of its state and of the VAE."""

    def __init__(self, minutes: float, seed: int, checkpoint: Path, out: Path) -> None:
        torch.manual_seed(seed)
        self.budget_s = minutes * 60.0
        self.seed = seed
        self.checkpoint = checkpoint
        self.out = out
        self.clips = ClipMaker(seed)
        self.vae = _channels_last(TrainingVAE(WIDTH))
        self.average = copy.deepcopy(self.vae).requires_grad_(False)
        convs, others = [], []
        for name, weight in self.vae.named_parameters():
            hidden = weight.ndim >= 4 and "gamma" not in name and name not in OUTER
            (convs if hidden else others).append(weight)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(convs, MUON_RATE, MUON_MOMENTUM),
            torch.optim.Adam(others, ADAM_RATE, ADAM_BETAS, fused=True),
        )
        self.rates = (MUON_RATE, ADAM_RATE)
        self.steps = 0
        self.elapsed_s = 0.0
        self.error = 1.0
        if checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Train until the time is over, then write the VAE."""
        clock = time.monotonic()
        saved = measured = self.elapsed_s
        while self.elapsed_s < self.budget_s:
            self._step(self.elapsed_s / self.budget_s)
            now = time.monotonic()
            self.elapsed_s += now - clock
            clock = now
            if self.elapsed_s - measured > MEASURE_EVERY_S:
                measured = self.elapsed_s
                logger.info("%s", self.measure())
            if self.elapsed_s - saved > SAVE_EVERY_S:
                saved = self.elapsed_s
                self._save()
                clock = time.monotonic()
        logger.info("%s", self.measure())
        self._save()

    def measure(self) -> dict[str, float]:
        """Return the PSNR in dB of the averaged weights on pans over the held-out pictures."""
        values = {}
        for picture in HELD_OUT:
            frames = held_out_clip(load_picture(picture)) * 2.0 - 1.0
            with torch.no_grad():
                again = self.average.decode(self.average.encode(frames[None]))[0].clamp(-1.0, 1.0)
            values[picture.name] = -10.0 * math.log10((again - frames).square().mean().item() / 4.0)
        return values

    def _step(self, progress: float) -> None:
        """Train on one batch."""
        stage = next(stage for stage in STAGES if progress < stage.until)
        factor = stage.rate * min(1.0, progress / WARM_UP)
        factor *= 0.5 * (1.0 + math.cos(math.pi * progress))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        frames = self.clips.batch(*stage.batches[self.steps % len(stage.batches)])
        frames = frames[:, :, 0] if frames.shape[2] == 1 else frames
        layout = torch.channels_last if frames.ndim == 4 else torch.channels_last_3d
        frames = frames.contiguous(memory_format=layout)
        with torch.autocast("cpu", torch.bfloat16):
            latent = self.vae.encode(frames).float()
            again = self.vae.decode(latent + LATENT_NOISE * torch.randn_like(latent)).float()
        error = (again - frames).square().mean()
        (error + LATENT_PRICE * latent.square().mean()).backward()
        nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        keep = 1.0 - 1.0 / min(LONGEST_AVERAGE, 1.0 + self.steps / 10.0)
        with torch.no_grad():
            both = zip(self.average.parameters(), self.vae.parameters(), strict=True)
            for average, weight in both:
                average.lerp_(weight, 1.0 - keep)
        self.error += (error.item() / 4.0 - self.error) / min(self.steps, 200)
        if self.steps % 100 == 0:
            spread = latent.detach().square().mean().sqrt().item()
            logger.info(
                "%5.1f min, step %d: %.2f dB in training, latents of size %.2f",
                self.elapsed_s / 60.0,
                self.steps,
                -10.0 * math.log10(self.error),
                spread,
            )

    def _save(self) -> None:
        """Write the VAE and the state of the run, each atomically."""
        frames = ClipMaker(self.seed).batch(8, 9, 96)
        export(balanced(self.average, frames), self.out)
        state: dict[str, Any] = {
            **{name: part.state_dict() for name, part in self._parts().items()},
            "counts": (self.steps, self.elapsed_s, self.error),
            "torch_rng": torch.get_rng_state(),
            "clips_rng": self.clips.rng.bit_generator.state,
        }
        temporary = self.checkpoint.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(self.checkpoint)

    def _load(self) -> None:
        """Load the state of the run from its checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.steps, self.elapsed_s, self.error = state["counts"]
        torch.set_rng_state(state["torch_rng"])
        self.clips.rng.bit_generator.state = state["clips_rng"]

    def _parts(self) -> dict[str, Any]:
        muon, adam = self.optimizers
        return {"vae": self.vae, "average": self.average, "muon": muon, "adam": adam}


def held_out_clip(picture: Tensor, frames: int = 17, size: int = 256) -> Tensor:
    """Make a slow pan and zoom over `picture`, `[3, H, W]`: `[3, frames, size, size]` in [0, 1]."""
    height, width = picture.shape[-2:]
    time_ = torch.arange(frames) - (frames - 1) / 2.0
    zoom = min(1.1, min(height, width) / size / 1.05)
    x, y = width / 2.0 + 2.0 * zoom * time_, height / 2.0 + 0.7 * zoom * time_
    windows = torch.stack([x, y, zoom * (1.0 + 0.005 * time_), 0.004 * time_], 1)
    return cut(pyramid(picture), windows, size).transpose(0, 1)


def export(vae: TrainingVAE, path: Path) -> None:
    """Write a VAE as a checkpoint of the Wan 2.1 layout, in float16.

    Args:
        vae: The VAE; its log variance, which was not trained, is set to that of `LATENT_NOISE`.
        path: The file.
    """
    state = {key: value.detach().contiguous().half() for key, value in vae.state_dict().items()}
    latents = state["conv2.weight"].shape[0]
    state["conv1.weight"][latents:] = 0.0
    state["conv1.bias"][latents:] = 2.0 * math.log(LATENT_NOISE)
    metadata = {"format": "pt", "family": "wan2.1", "made_by": "fast_video_vae.vae.demo"}
    temporary = path.with_suffix(".part")
    save_file(state, temporary, metadata)
    temporary.replace(path)


def _channels_last(vae: TrainingVAE) -> TrainingVAE:
    """Convert the weights to channels-last, which oneDNN prefers."""
    for weight in vae.parameters():
        if weight.ndim >= 4:
            order = torch.channels_last if weight.ndim == 4 else torch.channels_last_3d
            weight.data = weight.data.contiguous(memory_format=order)
    return vae


def main() -> None:
    """Train for the time given on the command line."""
    parser = argparse.ArgumentParser(description="Train the bundled VAE.")
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--checkpoint", type=Path, default=Path("demo-vae.pt"))
    parser.add_argument("--out", type=Path, default=VAE_PATH)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    Trainer(args.minutes, args.seed, args.checkpoint, args.out).run()


if __name__ == "__main__":
    main()
