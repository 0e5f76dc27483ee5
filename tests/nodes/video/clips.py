"""Videos for the tests of the video nodes: as files, as tensors, as ComfyUI has them."""

import torch

from fast_video_vae.tests.nodes.vae.pairs import node, ours, relative_error, v3_node
from fast_video_vae.tests.videos import stacked, write, write_planes


def decode(vae, latent, **options):
    """The VIDEO of a latent."""
    return ours("DecodeVideo", vae=vae, samples={"samples": latent}, **options).args[0]


def encode(vae, video, **options):
    """The samples, fps, count of frames and sound of a VIDEO."""
    latent, *rest = ours("EncodeVideo", vae=vae, video=video, **options).args
    return latent["samples"], *rest


def frames_of(video):
    """The bytes of every frame `[N, H, W, 3]`."""
    return stacked(video.get_stream_source())


def components(video):
    """Return the outputs of Get Video Components."""
    images, audio, fps, *_ = v3_node("nodes_video", "GetVideoComponents", video=video)
    return images, audio, fps


def image(vae, latent):
    return node("VAEDecode", vae=vae, samples={"samples": latent})[0]


def assert_encoded(latent, vae, pixels):
    """Check that the latent equals that of VAE Encode for an IMAGE."""
    (expected,) = node("VAEEncode", vae=vae, pixels=pixels)
    assert relative_error(latent, expected["samples"]) <= 1e-5


def from_file(path):
    from comfy_api.latest import InputImpl

    return InputImpl.VideoFromFile(str(path))


def written(frames, path, **options):
    """A VIDEO that is a file of these bytes."""
    return from_file(write(path, frames, 16, codec="ffv1", **options))


def deep_file(images, path):
    """A VIDEO that is a file of 16 bits per component of these images `[N, H, W, 3]`."""
    numbers = (images * 65535).round().int().numpy()
    pictures = [[picture[..., channel] for channel in (1, 2, 0)] for picture in numbers]
    return from_file(write_planes(path, "ffv1", "gbrp16le", pictures))


def held(frames):
    """A VIDEO that is tensors, of these bytes."""
    return v3_node("nodes_video", "CreateVideo", images=frames.float() / 255, fps=16.0)[0]


def tone(seconds, rate=44100, channels=2):
    time = torch.arange(round(seconds * rate)) / rate
    waves = [torch.sin(2 * torch.pi * (220 + 110 * n) * time) * 0.5 for n in range(channels)]
    return {"waveform": torch.stack(waves).unsqueeze(0), "sample_rate": rate}
