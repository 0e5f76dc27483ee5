"""The benchmark node: both networks on the same weights, correct figures, no leftovers."""

import json

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict, refused
from fast_video_vae.tests.nodes.vae.pairs import clip, fast_vae, latents, small_latents, stock_vae
from fast_video_vae.tests.wan22 import random_wan22

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

SMALL = {"width": 48, "height": 32, "frames": 5, "rounds": 1}


def run(vae, samples=None, **changed):
    """Execute the node; return chart, table, the JSON, and results by task and name."""
    from fast_video_vae.nodes.benchmark.nodes import Benchmark

    inputs = {"task": "both", **SMALL, "dtype": "auto"} | changed
    inputs |= {} if samples is None else {"samples": {"samples": samples}}
    chart, table, text = Benchmark.PREPARE_CLASS_CLONE(None).execute(vae=vae, **inputs).args
    content = json.loads(text)
    named = {each["task"]: each["results"] for each in content["tasks"]}
    found = {task: {each["name"]: each for each in results} for task, results in named.items()}
    return chart, table, content, found


# A decode in bf16 has roundings of half an eps (2^-8) on values below 1.
@pytest.mark.parametrize(
    ("make", "dtype", "psnr_db", "error"),
    [(stock_vae, "fp32", 80, 1e-5), (fast_vae, "bf16", 30, 0.1)],
)
def test_networks_agree_and_nothing_is_left(
    state, make, dtype, psnr_db, error, tmp_path, progress, monkeypatch
):
    import comfy.utils
    from comfy import model_management

    from fast_video_vae.nodes.benchmark import run as work

    def networks():
        models = [each.model for each in model_management.current_loaded_models]
        return {id(each.model) for each in models if each is not None}

    twins, real = [], work.accelerated  # references, without which Python would free a network
    monkeypatch.setattr(work, "accelerated", lambda *a: twins.append(real(*a)) or twins[0])
    vae = stock_vae(state) if make is stock_vae else fast_vae(state, tmp_path)
    patch = torch.randn(3, generator=torch.Generator().manual_seed(0))
    vae.patcher.add_patches({"decoder.head.2.bias": (patch,)})
    before, loaded = dict(vae.__dict__), networks() | {id(vae.first_stage_model)}
    latent, pixels, hook = small_latents(2), clip(5, 32, 48), comfy.utils.PROGRESS_BAR_HOOK
    given = latent, pixels, *vae.first_stage_model.state_dict().values()
    copies = [each.clone() for each in given]
    chart, table, _, found = run(vae, latent, pixels=pixels, rounds=2, dtype=dtype)
    assert networks() <= loaded
    assert vae.__dict__ == before
    assert all(torch.equal(one, other) for one, other in zip(given, copies, strict=True))
    assert comfy.utils.PROGRESS_BAR_HOOK is hook
    assert progress == [(done, 12) for done in range(1, 13)]
    assert chart.shape == (1, 640, 1024, 3)
    assert len(chart.flatten(0, 2).unique(dim=0)) > 20  # something is drawn
    for results in found.values():
        assert [len(each["seconds"]) for each in results.values()] == [2, 2]
    decode = found["decode"]["fast"]
    assert decode["identical"] or psnr_db < decode["psnr_db"] < (80 if dtype == "bf16" else 999)
    assert found["encode"]["fast"]["relative_error"] < error
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [line.count(dtype) for line in rows] == [0, 0, 1, 1, 1, 1]


def test_int8_is_measured_in_the_fast_vae_with_its_loss(state, tmp_path, monkeypatch, progress):
    from fast_video_vae.kernels.ready.facts import Facts
    from fast_video_vae.vae.streaming.int8 import layers, settings

    facts, lines = Facts(tmp_path / "facts.json", {}), ["a line of the chip"]
    monkeypatch.setattr(layers, "facts_of", lambda _: facts)
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "")
    monkeypatch.setattr("fast_video_vae.nodes.benchmark.run.table_entry", lambda device: lines)
    vae = fast_vae(state, tmp_path)
    _, table, content, found = run(vae, latents(5, 2, 3), dtype="fp32", precision="int8")
    assert content["frames"] == 17
    assert "please post these lines:" in content["notes"][0]
    assert content["notes"][1:] == lines
    assert list(found["decode"]) == ["stock", "fast int8"]
    assert list(found["encode"]) == ["stock", "fast"]  # latents are not affected
    loss = content["precision"]
    assert (loss["width"], loss["height"], loss["frames"]) == (24, 16, 9)
    assert min(loss["bf16_psnr_db"], loss["int8_psnr_db"]) > 30
    assert 0 < loss["int8_share"] <= 1
    assert f"{loss['int8_psnr_db']:.2f} dB" in table
    assert vae.first_stage_model.precision == "auto"
    assert progress[-1] == (9, 9)  # 2 tasks of 2 x 2 calls, and the precision
    # A fast VAE that is in int8 is measured as it is.
    coded = fast_vae(state, tmp_path, precision="int8")
    _, _, content, found = run(coded, dtype="fp32", task="decode")
    assert list(found["decode"]) == ["stock", "fast int8"]
    assert content["precision"] is None


@pytest.mark.parametrize(
    ("task", "inputs", "size", "notes"),
    [
        ("encode", {"samples": small_latents(3)}, (48, 32, 9), []),
        # Frames and pixels that do not fill a latent are not measured.
        ("encode", {"pixels": clip(7, 35, 50)}, (48, 32, 5), ["pixels 7 frames of 50 x 35 were"]),
        ("decode", {"width": 52, "frames": 8}, (48, 32, 5), ["requested 8 frames of 52 x 32,"]),
    ],
)
def test_the_size_follows_the_inputs(stock, task, inputs, size, notes):
    _, table, content, found = run(stock, task=task, **inputs)
    assert (content["width"], content["height"], content["frames"]) == size
    assert list(found) == [task]
    assert content["notes"] == [f"{note} cut to whole latents" for note in notes]
    assert all(note in table for note in notes)


def test_an_unfit_input_is_a_one_line_error(stock, state, tmp_path, monkeypatch):
    from fast_video_vae.vae.streaming.int8 import settings

    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "this CPU is old")
    no_network, infinite = "ComfyUI has no network for this wan2", clip(5, 32, 48)
    infinite[2:] = torch.inf
    sizes = "decode to 5 frames of 48 x 48; expected 5 frames of 48 x 32, the size of pixels$"
    for vae, message in (
        (object(), "got an object; expected a VAE$"),
        (stock_vae({"pixel_space_vae": torch.tensor(1.0)}), ".* cannot be accelerated"),
        (decoder_of(state), rf"{no_network}.* it has a decoder only$"),
        (random_state_dict(8, out_channels=12), rf"{no_network}.* doubles the size of frames$"),
        (random_wan22(), no_network),
    ):
        with refused(f"^vae: {message}"):
            run(fast_vae(vae, tmp_path) if isinstance(vae, dict) else vae)
    for message, inputs in (
        ("samples: latent has 4 channels", {"samples": torch.zeros(1, 4, 2, 4, 6)}),
        ("samples: got 2 videos", {"samples": latents(2, batch=2)}),
        ("pixels: 5 frames of 48 x 4; expected", {"pixels": torch.zeros(5, 4, 48, 3)}),
        (r"pixels: frames has 13824 values .* frame 2 of 5 \(from 0\)", {"pixels": infinite}),
        (f"samples: they {sizes}", {"pixels": clip(5, 32, 48), "samples": latents(2, 6, 6)}),
        ("precision is int8, but this CPU is old; expected auto$", {"precision": "int8"}),
        ("precision: .* auto for task encode$", {"precision": "int8", "task": "encode"}),
    ):
        with refused(f"^{message}"):
            run(stock, **inputs)


def test_stop_ends_between_calls_and_an_equal_run_measures_again(state, progress):
    import comfy.model_management as management
    import comfy.utils

    from fast_video_vae.nodes.benchmark.nodes import Benchmark

    assert Benchmark.fingerprint_inputs() != Benchmark.fingerprint_inputs()

    hook, stock, calls = comfy.utils.PROGRESS_BAR_HOOK, stock_vae(state), []

    def decode(latent):
        calls.append(latent)
        management.interrupt_current_processing()
        return torch.zeros(1, 3, 5, 32, 48)

    stock.first_stage_model.decode = decode
    with pytest.raises(management.InterruptProcessingException):
        run(stock, task="decode")
    assert len(calls) == 1
    assert comfy.utils.PROGRESS_BAR_HOOK is hook
