"""ComfyUI's nodes: the only folder that imports ComfyUI."""

from comfy_api.latest import ComfyExtension, io

from .benchmark_nodes import Benchmark
from .fuse_mlp import FuseMLP
from .lora_nodes import ApplyLora, LoraStack
from .sampler_nodes import WanSampler
from .text_nodes import TextEncode
from .vae_nodes import Accelerate, Decode, DemoClip, Encode, Load
from .video_nodes import DecodeVideo, EncodeVideo
from .wan_wrapper import ToWanVideoWrapper


class FastVideoVAEExtension(ComfyExtension):
    """The nodes of this pack, in the order of the menu."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The node classes."""
        return [
            Load,
            Accelerate,
            Encode,
            Decode,
            EncodeVideo,
            DecodeVideo,
            DemoClip,
            LoraStack,
            ApplyLora,
            TextEncode,
            WanSampler,
            FuseMLP,
            ToWanVideoWrapper,
            Benchmark,
        ]
