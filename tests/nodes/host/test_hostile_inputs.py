"""Wrong values in every input of every node give a one-line error that names the input."""

import re

import pytest

from fast_video_vae.tests.nodes.extra_nodes import BAD, GOOD
from fast_video_vae.tests.nodes.server import AUTO, NODES, VIDEO, PromptError, Workflow
from fast_video_vae.tests.tools.locales import inputs

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


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


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
    "FastVAE_LoraStack": LORA["inputs"],
    "FastVAE_TextEncode": {"positive": "a", "negative": "b"},
    "FastVAE_WanSampler": {"steps": 1, "latent_image": link("small latent")},
    "FastVAE_Benchmark": {"width": 16, "height": 16, "frames": 1, "rounds": 1},
}
WITH_INPUTS = [each for each in NODES if each != "FastVAE_DemoClip"]


class Working(dict):
    """Valid inputs of a node, and the names of the optional ones."""

    def __init__(self, kind, info):
        self.kind, self.optional = kind, {*info["input"].get("optional", {})}
        for name, link_type, options in inputs(info):
            choices = options.get("options") or [""]
            self[name] = LINKS.get(link_type) or options.get("default", choices[0])
        self |= CHANGED.get(kind, {})

    def values_for(self, name):
        """Return all values for a link; for a widget those that are not tensors, and two more."""
        if isinstance(self[name], (tuple, dict)):
            return list(BAD)
        return [*list(BAD)[: list(BAD).index("flat latent")], "flat image", "bool"]

    def few_rows(self):
        """Return some values for each input, so that every value is sent into some input."""
        always = ("None", "list", "empty dict", "NUL", "NaN")
        rows = []
        for at, name in enumerate(self):
            own = [value for value in self.values_for(name) if value not in always]
            linked = isinstance(self[name], (tuple, dict))
            few = own[at % 9 :: 9] if linked else own[at % 4 :: 10]
            rows += [(name, each) for each in self.values_for(name) if each in (*always, *few)]
        return rows

    def accepts(self, name, value):
        if value == "None":
            return name in self.optional
        if value == "fraction":
            return not isinstance(self[name], int) or isinstance(self[name], float)
        words = {"text", "NUL", "lines", "long text", "half a character", "out of the folder"}
        taken = {
            "positive": words,
            "negative": words,
            "blocks": {"text", "NUL"},
            "filename_prefix": {"text"},
            "stack": {"empty list"},
            "loras_high": {"empty list"},
            "loras_low": {"empty list"},
            "latent_image": {"latent of 5 channels"},  # all zeros fit any number of channels
        }
        return value in taken.get(name, set())

    def prompt(self, **changed):
        """Return a workflow of the node with `changed` inputs, and the nodes that it needs."""
        workflow = Workflow()

        def added(value):
            if isinstance(value, tuple):
                return workflow.add("Test_Value", name=value[1])
            if isinstance(value, dict):
                given = {key: added(each) for key, each in value["inputs"].items()}
                return workflow.add(value["class_type"], **given)
            return value

        given = {key: added(value) for key, value in (self | changed).items()}
        workflow.add("PreviewAny", source=workflow.add(self.kind, **given))
        return workflow


@pytest.fixture
def working(request, expert_server):
    (info,) = expert_server.get(f"/object_info/{request.param}").values()
    return Working(request.param, info)


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


def check(server, working, rows):
    """Send the value of each row into its input, and check the errors."""
    # LoRAs for a second model need a second model.
    alone = {"loras_low": link("None")} if "loras_low" in working else {}
    prompts = [working.prompt(**alone | {name: link(value)}) for name, value in rows]
    wrong = []
    for (name, value), error in zip(rows, failures(server, prompts), strict=True):
        if error is None:
            wrong += [] if working.accepts(name, value) else [f"{name}, {value}: accepted"]
            continue
        text, kind = error
        is_line = text.isprintable() and len(text) <= LONGEST
        if kind not in KINDS or not re.match(rf"{name}[ :]", text) or RAW.search(text):
            is_line = False
        wrong += [] if is_line else [f"{name}, {value}: {kind} {text!r}"]
    assert wrong == []


@pytest.mark.parametrize("working", WITH_INPUTS, indirect=True)
def test_a_wrong_value_is_a_one_line_error_naming_its_input(expert_server, working):
    check(expert_server, working, working.few_rows())


@pytest.mark.slow
@pytest.mark.parametrize("working", WITH_INPUTS, indirect=True)
def test_all_other_wrong_values_into_every_input(expert_server, working):
    few = working.few_rows()
    rows = [(name, value) for name in working for value in working.values_for(name)]
    check(expert_server, working, [row for row in rows if row not in few])


@pytest.mark.parametrize("working", ["FastVAE_Load", "FastVAE_Accelerate"], indirect=True)
@pytest.mark.parametrize("value", ["exact", link("text")])
def test_a_prompt_with_the_removed_input_quality_runs(expert_server, working, value):
    assert failures(expert_server, [working.prompt(quality=value)]) == [None]


@pytest.mark.parametrize(
    ("working", "changed", "said"),
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
    indirect=["working"],
)
def test_an_invalid_widget_value_is_refused_before_the_run(expert_server, working, changed, said):
    with pytest.raises(PromptError) as refused:
        expert_server.run(working.prompt(**changed))
    assert not refused.value.messages  # the prompt was refused, not run
    errors = refused.value.node_errors.values()
    found = [each for each in errors if each["class_type"] == working.kind]
    assert said in " ".join(error["details"] for each in found for error in each["errors"])
