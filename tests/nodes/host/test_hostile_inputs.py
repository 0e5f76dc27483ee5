"""Wrong values in every input of every node give a one-line error that names the input."""

import re

import pytest

from fast_video_vae.tests.nodes.extra_nodes import BAD
from fast_video_vae.tests.nodes.sampling.sampler_models import DEFAULTS
from fast_video_vae.tests.nodes.server import AUTO, VIDEO, PromptError, Workflow

pytestmark = pytest.mark.comfyui

LONGEST = 300

# FileNotFoundError: a file that is gone.
KINDS = ("ValueError", "FileNotFoundError")

# Messages of Python and PyTorch, which do not name the input.
RAW = re.compile(
    r"object has no attribute|object is not|not subscriptable|argument must be|indices must be"
    r"|unexpected keyword|embedded null|cannot convert|Expected .* to be|not supported between"
    r"|can't be|must be a? ?(str|real)|not implemented for|mat1 and mat2|^'\w+'$"
)


def link(name):
    """Return a placeholder for a value of the test node, resolved in `prompt`."""
    return ("value", name)


VAE = {"class_type": "FastVAE_Load", "inputs": {"vae_name": "bundled demo", **AUTO}}
MODEL = {
    "class_type": "UNETLoader",
    "inputs": {"unet_name": "expert-0.safetensors", "weight_dtype": "default"},
}
LORA = {
    "class_type": "FastVAE_LoraStack",
    "inputs": {"lora_name": "lora-0.safetensors", "strength": "1", "blocks": ""},
}

# Valid inputs of each node.
WORKING = {
    "FastVAE_Load": VAE["inputs"],
    "FastVAE_Accelerate": {"vae": VAE, **AUTO},
    "FastVAE_Encode": {"pixels": link("image"), "vae": VAE, "batch": "video", "dtype": "auto",
                       "chunk": 0},
    "FastVAE_Decode": {"samples": link("latent"), "vae": VAE, "dtype": "auto", "chunk": 0},
    "FastVAE_EncodeVideo": {"video": link("video"), "vae": VAE, "fps": 0.0, "width": 0, "height": 0,
                            "max_frames": 0, "dtype": "auto", "chunk": 0},
    "FastVAE_DecodeVideo": VIDEO | {"samples": link("latent"), "vae": VAE, "audio": link("audio"),
                                    "hardware": False, "frames": "", "dtype": "auto", "chunk": 0},
    "FastVAE_PreviewLatent": {"samples": link("latent"), "decoder": "auto", "fps": 16.0},
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


def values_for(usual):
    """Return all values for a link; for a widget those that are not tensors, and two more."""
    if isinstance(usual, (tuple, dict)):
        return list(BAD)
    return [*list(BAD)[: list(BAD).index("flat latent")], "flat image", "bool"]


def prompt(node, **changed):
    """Return a workflow of one node with `changed` inputs, and the nodes that it needs."""
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
    """Return the text and type of each prompt's error; None: it ran."""
    found = []
    # In groups of 20: ComfyUI copies the whole queue whenever it changes.
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


def check(server, node, rows):
    """Send the value of each row into its input, and check the errors."""
    changes = [{name: link(value)} for name, value in rows]
    if node == "FastVAE_WanSampler":  # LoRAs for a second model need a second model
        changes = [{"loras_low": link("None")} | each for each in changes]
    errors = failures(server, [prompt(node, **each) for each in changes])
    wrong = []
    for (name, value), error in zip(rows, errors, strict=True):
        if error is None:
            if not is_fine(node, name, value):
                wrong.append(f"{name}, {value}: accepted")
            continue
        text, kind = error
        is_line = text.isprintable() and len(text) <= LONGEST
        named = re.match(rf"{name}[ :]", text)
        if kind not in KINDS or not named or RAW.search(text) or not is_line:
            wrong.append(f"{name}, {value}: {kind} {text!r}")
    assert wrong == []


def is_fine(node, name, value):
    """Return whether the input is to accept a value."""
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
        "latent_image": {"latent of 5 channels"},  # all zeros: accepted with any number of channels
    }
    return value in taken.get(name, set())


# Inputs for which None is the same as not connected.
OPTIONAL = {
    "quality", "batch", "dtype", "chunk", "fps", "width", "height", "max_frames", "audio",
    "hardware", "frames", "stack", "phase", "model_low", "negative", "loras_high", "loras_low",
    "sigmas", "samples", "pixels", "compile", "cache",
}  # fmt: skip

# Values that `few_rows` sends into every input.
ALWAYS = ("None", "list", "empty dict", "NUL", "NaN")


@pytest.mark.parametrize("node", ["FastVAE_Load", "FastVAE_Accelerate"])
@pytest.mark.parametrize("value", ["exact", link("text")])
def test_a_prompt_with_the_removed_input_quality_runs(expert_server, node, value):
    assert failures(expert_server, [prompt(node, quality=value)]) == [None]


@pytest.mark.parametrize(
    ("node", "changed", "said"),
    [
        ("FastVAE_Load", {"vae_name": "gone.safetensors"}, "vae_name: 'gone.safetensors'"),
        ("FastVAE_Load", {"chunk": -2}, "chunk"),
        ("FastVAE_Load", {"chunk": "many"}, "chunk"),
        ("FastVAE_LoraStack", {"lora_name": "gone.safetensors"}, "lora_name: 'gone.safetensors'"),
        ("FastVAE_LoraStack", {"strength": "strong"}, "'strong' is not a finite number"),
        ("FastVAE_LoraStack", {"blocks": "9-3"}, "9-3"),
        ("FastVAE_TextEncode", {"positive": " "}, "positive: the prompt is empty; expected text"),
        ("FastVAE_WanSampler", {"boundary": "2.0"}, "boundary: got '2.0'"),
        ("FastVAE_WanSampler", {"cfg_high": "one"}, "cfg_high: got 'one'"),
        ("FastVAE_WanSampler", {"shift_low": "-1"}, "shift_low: got -1"),
    ],
)
def test_an_invalid_widget_value_is_refused_before_the_run(expert_server, node, changed, said):
    with pytest.raises(PromptError) as refused:
        expert_server.run(prompt(node, **changed))
    assert not refused.value.messages  # the prompt was refused, not run
    found = [each for each in refused.value.node_errors.values() if each["class_type"] == node]
    assert said in " ".join(error["details"] for each in found for error in each["errors"])


def few_rows(node):
    """Return some values for each input, so that every value is sent into some input."""
    rows = []
    for at, name in enumerate(WORKING[node]):
        values = values_for(WORKING[node][name])
        own = [value for value in values if value not in ALWAYS]
        linked = isinstance(WORKING[node][name], (tuple, dict))
        few = own[at % 9 :: 9] if linked else own[at % 4 :: 10]
        rows += [(name, value) for value in values if value in ALWAYS or value in few]
    return rows


@pytest.mark.parametrize("node", WORKING)
def test_a_wrong_value_is_a_one_line_error_naming_its_input(expert_server, node):
    check(expert_server, node, few_rows(node))


@pytest.mark.slow
@pytest.mark.parametrize("node", WORKING)
def test_all_other_wrong_values_into_every_input(expert_server, node):
    rows = [(name, value) for name in WORKING[node] for value in values_for(WORKING[node][name])]
    few = few_rows(node)
    check(expert_server, node, [row for row in rows if row not in few])
