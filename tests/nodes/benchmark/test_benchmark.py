"""The benchmark node: both networks on the same weights, correct figures, no leftovers."""

import json

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.server import VAE_FILE, Workflow
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, stock_vae
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

SMALL = {"width": 48, "height": 32, "frames": 5, "rounds": 1}


def run(vae, **changed):
    """Execute the node; return chart, table, and the decoded JSON."""
    from fast_video_vae.nodes.benchmark.nodes import Benchmark

    inputs = {"task": "decode", **SMALL, "dtype": "auto"} | changed
    node = Benchmark.PREPARE_CLASS_CLONE(None)
    *shown, text = node.execute(vae=vae, **inputs).args
    return *shown, json.loads(text)


def results(content, task="decode"):
    found = {each["task"]: each["results"] for each in content["tasks"]}
    return {each["name"]: each for each in found[task]}


@pytest.fixture(params=["stock", "fast"])
def vae(request, state, tmp_path, inference):
    """A VAE of ComfyUI's loader, and of this pack's."""
    return stock_vae(state) if request.param == "stock" else fast_vae(state, tmp_path)


def test_both_networks_are_measured_and_agree(vae):
    chart, table, content = run(vae, task="both", rounds=2, dtype="fp32")
    assert chart.shape == (1, 640, 1024, 3)
    assert (chart.min() >= 0, chart.max() <= 1) == (True, True)
    assert len(chart.flatten(0, 2).unique(dim=0)) > 20  # something is drawn
    for task in ("encode", "decode"):
        assert list(results(content, task)) == ["stock", "fast"]
        for result in results(content, task).values():
            assert (len(result["seconds"]), result["failure"]) == (2, None)
    fast = results(content)["fast"]
    assert fast["identical"] or fast["psnr_db"] > 60
    assert results(content, "encode")["fast"]["relative_error"] < 1e-5
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert [line.count("fp32") for line in lines] == [0, 0, 1, 1, 1, 1]


@pytest.fixture
def int8(monkeypatch, tmp_path):
    """A machine that supports int8."""
    from fast_video_vae.kernels.ready.facts import Facts
    from fast_video_vae.vae.streaming.int8 import layers, settings

    monkeypatch.setattr(layers, "facts_of", lambda _: kept)
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "")
    kept = Facts(tmp_path / "facts.json", {})


def test_int8_is_measured_in_the_fast_vae_with_its_loss(vae, int8, progress):
    given = {"samples": {"samples": latents(5, 2, 3)}, "precision": "int8"}
    _, table, content = run(vae, task="both", dtype="fp32", **given)
    assert content["frames"] == 17
    assert list(results(content)) == ["stock", "fast int8"]
    assert list(results(content, "encode")) == ["stock", "fast"]  # latents are not affected
    found = content["precision"]
    assert (found["width"], found["height"], found["frames"]) == (24, 16, 9)
    assert min(found["bf16_psnr_db"], found["int8_psnr_db"]) > 30
    assert found["loss_db"] == pytest.approx(found["bf16_psnr_db"] - found["int8_psnr_db"])
    assert 0 < found["int8_share"] <= 1
    assert f"{found['int8_psnr_db']:.2f} dB" in table
    assert all(f"| {each['name']} " in table for each in found["layers"])
    assert getattr(vae.first_stage_model, "precision", "auto") == "auto"
    assert progress[-1] == (9, 9)  # 2 tasks of 2 x 2 calls, and the precision


def test_a_fast_vae_that_is_in_int8_is_measured_as_it_is(state, tmp_path, int8):
    _, _, content = run(fast_vae(state, tmp_path, precision="int8"), dtype="fp32")
    assert list(results(content)) == ["stock", "fast int8"]
    assert content["precision"] is None


def test_int8_that_is_not_supported_is_a_one_line_error(state, monkeypatch):
    from fast_video_vae.vae.streaming.int8 import settings

    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    with refused("^precision is int8, but this CPU is old; expected auto$"):
        run(stock_vae(state), precision="int8")
    with refused("^precision: int8 is for decodes; expected auto for task encode$"):
        run(stock_vae(state), task="encode", precision="int8")


def test_the_inputs_are_not_modified_and_no_other_model_stays_loaded(vae):
    from comfy import model_management

    def networks():
        models = [each.model for each in model_management.current_loaded_models]
        return {id(each.model) for each in models if each is not None}

    before, loaded = dict(vae.__dict__), networks() | {id(vae.first_stage_model)}
    weights = {key: value.clone() for key, value in vae.first_stage_model.state_dict().items()}
    latent, pixels = latents(2, 4, 6), clip(5, 32, 48)
    given = latent.clone(), pixels.clone()
    run(vae, task="both", samples={"samples": latent}, pixels=pixels, dtype="bf16")
    assert networks() <= loaded
    assert vae.__dict__ == before
    after = vae.first_stage_model.state_dict()
    assert all(torch.equal(after[key], weights[key]) for key in weights)
    assert torch.equal(latent, given[0])
    assert torch.equal(pixels, given[1])


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
    _, table, content = run(stock_vae(state), task=task, **inputs)
    assert (content["width"], content["height"], content["frames"]) == size
    assert len(results(content, task)) == 2
    assert content["notes"] == [f"{note} cut to whole latents" for note in notes]
    assert all(note in table for note in notes)


def test_both_networks_use_the_chosen_dtype(state, tmp_path):
    bf16, fp32 = (run(fast_vae(state, tmp_path), dtype=each)[2] for each in ("bf16", "fp32"))
    assert bf16["tasks"][0]["dtype"] == "bf16"
    # Some roundings of half an eps (2^-8) on values below 1: far above the error of float32.
    assert 30 < results(bf16)["fast"]["psnr_db"] < 80
    assert results(fp32)["fast"]["psnr_db"] > results(bf16)["fast"]["psnr_db"]


def test_an_incomparable_vae_is_a_one_line_error(state, tmp_path):
    import comfy.sd

    with refused("^vae: got an object; expected a VAE$"):
        run(object())
    with refused("^vae: .* cannot be accelerated"):
        run(comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)}))
    for weights, reason in (
        (decoder_of(state), r".* it has a decoder only$"),
        (random_state_dict(8, out_channels=12), r".* doubles the size of frames$"),
        (random_wan22(), "for this wan2.2 VAE"),
    ):
        with refused(f"^vae: ComfyUI has no network {reason}"):
            run(fast_vae(weights, tmp_path))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"samples": {"samples": torch.zeros(1, 4, 2, 4, 6)}}, "^samples: latent has 4 channels"),
        ({"samples": {"samples": latents(2, batch=2)}}, "^samples: got 2 videos"),
        ({"pixels": torch.zeros(5, 4, 48, 3)}, "^pixels: 5 frames of 48 x 4; expected"),
        (
            {"pixels": torch.cat([clip(2, 32, 48), torch.full((3, 32, 48, 3), torch.inf)])},
            r"^pixels: frames has 13824 values .* frame 2 of 5 \(from 0\), made by another node",
        ),
        (
            {"pixels": clip(5, 32, 48), "samples": {"samples": latents(2, 6, 6)}},
            "^samples: they decode to 5 frames of 48 x 48; expected 5 frames of 48 x 32",
        ),
    ],
)
def test_an_unfit_input_is_a_one_line_error(state, inputs, message):
    with refused(message):
        run(stock_vae(state), task="both", **inputs)


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


@pytest.mark.slow
def test_seedvr2_is_measured_too():
    stock = stock_vae(random_seedvr2((128, 256, 512, 512)))
    _, _, content = run(stock, task="both", width=32, frames=1, dtype="fp32")
    fast = results(content)["fast"]
    assert fast["identical"] or fast["psnr_db"] > 60
    assert results(content, "encode")["fast"]["relative_error"] < 1e-4


def test_each_run_in_a_server_measures_again(server):
    workflow = Workflow()
    vae = workflow.add("VAELoader", vae_name=VAE_FILE)
    node, _ = workflow.add("FastVAE_Benchmark", vae=vae, task="both", dtype="auto", **SMALL)
    one, two = (server.run(workflow)[node] for _ in range(2))
    assert server.pictures(one).shape == (1, 640, 1024, 3)
    assert "| decode | fp32  | fast" in one["text"][0]
    assert one["text"] != two["text"]
