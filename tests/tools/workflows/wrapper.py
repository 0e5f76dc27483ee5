"""Inputs and outputs of the nodes of ComfyUI-WanVideoWrapper in a workflow.

ComfyUI-WanVideoWrapper is not installed when workflows are drawn. The frontend needs only names,
types and defaults; these are as of the end of 2025.
"""

from pathlib import Path

# Its name in ComfyUI's registry and the name of its folder.
NAME = "ComfyUI-WanVideoWrapper"

_ENDINGS = ("", "_fast", "_scaled", "_scaled_fast")
_FP8 = [f"fp8_{dtype}{ending}" for dtype in ("e4m3fn", "e5m2") for ending in _ENDINGS]

# For each node: title, required inputs, optional inputs, outputs. For each input: type, default and
# further options of the frontend. FILES in a list of choices are the files of a folder.
NODES = {
    "WanVideoModelLoader": (
        "WanVideo Model Loader",
        {
            "model": ("FILES", "diffusion_models"),
            "base_precision": (["fp32", "bf16", "fp16", "fp16_fast"], {"default": "bf16"}),
            "quantization": (["disabled", *_FP8], {"default": "disabled"}),
            "load_device": (["main_device", "offload_device"], {"default": "offload_device"}),
        },
        {
            "attention_mode": (["sdpa", "flash_attn_2", "sageattn"], {"default": "sdpa"}),
            "compile_args": ("WANCOMPILEARGS",),
            "block_swap_args": ("BLOCKSWAPARGS",),
            "lora": ("WANVIDLORA",),
            "vram_management_args": ("VRAM_MANAGEMENTARGS",),
            "extra_model": ("VACEPATH",),
            "fantasytalking_model": ("FANTASYTALKINGMODEL",),
            "multitalk_model": ("MULTITALKMODEL",),
            "fantasyportrait_model": ("FANTASYPORTRAITMODEL",),
            "rms_norm_function": (["default", "pytorch"], {"default": "default"}),
        },
        {"model": "WANVIDEOMODEL"},
    ),
    "LoadWanVideoT5TextEncoder": (
        "WanVideo T5 Text Encoder Loader",
        {
            "model_name": ("FILES", "text_encoders"),
            "precision": (["fp32", "bf16"], {"default": "bf16"}),
        },
        {
            "load_device": (["main_device", "offload_device"], {"default": "offload_device"}),
            "quantization": (["disabled", "fp8_e4m3fn"], {"default": "disabled"}),
        },
        {"wan_t5_model": "WANTEXTENCODER"},
    ),
    "WanVideoTextEncode": (
        "WanVideo TextEncode",
        {
            "positive_prompt": ("STRING", {"default": "", "multiline": True}),
            "negative_prompt": ("STRING", {"default": "", "multiline": True}),
        },
        {
            "t5": ("WANTEXTENCODER",),
            "force_offload": ("BOOLEAN", {"default": True}),
            "model_to_offload": ("WANVIDEOMODEL",),
            "use_disk_cache": ("BOOLEAN", {"default": False}),
            "device": (["gpu", "cpu"], {"default": "gpu"}),
        },
        {"text_embeds": "WANVIDEOTEXTEMBEDS"},
    ),
    "WanVideoEmptyEmbeds": (
        "WanVideo Empty Embeds",
        {
            "width": ("INT", {"default": 832, "min": 64, "max": 8096, "step": 8}),
            "height": ("INT", {"default": 480, "min": 64, "max": 8096, "step": 8}),
            "num_frames": ("INT", {"default": 81, "min": 1, "max": 10000, "step": 4}),
        },
        {"control_embeds": ("WANVIDIMAGE_EMBEDS",), "extra_latents": ("LATENT",)},
        {"image_embeds": "WANVIDIMAGE_EMBEDS"},
    ),
    "WanVideoSampler": (
        "WanVideo Sampler",
        {
            "model": ("WANVIDEOMODEL",),
            "image_embeds": ("WANVIDIMAGE_EMBEDS",),
            "steps": ("INT", {"default": 30, "min": 1}),
            "cfg": ("FLOAT", {"default": 6.0, "min": 0.0, "max": 30.0, "step": 0.01}),
            "shift": ("FLOAT", {"default": 5.0, "min": 0.0, "max": 1000.0, "step": 0.01}),
            "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1}),
            "force_offload": ("BOOLEAN", {"default": True}),
            "scheduler": (["unipc", "dpm++", "euler", "lcm"], {"default": "unipc"}),
            "riflex_freq_index": ("INT", {"default": 0, "min": 0, "max": 1000}),
        },
        {
            "text_embeds": ("WANVIDEOTEXTEMBEDS",),
            "samples": ("LATENT",),
            "denoise_strength": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}),
            "feta_args": ("FETAARGS",),
            "context_options": ("WANVIDCONTEXT",),
            "cache_args": ("CACHEARGS",),
            "flowedit_args": ("FLOWEDITARGS",),
            "batched_cfg": ("BOOLEAN", {"default": False}),
            "slg_args": ("SLGARGS",),
            "rope_function": (["default", "comfy", "comfy_chunked"], {"default": "comfy"}),
            "loop_args": ("LOOPARGS",),
            "experimental_args": ("EXPERIMENTALARGS",),
            "sigmas": ("SIGMAS",),
            "unianimate_poses": ("UNIANIMATE_POSE",),
            "fantasytalking_embeds": ("FANTASYTALKING_EMBEDS",),
            "uni3c_embeds": ("UNI3C_EMBEDS",),
            "multitalk_embeds": ("MULTITALK_EMBEDS",),
            "freeinit_args": ("FREEINITARGS",),
            "start_step": ("INT", {"default": 0, "min": 0, "max": 10000}),
            "end_step": ("INT", {"default": -1, "min": -1, "max": 10000}),
            "add_noise_to_samples": ("BOOLEAN", {"default": False}),
        },
        {"samples": "LATENT", "denoised_samples": "LATENT"},
    ),
    "WanVideoDecode": (
        "WanVideo Decode",
        {
            "vae": ("WANVAE",),
            "samples": ("LATENT",),
            "enable_vae_tiling": ("BOOLEAN", {"default": False}),
            "tile_x": ("INT", {"default": 272, "min": 40, "max": 2048, "step": 8}),
            "tile_y": ("INT", {"default": 272, "min": 40, "max": 2048, "step": 8}),
            "tile_stride_x": ("INT", {"default": 144, "min": 32, "max": 2040, "step": 8}),
            "tile_stride_y": ("INT", {"default": 128, "min": 32, "max": 2040, "step": 8}),
        },
        {"normalization": (["default", "minmax", "none"], {"advanced": True})},
        {"images": "IMAGE"},
    ),
}

_PACK = """
import folder_paths

NODES = {nodes!r}


def entry(spec):
    return (folder_paths.get_filename_list(spec[1]),) if spec[0] == "FILES" else spec


def run(self, **inputs):
    raise NotImplementedError("only the looks of this node are here")


def node(required, optional, outputs):
    def inputs(cls):
        return {{
            "required": {{name: entry(spec) for name, spec in required.items()}},
            "optional": {{name: entry(spec) for name, spec in optional.items()}},
        }}

    return type("Node", (), {{
        "INPUT_TYPES": classmethod(inputs),
        "RETURN_TYPES": (*outputs.values(),),
        "RETURN_NAMES": (*outputs,),
        "FUNCTION": "run",
        "run": run,
        "CATEGORY": "WanVideoWrapper",
    }})


NODE_CLASS_MAPPINGS = {{name: node(*parts) for name, (_, *parts) in NODES.items()}}
NODE_DISPLAY_NAME_MAPPINGS = {{name: title for name, (title, *_) in NODES.items()}}
"""


def place(custom_nodes: Path) -> None:
    """Put a pack there whose nodes look like the wrapper's; none of them runs."""
    folder = custom_nodes / NAME
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_PACK.format(nodes=NODES), encoding="utf-8")
