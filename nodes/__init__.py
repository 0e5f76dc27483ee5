"""The nodes of the pack; the only folder that imports ComfyUI."""

from .benchmark.nodes import Benchmark
from .host.api import ComfyExtension, io
from .lora.nodes import ApplyLora, LoraStack
from .mlp.nodes import FuseMLP
from .preview.nodes import PreviewLatent
from .sampling.nodes import WanSampler
from .text.nodes import TextEncode
from .upscale.nodes import UpscaleVideo
from .vae.joins import JoinLatents
from .vae.nodes import Accelerate, Decode, DemoClip, Encode, Load
from .video.nodes import DecodeVideo, EncodeVideo
from .wan_wrapper.nodes import ToWanVideoWrapper


class FastVideoVAEExtension(ComfyExtension):
    """The nodes of this pack, in the order of the menu."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes."""
        return [
            Load,
            Accelerate,
            Encode,
            Decode,
            EncodeVideo,
            DecodeVideo,
            UpscaleVideo,
            JoinLatents,
            PreviewLatent,
            DemoClip,
            LoraStack,
            ApplyLora,
            TextEncode,
            WanSampler,
            FuseMLP,
            ToWanVideoWrapper,
            Benchmark,
        ]
