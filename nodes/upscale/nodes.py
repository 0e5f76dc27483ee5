"""The node that upscales a video from file to file with SeedVR2."""

from typing import Any

import comfy.samplers
from comfy.model_patcher import ModelPatcher

from ...vae import media
from ..host.api import Input, io, ui
from ..host.input_checks import check_text, checked
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, timing_output
from ..video.inputs import DEPTHS, QUALITY
from ..video.target import FOLDERS

start, wanted = Later("nodes.upscale.start"), Later("nodes.upscale.wanted")
timing, videos = Later("nodes.host.timing"), Later("nodes.video.videos")

_TEXTS = {
    "video": "Video of any length, from Load Video for example. It is read a few frames at a time; "
    "its sound and tags are kept.",
    "model": "SeedVR2 model, 3B or 7B, from Load Diffusion Model.",
    "vae": "SeedVR2 VAE. One from another loader is accelerated as by Accelerate VAE (Fast).",
    "multiplier": "Size of the output, as a multiple of the size of the video.",
    "shorter_side": "Shorter side of the output in pixels, instead of the multiplier; 1080 for "
    "1920 x 1080. 0: the multiplier.",
    "seed": "Seed of the noise, the same for every window.",
    "window": "Frames that are sampled at once, 4 n + 1. More are steadier and need more memory. "
    "0: as many as the free memory allows, at least 17 and at most 241; a run that is continued "
    "keeps them.",
    "overlap": "Latent frames that a window shares with the one before (4 video frames each), "
    "which are cross-faded.",
    "cuts": "Where scenes begin. auto: hard cuts are found. none: one scene. Or the numbers of "
    "their first frames, counted from 0, such as 48, 120. No window reaches over a cut.",
    "color": "Colors of the output. lab: those of the video, with the detail of the model. "
    "wavelet: the coarse colors of the video. adain: its mean and contrast. none: the model's.",
    "codec": "h264 (mp4): plays everywhere. hevc (mp4), av1 (mp4), vp9 (webm): smaller files, "
    "slower to write. prores, prores4444 (mov): for editing. ffv1 (mkv): lossless.",
    "quality": "Quality in percent. 0: smallest file. 100: best picture. 70: no visible loss. ffv1 "
    "ignores it.",
    "filename_prefix": "Folder and start of the file name; a number is appended. %width%, "
    "%height%, %year% and similar placeholders are replaced.",
    "save_to": "output: the file is kept. temp: the file is deleted when ComfyUI restarts.",
    "bit_depth": "Bits per color of the file. auto: 8 for h264, which plays everywhere; 10 for "
    "hevc, av1, vp9 and prores; 16 for ffv1.",
    "scale_method": "How frames are resized before the model. lanczos works in 8 bits; bicubic "
    "keeps the depth of the video.",
    "steps": "Sampling steps. SeedVR2 needs one.",
    "cfg": "CFG scale. 1: no guidance, which SeedVR2 does not need.",
    "sampler_name": "Sampler, as in KSampler.",
    "scheduler": "Noise schedule, as in KSampler. simple: evenly spaced steps.",
    "denoise": "Amount of noise, as in KSampler. 1: all.",
}


class UpscaleVideo(io.ComfyNode):
    """Upscale a video with SeedVR2, from file to file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_UpscaleVideo",
            display_name="Upscale Video (Fast)",
            category=CATEGORY,
            description="Upscales a video of any length with SeedVR2, window by window from its "
            "file to a new one: memory does not grow with the length of the video. After Stop or a "
            "crash, the next run with the same inputs continues after the last finished window.",
            search_aliases=["seedvr2", "upscale video", "video upscale", "super resolution"],
            inputs=_inputs(),
            outputs=[
                io.Video.Output(
                    display_name="VIDEO",
                    tooltip="The written file, as an input for other video nodes.",
                ),
                timing_output(),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, window: int | None = None, cuts: str | None = None) -> bool | str:
        """Check what the widgets alone do not, before anything runs."""
        return check_text(
            {
                "window": lambda: wanted.check_window(window or 0),
                "cuts": lambda: wanted.parsed_cuts(cuts or ""),
            }
        )

    @classmethod
    @checked
    def execute(
        cls,
        video: Input.Video,
        model: ModelPatcher,
        vae: object,
        multiplier: float,
        shorter_side: int,
        seed: int,
        window: int,
        overlap: int,
        cuts: str,
        color: str,
        codec: str,
        quality: int,
        filename_prefix: str,
        save_to: str,
        bit_depth: str = AUTO,
        scale_method: str = "lanczos",
        steps: int = 1,
        cfg: float = 1.0,
        sampler_name: str = "euler",
        scheduler: str = "simple",
        denoise: float = 1.0,
    ) -> io.NodeOutput:
        """Upscale what is not finished yet."""
        given = locals()  # its fields have the names of the widgets
        wanted.check_window(window)
        asked = wanted.Wanted(**{name: given[name] for name in wanted.Wanted.__annotations__})
        path, result = start.upscaled(video, model, vae, asked, cls.hidden)
        return io.NodeOutput(
            videos.FileVideo(str(path)), timing.text(), ui=ui.PreviewVideo([result])
        )


def _inputs() -> list[io.Input]:
    text = _TEXTS
    more: dict[str, Any] = {"optional": True, "advanced": True}
    # Not changed after a run: the next one goes on with the same seed.
    big = {"max": 0xFFFFFFFFFFFFFFFF, "control_after_generate": False}

    def number(name: str, default: int, most: int, **options: Any) -> io.Int.Input:  # noqa: ANN401
        tooltip, least = text[name], options.pop("min", 0)
        return io.Int.Input(name, default=default, min=least, max=most, tooltip=tooltip, **options)

    def choice(name: str, options: list[str], default: str, **more: Any) -> io.Combo.Input:  # noqa: ANN401
        return io.Combo.Input(name, options=options, default=default, tooltip=text[name], **more)

    def factor(name: str, default: float, most: float, step: float, **more: Any) -> io.Float.Input:  # noqa: ANN401
        tooltip, least = text[name], min(step, 0.05)
        return io.Float.Input(
            name, default=default, min=least, max=most, step=step, tooltip=tooltip, **more
        )

    codecs = [n for n in media.available_codecs() if not media.codec_named(n).is_sequence]
    samplers, schedulers = comfy.samplers.KSampler.SAMPLERS, comfy.samplers.KSampler.SCHEDULERS
    return [
        io.Video.Input("video", tooltip=text["video"]),
        io.Model.Input("model", tooltip=text["model"]),
        io.Vae.Input("vae", tooltip=text["vae"]),
        factor("multiplier", 2.0, 8.0, 0.05),
        number("shorter_side", 0, 16384, step=2),
        io.Int.Input("seed", default=42, min=0, tooltip=text["seed"], **big),
        number("window", 0, 16385),
        number("overlap", 2, 4096),
        io.String.Input("cuts", default=AUTO, tooltip=text["cuts"]),
        choice("color", ["lab", "wavelet", "adain", "none"], "lab"),
        choice("codec", codecs, "h264"),
        number("quality", QUALITY, 100),
        io.String.Input(
            "filename_prefix", default="video/upscaled", tooltip=text["filename_prefix"]
        ),
        choice("save_to", [*FOLDERS], FOLDERS[0]),
        choice("bit_depth", list(DEPTHS), AUTO, display_name="bit depth", **more),
        choice(
            "scale_method", ["lanczos", "bicubic", "bilinear", "area"], "lanczos",
            display_name="scale method", **more,
        ),
        number("steps", 1, 1000, min=1, **more),
        factor("cfg", 1.0, 100.0, 0.1, **more),
        choice("sampler_name", list(samplers), "euler", display_name="sampler", **more),
        choice("scheduler", list(schedulers), "simple", **more),
        factor("denoise", 1.0, 1.0, 0.01, **more),
    ]  # fmt: skip
