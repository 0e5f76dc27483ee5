"""The benchmark node: both networks on the same weights, correct figures, no leftovers."""

import json

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.server import VAE_FILE, Workflow
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, stock_vae
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

SMALL = {"width": 48, "height": 32, "frames": 5, "rounds": 1}


def run(vae, **changed):
    """Execute the node; return chart, table, the JSON, and results by task and name."""
    from fast_video_vae.nodes.benchmark.nodes import Benchmark

    inputs = {"task": "decode", **SMALL, "dtype": "auto"} | changed
    chart, table, text = Benchmark.PREPARE_CLASS_CLONE(None).execute(vae=vae, **inputs).args
    content = json.loads(text)
    found = {
        task["task"]: {each["name"]: each for each in task["results"]} for task in content["tasks"]
    }
    return chart, table, content, found


@pytest.fixture(params=["stock", "fast"])
def vae(request, state, tmp_path, inference):
    """A VAE of ComfyUI's loader, and of this pack's."""
    return stock_vae(state) if request.param == "stock" else fast_vae(state, tmp_path)


# A decode in bf16 has roundings of half an eps (2^-8) on values below 1.
@pytest.mark.parametrize(("dtype", "psnr_db", "error"), [("fp32", 80, 1e-5), ("bf16", 30, 0.1)])
def test_both_networks_are_measured_in_a_dtype_and_agree(vae, dtype, psnr_db, error, monkeypatch):
    lines = ["a line of the chip"]
    monkeypatch.setattr("fast_video_vae.nodes.benchmark.run.table_entry", lambda device: lines)
    chart, table, content, found = run(vae, task="both", rounds=2, dtype=dtype)
    assert chart.shape == (1, 640, 1024, 3)
    assert (chart.min() >= 0, chart.max() <= 1) == (True, True)
    assert len(chart.flatten(0, 2).unique(dim=0)) > 20  # something is drawn
    for results in found.values():
        assert list(results) == ["stock", "fast"]
        assert [len(each["seconds"]) for each in results.values()] == [2, 2]
    decode = found["decode"]["fast"]
    assert decode["identical"] or psnr_db < decode["psnr_db"] < (80 if dtype == "bf16" else 999)
    assert found["encode"]["fast"]["relative_error"] < error
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [line.count(dtype) for line in rows] == [0, 0, 1, 1, 1, 1]
    assert "please post these lines:" in content["notes"][0]
    assert content["notes"][1:] == lines


@pytest.fixture
def int8(monkeypatch, tmp_path):
    """A machine that supports int8."""
    from fast_video_vae.kernels.ready.facts import Facts
    from fast_video_vae.vae.streaming.int8 import layers, settings

    monkeypatch.setattr(layers, "facts_of", lambda _: kept)
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "")
    kept = Facts(tmp_path / "facts.json", {})


def test_int8_is_measured_in_the_fast_vae_with_its_loss(vae, state, tmp_path, int8, progress):
    given = {"samples": {"samples": latents(5, 2, 3)}, "precision": "int8"}
    _, table, content, found = run(vae, task="both", dtype="fp32", **given)
    assert content["frames"] == 17
    assert list(found["decode"]) == ["stock", "fast int8"]
    assert list(found["encode"]) == ["stock", "fast"]  # latents are not affected
    loss = content["precision"]
    assert (loss["width"], loss["height"], loss["frames"]) == (24, 16, 9)
    assert min(loss["bf16_psnr_db"], loss["int8_psnr_db"]) > 30
    assert loss["loss_db"] == pytest.approx(loss["bf16_psnr_db"] - loss["int8_psnr_db"])
    assert 0 < loss["int8_share"] <= 1
    assert f"{loss['int8_psnr_db']:.2f} dB" in table
    assert all(f"| {each['name']} " in table for each in loss["layers"])
    assert getattr(vae.first_stage_model, "precision", "auto") == "auto"
    assert progress[-1] == (9, 9)  # 2 tasks of 2 x 2 calls, and the precision
    # A fast VAE that is in int8 is measured as it is.
    _, _, content, found = run(fast_vae(state, tmp_path, precision="int8"), dtype="fp32")
    assert list(found["decode"]) == ["stock", "fast int8"]
    assert content["precision"] is None


def test_the_inputs_are_not_modified_and_no_other_model_stays_loaded(vae):
    from comfy import model_management

    def networks():
        models = [each.model for each in model_management.current_loaded_models]
        return {id(each.model) for each in models if each is not None}

    before, loaded = dict(vae.__dict__), networks() | {id(vae.first_stage_model)}
    latent, pixels = latents(2, 4, 6), clip(5, 32, 48)
    weights = vae.first_stage_model.state_dict()
    given = [each.clone() for each in (latent, pixels, *weights.values())]
    run(vae, task="both", samples={"samples": latent}, pixels=pixels, dtype="bf16")
    assert networks() <= loaded
    assert vae.__dict__ == before
    after = latent, pixels, *vae.first_stage_model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(given, after, strict=True))


@pytest.mark.parametrize(
    ("task", "inputs", "size", "notes"),
    [
        ("encode", {"samples": {"samples": latents(3, 4, 6)}}, (48, 32, 9), []),
        ("decode", {"pixels": clip(5, 32, 48)}, (48, 32, 5), []),
        # Frames and pixels that do not fill a latent are not measured.
        ("encode", {"pixels": clip(7, 35, 50)}, (48, 32, 5), ["pixels 7 frames of 50 x 35 were"]),
        ("decode", {"width": 52, "frames": 8}, (48, 32, 5), ["requested 8 frames of 52 x 32,"]),
    ],
)
def test_the_size_follows_the_inputs(state, task, inputs, size, notes):
    _, table, content, found = run(stock_vae(state), task=task, **inputs)
    assert (content["width"], content["height"], content["frames"]) == size
    assert list(found) == [task]
    assert content["notes"] == [f"{note} cut to whole latents" for note in notes]
    assert all(note in table for note in notes)


def test_an_incomparable_vae_is_a_one_line_error(state, tmp_path):
    pixel_space = stock_vae({"pixel_space_vae": torch.tensor(1.0)})
    for given, message in (
        (object(), "got an object; expected a VAE$"),
        (pixel_space, ".* cannot be accelerated"),
        (decoder_of(state), r"ComfyUI has no network .* it has a decoder only$"),
        (random_state_dict(8, out_channels=12), r"ComfyUI .* doubles the size of frames$"),
        (random_wan22(), "ComfyUI has no network for this wan2.2 VAE"),
    ):
        with refused(f"^vae: {message}"):
            run(fast_vae(given, tmp_path) if isinstance(given, dict) else given)


INFINITE = torch.cat([clip(2, 32, 48), torch.full((3, 32, 48, 3), torch.inf)])
PLACE = r"^pixels: frames has 13824 values .* frame 2 of 5 \(from 0\), made by another node"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"samples": torch.zeros(1, 4, 2, 4, 6)}, "^samples: latent has 4 channels"),
        ({"samples": latents(2, batch=2)}, "^samples: got 2 videos"),
        ({"pixels": torch.zeros(5, 4, 48, 3)}, "^pixels: 5 frames of 48 x 4; expected"),
        ({"pixels": INFINITE}, PLACE),
        (
            {"pixels": clip(5, 32, 48), "samples": latents(2, 6, 6)},
            "^samples: they decode to 5 frames of 48 x 48; expected 5 frames of 48 x 32",
        ),
        ({"precision": "int8"}, "^precision is int8, but this CPU is old; expected auto$"),
        (
            {"precision": "int8", "task": "encode"},
            "^precision: int8 is for decodes; expected auto for task encode$",
        ),
    ],
)
def test_an_unfit_input_is_a_one_line_error(state, inputs, message, monkeypatch):
    from fast_video_vae.vae.streaming.int8 import settings

    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    if "samples" in inputs:
        inputs = inputs | {"samples": {"samples": inputs["samples"]}}
    with refused(message):
        run(stock_vae(state), **{"task": "both"} | inputs)


def test_the_bar_counts_calls_and_stop_ends_between_them(state, progress):
    import comfy.model_management
    import comfy.utils

    hook, stock, calls = comfy.utils.PROGRESS_BAR_HOOK, stock_vae(state), []
    run(stock, rounds=2)
    assert {total for _, total in progress} == {6}
    assert progress[-1] == (6, 6)

    def decode(latent):
        calls.append(latent)
        comfy.model_management.interrupt_current_processing()
        return torch.zeros(1, 3, 5, 32, 48)

    stock.first_stage_model.decode = decode
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        run(stock)
    assert len(calls) == 1
    assert comfy.utils.PROGRESS_BAR_HOOK is hook


def test_each_run_in_a_server_measures_again(server):
    workflow = Workflow()
    vae = workflow.add("VAELoader", vae_name=VAE_FILE)
    node, _ = workflow.add("FastVAE_Benchmark", vae=vae, task="both", dtype="auto", **SMALL)
    one, two = (server.run(workflow)[node] for _ in range(2))
    assert server.pictures(one).shape == (1, 640, 1024, 3)
    assert "| decode | fp32  | fast" in one["text"][0]
    assert one["text"] != two["text"]
