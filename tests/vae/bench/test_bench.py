"""The benchmark: order, figures, memory of a call, chart, command, and the report on int8."""

import importlib.util
import json
import math
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

pytest.importorskip("PIL", reason="Pillow is not installed")

from fast_video_vae.tests.vae.families import computes_16_bits, prepared
from fast_video_vae.vae.bench import compare_precision
from fast_video_vae.vae.bench.baselines import contestants
from fast_video_vae.vae.bench.chart import COLORS, draw_chart
from fast_video_vae.vae.bench.content import Clip, fitted, moving_pictures, random_latent
from fast_video_vae.vae.bench.measure import (
    Contestant,
    compare,
    measured,
    psnr,
    relative_error,
)
from fast_video_vae.vae.bench.report import BenchmarkReport, Comparison, Result
from fast_video_vae.vae.checkpoint import load_vae, read_checkpoint
from fast_video_vae.vae.streaming.options import StreamOptions

pytest.importorskip("tqdm", reason="tqdm is not installed")

CPU = torch.device("cpu")
MIB = 2**20


def images(seed=0, frames=3):
    return torch.rand(1, frames, 8, 6, 3, generator=torch.Generator().manual_seed(seed))


def compared(contestants, task="decode", rounds=1, **options):
    return compare(task, contestants, rounds=rounds, dtype="", device=CPU, **options).results


def test_the_order_rotates_each_round_after_a_warm_up_that_is_not_in_the_figures(monkeypatch):
    order, passed = [], []
    costs = {
        "a": iter([(99.0, 900), (4.0, 100), (2.5, 100), (9.0, 100)]),
        "b": iter([(0.1, 900), (1.0, 30), (2.0, 40), (1.0, None)]),
        "c": iter([(1.0, 1)] * 4),
    }

    def costed(device, run):
        return run(), *next(costs[order[-1]])

    monkeypatch.setattr(sys.modules[compare.__module__], "measured", costed)
    a, b, c = (
        Contestant(name, lambda name=name, seed=seed: [order.append(name), images(seed)][1])
        for seed, name in enumerate(costs)
    )
    # `prepare` runs before each call.
    entries = [a, replace(b, prepare=lambda: order.append("(")), c]
    one, two, _ = compared(entries, rounds=3, passed=lambda: passed.append("".join(order)))
    assert passed[-1] == "a(bc" + "a(bc" + "c(ba" + "a(bc"
    assert [calls[-1] for calls in passed] == [*"abcabccbaabc"]
    assert (one.seconds, one.median_s, one.best_s) == ([4.0, 2.5, 9.0], 4.0, 2.5)
    assert one.psnr_db is None
    assert (one.peak_bytes, two.peak_bytes) == (100, 40)
    assert (two.speed, two.thrift) == (4.0, 2.5)
    assert two.psnr_db == psnr(images(1), images(0))


@pytest.mark.parametrize(
    ("task", "made", "words"),
    [
        ("decode", images(), "identical"),
        ("decode", images() * math.nan, "not finite"),
        ("decode", images() + torch.tensor([0.0, 0.01, 0.02]), "PSNR 37.8 dB"),
        ("encode", images() * 1.5, "relative error 5.0e-01"),
    ],
)
def test_results_are_compared_in_words(task, made, words):
    first, found = compared([Contestant("a", images), Contestant("b", lambda: made)], task)
    assert (first.agreement, found.agreement) == ("", words)
    assert found.identical == (words == "identical")


def test_incomparable_results_are_an_error():
    given = [Contestant("a", images), Contestant("b", lambda: images(frames=2))]
    for rounds, message in (
        (1, r"b gives \[1, 2, .*; expected \[1, 3, .* as a does"),
        (0, "rounds is 0; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compared(given, rounds=rounds)


@pytest.mark.parametrize(("failing", "at"), [(0, 0), (1, 2)])
def test_a_contestant_out_of_memory_is_skipped_afterwards(at, failing):
    calls, passed = [0, 0], []

    def run(index):
        calls[index] += 1
        if index == failing and calls[index] == at + 1:
            raise torch.OutOfMemoryError("no")
        return images(index)

    given = [Contestant("a", lambda: run(0)), Contestant("b", lambda: run(1))]
    found = compared(given, rounds=3, passed=lambda: passed.append(0))
    assert (calls[failing], calls[1 - failing]) == (at + 1, 4)
    assert len(passed) == 8
    assert (found[failing].failure, found[failing].seconds) == ("out of memory", [])
    assert (found[1 - failing].failure, len(found[1 - failing].seconds)) == (None, 3)
    assert (found[1].psnr_db is None) == (at == 0)  # there was nothing to compare


def test_the_peak_excludes_memory_from_before_the_call(monkeypatch):
    pytest.importorskip("psutil", reason="psutil is not installed")

    def takes(mebibytes):
        block = torch.ones(mebibytes * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        return block.numel()

    kept = torch.ones(40 * MIB, dtype=torch.uint8)  # allocated before, so not counted
    for mebibytes in (96, 32):  # the second takes less than the first
        _, _, peak = measured(CPU, lambda mebibytes=mebibytes: takes(mebibytes))
        assert mebibytes - 4 <= peak / MIB <= mebibytes + 24
    assert kept.numel() == 40 * MIB
    names = lambda: {each.name for each in threading.enumerate()}  # noqa: E731
    assert "fast-video-vae-memory" in measured(CPU, names)[0]
    assert "fast-video-vae-memory" not in names()
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert measured(CPU, lambda: takes(1))[2] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_peak_counts_tensors_and_time_includes_the_work():
    device = torch.device("cuda")
    square = torch.rand(8192, 8192, device=device)  # allocated before, so not counted
    assert measured(device, lambda: square[0].clone())[2] == 8192 * 4
    # 1.1 TFLOP at no more than 1000 TFLOP/s in float32; a launch alone returns sooner.
    assert measured(device, lambda: square @ square)[1] > 1e-3


def report(*comparisons, notes=()):
    clip = Clip(832, 480, 81)
    return BenchmarkReport("wan2.1, base width 96", "A card", clip, 3, comparisons, notes)


DECODED = Comparison(
    "decode",
    "bf16",
    [
        Result("stock", [], 12.0, 11.0, 6 * 2**30, speed=1.0, thrift=1.0),
        Result("fast", [], 3.0, 2.9, 512 * MIB, agreement="PSNR 52.4 dB", speed=4.0, thrift=12),
        Result("other", failure="out of memory"),
        Result("same", [], 24.0, 24.0, agreement="identical", speed=0.5),
    ],
)
ENCODED = Comparison(
    "encode",
    "fp32",
    [Result("stock", [], 2.0, 2.0, speed=1.0), Result("fast", [], 0.05, 0.05, speed=40.0)],
)


def test_the_table_has_every_figure_with_its_unit():
    table = report(DECODED, ENCODED, notes=("cut to size",)).table().splitlines()
    assert table[0] == "81 frames of 832 x 480; wan2.1, base width 96; A card; 3 rounds"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line[:1] == "|"]
    assert rows[0][-1] == "against stock"
    assert rows[2:] == [
        ["decode", "bf16", "stock", "12.0 s", "11.0 s", "1.00x", "6.00 GiB", "-"],
        ["decode", "bf16", "fast", "3.00 s", "2.90 s", "4.00x", "512 MiB", "PSNR 52.4 dB"],
        ["decode", "bf16", "other", "out of memory", "-", "-", "-", "-"],
        ["decode", "bf16", "same", "24.0 s", "24.0 s", "0.50x", "not measured", "identical"],
        ["encode", "fp32", "stock", "2.00 s", "2.00 s", "1.00x", "not measured", "-"],
        ["encode", "fp32", "fast", *["0.0500 s"] * 2, "40.0x", "not measured", "-"],
    ]
    assert table[-1] == "- cut to size"
    assert len({len(line) for line in table if line[:1] == "|"}) == 1


def test_the_summary_compares_each_contestant_with_the_first():
    assert report(DECODED, ENCODED).summary().splitlines() == [
        "decode, fast: 4.00x as fast, 3.00 s instead of 12.0 s; 512 MiB instead of 6.00 GiB; "
        "PSNR 52.4 dB",
        "decode, other: out of memory",
        "decode, same: 0.50x as fast, 24.0 s instead of 12.0 s; identical",
        "encode, fast: 40.0x as fast, 0.0500 s instead of 2.00 s",
    ]
    failed = Comparison("decode", "", [Result("stock", failure="no"), Result("fast", [], 1.0)])
    assert report(failed).summary() == "decode, fast: 1.00 s; stock: no"


def test_bars_are_proportional_to_their_values():
    chart = draw_chart(report(Comparison("decode", "bf16", DECODED.results[:2])))
    pixels = torch.frombuffer(bytearray(chart.tobytes()), dtype=torch.uint8).view(640, 1024, 3)
    seconds = pixels[:, :512]
    # How many pixels of its color the widest row has.
    stock, fast = ((seconds == torch.tensor(each)).all(2).sum(1).max() for each in COLORS[:2])
    assert stock > 1024 // 3
    assert fast / stock == pytest.approx(3 / 12, abs=0.03)
    assert draw_chart(report(ENCODED, DECODED)).size == (1024, 640)


@pytest.mark.parametrize(
    ("state", "asked", "kept"),
    [
        (random_wan22(), (1925, 1080, 8), (1920, 1072, 5)),
        (random_qwen21(), (40, 40, 6), (32, 32, 6)),  # every frame is a picture
    ],
)
def test_a_clip_is_cut_to_whole_latents(state, asked, kept):
    config = read_checkpoint(state).config
    clip = fitted(config, Clip(*asked))
    assert clip == Clip(*kept)
    latent = random_latent(config, clip)
    assert torch.equal(latent, random_latent(config, clip))
    assert config.decoded_shape(latent.shape)[2:] == (kept[2], kept[1], kept[0])
    mean, std = torch.tensor([config.latent_mean, config.latent_std]).view(2, 1, -1, 1, 1, 1)
    assert ((latent - mean) / std).square().mean().item() == pytest.approx(1, abs=0.2)
    with pytest.raises(ValueError, match="expected at least 1 frame of"):
        fitted(config, Clip(832, 4, 1))
    # Pictures move softly within the range.
    pictures = moving_pictures(Clip(48, 32, 9))
    assert pictures.shape == (1, 3, 9, 32, 48)
    assert 0 <= pictures.min() < pictures.max() <= 1
    assert all(0 < pictures.diff(dim=axis).abs().max() < 0.5 for axis in (2, 3, 4))


def test_the_command_measures_and_writes_both_files(tmp_path, run, vae_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    chart, text = tmp_path / "c.png", tmp_path / "c.json"
    small = ("--size", "48x32", "--frames", "5", "--rounds", "1", "--dtype", "fp32")
    files = ("-o", chart, "--json", text)
    code, lines, _ = run("bench", "--vae", vae_path, *small, "--task", "both", *files)
    assert code == 0
    with Image.open(chart) as picture:
        assert (picture.format, picture.size) == ("PNG", (1024, 640))
    content = json.loads(text.read_text(encoding="utf-8"))
    assert (content["width"], content["height"], content["frames"]) == (48, 32, 5)
    encode, decode = ({x["name"]: x for x in each["results"]} for each in content["tasks"])
    assert list(encode) == list(decode) == ["reference", "fast"]
    assert encode["fast"]["relative_error"] < 1e-4
    assert decode["fast"]["identical"] or decode["fast"]["psnr_db"] > 80
    assert len(decode["fast"]["seconds"]) == 1
    assert {f"wrote {chart}", "- diffusers is left out: it is not installed"} <= {*lines}
    assert lines[-1].startswith("decode, fast: ")
    code, _, errors = run("bench", "--vae", vae_path, *small, *files)
    assert (code, f"{chart} exists already; expected a new name" in errors[-1]) == (1, True)


@pytest.mark.parametrize(
    ("state", "knows"),
    [
        (random_state_dict(8, image_channels=4, out_channels=4), True),
        (random_state_dict(8, out_channels=12), False),
    ],
)
def test_diffusers_uses_the_same_weights_if_it_supports_the_layout(state, knows):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    vae, clip = load_vae(state, dtype=torch.float32), Clip(16, 16, 5)
    for task in ("encode", "decode"):
        found, note = contestants(vae, task, clip)
        assert [each.name for each in found] == ["reference", "fast", *["diffusers"] * knows]
        assert note == (None if knows else "diffusers is left out: it has no VAE of this layout")
        expected = found[0].run()
        for each in found[1:]:
            assert relative_error(each.run(), expected) < 1e-5


def test_the_report_on_int8_compares_clamped_frames_with_float32(int8, monkeypatch):
    def decibels(frames):
        error = (frames.double().clamp(-1, 1) - exact.double().clamp(-1, 1)).square().mean()
        return 10 * math.log10(4 / error.item())

    computes_16_bits(monkeypatch)
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    latent = random_latent(vae.config, Clip(24, 16, 5))
    report = compare_precision(vae, latent)
    assert (vae.precision, vae.dtype) == ("auto", torch.float32)  # as before the report
    exact, bf16 = (
        torch.cat(list(vae.decode_stream(latent, StreamOptions(dtype=dtype))), dim=2)
        for dtype in (torch.float32, torch.bfloat16)
    )
    vae.precision = "int8"
    assert report.bf16_db == pytest.approx(decibels(bf16), abs=1e-3)
    assert report.int8_db == pytest.approx(decibels(prepared(vae).decode(latent)), abs=1e-3)
    assert report.loss_db == pytest.approx(report.bf16_db - report.int8_db)
    assert report.clip == Clip(24, 16, 5)

    lines, rows = report.text().splitlines(), report.layers.rows
    assert lines[0].startswith(f"int8          {report.layers.share:.0%} of the multiplications")
    assert lines[0].endswith("other layers in fp32")
    runs = [(line.split()[0], line.split()[-1]) for line in lines[6:]]
    assert runs == [(each.name, "int8" if each.chosen else "fp32") for each in rows]
    assert max(map(len, lines)) <= 100
    table = [line for line in report.table().splitlines() if line.startswith("|")]
    assert len(table) == 4 + 2 + len(rows)
    for bf16_db, int8_db, words in (
        (48.0, 47.25, "with int8     47.25 dB, 0.75 dB less than bf16"),
        (48.0, 50.0, "2.00 dB more"),
        (math.inf, math.inf, "identical, 0.00 dB less"),
        (48.0, math.nan, "not finite, not comparable"),
    ):
        changed = replace(report, bf16_db=bf16_db, int8_db=int8_db)
        assert words in changed.text()
        json.dumps(changed.record(), allow_nan=False)
