"""Values that no input asks for, into every input of every node: one line that names the input."""

import re

import pytest
from safetensors.torch import save_file

from fast_video_vae.tests.nodes.extra_nodes import BAD
from fast_video_vae.tests.nodes.lora.lora_models import lora_for, random_weights
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import PromptError, Workflow

pytestmark = pytest.mark.comfyui

LONGEST = 300

# The second for a file that is gone.
KINDS = ("ValueError", "FileNotFoundError")

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
       "encode_dtype": "auto", "chunk": 0}}  # fmt: skip
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
    "FastVAE_Accelerate": {"vae": VAE, "dtype": "auto", "encode_dtype": "auto", "chunk": 0},
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


def values_for(usual):
    """All values for what is linked; for a widget those that are no tensors, and a few of them."""
    if isinstance(usual, (tuple, dict)):
        return list(BAD)
    return [*list(BAD)[: list(BAD).index("flat latent")], "flat image", "bool"]


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
    # Not all at once: ComfyUI copies the whole queue whenever it changes.
    for start in range(0, len(prompts), 20):
        queued = [server.queue(each) for each in prompts[start : start + 20]]
        for each in queued:
            try:
                server.wait(each, timeout_s=60)
                found.append(None)
            except PromptError as error:
                details = error.messages[-1][1]
                text = details["exception_message"].removesuffix("\n")
                found.append((text, details["exception_type"]))
    return found


def check(files, node, rows):
    """Send a value into an input, for each row of both."""
    changes = [{name: link(value)} for name, value in rows]
    if node == "FastVAE_WanSampler":  # LoRAs for a second model need one
        changes = [{"loras_low": link("None")} | each for each in changes]
    told = failures(files, [prompt(node, **each) for each in changes])
    wrong = []
    for (name, value), error in zip(rows, told, strict=True):
        if error is None:
            if not is_fine(node, name, value):
                wrong.append(f"{name}, {value}: taken")
            continue
        text, kind = error
        named = re.match(rf"{name}[ :]", text)
        if kind not in KINDS or not named or RAW.search(text) or len(text) > LONGEST:
            wrong.append(f"{name}, {value}: {kind} {text}")
        elif not text.isprintable():
            wrong.append(f"{name}, {value}: more than a line, {text!r}")
    assert wrong == []


def is_fine(node, name, value):
    """Whether a value is one that the input is to take, strange as it may be."""
    usual = WORKING[node][name]
    if value == "None":
        return name in OPTIONAL
    if value == "fraction":
        return not isinstance(usual, int) or isinstance(usual, float)
    words = {"text", "NUL", "lines", "long text", "half a character", "out of the folder"}
    taken = {
        "positive": words,
        "negative": words,
        "blocks": {"text", "NUL"},
        "filename_prefix": {"text"},
        "stack": {"empty list"},
        "loras_high": {"empty list"},
        "loras_low": {"empty list"},
        "latent_image": {"latent of 5 channels"},  # all zeros, which become as many as are needed
    }
    return value in taken.get(name, set())


# Nothing comes: as if nothing were connected.
OPTIONAL = {
    "quality", "batch", "dtype", "chunk", "fps", "width", "height", "max_frames", "audio",
    "hardware", "frames", "stack", "phase", "model_low", "negative", "loras_high", "loras_low",
    "sigmas", "samples", "pixels", "compile", "cache",
}  # fmt: skip

# What was seen first: these go into every input.
ALWAYS = ("None", "list", "empty dict", "NUL", "NaN")


@pytest.mark.parametrize("node", ["FastVAE_Load", "FastVAE_Accelerate"])
@pytest.mark.parametrize("value", ["exact", link("text")])
def test_a_prompt_with_the_removed_input_quality_runs(files, node, value):
    assert failures(files, [prompt(node, quality=value)]) == [None]


def few_rows(node):
    """Some of all values for each input, so that every value goes into some."""
    rows = []
    for at, name in enumerate(WORKING[node]):
        values = values_for(WORKING[node][name])
        own = [value for value in values if value not in ALWAYS]
        linked = isinstance(WORKING[node][name], (tuple, dict))
        few = own[at % 9 :: 9] if linked else own[at % 4 :: 10]
        rows += [(name, value) for value in values if value in ALWAYS or value in few]
    return rows


@pytest.mark.parametrize("node", WORKING)
def test_a_strange_value_is_an_error_of_one_line_that_names_its_input(files, node):
    check(files, node, few_rows(node))


@pytest.mark.slow
@pytest.mark.parametrize("node", WORKING)
def test_every_other_strange_value_into_every_input(files, node):
    rows = [(name, value) for name in WORKING[node] for value in values_for(WORKING[node][name])]
    few = few_rows(node)
    check(files, node, [row for row in rows if row not in few])
