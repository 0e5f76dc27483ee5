"""SeedVR2's VAE on whole clips in plain PyTorch, as the oracle of the tests.

From the published description: models/video_vae_v3 of SeedVR. No state, no chunks, no fused ops.
"""

import torch
import torch.nn.functional as F

GROUPS = 32


class Oracle:
    """Encode and decode with a state dict under the original names.

    Args:
        state: The tensors, in the dtype to compute in.
    """

    def __init__(self, state):
        self._state = state

    def encode(self, video):
        """The scaled mean of `[B, 3, T, H, W]`."""
        x = self._causal("encoder.conv_in", video)
        for stage in range(4):
            for block in range(2):
                x = self._residual(f"encoder.down_blocks.{stage}.resnets.{block}", x)
            if stage < 3:
                name = f"encoder.down_blocks.{stage}.downsamplers.0.conv"
                x = F.pad(x, (0, 1, 0, 1))
                x = self._causal(name, x, stride=(2 if stage else 1, 2, 2), padding=0)
        x = self._head("encoder", self._middle("encoder", x))
        return x.chunk(2, 1)[0] * 0.9152

    def decode(self, latent):
        """The frames of a scaled latent."""
        x = self._causal("decoder.conv_in", latent / 0.9152)
        x = self._middle("decoder", x)
        for stage in range(4):
            for block in range(3):
                x = self._residual(f"decoder.up_blocks.{stage}.resnets.{block}", x)
            if stage < 3:
                x = self._upsampled(f"decoder.up_blocks.{stage}.upsamplers.0", x, stage < 2)
        return self._head("decoder", x)

    def _upsampled(self, name, x, temporal):
        y = self._pointwise(f"{name}.upscale_conv", x)
        batch, channels, frames, height, width = y.shape
        times = 2 if temporal else 1
        y = y.view(batch, 2, 2, times, channels // 4 // times, frames, height, width)
        # b x y z c f h w -> b c (f z) (h x) (w y)
        y = y.permute(0, 4, 5, 3, 6, 1, 7, 2).reshape(
            batch, -1, frames * times, 2 * height, 2 * width
        )
        if temporal:
            y = torch.cat([y[:, :, :1], y[:, :, 2:]], 2)
        return self._causal(f"{name}.conv", y)

    def _middle(self, side, x):
        x = self._residual(f"{side}.mid_block.resnets.0", x)
        x = x + self._attended(f"{side}.mid_block.attentions.0", x)
        return self._residual(f"{side}.mid_block.resnets.1", x)

    def _attended(self, name, x):
        batch, channels, frames, height, width = x.shape
        rows = self._norm(f"{name}.group_norm", x).permute(0, 2, 3, 4, 1)
        rows = rows.reshape(batch * frames, height * width, channels)
        q, k, v = (self._linear(f"{name}.to_{part}", rows) for part in "qkv")
        weights = torch.softmax(q @ k.mT / channels**0.5, -1)
        y = self._linear(f"{name}.to_out.0", weights @ v)
        return y.view(batch, frames, height, width, channels).permute(0, 4, 1, 2, 3)

    def _residual(self, name, x):
        y = self._causal(f"{name}.conv1", F.silu(self._norm(f"{name}.norm1", x)))
        y = self._causal(f"{name}.conv2", F.silu(self._norm(f"{name}.norm2", y)))
        shortcut = f"{name}.conv_shortcut"
        return y + (self._pointwise(shortcut, x) if f"{shortcut}.weight" in self._state else x)

    def _head(self, side, x):
        return self._causal(f"{side}.conv_out", F.silu(self._norm(f"{side}.conv_norm_out", x)))

    def _norm(self, name, x):
        # By the formula: PyTorch's refuses a group of one value.
        groups = x.unflatten(1, (GROUPS, -1))
        variance, mean = torch.var_mean(groups, (2, 4, 5), correction=0, keepdim=True)
        y = ((groups - mean) / (variance + 1e-6).sqrt()).flatten(1, 2)
        weight, bias = (each.view(-1, 1, 1, 1) for each in self._weights(name))
        return y * weight + bias

    def _causal(self, name, x, stride=(1, 1, 1), padding=1):
        weight, bias = self._weights(name)
        before = x[:, :, :1].repeat(1, 1, weight.shape[2] - 1, 1, 1)
        return F.conv3d(torch.cat([before, x], 2), weight, bias, stride, (0, padding, padding))

    def _pointwise(self, name, x):
        return F.conv3d(x, *self._weights(name))

    def _linear(self, name, x):
        return F.linear(x, *self._weights(name))

    def _weights(self, name):
        return self._state[f"{name}.weight"], self._state[f"{name}.bias"]
