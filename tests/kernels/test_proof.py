"""Proof on chips without an entry in the table, by the user's own calls."""

import itertools

import pytest
import torch

from fast_video_vae.kernels import fp16_pays, routes, table_entry
from fast_video_vae.kernels.ready import facts, proof, selfcheck, serving
from fast_video_vae.kernels.routes import Proof, ProofKey
from fast_video_vae.kernels.tables import KERNELS, SUMS_IN_HALF, Kind
from fast_video_vae.kernels.triton_ops.convolution_tiles import tiles_of
from fast_video_vae.tests import played_devices
from fast_video_vae.tests.kernels.own_kernels import CUBE, bits, playing, restart
from fast_video_vae.tests.vae.families import STATES, latent_for
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.streaming.prepared import preparation

AMPERE, GEFORCE = (8, 0), (8, 9)


@pytest.fixture(autouse=True)
def right(monkeypatch):
    """Let the check find the stand-ins right at once."""
    monkeypatch.setattr(selfcheck, "checked", lambda *_: ("triton",))


@pytest.fixture(params=[AMPERE])
def unknown(request, monkeypatch, tmp_path):
    """Play a chip that is not in the table, whose tiles take half the library's time."""
    clock = itertools.count()
    with playing(monkeypatch, tmp_path, request.param, {}) as (device, own):
        monkeypatch.setattr(
            played_devices.Event, "record", lambda e, *_: setattr(e, "at", next(clock))
        )
        monkeypatch.setattr(proof, "_PRODUCTS", 0)
        times = itertools.cycle((1.0, 2.0))
        monkeypatch.setattr(played_devices.Event, "elapsed_time", lambda *_: next(times))
        yield device, own


def new_vae(dtype=torch.bfloat16):
    return load_vae(STATES["wan2.1"](), device="cuda", dtype=dtype)


def decoded(vae, latents=4, size=16):
    return vae.decode(latent_for(vae, latents, size, size), 1)


def settle(device, vae):
    """Run a video, whose tiles are then built, and the jobs after it."""
    device.build()
    decoded(vae)
    device.build()


def proofs_of(device):
    return facts.of_kernels(device.device).named("proof: ")


def test_a_tile_serves_after_a_proof_in_a_later_video(unknown):
    device, own = unknown
    vae = new_vae()
    settle(device, vae)
    own.ran.clear()
    frames = decoded(vae)  # proves
    proved = own.ran["conv3d"]
    assert proved
    assert not proofs_of(device)  # the numbers are on the device until the thread reads them
    device.build()
    kept = proofs_of(device)
    assert len(kept) == proved  # one call of each kind
    assert all(each["right"] and each["ms"] < each["plain_ms"] for each in kept.values())
    own.ran.clear()
    decoded(vae)  # the library convolves, because the tiles need other variants
    assert own.ran["rms_norm_silu"]  # but what was built before serves on
    device.build()
    assert own.ran["conv3d"] == len(proofs_of(device)) - proved  # of rarer kinds
    own.ran.clear()
    again = decoded(vae)
    assert own.ran["conv3d"] > proved
    assert again.shape == frames.shape
    own.ran.clear()
    assert bits(decoded(vae)) == bits(again)


def test_no_kind_is_proved_twice_on_a_machine(unknown, monkeypatch):
    device, _ = unknown
    vae = new_vae()
    settle(device, vae)
    decoded(vae)
    device.build()
    known = proofs_of(device)
    restart(monkeypatch)
    monkeypatch.setattr(preparation, "_prepared", {})
    monkeypatch.setattr(proof, "_difference", None)  # which a proof calls
    vae = new_vae()
    settle(device, vae)
    decoded(vae)
    device.build()
    assert proofs_of(device) == known


def test_frames_of_a_video_with_a_proof_are_those_of_the_library(unknown, monkeypatch):
    device, own = unknown
    vae = new_vae()
    settle(device, vae)
    with monkeypatch.context() as patch:
        patch.setattr(proof, "_CALL", 1 << 30)
        expected = bits(decoded(vae))
    own.ran.clear()
    assert bits(decoded(vae)) == expected
    assert own.ran["conv3d"]


def test_a_tile_with_other_results_does_not_serve(unknown):
    device, own = unknown
    vae = new_vae()
    settle(device, vae)

    def wrong(op, y):
        return y.mul_(1.02) if op.startswith("conv") else y

    own.change = wrong  # after the check of the kernels
    for _ in range(3):
        decoded(vae)
        device.build()
    assert not any(each["right"] for each in proofs_of(device).values())
    own.ran.clear()
    decoded(vae)
    assert not own.ran["conv3d"]


def test_a_picture_proves_one_kind_and_memory_is_needed(unknown, monkeypatch):
    device, own = unknown
    vae = new_vae()
    device.build()
    counts = []
    for _ in range(6):
        decoded(vae, 1)
        device.build()
        counts.append(len(proofs_of(device)))
    assert counts[-1]
    assert all(after <= before + 1 for before, after in itertools.pairwise(counts))
    monkeypatch.setattr(proof.Proofs, "_room", lambda *_: 0)
    own.ran.clear()
    before = len(proofs_of(device))
    for _ in range(3):
        decoded(vae)
        device.build()
    assert len(proofs_of(device)) == before


@pytest.mark.parametrize("because", ["the convolutions are small", "the chip has a table"])
def test_nothing_is_proved(because, monkeypatch, tmp_path):
    chip, table = ((9, 0), {(9, 0): {}}) if because == "the chip has a table" else (AMPERE, {})
    with playing(monkeypatch, tmp_path, chip, table) as (device, own):
        monkeypatch.setattr(proof, "_PRODUCTS", 0 if table else 1e10)
        vae = new_vae()
        settle(device, vae)
        for _ in range(3):
            decoded(vae)
            device.build()
        assert own.ran["rms_norm_silu"]
        assert not own.ran["conv3d"]
        assert not proofs_of(device)


@pytest.mark.parametrize("unknown", [GEFORCE], indirect=True)
def test_float16_serves_a_decode_where_sums_in_float16_are_proved(unknown):
    device, _ = unknown
    vae = new_vae(None)
    assert vae.dtype == torch.bfloat16
    settle(device, vae)
    assert not fp16_pays(device.device)
    decoded(vae)
    device.build()
    kept = proofs_of(device)
    assert kept
    assert all(name.endswith("float16") for name in kept)
    for number in range(3):
        kind = Kind(8, 8 + number, (3, 3, 3), (1, 1, 1), video=True)
        key = ProofKey(device.device, kind, torch.float16)
        routes.keep_proof(key, Proof(2.0, 1.0, right=True))
    assert fp16_pays(device.device)
    assert not fp16_pays(torch.device("cpu"))
    assert AMPERE not in SUMS_IN_HALF
    assert decoded(vae).dtype == torch.bfloat16


def test_the_entry_of_a_chip_is_one_line_per_kind(unknown):
    device, _ = unknown
    assert table_entry(device.device) == []
    routes.keep_proof(ProofKey(device.device, CUBE, torch.bfloat16), Proof(2.5, 1.25, right=True))
    assert table_entry(device.device) == [
        "8x8 3x3x3 stride 1x1x1 video bfloat16: library 2.500 ms, tile 1.250 ms, right"
    ]


def test_every_entry_of_the_table_has_its_tile():
    for chip, entries in KERNELS.items():
        for kind, kernel in entries.items():
            assert kernel.backend == "triton"  # no row has another one yet
            assert tiles_of(chip, torch.bfloat16, kind.outputs)[kernel.tile].width >= 96


def test_a_damaged_proof_counts_as_none(unknown):
    device, _ = unknown
    key = ProofKey(device.device, CUBE, torch.bfloat16)
    for damaged in (3, {}, {"plain_ms": "x", "ms": 1, "right": True}, [1, 2]):
        facts.of_kernels(device.device).put(key.name(), damaged)
        assert routes.proof_of(key) is None
        assert table_entry(device.device) == []
    assert serving.snapshot() is None
