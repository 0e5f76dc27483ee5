"""Several devices for one VAE: the input of the nodes, workflows of other machines, and memory."""

import copy
import itertools
import logging

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.cards import machine
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

HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def vae_name(models, state):
    save_file(state, models / "spread.safetensors")
    return "spread.safetensors"


def inputs_of(name):
    from fast_video_vae.nodes.vae import nodes

    return getattr(nodes, name).define_schema().inputs


def devices_of(vae):
    """The devices that share the videos of a VAE; none: its own."""
    return vae.first_stage_model.shared_by


def test_a_machine_with_several_devices_has_the_input_as_its_last(monkeypatch):
    """Values of widgets are saved by position."""
    from comfy.cli_args import args
    from comfy.model_management import get_gpu_device_options

    machine(monkeypatch, 1)
    before = [each.id for each in inputs_of("Load")]
    assert "devices" not in before
    for count in (2, 4, 9):
        machine(monkeypatch, count)
        assert inputs_of("Accelerate")[-1].id == "devices"
        *others, last = inputs_of("Load")
        assert [each.id for each in others] == before
        assert (last.id, last.default, last.optional) == ("devices", "one", True)
        names = [each for each in get_gpu_device_options() if each.startswith("gpu:")]
        some = [each for size in range(2, count) for each in itertools.combinations(names, size)]
        some = some if count <= 4 else [names[:size] for size in range(2, count)]
        assert last.options == ["one", "all", *map(", ".join, some)]
    monkeypatch.setattr(args, "cpu_vae", True)  # VAEs are put on the CPU
    assert [each.id for each in inputs_of("Load")] == before


@pytest.mark.parametrize(
    ("selection", "numbers", "missing"),
    [
        ("one", [0], None),
        ("all", [0, 1, 2, 3], None),
        ("gpu:2,gpu:1 ", [0, 2, 1], None),  # the VAE's own device takes part, and is the first
        ("gpu:1, gpu:1, gpu:7", [0, 1], "gpu:7"),  # saved on a larger machine
    ],
)
def test_a_vae_gets_the_selected_devices(
    vae_name, monkeypatch, caplog, selection, numbers, missing
):
    import comfy.model_management as management

    monkeypatch.setattr(errors, "_logged", set())
    found = machine(monkeypatch, 4)
    monkeypatch.setattr(management, "get_torch_device", lambda: found[0])
    wanted = [found[number] for number in numbers] if len(numbers) > 1 else []
    with caplog.at_level(logging.INFO):
        assert devices_of(ours("Load", vae_name=vae_name, devices=selection).args[0]) == wanted
    texts = [f"this machine has no {missing}"] if missing else []
    texts += ["among " + ", ".join(f"gpu:{number}" for number in numbers)] if wanted else []
    lines = [text for text in caplog.messages if "Fast Video VAE" in text or "no gpu" in text]
    assert all(text in line for text, line in zip(texts, lines, strict=True))
    (plain,) = ours("Load", vae_name=vae_name).args
    (again,) = ours("Accelerate", vae=plain, devices=selection).args
    assert devices_of(again) == wanted
    assert devices_of(plain) == []
    assert accelerated(again) is again  # as other nodes of the pack, which keep the devices
    assert devices_of(ours("Accelerate", vae=again).args[0]) == []


def test_a_vae_on_the_cpu_and_seedvr2_use_their_own_device(seedvr2, fast, monkeypatch, caplog):
    for kind, stock, count in (("cuda", fast, 0), ("cpu", seedvr2.stock, 1)):
        machine(monkeypatch, 2, kind)
        with caplog.at_level(logging.INFO):
            vae = accelerated(stock, devices="all")
        assert vae.decode(latents(1, 4, 6)).device == HOST
        assert devices_of(vae) == []
        assert caplog.text.count("the norms of SeedVR2 measure whole frames") == count


def test_a_workflow_of_another_machine_runs_on_its_devices(vae_name, monkeypatch):
    from fast_video_vae.nodes.vae.nodes import Load

    # The first is saved on a machine with several.
    for count, devices, wanted in ((1, "gpu:0, gpu:2", 0), (2, "all", 2)):
        found = machine(monkeypatch, count)
        assert Load.validate_inputs(devices=devices) is True
        # The VAE of a test is on "cpu", which is none of the devices of the machine.
        (vae,) = ours("Load", vae_name=vae_name, devices=devices).args
        assert devices_of(vae)[1:] == found[:wanted]
    for bad in ("", "gpu:0 gpu:1", 1):
        expected = f"devices: got {bad!r}; expected one, all, or names such as gpu:0, gpu:1"
        assert Load.validate_inputs(devices=bad).startswith(expected)
        with refused(f"^{expected}"):  # a linked value
            ours("Load", vae_name=vae_name, devices=bad)


def test_several_devices_give_the_result_of_one_and_stop(fast, state, tmp_path, monkeypatch):
    from fast_video_vae.nodes.host import timing

    machine(monkeypatch, 2)
    measured = set()  # the rows of the table of times
    note = lambda kind, first, last, label="", *_: measured.add((kind, label))  # noqa: E731
    monkeypatch.setattr(timing, "add", note)
    shared = fast_vae(state, tmp_path, devices="all")
    latent, pixels = latents(2, 16, 24), clip(5, 128, 192)
    expected = fast.decode(latent)
    tiled = shared.decode_tiled(latent, tile_x=8, tile_y=8, overlap=4)
    for images in (shared.decode(latent), tiled):
        assert images.device == HOST
        assert relative_error(images, expected) <= 1e-5
    assert relative_error(shared.encode(pixels), fast.encode(pixels)) <= 1e-5
    assert {(f"VAE {way}", "cpu, gpu:0, gpu:1") for way in ("decode", "encode")} <= measured
    # Each of the three devices, the CPU too, can be in its first step of two.
    with stopped_at(shared.first_stage_model.decoder.get_submodule("middle.0"), most=3):
        shared.decode(latent)
    assert relative_error(shared.decode(latent), expected) <= 1e-5


def test_room_is_made_on_each_device_and_a_release_on_the_one_that_is_short(
    state, tmp_path, monkeypatch
):
    import comfy.model_management as management

    from fast_video_vae.nodes.vae import pieces

    others, freed = machine(monkeypatch, 2), []
    note = lambda size, device, keep_loaded=(): freed.append((device, size))  # noqa: E731
    monkeypatch.setattr(management, "free_memory", note)
    for devices, expected in (("all", others), ("one", [])):
        vae = fast_vae(state, tmp_path, devices=devices)
        for run, given in ((vae.encode, frames(5)), (vae.decode, small_latents(2))):
            freed.clear()
            run(given)
            # A copy of the weights, and the work.
            sizes = dict(each for each in freed if each[0] != HOST)
            assert [*sizes] == expected
            assert all(size > 1.1 * vae.model_size() for size in sizes.values())
        for device in ("cpu:1", "meta"):  # the VAE's own device may have other names
            freed.clear()
            pieces.release(vae)(torch.device(device))
            wanted = torch.device(device) if torch.device(device) in expected else HOST
            assert [device for device, _ in freed] == [wanted]


def test_the_device_of_a_vae_that_comfyui_has_moved_comes_first(state, tmp_path, monkeypatch):
    first, second = machine(monkeypatch, 2)
    vae, latent = fast_vae(state, tmp_path, devices="gpu:0"), small_latents(2)
    expected, moved = vae.decode(latent), copy.copy(vae)
    # As Select VAE Device.
    moved.patcher = vae.patcher.deepclone_multigpu(new_load_device=second)
    moved.first_stage_model, moved.device = moved.patcher.model, second
    assert relative_error(moved.decode(latent), expected) <= 1e-5
    assert devices_of(moved) == [second, first]
    assert relative_error(vae.decode(latent), expected) <= 1e-5
