"""The files that the workflows ask for, with the addresses that ComfyUI's own templates have."""

from .graph import Model

_HUB = "https://huggingface.co"
_WAN21 = f"{_HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
_WAN22 = f"{_HUB}/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
_QWEN = f"{_HUB}/Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files"
_SEEDVR2 = f"{_HUB}/Comfy-Org/SeedVR2/resolve/main"
_KIJAI = f"{_HUB}/Kijai/WanVideo_comfy/resolve/main"


def _model(base: str, directory: str, name: str) -> Model:
    return Model(name, f"{base}/{name}", directory)


def _split(base: str, directory: str, name: str) -> Model:
    return _model(f"{base}/{directory}", directory, name)


UMT5 = _split(_WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN21_VAE = _split(_WAN22, "vae", "wan_2.1_vae.safetensors")

WAN22_HIGH = _split(_WAN22, "diffusion_models", "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors")
WAN22_LOW = _split(_WAN22, "diffusion_models", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors")
WAN22_HIGH_LORA = _split(
    _WAN22, "loras", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"
)
WAN22_LOW_LORA = _split(
    _WAN22, "loras", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise.safetensors"
)

WAN22_5B = _split(_WAN22, "diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors")
WAN22_5B_VAE = _split(_WAN22, "vae", "wan2.2_vae.safetensors")

WAN21_I2V = _model(
    f"{_HUB}/Kijai/WanVideo_comfy_fp8_scaled/resolve/main/I2V",
    "diffusion_models",
    "Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors",
)
WAN21_I2V_LORA = _model(
    f"{_KIJAI}/Lightx2v",
    "loras",
    "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors",
)
INFINITETALK = _split(_WAN21, "model_patches", "wan2.1_infiniteTalk_single_fp16.safetensors")
WAV2VEC2 = _model(
    f"{_HUB}/Kijai/wav2vec2_safetensors/resolve/main",
    "audio_encoders",
    "wav2vec2-chinese-base_fp16.safetensors",
)

QWEN_IMAGE = _split(_QWEN, "diffusion_models", "qwen_image_fp8_e4m3fn.safetensors")
QWEN_LORA = _model(
    f"{_HUB}/lightx2v/Qwen-Image-Lightning/resolve/main",
    "loras",
    "Qwen-Image-Lightning-8steps-V1.0.safetensors",
)
QWEN_CLIP = _split(_QWEN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors")
QWEN_VAE = _split(_QWEN, "vae", "qwen_image_vae.safetensors")

SEEDVR2 = _split(_SEEDVR2, "diffusion_models", "seedvr2_3b_int8_convrot.safetensors")
SEEDVR2_VAE = _split(_SEEDVR2, "vae", "seedvr2_ema_vae_fp16.safetensors")

# ComfyUI-WanVideoWrapper does not read the text encoders of ComfyUI's own nodes.
WRAPPER_T2V = _model(_KIJAI, "diffusion_models", "Wan2_1-T2V-1_3B_bf16.safetensors")
WRAPPER_T5 = _model(_KIJAI, "text_encoders", "umt5-xxl-enc-bf16.safetensors")
