"""Values that no input asks for, into every input of every node: one line that names the input."""

import re

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.extra_nodes import BAD
from fast_video_vae.tests.nodes.lora_models import lora_for, random_weights
from fast_video_vae.tests.nodes.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui

LONGEST = 300

# How Python and PyTorch themselves put it.
RAW = re.compile(
    r"object has no attribute|object is not|not subscriptable|argument must be|indices must be"
    r"|unexpected keyword|embedded null|cannot convert|Expected .* to be|not supported between"
    r"|can't be|must be a? ?(str|real)|not implemented for|mat1 and mat2|^'\w+'$"
)


def link(name):
    """What stands for a value of the node for tests, until a workflow has that node."""
    return ("value", name)


VAE = {"class_type": "FastVAE_Load", "inputs": {"vae_name": "bundled demo", "dtype": "auto",
       "encode_dtype": "auto", "chunk": 0, "quality": "fast"}}  # fmt: skip
MODEL = {
    "class_type": "UNETLoader",
    "inputs": {"unet_name": "expert.safetensors", "weight_dtype": "default"},
}
LORA = {
    "class_type": "FastVAE_LoraStack",
    "inputs": {"lora_name": "hostile.safetensors", "strength": "1", "blocks": ""},
}

# Inputs with which each node of ours works.
WORKING = {
    "FastVAE_Load": VAE["inputs"],
    "FastVAE_Accelerate": {"vae": VAE, "dtype": "auto", "encode_dtype": "auto", "chunk": 0,
                           "quality": "fast"},
    "FastVAE_Encode": {"pixels": link("image"), "vae": VAE, "batch": "video", "dtype": "auto",
                       "chunk": 0},
    "FastVAE_Decode": {"samples": link("latent"), "vae": VAE, "dtype": "auto", "chunk": 0},
    "FastVAE_EncodeVideo": {"video": link("video"), "vae": VAE, "fps": 0.0, "width": 0, "height": 0,
                            "max_frames": 0, "dtype": "auto", "chunk": 0},
    "FastVAE_DecodeVideo": {"samples": link("latent"), "vae": VAE, "fps": 16.0, "codec": "ffv1",
                            "quality": 70, "filename_prefix": "hostile/x", "save_to": "temp",
                            "audio": link("audio"), "hardware": False, "frames": "",
                            "dtype": "auto", "chunk": 0},
    "FastVAE_LoraStack": LORA["inputs"] | {"stack": LORA},
    "FastVAE_ApplyLora": {"model": MODEL, "stack": LORA, "mode": "auto", "phase": "auto"},
    "FastVAE_TextEncode": {"clip": link("clip"), "positive": "a", "negative": "b", "dtype": "auto",
                           "compile": "off", "cache": 0},
    "FastVAE_WanSampler": DEFAULTS | {
        "steps": 1, "model_high": MODEL, "model_low": MODEL, "positive": link("conditioning"),
        "negative": link("conditioning"), "latent_image": link("small latent"),
        "loras_high": LORA, "loras_low": LORA, "sigmas": link("sigmas"),
    },
    "FastVAE_FuseMLP": {"model": MODEL},
    "FastVAE_ToWanVideoWrapper": {"vae": VAE},
    "FastVAE_Benchmark": {"vae": VAE, "task": "decode", "width": 16, "height": 16, "frames": 1,
                          "rounds": 1, "dtype": "auto", "samples": link("latent"),
                          "pixels": link("image")},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(server, comfyui):
    """A model and a LoRA, where the server's loaders find them."""
    state = random_weights("wan21-t2v", 0)
    save_file(state, server.models("diffusion_models") / "expert.safetensors")
    lora = {key: value.contiguous() for key, value in lora_for(state, seed=0).items()}
    save_file(lora, server.models("loras") / "hostile.safetensors")
    return server


def prompt(node, **changed):
    """A workflow of one node of ours and what its inputs need."""
    workflow = Workflow()

    def added(value):
        if isinstance(value, tuple):
            return workflow.add("Test_Value", name=value[1])
        if isinstance(value, dict):
            inputs = {key: added(each) for key, each in value["inputs"].items()}
            return workflow.add(value["class_type"], **inputs)
        return value

    inputs = {key: added(value) for key, value in (WORKING[node] | changed).items()}
    workflow.add("PreviewAny", source=workflow.add(node, **inputs))
    return workflow


def failures(server, prompts):
    """For each prompt the text and the type of its error; None: it ran."""
    found = []
    queued = []
    for each in prompts:
        try:
            queued.append(server.queue(each))
        except PromptError as error:
            queued.append(error)
    for each in queued:
        try:
            if isinstance(each, PromptError):
                raise each
            server.wait(each, timeout_s=60)
            found.append(None)
        except PromptError as error:
            details = error.messages[-1][1] if error.messages else None
            text = details["exception_message"].rstrip("\n") if details else str(error)
            found.append((text, details["exception_type"] if details else "refused"))
    return found


@pytest.mark.parametrize("node", WORKING)
def test_every_value_into_every_input_is_an_error_of_one_line_or_taken(files, node):
    rows = [(name, value) for name in WORKING[node] for value in BAD]
    told = failures(files, [prompt(node, **{name: link(value)}) for name, value in rows])
    for (name, value), error in zip(rows, told, strict=True):
        print(node, name, "|", value, "|", error)
