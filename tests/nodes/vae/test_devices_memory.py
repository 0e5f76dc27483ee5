"""A VAE on two stand-in cards in ComfyUI's memory management: room, retries, and unloading."""

import copy
import threading

import pytest
import torch
from torch import nn

from fast_video_vae.tests.nodes.lora.cards import GB, Cards
from fast_video_vae.tests.nodes.vae.machines import known
from fast_video_vae.tests.nodes.vae.pairs import (
    fast_vae,
    frames,
    relative_error,
    small_latents,
)

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

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
    ("sizes", "expected", "encode"),
    [
        ((10, 10), [], False),  # there is room on both
        ((10, 23.9), ["model 1"], True),
        ((23.9, 10), ["model 0"], False),
        ((23.9, 23.9), ["model 0", "model 1"], True),
    ],
)
def test_room_is_made_on_each_device_that_lacks_it(cards, vae, sizes, expected, encode):
    models = fill(cards, *sizes)
    vae.encode(frames(5)) if encode else vae.decode(small_latents(2))
    assert unloaded(cards) == expected
    del models


def test_a_vae_on_one_device_leaves_the_others(cards, state, tmp_path):
    models = fill(cards, 10, 23.9)
    fast_vae(state, tmp_path).decode(small_latents(2))
    assert unloaded(cards) == []
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
def test_the_table_of_times_names_several_devices(cards, vae, state, tmp_path, task):
    from fast_video_vae.nodes.host import timing
    from fast_video_vae.nodes.video import stream

    def labels(vae):
        """Those of the work in a thread of its own, which has a table of its own."""
        found = []

        def run():
            with torch.inference_mode():
                if task == "encode":
                    vae.encode(frames(1))
                elif task == "decode":
                    vae.decode(small_latents(1))
                else:
                    list(stream.decode_pictures(vae, small_latents(1)))
            found.extend(row.label for row in timing.report().rows() if row.kind.startswith("VAE"))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found

    assert labels(vae) == ["gpu:0, gpu:1"]
    assert labels(fast_vae(state, tmp_path)) == [""]
