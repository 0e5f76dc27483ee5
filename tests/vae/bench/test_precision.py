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
from fast_video_vae.vae.bench.precision import smooth_latent
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.streaming.int8 import layers, settings
from fast_video_vae.vae.streaming.options import StreamOptions


@pytest.fixture(scope="module")
def supported(tmp_path_factory):
    """Every machine supports int8, and computes in bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "int8_lacks", lambda *_: "")
        computes_16_bits(patch)
        kept = facts.Facts(tmp_path_factory.mktemp("facts") / "facts.json", {})
        patch.setattr(layers, "facts_of", lambda _: kept)
        yield


@pytest.fixture(scope="module")
def vae(supported):
    return load_vae(random_state_dict(8), dtype=torch.float32)


@pytest.fixture(scope="module")
def latent(vae):
    return random_latent(vae.config, Clip(24, 16, 5))


@pytest.fixture(scope="module")
def report(vae, latent):
    return compare_precision(vae, latent)


def psnr(frames, exact):
    error = (frames.double().clamp(-1, 1) - exact.double().clamp(-1, 1)).square().mean()
    return 10 * math.log10(4 / error.item())


def test_the_figures_compare_clamped_frames_with_float32(vae, latent, report):
    assert (vae.precision, vae.dtype) == ("auto", torch.float32)  # as before the report
    decodes = {}
    for name, dtype in (("exact", torch.float32), ("bf16", torch.bfloat16)):
        pieces = vae.decode_stream(latent, StreamOptions(dtype=dtype))
        decodes[name] = torch.cat(list(pieces), dim=2)
    vae.precision = "int8"
    try:
        decodes["int8"] = prepared(vae).decode(latent)
    finally:
        vae.precision = "auto"
    exact = decodes["exact"]
    assert report.bf16_db == pytest.approx(psnr(decodes["bf16"], exact), abs=1e-3)
    assert report.int8_db == pytest.approx(psnr(decodes["int8"], exact), abs=1e-3)
    assert not torch.equal(decodes["int8"], exact)
    assert report.loss_db == pytest.approx(report.bf16_db - report.int8_db)
    assert report.clip == Clip(24, 16, 5)


def test_the_tables_have_a_row_per_convolution(report):
    lines = report.text().splitlines()
    assert lines[0].startswith(f"int8          {report.layers.share:.0%} of the multiplications")
    assert lines[0].endswith("other layers in fp32")
    assert f"{report.bf16_db:.2f} dB" in lines[2]
    assert f"{report.int8_db:.2f} dB, {abs(report.loss_db):.2f} dB" in lines[3]
    names = [each.name for each in report.layers.rows]
    assert [line.split()[0] for line in lines[6:]] == names
    assert max(map(len, lines)) <= 100
    runs = [line.split()[-1] for line in lines[6:]]
    assert runs == ["int8" if each.chosen else "fp32" for each in report.layers.rows]
    table = [line for line in report.table().splitlines() if line.startswith("|")]
    assert len(table) == 4 + 2 + len(names)


@pytest.mark.parametrize(
    ("bf16_db", "int8_db", "words"),
    [
        (48.0, 47.25, "0.75 dB less"),
        (48.0, 50.0, "2.00 dB more"),
        (math.inf, math.inf, "identical, 0.00 dB less"),
        (48.0, math.nan, "not comparable"),
    ],
)
def test_the_report_has_the_loss(report, bf16_db, int8_db, words):
    changed = replace(report, bf16_db=bf16_db, int8_db=int8_db)
    assert words in changed.text()
    json.dumps(changed.record(), allow_nan=False)


def test_a_latent_is_drawn_with_the_statistics_of_the_vae(vae):
    latent = smooth_latent(vae.config)
    assert latent.shape == (1, 16, 3, 20, 48)
    assert torch.equal(latent, smooth_latent(vae.config))
    spread = latent.std(dim=(0, 2, 3, 4)) / torch.tensor(vae.config.latent_std)
    assert 0.8 < spread.min() < spread.max() < 1.2
