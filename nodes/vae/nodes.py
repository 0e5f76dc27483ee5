"""The VAE nodes: load, accelerate, encode, decode, and the bundled clip."""

import logging

import comfy.sd
import folder_paths
import torch

import nodes as core_nodes

from ... import vae as library
from ...vae import media
from ..host import devices as machine
from ..host import widgets
from ..host.api import InputImpl, io
from ..host.error_text import about, require
from ..host.frame_range import frame_range
from ..host.input_checks import check_text, checked
from ..host.latents import first_of
from ..host.lazy import Later
from ..host.widgets import AUTO, CATEGORY, DTYPES, INT8, INT8_AND_ENCODE, PRECISIONS

comfy_vae, accelerate = Later("nodes.vae.comfy_vae"), Later("nodes.vae.accelerate")
timing, kernels = Later("nodes.host.timing"), Later("kernels")

_logger = logging.getLogger(__name__)

# The choice that loads the bundled VAE; not a file name.
_BUNDLED = "bundled demo"

_VIDEO, _IMAGES = "video", "images"

_TEXTS = {
    "vae_name": "VAE file in models/vae, or the small demo VAE of this pack for a first test.",
    "accelerated": "VAE to accelerate. The input VAE is not modified; the weights are shared.",
    "vae": "VAE to use. The options below have an effect only on a fast VAE.",
    "pixels": "Images or video frames to encode. Height and width are center-cropped to multiples "
    "of 8 (Wan 2.2 5B, Qwen-Image 2.1: 16; the model of the 5B needs 32), a video to 4 n + 1 "
    "frames.",
    "batch": "Meaning of several images. video: frames of one video, as in VAE Encode. images: a "
    "batch of separate images.",
    "corrections": "Corrections of the latent, for the few frames that are handed over to the next "
    "window of a long video: decoded again, they keep color and sharpness. 0: none. 3: about a "
    "tenth of the loss is left. Each takes as long as a decode and an encode.",
    "samples": "Latent of a video or of images to decode.",
    "clip": "The clip as a video with its frame rate.",
    "frames": "Range of frames to decode, such as 40-80: counted from 0, both ends included. 40-: "
    "to the end. Empty: all. Frames are identical to those of the whole video; a fast VAE does not "
    "decode unneeded parts.",
}

_LATE = {"optional": True, "advanced": True}


def _settings(dtype: str, encode_dtype: str, chunk: str, precision: str) -> list[io.Input]:
    """Return the inputs that a VAE keeps, with the meaning of their defaults."""
    return [
        widgets.dtype_input(f"Data type of the computation. auto: {dtype}."),
        widgets.dtype_input(f"Data type for encoding only. auto: {encode_dtype}.", "encode_dtype"),
        widgets.chunk_input(chunk),
        widgets.precision_input(precision),
        *machine.devices_input(),
    ]


class _Kept(io.ComfyNode):
    """A node whose settings a VAE keeps."""

    @classmethod
    def validate_inputs(
        cls, precision: str | None = None, devices: str | None = None
    ) -> bool | str:
        """Check what a saved workflow may have from an older version or another machine."""
        # Before anything runs; linked ones are None.
        return check_text(
            {
                "precision": lambda: precision is None or widgets.check_precision(precision),
                "devices": lambda: devices is None or machine.check_selection(devices),
            }
        )


class Load(_Kept):
    """Load a VAE file as a fast VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        files = [*folder_paths.get_filename_list("vae"), _BUNDLED]
        return io.Schema(
            node_id="FastVAE_Load",
            display_name="Load VAE (Fast)",
            category=CATEGORY,
            description="Loads a VAE file as a fast VAE: Wan 2.1, Wan 2.2, Qwen-Image, "
            "Qwen-Image 2.1 or SeedVR2, also pruned, 2x, decoder-only, layered (RGBA) or in "
            "diffusers format. The VAE works in every node. Other VAE files are loaded as by "
            "Load VAE.",
            search_aliases=["load vae", "wan vae", "qwen vae", "seedvr2 vae", "fast vae"],
            inputs=[
                io.Combo.Input("vae_name", options=files, tooltip=_TEXTS["vae_name"]),
                *_settings(
                    "ComfyUI's choice for VAEs, which --fp32-vae, --bf16-vae and --fp16-vae set",
                    "same as for decoding",
                    "chosen from video size and free memory",
                    "that of the data type",
                ),
            ],
            outputs=[io.Vae.Output(display_name="VAE")],
        )

    @classmethod
    @checked
    def execute(
        cls,
        vae_name: str,
        dtype: str,
        encode_dtype: str,
        chunk: int,
        precision: str = AUTO,
        devices: str = machine.ONE,
    ) -> io.NodeOutput:
        """Load the file."""
        choice = _choice(dtype, encode_dtype, chunk, precision, devices)
        with timing.span("load", vae_name):
            return io.NodeOutput(_loaded(vae_name, choice))


class Accelerate(_Kept):
    """Accelerate a VAE that another node loaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_Accelerate",
            display_name="Accelerate VAE (Fast)",
            category=CATEGORY,
            description="Converts a VAE from any loader, for example Load Checkpoint, to a fast "
            "VAE with the same weights: Wan, Qwen-Image, SeedVR2. Other VAEs are returned "
            "unchanged; the log gives the reason.",
            search_aliases=["fast vae", "speed up vae", "vae accelerate"],
            inputs=[
                io.Vae.Input("vae", tooltip=_TEXTS["accelerated"]),
                *_settings(
                    "same as the input VAE",
                    "same as dtype above; if that is auto too, same as the input VAE",
                    "same as the input VAE, else chosen from video size and free memory",
                    "same as the input VAE, else that of the data type",
                ),
            ],
            outputs=[io.Vae.Output(display_name="VAE")],
        )

    @classmethod
    @checked
    def execute(
        cls,
        vae: object,
        dtype: str,
        encode_dtype: str,
        chunk: int,
        precision: str = AUTO,
        devices: str = machine.ONE,
    ) -> io.NodeOutput:
        """Replace the network in a copy."""
        require(isinstance(vae, comfy.sd.VAE), vae, "a VAE of ComfyUI", "vae: got")
        choice = _choice(dtype, encode_dtype, chunk, precision, devices)
        with about("vae"), timing.span("load", "accelerated VAE"):
            fast = accelerate.accelerate(vae, choice)
        return io.NodeOutput(fast)


class Encode(io.ComfyNode):
    """Encode images or a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        kinds = {"options": [_VIDEO, _IMAGES], "default": _VIDEO, "optional": True}
        limits = {"default": 0, "min": 0, "max": 8}
        return io.Schema(
            node_id="FastVAE_Encode",
            display_name="VAE Encode (Fast)",
            category=CATEGORY,
            description="Encodes images or a video as VAE Encode does. A fast VAE encodes the "
            "video in steps, so memory does not grow with its length.",
            search_aliases=["encode video", "image to latent", "video to latent"],
            inputs=[
                io.Image.Input("pixels", tooltip=_TEXTS["pixels"]),
                io.Vae.Input("vae", tooltip=_TEXTS["vae"]),
                io.Combo.Input("batch", tooltip=_TEXTS["batch"], **kinds),
                *widgets.once(),
                io.Int.Input("corrections", tooltip=_TEXTS["corrections"], **limits, **_LATE),
            ],
            outputs=[io.Latent.Output(display_name="LATENT")],
        )

    @classmethod
    @checked
    def execute(
        cls,
        pixels: torch.Tensor,
        vae: object,
        batch: str = _VIDEO,
        dtype: str = AUTO,
        chunk: int = 0,
        corrections: int = 0,
    ) -> io.NodeOutput:
        """Encode."""
        if not isinstance(vae, comfy_vae.FastVAE):
            unused = {"batch": batch != _VIDEO, "dtype": dtype != AUTO, "chunk": chunk != 0}
            widgets.log_unused(**unused, corrections=corrections != 0)
            return io.NodeOutput({"samples": comfy_vae.by_another(vae, "encode", pixels, "pixels")})
        if vae.first_stage_model.encoder is None:
            raise ValueError("vae: the checkpoint has no encoder; only decoding works with it")
        library.check_corrections(vae.first_stage_model, corrections)
        with about("pixels"):
            options = library.StreamOptions(chunk or None, DTYPES.get(dtype))
            not_video = True if batch == _IMAGES else None
            latent = vae.encode(pixels, not_video, options=options, corrections=corrections)
        return io.NodeOutput({"samples": latent})


class Decode(io.ComfyNode):
    """Decode latents to images."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_Decode",
            display_name="VAE Decode (Fast)",
            category=CATEGORY,
            description="Decodes latents as VAE Decode does. A fast VAE decodes a few frames at "
            "a time and uses tiles only if memory is short (SeedVR2: never). Other VAEs decode "
            "as in VAE Decode.",
            search_aliases=["decode video", "latent to image", "latent to video"],
            inputs=[
                io.Latent.Input("samples", tooltip=_TEXTS["samples"]),
                io.Vae.Input("vae", tooltip=_TEXTS["vae"]),
                *widgets.once(),
                io.String.Input("frames", default="", tooltip=_TEXTS["frames"], **_LATE),
            ],
            outputs=[io.Image.Output(display_name="IMAGE"), widgets.timing_output()],
        )

    @classmethod
    @checked
    def execute(
        cls,
        samples: dict[str, torch.Tensor],
        vae: object,
        dtype: str = AUTO,
        chunk: int = 0,
        frames: str = "",
    ) -> io.NodeOutput:
        """Decode."""
        frame_range(frames, None)
        latent, is_part = first_of(samples["samples"]), bool(frames.strip())
        video = comfy_vae.one_video(vae, latent) if is_part else latent
        if isinstance(vae, comfy_vae.FastVAE):
            count = vae.first_stage_model.config.frames
            wanted = frame_range(frames, count(video.shape[2])) if is_part else None
            with about("samples"):
                options = library.StreamOptions(chunk or None, DTYPES.get(dtype))
                images = vae.decode(latent, options=options, frames=wanted)
            return io.NodeOutput(_flat(images), timing.text())
        widgets.log_unused(dtype=dtype != AUTO, chunk=chunk != 0)
        images = _flat(comfy_vae.by_another(vae, "decode", latent, "samples"))
        wanted = frame_range(frames, len(images))
        return io.NodeOutput(images[wanted.start : wanted.stop], timing.text())


class DemoClip(io.ComfyNode):
    """Load the bundled clip."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_DemoClip",
            display_name="Demo Clip (Fast)",
            category=CATEGORY,
            description="Loads a short clip from this pack for testing a VAE: 33 frames of 256 x "
            "256 at 16 frames per second.",
            search_aliases=["sample video", "test video", "example clip"],
            inputs=[],
            outputs=[
                io.Image.Output(display_name="IMAGE", tooltip="The 33 frames of the clip."),
                io.Video.Output(display_name="VIDEO", tooltip=_TEXTS["clip"]),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        """Read the clip."""
        frames = torch.stack(list(media.read_video(library.CLIP_PATH).frames(dtype=torch.uint8)))
        return io.NodeOutput(frames.float() / 255, InputImpl.VideoFromFile(str(library.CLIP_PATH)))


def _flat(images: torch.Tensor) -> torch.Tensor:
    """Return an IMAGE `[N, H, W, C]` of frames, also of several videos."""
    return images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images


def _loaded(vae_name: str, choice: object) -> object:
    """Return the VAE of a name: fast, or loaded as by Load VAE if it is of another kind."""
    try:
        if vae_name == _BUNDLED:
            return accelerate.load(library.VAE_PATH, choice)
        return accelerate.load(folder_paths.get_full_path_or_raise("vae", vae_name), choice)
    except library.LayoutError as error:
        layout = error
    except (ValueError, OSError) as error:
        raise ValueError(f"vae_name: {error}") from None
    try:
        (loaded,) = core_nodes.VAELoader().load_vae(vae_name)
    except Exception as error:
        reason = kernels.shown(kernels.first_line(error), 90)
        why = kernels.shown(layout, 170)
        raise ValueError(f"vae_name: {why}; and Load VAE fails with: {reason}") from error
    _logger.info("Fast Video VAE: %s is loaded as by Load VAE: %s", vae_name, layout)
    return loaded


def _choice(dtype: str, encode_dtype: str, chunk: int, precision: str, devices: str) -> object:
    if precision not in PRECISIONS and devices == machine.ONE and machine.is_selection(precision):
        devices = precision  # an older workflow, see `check_precision`
    if not machine.is_selection(devices):  # a link into an input that this machine lacks
        devices = machine.ONE
    dtypes = DTYPES.get(dtype), DTYPES.get(encode_dtype)
    if precision == INT8_AND_ENCODE:
        kernels.log_once("precision: 'int8 and encode' is 'int8', which is for decodes")
    wish = INT8 if precision in (INT8, INT8_AND_ENCODE) else None
    return accelerate.Choice(*dtypes, chunk or None, devices=devices, precision=wish)
