"""Random tiny decoders in the published layout, and the published network as an oracle.

`TinyOracle` follows the text of the layout (madebyollin/taehv, MIT): a list of modules whose
positions are in the keys, whole clips, plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast_video_vae.vae.preview.tiny_checkpoint import expected_shapes


def random_tiny(channels: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Return a state dict of a random tiny decoder with `channels` latents.

    The weights keep the size of activations, so that every layer matters in the result.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in expected_shapes(channels).items():
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5 if len(shape) == 4 else 0.1
        if ".conv.4." in key:
            scale *= 0.3
        if key.startswith("22."):
            scale *= 0.05
        state[f"decoder.{key}"] = (torch.randn(shape, generator=generator) * scale).to(dtype)
    return state


class TinyOracle(nn.Module):
    """The decoder of a state dict, all frames of a clip at once."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = {key.removeprefix("decoder."): value for key, value in state.items()}

    def conv(self, x: Tensor, name: str, padding: int = 1) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state.get(f"{name}.bias")
        return F.conv2d(x, weight.to(x), None if bias is None else bias.to(x), padding=padding)

    def forward(self, latent: Tensor) -> Tensor:
        """Decode `[1, C, t, h, w]` to `[1, 3, 4 t - 3, H, W]`."""
        x = 3 * torch.tanh(latent[0].movedim(0, 1) / 3)
        x = F.relu(self.conv(x, "1"))
        for start, times in ((3, 1), (9, 2), (15, 2)):
            for block in range(start, start + 3):
                past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
                y = F.relu(self.conv(torch.cat([x, past], dim=1), f"{block}.conv.0"))
                y = F.relu(self.conv(y, f"{block}.conv.2"))
                x = F.relu(self.conv(y, f"{block}.conv.4") + x)
            x = F.interpolate(x, scale_factor=2)
            grown = self.conv(x, f"{start + 4}.conv", padding=0)
            x = grown.reshape(times * len(grown), -1, *grown.shape[2:])
            x = self.conv(x, f"{start + 5}")
        x = self.conv(F.relu(x), "22")
        if x.shape[1] == 12:
            x = F.pixel_shuffle(x, 2)
        return x[3:].movedim(0, 1)[None]
