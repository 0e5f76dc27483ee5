"""The node that measures ComfyUI's own VAE against the fast one."""

import numpy
import torch

from ..host.api import io, ui
from ..host.input_checks import checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, PRECISIONS, dtype_input

run, progress = Later("nodes.benchmark.run"), Later("nodes.host.progress")
bench = Later("vae.bench")

_SIDE = (
    "{} in pixels, cut to a multiple of 8 (Wan 2.2 5B, Qwen-Image 2.1: 16). Time grows with the "
    "area: 1280 x 720 takes 2.3 times as long as 832 x 480."
)

_TEXTS = {
    "vae": "VAE of Wan, Qwen-Image or SeedVR2 from any loader. The input VAE is not modified; the "
    "other network is built from its weights.",
    "task": "Operation to measure: decode, encode or both. both takes the time of both.",
    "width": _SIDE.format("Width"),
    "height": _SIDE.format("Height"),
    "frames": "Number of video frames, cut to 4 n + 1. Time grows with it, and so does the memory "
    "of ComfyUI's network. A GPU decodes 33 frames of 832 x 480 in seconds, a CPU in minutes.",
    "rounds": "Number of measurements of each network, in turn; the table has the median and the "
    "best. One warm-up of each is added: 3 rounds are 8 calls per task.",
    "dtype": "Data type of both networks. auto: the data type that the VAE decodes in.",
    "samples": "Latent of one video to decode, which sets width, height and frames; it is decoded "
    "first if task is encode. Not connected: fixed random latents with the statistics of the VAE.",
    "pixels": "Video to encode, which sets width, height and frames; it is encoded first if task "
    "is decode. Not connected: a fixed video of soft moving colors.",
    "precision": "Precision of the fast VAE. auto: its own. int8: decode with int8, and measure "
    "what that loses with your VAE: PSNR of int8 and bf16 against fp32, in all and by layer.",
    "chart": "Bar chart as an image of 1024 x 640 pixels.",
    "table": "Table of the results in Markdown.",
    "json": "All measurements of every round as JSON.",
}


class Benchmark(io.ComfyNode):
    """Measure both networks of a VAE on this machine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        tasks, known = ["decode", "encode", "both"], {"optional": True, "advanced": True}
        known |= {"options": list(PRECISIONS), "default": AUTO}
        return io.Schema(
            node_id="FastVAE_Benchmark",
            display_name="VAE Benchmark (Fast)",
            category=CATEGORY,
            description="Compares ComfyUI's VAE with the fast VAE on this machine, with the same "
            "weights and at the size that you set: seconds, peak memory and difference of the "
            "results. Returns a chart and a table.",
            search_aliases=["benchmark", "vae speed", "measure vae", "compare vae", "psnr"],
            inputs=[
                io.Vae.Input("vae", tooltip=_TEXTS["vae"]),
                io.Combo.Input("task", default="decode", options=tasks, tooltip=_TEXTS["task"]),
                *(
                    io.Int.Input(name, default=default, tooltip=_TEXTS[name], **limits)
                    for name, default, limits in (
                        ("width", 832, {"min": 16, "max": 16384, "step": 16}),
                        ("height", 480, {"min": 16, "max": 16384, "step": 16}),
                        ("frames", 33, {"min": 1, "max": 4097, "step": 4}),
                        ("rounds", 3, {"min": 1, "max": 100}),
                    )
                ),
                dtype_input(_TEXTS["dtype"]),
                io.Latent.Input("samples", optional=True, tooltip=_TEXTS["samples"]),
                io.Image.Input("pixels", optional=True, tooltip=_TEXTS["pixels"]),
                io.Combo.Input("precision", tooltip=_TEXTS["precision"], **known),
            ],
            outputs=[
                io.Image.Output(display_name="chart", tooltip=_TEXTS["chart"]),
                io.String.Output(display_name="table", tooltip=_TEXTS["table"]),
                io.String.Output(display_name="json", tooltip=_TEXTS["json"]),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Return NaN, which equals nothing, so that each run measures again."""
        return float("nan")

    @classmethod
    @checked
    def execute(
        cls,
        vae: object,
        task: str,
        width: int,
        height: int,
        frames: int,
        rounds: int,
        dtype: str = AUTO,
        samples: dict[str, torch.Tensor] | None = None,
        pixels: torch.Tensor | None = None,
        precision: str = AUTO,
    ) -> io.NodeOutput:
        """Measure, and show the results."""
        clip, latent = bench.Clip(width, height, frames), samples and samples["samples"]
        done = run.benchmark(vae, task, clip, rounds, dtype, precision, latent, pixels)
        image = torch.from_numpy(numpy.array(bench.draw_chart(done))).unsqueeze(0).float() / 255
        progress.show_text(done.summary())
        shown = ui.PreviewImage(image, cls=cls).as_dict() | ui.PreviewText(done.table()).as_dict()
        return io.NodeOutput(image, done.table(), done.as_json(), ui=shown)
