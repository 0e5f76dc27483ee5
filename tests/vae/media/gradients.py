"""A gradient, and the oracle that reads what a file stores of it.

The oracle reads the planes that PyAV decodes and inverts the formulas in float64: BT.709 in limited
range for YUV (ITU-R BT.709-6, section 3), the sRGB curve for EXR (IEC 61966-2-1).
"""

import numpy as np
import torch

from fast_video_vae.tests.videos import av
from fast_video_vae.vae.media import VideoWriter, codec_named

HEIGHT, WIDTH, FRAMES = 96, 832, 6
STEP = 0.25 / 255  # of a component in [0, 1] per pixel


def gradient(axis="x", frames=FRAMES, height=HEIGHT, width=WIDTH):
    """A gray gradient of 1 / 4 of an 8-bit level per pixel, `[T, H, W, 3]` float64."""
    y, x = np.mgrid[:height, :width]
    along = {"x": x, "y": y + 300.0, "xy": (x + y) / 2**0.5}[axis] * STEP
    return np.broadcast_to(along.clip(0, 1)[None, ..., None], (frames, height, width, 3))


def decoder_output(pictures):
    """Frames of a decoder, `[1, 3, T, H, W]` in [-1, 1]."""
    return torch.from_numpy(pictures * 2 - 1).float().movedim(-1, 0)[None]


def planes(frame):
    """The planes of a frame in float64."""
    kind = {"f32le": "<f4", "f16le": "<f2"}.get(frame.format.name[-5:])
    bits = frame.format.components[0].bits
    name = kind or ("u1" if bits == 8 else ">u2" if frame.format.name.endswith("be") else "<u2")
    found = []
    for plane in frame.planes:
        rows = np.frombuffer(plane, name).reshape(plane.height, -1)
        packed = len(frame.planes) == 1
        count = plane.width * (len(frame.format.components) if packed else 1)
        if frame.format.name == "bgr0":
            count = plane.width * 4
        found.append(rows[:, :count].astype(np.float64))
    return found


def rgb(frame):
    """`[H, W, C]` float64 in [0, 1] from the planes of a frame; EXR as sRGB."""
    name, bits = frame.format.name, frame.format.components[0].bits
    found = planes(frame)
    if name.startswith(("gbrp", "gbrap")):
        colors = [found[2], found[0], found[1], *found[3:]]
        values = np.stack(colors, -1)
        if "f" in name[4:]:
            light, alpha = values[..., :3], values[..., 3:]
            if alpha.shape[-1]:
                light = light / np.where(alpha > 0, alpha, 1)
            low = light <= 0.0031308
            curve = 1.055 * np.maximum(light, 0.0031308) ** (1 / 2.4) - 0.055
            return np.concatenate([np.where(low, 12.92 * light, curve), alpha], -1)
        return values / (2**bits - 1)
    if name.startswith(("rgb", "bgr")):
        packed = found[0].reshape(frame.height, frame.width, -1)
        order = [2, 1, 0] if name == "bgr0" else [2, 1, 0, 3] if name == "bgra" else slice(None)
        return packed[..., order] / (2**bits - 1)
    scale = 2 ** (bits - 8)
    y = (found[0] - 16 * scale) / (219 * scale)
    cb, cr = ((plane - 128 * scale) / (224 * scale) for plane in found[1:3])
    rows, columns = y.shape[0] // cb.shape[0], y.shape[1] // cb.shape[1]
    cb, cr = (np.repeat(np.repeat(each, rows, 0), columns, 1) for each in (cb, cr))
    red, blue = y + 1.5748 * cr, y + 1.8556 * cb
    green = (y - 0.2126 * red - 0.0722 * blue) / 0.7152
    alpha = [found[3] / (2**bits - 1)] if len(found) > 3 else []
    return np.stack([red, green, blue, *alpha], -1)


def images(path):
    """The files of a video: itself, or the images of a folder."""
    return [path] if path.is_file() else sorted(path.with_suffix("").iterdir())


def read(path):
    """All frames of a file or folder, `[T, H, W, C]` float64 in [0, 1]."""
    found = []
    for file in images(path):
        with av.open(str(file)) as container:
            found += [rgb(frame) for frame in container.decode(video=0)]
    return np.stack(found)


def written(tmp_path, codec, pictures, **options):
    """The path of a file of decoded frames, through the conversion and the writer of a decode."""
    path = tmp_path / f"a{codec_named(codec).suffix}"
    with VideoWriter(path, 24, codec=codec, overwrite=True, **options) as writer:
        for piece in torch.from_numpy(pictures.copy()).split(4):
            writer.write(writer.pictures(decoder_output(piece.numpy())))
    return path
