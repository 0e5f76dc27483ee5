"""The training pictures, and an endless source of clips made from them.

Thirteen photographs in the public domain or under CC0 from the wheels of scikit-image and
matplotlib, some random drawings, and one augmentation: a window that moves over a picture, zooms
and rotates, in random colours, sometimes with a second moving picture on top.
"""

import hashlib
import io
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

# Ratio of adjacent pyramid levels. A cut reduces by less than this and needs no anti-aliasing.
LEVEL_RATIO = math.sqrt(2.0)
# Source pixels per pixel: from slightly enlarged to strongly reduced.
ZOOM_RANGE = (0.6, 4.0)
# Fastest pan in pixels per frame.
TOP_SPEED = 8.0
DRAWN_PICTURES = 24


@dataclass(frozen=True)
class Picture:
    """A picture inside an installed wheel; `vae/demo/README.md` lists the licences.

    Attributes:
        package: Dotted name of its folder.
        name: File name.
        digest: First 64 bits of its SHA-256 in hexadecimal.
        weight: How often it is drawn, relative to the others.
    """

    package: str
    name: str
    digest: str
    weight: float = 1.0


_SCIKIT_IMAGE, _MATPLOTLIB = "skimage.data", "matplotlib.mpl-data.sample_data"

TRAINING = (
    Picture(_SCIKIT_IMAGE, "astronaut.png", "88431cd9653ccd53", 2.5),
    Picture(_SCIKIT_IMAGE, "coffee.png", "cc02f8ca188b167c", 2.5),
    Picture(_MATPLOTLIB, "grace_hopper.jpg", "a8ca6d734765703b", 2.0),
    Picture(_SCIKIT_IMAGE, "hubble_deep_field.jpg", "3a19c5dd8a927a93", 1.0),
    Picture(_SCIKIT_IMAGE, "retina.jpg", "38a07f36f27f095e", 1.0),
    Picture(_SCIKIT_IMAGE, "camera.png", "b0793d2adda0fa6a", 2.0),
    Picture(_SCIKIT_IMAGE, "brick.png", "7966caf324f6ba84", 1.0),
    Picture(_SCIKIT_IMAGE, "grass.png", "b6b6022426b38936", 1.0),
    Picture(_SCIKIT_IMAGE, "gravel.png", "c48615b451bf1e60", 1.0),
    Picture(_SCIKIT_IMAGE, "clock_motion.png", "f029226b28b642e8", 0.3),
    Picture(_SCIKIT_IMAGE, "text.png", "bd84aa3a6e3c9887", 0.5),
    Picture(_SCIKIT_IMAGE, "cell.png", "8d23a7fb81f7cc87", 0.3),
    Picture(_SCIKIT_IMAGE, "horse.png", "c7fb60789fe394c4", 0.2),
)
HELD_OUT = (
    Picture(_SCIKIT_IMAGE, "chelsea.png", "596aa1e7cb875eb7"),
    Picture(_SCIKIT_IMAGE, "rocket.jpg", "c2dd0de7c538df8d"),
)


def load_picture(picture: Picture) -> Tensor:
    """Read a picture.

    Args:
        picture: The picture.

    Returns:
        `[3, H, W]` float32 in [0, 1].

    Raises:
        ValueError: The file has another SHA-256.
    """
    package, *folders = picture.package.split(".")
    content = files(package).joinpath("/".join([*folders, picture.name])).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if not digest.startswith(picture.digest):
        raise ValueError(f"{picture.name} has the SHA-256 {digest}; expected {picture.digest}...")
    with Image.open(io.BytesIO(content)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255.0


def pyramid(picture: Tensor, smallest: int = 64) -> list[Tensor]:
    """Scale `picture`, `[3, H, W]`, by `LEVEL_RATIO ** -k` down to a short side of `smallest`."""
    levels = [picture[None]]
    height, width = picture.shape[-2:]
    while min(height, width) / LEVEL_RATIO >= smallest:
        height, width = height / LEVEL_RATIO, width / LEVEL_RATIO
        size = (round(height), round(width))
        # Always from the original, so that filter errors do not accumulate.
        level = F.interpolate(picture[None], size, mode="bicubic", antialias=True)
        levels.append(level.clamp(0.0, 1.0))
    return levels


def cut(levels: list[Tensor], windows: Tensor, size: int) -> Tensor:
    """Cut a moving window out of a picture.

    Args:
        levels: Pyramid of the picture, `[1, 3, H, W]` each.
        windows: `[T, 4]`: centre x and y in pixels of the original, source pixels per pixel, angle
            in radians. Beyond the border the picture is mirrored.
        size: Side of the frames in pixels.

    Returns:
        `[T, 3, size, size]` in [0, 1].
    """
    zoom = float(windows[:, 2].min())
    k = max(0, min(len(levels) - 1, math.floor(math.log(zoom, LEVEL_RATIO) + 1e-3)))
    level = levels[k]
    height, width = levels[0].shape[-2:]
    x, y, zooms, angle = windows.unbind(1)
    # Coordinates of grid_sample: the picture spans [-1, 1] on each axis.
    half = zooms * size / 2.0
    cos, sin = angle.cos() * half, angle.sin() * half
    rows = torch.stack(
        [
            torch.stack([cos * 2 / width, -sin * 2 / width, 2 * x / width - 1], 1),
            torch.stack([sin * 2 / height, cos * 2 / height, 2 * y / height - 1], 1),
        ],
        1,
    )
    grid = F.affine_grid(rows, [len(windows), 3, size, size], align_corners=False)
    level = level.expand(len(windows), -1, -1, -1)
    frames = F.grid_sample(level, grid, "bicubic", padding_mode="reflection", align_corners=False)
    return frames.clamp(0.0, 1.0)


class ClipMaker:
    """An endless source of training clips; the seed determines all of them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        photographs = [load_picture(picture) for picture in TRAINING]
        drawn = [self._draw_picture(384) for _ in range(DRAWN_PICTURES)]
        self.pyramids = [pyramid(picture) for picture in photographs + drawn]
        weights = np.array([picture.weight for picture in TRAINING])
        # One clip in eight is from a drawn picture.
        share = weights.sum() / 7.0 / len(drawn)
        weights = np.concatenate([weights, np.full(len(drawn), share)])
        self.weights = weights / weights.sum()

    def batch(self, clips: int, frames: int, size: int) -> Tensor:
        """Make a batch of `clips` clips, `[clips, 3, frames, size, size]` in [-1, 1]."""
        made = torch.stack([self.clip(frames, size) for _ in range(clips)])
        return made.transpose(1, 2) * 2.0 - 1.0

    def clip(self, frames: int, size: int) -> Tensor:
        """Make one clip, `[frames, 3, size, size]` in [0, 1]."""
        rng = self.rng
        clip = self._layer(frames, size)
        kind = rng.random()
        if kind < 0.25:
            clip = torch.lerp(clip, self._layer(frames, size), self._moving_shape(frames, size))
        elif kind < 0.30:
            # A cross-fade, or a double exposure if both ends are equal.
            start, end = rng.random(2) if rng.random() < 0.5 else [rng.random()] * 2
            mix = torch.linspace(start, end, frames).reshape(-1, 1, 1, 1)
            clip = torch.lerp(clip, self._layer(frames, size), mix)
        elif kind < 0.33:
            start, end = rng.uniform(0.2, 1.0, 2)
            clip = clip * torch.linspace(start, end, frames).reshape(-1, 1, 1, 1)
        return self._turn(clip)

    def _layer(self, frames: int, size: int) -> Tensor:
        """Make a moving picture, in its own or in random colours."""
        rng = self.rng
        levels = self.pyramids[rng.choice(len(self.pyramids), p=self.weights)]
        return self._colour(cut(levels, self._windows(levels[0], frames, size), size))

    def _windows(self, picture: Tensor, frames: int, size: int) -> Tensor:
        """Draw the window of each frame, `[T, 4]` as for `cut`."""
        rng = self.rng
        height, width = picture.shape[-2:]
        low, high = ZOOM_RANGE
        zoom = math.exp(rng.uniform(math.log(low), math.log(high)))
        zoom = min(zoom, min(height, width) / size)
        time = torch.arange(frames) - (frames - 1) / 2.0
        static = rng.random() < 0.15
        speed = 0.0 if static else TOP_SPEED * rng.random() ** 2
        direction = rng.uniform(0.0, 2.0 * math.pi)
        growth = rng.normal(0.0, 0.01) * (not static) * (rng.random() < 0.5)
        spin = rng.normal(0.0, 0.015) * (not static) * (rng.random() < 0.3)
        margin = zoom * size / 2.0
        x = rng.uniform(min(margin, width / 2), max(width - margin, width / 2))
        y = rng.uniform(min(margin, height / 2), max(height - margin, height / 2))
        angle = rng.normal(0.0, 0.3) if rng.random() < 0.3 else 0.0
        windows = torch.empty(frames, 4)
        windows[:, 0] = x + math.cos(direction) * speed * zoom * time
        windows[:, 1] = y + math.sin(direction) * speed * zoom * time
        windows[:, 2] = zoom * torch.exp(growth * time)
        windows[:, 3] = angle + spin * time
        return windows

    def _moving_shape(self, frames: int, size: int) -> Tensor:
        """Draw a mask `[T, 1, S, S]` for a second layer: a drifting ellipse or half-plane."""
        rng = self.rng
        time = (torch.arange(frames) - (frames - 1) / 2.0).reshape(-1, 1, 1)
        axis = torch.arange(size) - (size - 1) / 2.0
        speed = rng.uniform(-1.0, 1.0, 2) * TOP_SPEED * rng.random()
        centre = rng.uniform(-0.4, 0.4, 2) * size
        x = axis[None, None, :] - centre[0] - speed[0] * time
        y = axis[None, :, None] - centre[1] - speed[1] * time
        if rng.random() < 0.7:
            radii = rng.uniform(0.12, 0.5, 2) * size
            distance = (1.0 - torch.sqrt((x / radii[0]) ** 2 + (y / radii[1]) ** 2)) * radii.min()
        else:
            angle = rng.uniform(0.0, 2.0 * math.pi)
            distance = math.cos(angle) * x + math.sin(angle) * y
        return (distance / rng.uniform(0.5, 2.0) + 0.5).clamp(0.0, 1.0)[:, None]

    def _colour(self, clip: Tensor) -> Tensor:
        """Swap, mix and bend the channels of half of the clips."""
        rng = self.rng
        if rng.random() < 0.5:
            return clip
        mix = np.eye(3)[rng.permutation(3)]
        # A saturation between 0 and 1.5, then a small hue rotation.
        mix = np.full((3, 3), 1.0 / 3.0) + rng.uniform(0.0, 1.5) * (mix - 1.0 / 3.0)
        mix = mix + rng.normal(0.0, 0.08, (3, 3))
        gains = torch.from_numpy(mix).float()
        clip = torch.einsum("ij,tjhw->tihw", gains, clip)
        contrast, offset = rng.uniform(0.6, 1.3), rng.normal(0.0, 0.1)
        clip = ((clip - 0.5) * contrast + 0.5 + offset).clamp(0.0, 1.0)
        if rng.random() < 0.5:
            clip = clip ** math.exp(rng.normal(0.0, 0.35))
        return 1.0 - clip if rng.random() < 0.1 else clip

    def _turn(self, clip: Tensor) -> Tensor:
        """Mirror and rotate by multiples of 90 degrees, at random."""
        rng = self.rng
        if rng.random() < 0.5:
            clip = clip.flip(-1)
        if rng.random() < 0.2:
            clip = clip.flip(0)
        return torch.rot90(clip, int(rng.integers(4)), (-2, -1)) if rng.random() < 0.5 else clip

    def _draw_picture(self, size: int) -> Tensor:
        """Draw 1/f noise, or shapes and letters over a gradient, `[3, size, size]`."""
        rng = self.rng
        if rng.random() < 0.4:
            frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
            frequency[0, 0] = 1.0
            noise = np.fft.rfft2(rng.normal(size=(3, size, size)))
            noise = np.fft.irfft2(noise / frequency ** rng.uniform(0.9, 1.6))
            noise = noise / noise.std() * rng.uniform(0.1, 0.25) + 0.5
            return torch.from_numpy(noise).float().clamp(0.0, 1.0)
        corners = torch.from_numpy(rng.random((1, 3, 2, 2))).float()
        gradient = F.interpolate(corners, (size, size), mode="bilinear", align_corners=True)
        pixels = (gradient[0].permute(1, 2, 0) * 255.0).to(torch.uint8).numpy()
        image = Image.fromarray(pixels)
        draw = ImageDraw.Draw(image)
        for _ in range(int(rng.integers(8, 40))):
            x, y = rng.integers(-40, size, 2).tolist()
            width, height = rng.integers(6, 160, 2).tolist()
            colour = cast("tuple[int, int, int]", tuple(rng.integers(0, 256, 3).tolist()))
            shape = rng.integers(4)
            if shape == 0:
                draw.rectangle((x, y, x + width, y + height), fill=colour)
            elif shape == 1:
                draw.ellipse((x, y, x + width, y + height), fill=colour)
            elif shape == 2:
                draw.line((x, y, x + width, y + height), fill=colour, width=1 + height // 20)
            else:
                letters = "".join(chr(c) for c in rng.integers(33, 127, 8))
                draw.text((x, y), letters, fill=colour, font_size=8 + height // 3)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255.0
