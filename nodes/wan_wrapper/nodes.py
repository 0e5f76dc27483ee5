"""The node between a VAE and the nodes of ComfyUI-WanVideoWrapper."""

import comfy.sd

from ..host.api import io
from ..host.error_text import about, require
from ..host.input_checks import checked
from ..host.lazy import Later

accelerate, wanvae = Later("nodes.vae.accelerate"), Later("nodes.wan_wrapper.wanvae")


class ToWanVideoWrapper(io.ComfyNode):
    """Convert a VAE for the nodes of ComfyUI-WanVideoWrapper."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_ToWanVideoWrapper",
            display_name="To WANVAE (Fast)",
            category="Fast VAE",
            description="Converts a VAE of Wan 2.1 or Wan 2.2 to a fast WANVAE for the nodes of "
            "ComfyUI-WanVideoWrapper, as a replacement of WanVideo VAE Loader. The weights are "
            "the same, and the result has no seams of tiles.",
            search_aliases=["wanvideo vae loader", "wan video wrapper vae", "wanvae"],
            inputs=[
                io.Vae.Input(
                    "vae",
                    tooltip="Fast VAE, or VAE of Wan 2.1 or Wan 2.2 from any other loader. The "
                    "input VAE is not modified; the weights are shared.",
                )
            ],
            outputs=[io.Custom("WANVAE").Output(display_name="WANVAE")],
        )

    @classmethod
    @checked
    def execute(cls, vae: object) -> io.NodeOutput:
        """Wrap the VAE, accelerated first if it is not fast."""
        require(isinstance(vae, comfy.sd.VAE), vae, "a VAE", "vae: got")
        with about("vae"):
            fast = accelerate.accelerated(vae, accelerate.Choice(), "Wan 2.1 or Wan 2.2")
            return io.NodeOutput(wanvae.WanVideoWrapperVAE(fast))
