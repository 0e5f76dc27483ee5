"""The weights of a VAE: its networks, and what is derived from their parameters."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .layers.conv import Conv, PointwiseConv
from .layers.inputs.coding import name_convolutions
from .models.base import Network
from .models.build import make_decoder, make_encoder
from .models.config import SEEDVR2, VAEConfig
from .models.replicas import Replicas


class VAEWeights(nn.Module):
    """Encoder, decoder and the 1x1x1 convolutions at the latents, under the original names."""

    def __init__(self, config: VAEConfig, dtype: torch.dtype, encode_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype  # Dtype of decoding and of the frames
        self.encode_dtype = encode_dtype  # Dtype of encoding and of the latents
        self.allow_fp16 = False  # A decode in bfloat16 may compute in float16; see `VideoVAE`
        self.graphs = False  # Repeated chunks are captured as CUDA graphs; see `VideoVAE`
        self.is_finite = True  # Frames are finite; False once they were not in any way
        self.replicas = Replicas()  # Copies of the networks on other devices
        latents = config.latent_channels
        mixes = config.family != SEEDVR2
        self.encoder = make_encoder(config)
        self.conv1 = PointwiseConv(2 * latents, 2 * latents) if mixes and self.encoder else None
        self.conv2 = PointwiseConv(latents, latents) if mixes else None
        self.decoder = make_decoder(config)
        for network in filter(None, (self.encoder, self.decoder)):
            name_convolutions(network)
        self.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        """Device of the weights; inputs are moved there, and results stay there."""
        return next(self.decoder.parameters()).device

    def encoding(self) -> Network:
        """Return the encoder."""
        if self.encoder is None:
            raise ValueError("the checkpoint has no encoder; only decode works with it")
        return self.encoder

    def weight_bytes(self) -> int:
        """Return the bytes of the parameters, their derived weights and their copies elsewhere."""
        own = sum(parameter.nbytes for parameter in self.parameters())
        own += sum(conv.form_bytes() for conv in self._convs())
        return own + self.replicas.nbytes()

    def drop_derived(self) -> None:
        """Free the derived weights and all copies; they are derived again when needed."""
        self.replicas.clear()
        for conv in self._convs():
            conv.forms.clear()

    def _convs(self) -> Iterator[Conv]:
        return (module for module in self.modules() if isinstance(module, Conv))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "VAEWeights":
        """Move or cast the weights (`.to`, `.half`, ...), and with them the computation."""
        networks = self.decoder, self.decoder if self.encoder is None else self.encoder
        before = [next(network.parameters()).dtype for network in networks]
        super()._apply(fn, recurse)
        self.replicas.clear()
        after = [next(network.parameters()).dtype for network in networks]
        if after[0] != before[0]:
            self.dtype, self.allow_fp16 = after[0], False
        if self.encoder is None:
            self.encode_dtype = self.dtype
        elif after[1] != before[1]:
            self.encode_dtype = after[1]
        return self
