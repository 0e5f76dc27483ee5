"""The report on int8: figures and tables, and a VAE that keeps its settings."""

import json
import math
from dataclasses import replace

import pytest
import torch

from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import computes_16_bits, prepared

pytest.importorskip("PIL", reason="Pillow is not installed")

from fast_video_vae.vae.bench import Clip, compare_precision
from fast_video_vae.vae.bench.content import random_latent
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.streaming.int8 import layers, settings
from fast_video_vae.vae.streaming.options import StreamOptions


@pytest.fixture
def vae(monkeypatch, tmp_path):
    """On a machine that supports int8, and computes in bfloat16."""
    monkeypatch.setattr(settings, "int8_lacks", lambda *_: "")
    monkeypatch.setattr(layers, "facts_of", lambda _: kept)
    computes_16_bits(monkeypatch)
    kept = facts.Facts(tmp_path / "facts.json", {})
    return load_vae(random_state_dict(8), dtype=torch.float32)


def psnr(frames, exact):
    error = (frames.double().clamp(-1, 1) - exact.double().clamp(-1, 1)).square().mean()
    return 10 * math.log10(4 / error.item())


def test_the_report_compares_clamped_frames_with_float32(vae):
    latent = random_latent(vae.config, Clip(24, 16, 5))
    report = compare_precision(vae, latent)
    assert (vae.precision, vae.dtype) == ("auto", torch.float32)  # as before the report
    exact, bf16 = (
        torch.cat(list(vae.decode_stream(latent, StreamOptions(dtype=dtype))), dim=2)
        for dtype in (torch.float32, torch.bfloat16)
    )
    vae.precision = "int8"
    assert report.bf16_db == pytest.approx(psnr(bf16, exact), abs=1e-3)
    assert report.int8_db == pytest.approx(psnr(prepared(vae).decode(latent), exact), abs=1e-3)
    assert report.loss_db == pytest.approx(report.bf16_db - report.int8_db)
    assert report.clip == Clip(24, 16, 5)

    lines, rows = report.text().splitlines(), report.layers.rows
    assert lines[0].startswith(f"int8          {report.layers.share:.0%} of the multiplications")
    assert lines[0].endswith("other layers in fp32")
    assert f"{report.bf16_db:.2f} dB" in lines[2]
    assert f"{report.int8_db:.2f} dB, {abs(report.loss_db):.2f} dB" in lines[3]
    runs = [(line.split()[0], line.split()[-1]) for line in lines[6:]]
    assert runs == [(each.name, "int8" if each.chosen else "fp32") for each in rows]
    assert max(map(len, lines)) <= 100
    table = [line for line in report.table().splitlines() if line.startswith("|")]
    assert len(table) == 4 + 2 + len(rows)
    for bf16_db, int8_db, words in (
        (48.0, 50.0, "2.00 dB more"),
        (math.inf, math.inf, "identical, 0.00 dB less"),
        (48.0, math.nan, "not finite, not comparable"),
    ):
        changed = replace(report, bf16_db=bf16_db, int8_db=int8_db)
        assert words in changed.text()
        json.dumps(changed.record(), allow_nan=False)
