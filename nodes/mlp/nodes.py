"""Fuse SwiGLU MLPs: the node."""

from comfy.model_patcher import ModelPatcher

from ..host.api import io
from ..host.input_checks import checked
from ..host.lazy import Later

work = Later("nodes.mlp.fuse")


class FuseMLP(io.ComfyNode):
    """Run each gated MLP of a model in one pass."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_FuseMLP",
            display_name="Fuse SwiGLU MLPs (Fast)",
            category="Fast VAE",
            description="Makes the SiLU-gated MLPs of a diffusion model faster, with less "
            "memory: SeedVR2, Lumina 2, Z-Image, HiDream, OmniGen 2, Mochi, Flux 2 and others. "
            "LoRAs, offloading and quantised weights work as before. Models without such MLPs "
            "are returned unchanged; the log says so.",
            search_aliases=["swiglu", "fuse mlp", "fast mlp", "speed up model", "feed forward"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="Diffusion model. The input model is not "
                    "modified; the weights are shared.",
                )
            ],
            outputs=[io.Model.Output(display_name="MODEL")],
        )

    @classmethod
    @checked
    def execute(cls, model: ModelPatcher) -> io.NodeOutput:
        """Patch a clone."""
        return io.NodeOutput(work.fuse(model))
