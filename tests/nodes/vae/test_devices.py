"""Several devices for one VAE: the input of the nodes, workflows of other machines, and memory."""

import asyncio
import copy
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.cards import GB, Cards
from fast_video_vae.tests.nodes.server import AUTO, Workflow
from fast_video_vae.tests.nodes.vae.machines import known, machine
from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    clip,
    fast_vae,
    frames,
    latents,
    ours,
    relative_error,
    small_latents,
    stopped_at,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


NODES = ("Load", "Accelerate")


@pytest.fixture
def two(monkeypatch):
    return machine(monkeypatch, 2)


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "spread.safetensors")
    return "spread.safetensors"


def node_class(name):
    from fast_video_vae.nodes.vae import nodes

    return getattr(nodes, name)


def inputs_of(name):
    return node_class(name).define_schema().inputs


def loaded(name, **options):
    return ours("Load", vae_name=name, **options).args[0]


def devices_of(vae):
    """The devices that share the videos of a VAE; none: its own."""
    model = vae.first_stage_model
    # The network may name a device in another way.
    assert len(getattr(model, "devices", [])) == len(model.shared_by)
    return model.shared_by


def lines(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "Fast Video VAE" in text]


@pytest.mark.parametrize("name", NODES)
def test_only_a_machine_with_several_devices_has_the_input(name, monkeypatch):
    """The last one: values of widgets are saved by position."""
    from comfy.cli_args import args

    for count in (0, 1):
        machine(monkeypatch, count)
        before = [each.id for each in inputs_of(name)]
        assert "devices" not in before
    machine(monkeypatch, 2)
    *others, last = inputs_of(name)
    assert [each.id for each in others] == before
    assert (last.id, last.default, last.optional) == ("devices", "one", True)
    info = node_class(name).GET_NODE_INFO_V1()
    assert info["input"]["optional"]["devices"][1]["options"] == ["one", "all"]
    monkeypatch.setattr(args, "cpu_vae", True)  # VAEs are put on the CPU
    assert [each.id for each in inputs_of(name)] == before


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_the_choices_are_one_all_and_proper_selections(count, monkeypatch):
    import comfy.model_management as management

    machine(monkeypatch, count)
    *_, last = inputs_of("Load")
    assert last.options[:2] == ["one", "all"]
    known = [name for name in management.get_gpu_device_options() if name.startswith("gpu:")]
    selections = [choice.split(", ") for choice in last.options[2:]]
    assert len({*last.options}) == len(last.options) <= 12
    assert {len(each) for each in selections} <= {*range(2, count)}
    every = [[*c] for size in range(2, count) for c in itertools.combinations(known, size)]
    assert [each for each in every if each in selections] == selections
    assert count > 4 or selections == every


@pytest.mark.parametrize(
    ("selection", "numbers", "missing"),
    [
        ("one", [0], None),
        ("all", [0, 1, 2, 3], None),
        ("gpu:2,gpu:1 ", [0, 2, 1], None),  # the VAE's own device takes part, and is the first
        ("gpu:1, gpu:1", [0, 1], None),
        ("gpu:0", [0], None),
        ("gpu:1, gpu:7", [0, 1], "gpu:7"),  # saved on a larger machine
        ("gpu:7", [0], "gpu:7"),
    ],
)
def test_a_vae_gets_the_selected_devices(
    vae_name, monkeypatch, caplog, selection, numbers, missing
):
    import comfy.model_management as management

    found = machine(monkeypatch, 4)
    monkeypatch.setattr(management, "get_torch_device", lambda: found[0])
    wanted = [found[number] for number in numbers] if len(numbers) > 1 else []
    with caplog.at_level(logging.INFO):
        assert devices_of(loaded(vae_name, devices=selection)) == wanted
    texts = [f"this machine has no {missing}"] if missing else []
    texts += ["among " + ", ".join(f"gpu:{number}" for number in numbers)] if wanted else []
    assert all(text in line for text, line in zip(texts, lines(caplog), strict=True))
    (again,) = ours("Accelerate", vae=loaded(vae_name), devices=selection).args
    assert devices_of(again) == wanted


@pytest.mark.parametrize("bad", ["", "two", "cuda:0", "gpu:", "gpu:0 gpu:1", "gpu:-1", 1])
def test_an_unknown_selection_is_an_error_before_the_file_is_read(two, monkeypatch, bad):
    monkeypatch.setattr("fast_video_vae.nodes.vae.accelerate.read_checkpoint", pytest.fail)
    with refused(r"^devices: got .*; expected one, all, or names such as gpu:0, gpu:1"):
        loaded("bundled demo", devices=bad)


def test_a_vae_on_the_cpu_uses_no_gpu(vae_name, monkeypatch):
    machine(monkeypatch, 2, "cuda")
    vae = loaded(vae_name, devices="all")
    assert devices_of(vae) == []
    assert vae.decode(latents(1, 4, 6)).device.type == "cpu"
    assert devices_of(vae) == []


def test_accelerate_sets_the_devices_of_a_fast_vae(vae_name, two):
    fast = loaded(vae_name, devices="all")
    assert ours("Accelerate", vae=fast, devices="all").args[0] is fast
    assert accelerated(fast) is fast  # as other nodes of the pack, which keep the devices
    assert accelerated(fast, chunk=3).first_stage_model.selection == "all"
    (one,) = ours("Accelerate", vae=fast).args
    assert one is not fast
    assert one.first_stage_model.selection == "one"
    assert fast.first_stage_model.selection == "all"


def prompt_of(devices):
    """A prompt in the API format, as the frontend sends it, with the devices in both nodes."""
    workflow = Workflow()
    vae = workflow.add("FastVAE_Accelerate", vae=workflow.load(), **AUTO)
    if devices is not None:
        for number in "12":
            workflow[number]["inputs"]["devices"] = devices
    images = workflow.add("VAEDecode", samples=workflow.latent(16, 1), vae=vae)
    workflow.add("PreviewImage", images=images)
    return workflow


@pytest.fixture
def checked(monkeypatch):
    """ComfyUI's check of such a prompt."""
    import execution
    from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo

    import nodes as core

    known = {f"FastVAE_{name}": node_class(name) for name in NODES}
    for name, node in (known | {"EmptyHunyuanLatentVideo": EmptyHunyuanLatentVideo}).items():
        monkeypatch.setitem(core.NODE_CLASS_MAPPINGS, name, node)
    return lambda given: asyncio.run(execution.validate_prompt("test", prompt_of(given), None))


@pytest.mark.parametrize(
    ("count", "devices", "wanted"),
    [
        (1, "gpu:0, gpu:2", 0),  # saved on a machine with several
        (1, "all", 0),
        (1, "nothing of today", 0),  # a value that is not read
        (2, None, 0),  # saved on a machine with one
        (2, "gpu:5", 0),
        (2, "all", 2),
    ],
)
def test_a_workflow_of_another_machine_runs_on_its_devices(
    vae_name, checked, monkeypatch, count, devices, wanted
):
    import execution

    found = machine(monkeypatch, count)
    valid, error, _, errors = checked(devices)
    assert (valid, error, errors) == (True, None, {})
    # The inputs that ComfyUI takes from a prompt.
    inputs = prompt_of(devices)["1"]["inputs"]
    taken, _, _ = execution.get_input_data(inputs, node_class("Load"), "1")
    given = {key: value for key, (value,) in taken.items()} | {"vae_name": vae_name}
    # The VAE of a test is on "cpu", which is none of the devices of the machine.
    assert devices_of(loaded(given.pop("vae_name"), **given))[1:] == found[:wanted]


def test_a_wrong_selection_is_refused_before_anything_runs(checked, two):
    valid, _, _, errors = checked("both")
    assert not valid
    for number in "12":
        (found,) = errors[number]["errors"]
        assert found["details"].startswith("devices - devices: got 'both'; expected one, all, or")


@pytest.mark.parametrize("devices", ["all", "gpu:0, gpu:1"])
@pytest.mark.parametrize("name", NODES)
def test_seedvr2_uses_its_own_device(seedvr2, models, two, caplog, name, devices):
    save_file(seedvr2.state, models / "seedvr2.safetensors")
    given = {"Load": {"vae_name": "seedvr2.safetensors"}, "Accelerate": {"vae": seedvr2.stock}}
    with caplog.at_level(logging.INFO):
        (vae,) = ours(name, **given[name], devices=devices).args
        vae.decode(torch.zeros(1, 16, 1, 4, 4))
    (line,) = lines(caplog)
    assert "the norms of SeedVR2 measure whole frames" in line
    assert vae.first_stage_model.selection == "one"
    assert devices_of(vae) == []


def test_several_devices_give_the_result_of_one_and_stop(fast, state, tmp_path, two):
    shared = fast_vae(state, tmp_path, devices="all")
    latent, pixels = latents(2, 16, 24), clip(5, 128, 192)
    expected = fast.decode(latent)
    tiled = shared.decode_tiled(latent, tile_x=8, tile_y=8, overlap=4)
    for images in (shared.decode(latent), tiled):
        assert relative_error(images, expected) <= 1e-5
    assert tiled.device == HOST
    assert relative_error(shared.encode(pixels), fast.encode(pixels)) <= 1e-5
    # Each of the three devices, the CPU too, can be in its first step of two.
    with stopped_at(shared.first_stage_model.decoder.get_submodule("middle.0"), most=3):
        shared.decode(latent)
    assert relative_error(shared.decode(latent), expected) <= 1e-5


HOST = torch.device("cpu")


@pytest.fixture
def cards(comfyui, monkeypatch):
    cards = Cards(monkeypatch, 2, dynamic=False)
    known(monkeypatch, cards.devices)
    return cards


@pytest.fixture
def vae(cards, state, tmp_path):
    return fast_vae(state, tmp_path, devices="all")


def fill(cards, *sizes):
    """Load a model of another node, of some GB, to each card."""
    import comfy.model_management as management
    from comfy.model_patcher import ModelPatcher

    models = []
    for number, (device, size) in enumerate(zip(cards.devices, sizes, strict=True)):
        patcher = ModelPatcher(nn.Sequential(), device, HOST)
        models.append(cards.name(patcher, f"model {number}", int(size * GB)))
        management.load_models_gpu([patcher], force_full_load=True)
    cards.events.clear()
    return models


def moved_to(device, vae):
    """Return a copy of a VAE on another device, as Select VAE Device makes it."""
    moved = copy.copy(vae)
    moved.patcher = vae.patcher.deepclone_multigpu(new_load_device=device)
    moved.first_stage_model, moved.device = moved.patcher.model, device
    return moved


def unloaded(cards):
    taken = [event for event in cards.events if event[0] in ("detached", "unloaded")]
    return sorted({name for _, name, *_ in taken})


@pytest.mark.parametrize(
    ("devices", "sizes", "expected", "encode"),
    [
        ("all", (10, 10), [], False),  # there is room on both
        ("all", (10, 23.9), ["model 1"], True),
        ("all", (23.9, 10), ["model 0"], False),
        ("all", (23.9, 23.9), ["model 0", "model 1"], True),
        ("one", (10, 23.9), [], False),
    ],
)
def test_room_is_made_on_each_device_that_lacks_it(
    cards, state, tmp_path, devices, sizes, expected, encode
):
    models, vae = fill(cards, *sizes), fast_vae(state, tmp_path, devices=devices)
    vae.encode(frames(5)) if encode else vae.decode(small_latents(2))
    assert unloaded(cards) == expected
    del models


@pytest.mark.parametrize(("name", "taken"), [("cpu:0", 0), ("cpu:1", 1), ("cpu", 0)])
def test_a_release_unloads_other_models_from_the_device_that_is_short(cards, vae, name, taken):
    """The VAE's own device has other names, such as mps:0 for mps."""
    import comfy.model_management as management

    from fast_video_vae.nodes.vae import pieces

    vae.decode(small_latents(1))
    models = fill(cards, 5, 5)
    pieces.release(vae)(torch.device(name))
    assert unloaded(cards) == [f"model {taken}"]
    loaded = [each.model for each in management.current_loaded_models]
    assert set(loaded) == {vae.patcher, models[1 - taken]}
    del models


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("all", [1, 0]), ("gpu:0, gpu:1", [1, 0]), ("gpu:0", [1, 0]), ("one", [])],
)
def test_the_device_of_a_vae_that_comfyui_has_moved_comes_first(
    cards, state, tmp_path, selection, expected
):
    vae = fast_vae(state, tmp_path, devices=selection)
    latent = small_latents(2)
    frames_of_one = vae.decode(latent)
    selected = moved_to(cards.devices[1], vae)
    assert relative_error(selected.decode(latent), frames_of_one) <= 1e-5
    wanted = [cards.devices[each] for each in expected]
    assert selected.first_stage_model.shared_by == wanted
    assert relative_error(vae.decode(latent), frames_of_one) <= 1e-5


@pytest.mark.parametrize("task", ["decode", "encode", "pictures"])
@pytest.mark.parametrize(("devices", "label"), [("all", "gpu:0, gpu:1"), ("one", "")])
def test_the_table_of_times_names_several_devices(cards, state, tmp_path, task, devices, label):
    from fast_video_vae.nodes.host import timing
    from fast_video_vae.nodes.video import stream

    vae = fast_vae(state, tmp_path, devices=devices)
    work = {
        "decode": lambda: vae.decode(small_latents(1)),
        "encode": lambda: vae.encode(frames(1)),
        "pictures": lambda: list(stream.decode_pictures(vae, small_latents(1))),
    }[task]

    @torch.inference_mode()
    def labels():
        work()
        return [row.label for row in timing.report().rows() if row.kind.startswith("VAE")]

    with ThreadPoolExecutor(1) as thread:  # a thread has a table of its own
        assert thread.submit(labels).result() == [label]
