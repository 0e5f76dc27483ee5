"""Wrong values in every input of every node give a one-line error that names the input."""

import re

import pytest

from fast_video_vae.tests.nodes.extra_nodes import BAD, FOR_WIDGETS, GOOD
from fast_video_vae.tests.nodes.server import AUTO, NODES, VIDEO, PromptError, Workflow
from fast_video_vae.tests.tools.locales import inputs

pytestmark = pytest.mark.comfyui

LONGEST = 300
KINDS = ("ValueError", "FileNotFoundError")  # of a file that is gone

# Messages of Python and PyTorch, which do not name the input.
RAW = re.compile(
    r"object has no attribute|object is not|not subscriptable|argument must be|indices must be"
    r"|unexpected keyword|embedded null|cannot convert|Expected .* to be|not supported between"
    r"|can't be|must be a? ?(str|real)|not implemented for|mat1 and mat2|^'\w+'$"
)


def node(kind, **inputs):
    """A node that `prompt` adds where it is the value of an input."""
    return {"class_type": kind, "inputs": inputs}


def link(name):
    return node("Test_Value", name=name)


LORA = node("FastVAE_LoraStack", lora_name="lora-0.safetensors", strength="1", blocks="")

# A valid value for each type of links, and inputs for which the default is none or slow.
LINKS = {name.upper(): link(name) for name in GOOD} | {
    "VAE": node("FastVAE_Load", vae_name="bundled demo", **AUTO),
    "MODEL": node("UNETLoader", unet_name="expert-0.safetensors", weight_dtype="default"),
    "FASTVAE_LORA_STACK": LORA,
}
CHANGED = {
    "FastVAE_Load": {"vae_name": "bundled demo"},
    "FastVAE_DecodeVideo": VIDEO,
    "FastVAE_UpscaleVideo": {
        "model": node("Test_SeedVR2"),
        "vae": node("FastVAE_Load", vae_name="seedvr2.safetensors", **AUTO),
        "save_to": "temp",
    },
    "FastVAE_JoinLatents": {"hand_over": 1, "overlap": 0, "next": link("None")},
    "FastVAE_LoraStack": LORA["inputs"],
    "FastVAE_TextEncode": {"positive": "a", "negative": "b"},
    "FastVAE_WanSampler": {"steps": 1, "latent_image": link("small latent")},
    "FastVAE_Benchmark": {"width": 16, "height": 16, "frames": 1, "rounds": 1},
}

# Values of the test node that an input accepts, next to None and fractions.
_TEXTS = {"text", "NUL", "half a character", "out of the folder"}
TAKEN = {
    **dict.fromkeys(("positive", "negative"), _TEXTS),
    "blocks": {"text", "NUL"},
    "filename_prefix": {"text"},
    "latent_image": {"latent of 5 channels"},  # all zeros fit any number of channels
    ("FastVAE_JoinLatents", "samples"): {"latent of 5 channels"},  # without another latent
}

# Values that every input gets; of the others it gets every ninth.
ALWAYS = ("None", "list", "empty dict", "NUL", "NaN")


class Working(dict):
    """Valid inputs of a node, and the names of the optional ones."""

    def __init__(self, kind, info):
        self.kind, self.optional = kind, {*info["input"].get("optional", {})}
        for name, link_type, options in inputs(info):
            choices = options.get("options") or [""]
            self[name] = LINKS.get(link_type) or options.get("default", choices[0])
        self |= CHANGED.get(kind, {})

    def rows(self):
        """Yield inputs with a value for each, so that every value is sent into some input."""
        for at, name in enumerate(self):
            values = [*(BAD if isinstance(self[name], dict) else FOR_WIDGETS)]
            few = {*ALWAYS, *values[at % 9 :: 9]}
            yield from ((name, each) for each in values if each in few)

    def accepts(self, name, value):
        fits = {"None": name in self.optional, "fraction": not isinstance(self[name], int)}
        taken = TAKEN.get(name) or TAKEN.get((self.kind, name), ())
        return fits.get(value, value in taken)

    def prompt(self, **changed):
        """Return a workflow of the node with `changed` inputs, and the nodes that it needs."""
        workflow = Workflow()

        def added(value):
            if not isinstance(value, dict):
                return value
            given = {key: added(each) for key, each in value["inputs"].items()}
            return workflow.add(value["class_type"], **given)

        workflow.add("PreviewAny", source=added(node(self.kind, **self | changed)))
        return workflow


@pytest.fixture
def working(request, expert_server):
    (info,) = expert_server.get(f"/object_info/{request.param}").values()
    return Working(request.param, info)


@pytest.mark.parametrize("working", [each for each in NODES if "Demo" not in each], indirect=True)
def test_a_wrong_value_is_a_one_line_error_naming_its_input(expert_server, working):
    # LoRAs for a second model need a second model.
    alone = {"loras_low": link("None")} if "loras_low" in working else {}
    rows, wrong = [*working.rows()], []
    # In groups of 20: ComfyUI copies the whole queue whenever it changes.
    for group in [rows[start : start + 20] for start in range(0, len(rows), 20)]:
        prompts = [working.prompt(**alone | {name: link(value)}) for name, value in group]
        queued = [expert_server.queue(each) for each in prompts]
        for (name, value), prompt_id in zip(group, queued, strict=True):
            try:
                expert_server.wait(prompt_id, timeout_s=60)
            except PromptError as raised:
                error = raised.messages[-1][1]
            else:
                wrong += [] if working.accepts(name, value) else [(name, value, "accepted")]
                continue
            text = error["exception_message"].removesuffix("\n")
            is_line = text.isprintable() and len(text) <= LONGEST and not RAW.search(text)
            if not (is_line and error["exception_type"] in KINDS and re.match(f"{name}[ :]", text)):
                wrong.append((name, value, error["exception_type"], text))
    assert wrong == []


@pytest.mark.parametrize("working", ["FastVAE_Load", "FastVAE_Accelerate"], indirect=True)
@pytest.mark.parametrize("value", ["exact", link("text")])
def test_a_prompt_with_the_removed_input_quality_runs(expert_server, working, value):
    expert_server.run(working.prompt(quality=value))


@pytest.mark.parametrize(
    ("working", "changed", "said"),
    [
        ("FastVAE_Load", {"vae_name": "gone.safetensors"}, "vae_name: 'gone.safetensors'"),
        ("FastVAE_Load", {"chunk": -2}, "chunk"),
        ("FastVAE_LoraStack", {"lora_name": "gone.safetensors"}, "lora_name: 'gone.safetensors'"),
        ("FastVAE_TextEncode", {"positive": " "}, "positive: the prompt is empty; expected text"),
    ],
    indirect=["working"],
)
def test_an_invalid_widget_value_is_refused_before_the_run(expert_server, working, changed, said):
    with pytest.raises(PromptError) as refused:
        expert_server.run(working.prompt(**changed))
    assert not refused.value.messages  # the prompt was refused, not run
    errors = refused.value.node_errors.values()
    found = [each for each in errors if each["class_type"] == working.kind]
    assert said in " ".join(error["details"] for each in found for error in each["errors"])
