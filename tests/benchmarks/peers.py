"""Other implementations of the same VAEs, built from one state dict, as oracles and for timing.

Each function takes a state dict with the original names and returns a `Peer`, which encodes to and
decodes from the raw posterior mean, not normalised. A peer that cannot be built raises
`PeerUnavailableError` with the reason.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fast_video_vae.tests.nodes.checkout import find_comfyui, where_looked
from fast_video_vae.vae.bench import baselines
from fast_video_vae.vae.checkpoint import read_checkpoint
from fast_video_vae.vae.models.config import SEEDVR2_KEY, LayoutError


class PeerUnavailableError(RuntimeError):
    """The other implementation is not installed or does not import; the message has the reason."""


@dataclass(frozen=True)
class Peer:
    """Another implementation."""

    name: str  # `comfyui` or `diffusers`
    version: str
    module: nn.Module  # parameters in the chosen dtype on the chosen device

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """`[B, C, T, H, W]` in [-1, 1] -> posterior mean `[B, 16, 1 + (T - 1) // 4, H/8, W/8]`."""
        result = self.module.encode(self._adapt(frames))
        return result if isinstance(result, Tensor) else result.latent_dist.mode()

    @torch.inference_mode()
    def decode(self, latent: Tensor) -> Tensor:
        """`[B, 16, t, h, w]` -> `[B, C, 4 * t - 3, 8 * h, 8 * w]`."""
        result = self.module.decode(self._adapt(latent))
        return result if isinstance(result, Tensor) else result.sample

    def _adapt(self, x: Tensor) -> Tensor:
        parameter = next(self.module.parameters())
        return x.to(parameter.device, parameter.dtype)


@dataclass(frozen=True)
class SeedVR2Peer(Peer):
    """ComfyUI's SeedVR2: its module returns the mean, which ComfyUI scales afterwards."""

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """Encode `frames` `[B, 3, T, H, W]` to the latent of ComfyUI's LATENT, also for T = 1."""
        latent = self.module.encode(self._adapt(frames))
        return self.module.comfy_format_encoded(latent)


def comfyui_vae(
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Peer:
    """Build ComfyUI's own class for `state`, without its memory management.

    ComfyUI's folder is appended to `sys.path`, so it stays importable in this process.
    """
    root = find_comfyui()
    if root is None:
        raise PeerUnavailableError(where_looked())
    if str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of ComfyUI and its dependencies
            from comfy.cli_args import args

            args.cpu = args.cpu or not torch.cuda.is_available()  # before model_management
            from comfy.ldm.wan.vae import WanVAE
            from comfyui_version import __version__ as version
    except (ImportError, RuntimeError, AssertionError) as error:
        raise PeerUnavailableError(f"ComfyUI in {root} does not import: {error}") from error

    if SEEDVR2_KEY in state:
        module = _load(_comfyui_seedvr2(state), state, dtype, device)
        return SeedVR2Peer("comfyui", version, module)
    if "decoder.upsamples.0.upsamples.0.residual.2.weight" in state:
        return Peer("comfyui", version, _load(_comfyui_wan22(state), state, dtype, device))
    with torch.device("meta"):
        module = WanVAE(
            **_wan_options(state),
            dim=state["decoder.head.0.gamma"].shape[0],
            image_channels=state["encoder.conv1.weight"].shape[1],
            conv_out_channels=state["decoder.head.2.weight"].shape[0],
        )
    return Peer("comfyui", version, _load(module, state, dtype, device))


def diffusers_vae(
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    qwen_image: bool = False,
) -> Peer:
    """Build diffusers' class for `state`, or `AutoencoderKLQwenImage` (at most 3 out channels)."""
    try:
        config = read_checkpoint(dict(state)).config
        module = baselines.diffusers_vae(state, config, torch.device(device), dtype)
    except (ImportError, LayoutError) as error:
        raise PeerUnavailableError(f"diffusers: {error}") from error
    import diffusers

    if qwen_image:
        weights = module.state_dict()
        with torch.device("meta"):
            module = diffusers.AutoencoderKLQwenImage(
                base_dim=config.encoder_width,
                z_dim=config.latent_channels,
                input_channels=config.image_channels,
            )
        module = _load(module, weights, dtype, device)
    return Peer("diffusers", diffusers.__version__, module)


def _comfyui_wan22(state: Mapping[str, Tensor]) -> nn.Module:
    """Build ComfyUI's class for Wan 2.2, of any width."""
    from comfy.ldm.wan.vae2_2 import WanVAE

    with torch.device("meta"):
        return WanVAE(
            **_wan_options(state),
            dim=state["encoder.conv1.weight"].shape[0],
            dec_dim=state["decoder.head.0.gamma"].shape[0],
        )


def _wan_options(state: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the options that Wan 2.1 and Wan 2.2 share."""
    return {
        "z_dim": state["conv2.weight"].shape[0], "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
        "attn_scales": [], "temperal_downsample": [False, True, True],
    }  # fmt: skip


def _comfyui_seedvr2(state: Mapping[str, Tensor]) -> nn.Module:
    """Build ComfyUI's class for SeedVR2, of any width."""
    from comfy.ldm.seedvr import vae

    published = vae.BYTEDANCE_BLOCK_OUT_CHANNELS
    blocks = (f"encoder.down_blocks.{stage}.resnets.0.conv1.weight" for stage in range(4))
    vae.BYTEDANCE_BLOCK_OUT_CHANNELS = [state[name].shape[0] for name in blocks]
    try:
        with torch.device("meta"):
            return vae.VideoAutoencoderKLWrapper()
    finally:
        vae.BYTEDANCE_BLOCK_OUT_CHANNELS = published


def _load(
    module: nn.Module,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    copies = {name: tensor.to(device, dtype, copy=True) for name, tensor in state.items()}
    module.load_state_dict(copies, strict=True, assign=True)
    return module.eval().requires_grad_(False)
