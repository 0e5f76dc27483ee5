"""Proof on chips without an entry in the table, by the user's own calls."""

import itertools

import pytest
import torch

from fast_video_vae.kernels import fp16_pays, routes, table_entry
from fast_video_vae.kernels.ready import facts, proof, selfcheck
from fast_video_vae.kernels.routes import Proof, ProofKey
from fast_video_vae.kernels.tables import KERNELS, Kind
from fast_video_vae.kernels.triton_ops.convolution_tiles import tiles_of
from fast_video_vae.tests import played_devices
from fast_video_vae.tests.kernels.own_kernels import CUBE, Network, playing, restart

AMPERE, GEFORCE = (8, 0), (8, 9)


@pytest.fixture(autouse=True)
def right(monkeypatch):
    """Let the check find the stand-ins right at once, and let every call be large enough."""
    monkeypatch.setattr(selfcheck, "checked", lambda *_: ("triton",))
    monkeypatch.setattr(proof, "_PRODUCTS", 0)


@pytest.fixture(params=[AMPERE])
def unknown(request, monkeypatch, tmp_path):
    """Play a chip that is not in the table, whose tiles take half the library's time."""
    with playing(monkeypatch, tmp_path, request.param, {}) as (device, own):
        times = itertools.cycle((1.0, 2.0))
        monkeypatch.setattr(played_devices.Event, "elapsed_time", lambda *_: next(times))
        yield device, own


def built(device, dtype=torch.bfloat16):
    """Return a network whose kernels are built, after a video whose tiles were then built."""
    network = Network(dtype)
    device.build()
    network.video()
    device.build()
    return network


def proofs_of(device):
    return facts.of_kernels(device.device).named("proof: ")


def test_a_tile_serves_after_a_proof_in_a_later_video(unknown):
    device, own = unknown
    network = built(device)
    own.ran.clear()
    network.video()  # proves at the third call of the kind
    assert own.ran == {"rms_norm_silu": 4, "conv3d": 1}
    assert not proofs_of(device)  # the numbers are on the device until the thread reads them
    device.build()
    kept = proofs_of(device)
    assert list(kept.values()) == [{"plain_ms": 2.0, "ms": 1.0, "right": True}]
    own.ran.clear()
    network.video()  # the library convolves, because the tiles need other variants
    assert own.ran == {"rms_norm_silu": 4}  # what was built before serves on
    device.build()
    first = network.video()
    assert own.ran["conv3d"] == 4
    assert network.video() == first
    assert proofs_of(device) == kept


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_the_third_call_of_a_kind_proves_in_room_for_copies_and_result(unknown, missing_bytes):
    device, own = unknown
    network = built(device)
    for options in ({"most": 0}, {"steps": 2}):
        own.ran.clear()
        network.video(**options)
        device.build()
        assert not own.ran["conv3d"], options
    network.video(steps=1, room=4 * 1152 - missing_bytes)
    device.build()
    assert len(proofs_of(device)) == 1 - missing_bytes


def test_no_kind_is_proved_twice_on_a_machine(unknown, monkeypatch):
    device, _ = unknown
    built(device).video()
    device.build()
    known = proofs_of(device)
    restart(monkeypatch)
    monkeypatch.setattr(proof, "_difference", None)  # which a proof calls
    built(device).video()
    device.build()
    assert proofs_of(device) == known


@pytest.mark.parametrize("factor", [1, 1.02, torch.nan])
def test_frames_are_the_librarys_and_a_tile_with_other_results_does_not_serve(unknown, factor):
    device, own = unknown
    network = built(device)
    expected = network.video(most=0)
    own.change = lambda op, y: y.mul_(factor) if op == "conv3d" else y
    own.ran.clear()
    assert network.video() == expected
    assert own.ran["conv3d"] == 1
    device.build()
    (kept,) = proofs_of(device).values()
    assert kept["right"] == (factor == 1)
    network.video()
    device.build()
    own.ran.clear()
    network.video()
    assert own.ran["conv3d"] == 4 * (factor == 1)


@pytest.mark.parametrize(("tile_ms", "serves"), [(1.96, True), (1.97, False)])
def test_a_tile_serves_if_it_takes_2_percent_less(unknown, tile_ms, serves):
    device, own = unknown
    routes.keep_proof(ProofKey(device.device, CUBE, torch.bfloat16), Proof(2, tile_ms, right=True))
    network = Network()
    device.build()
    network.video()
    assert own.ran["conv3d"] == 4 * serves


@pytest.mark.parametrize("because", ["the convolutions are small", "the chip has a table"])
def test_nothing_is_proved(because, monkeypatch, tmp_path):
    chip, table = ((9, 0), {(9, 0): {}}) if because == "the chip has a table" else (AMPERE, {})
    with playing(monkeypatch, tmp_path, chip, table) as (device, own):
        monkeypatch.setattr(proof, "_PRODUCTS", 0 if table else 8 * 8 * 27 * 4 * 6 + 1)
        built(device).video()
        assert own.ran["rms_norm_silu"]
        assert not own.ran["conv3d"]
        assert not device.jobs


@pytest.mark.parametrize("unknown", [GEFORCE], indirect=True)
def test_float16_pays_where_it_is_proved_in_three_widths_by_15_percent(unknown):
    device, _ = unknown
    built(device).video()
    device.build()
    (name,) = proofs_of(device)
    assert name.endswith("float16")  # of calls in bfloat16
    assert not fp16_pays(device.device)

    def keep(width, ms, right=True):
        kind = Kind(width, 8, (3, 3, 3), (1, 1, 1), video=True)
        key = ProofKey(device.device, kind, torch.float16)
        routes.keep_proof(key, Proof(2.3, ms, right=right))

    keep(8, 2.0)
    keep(16, 2.0)
    keep(32, 2.0, right=False)
    assert not fp16_pays(device.device)
    keep(32, 2.01)
    assert not fp16_pays(device.device)
    keep(32, 2.0)
    assert fp16_pays(device.device)
    assert not fp16_pays(torch.device("cpu"))


def test_the_entry_of_a_chip_is_one_line_per_kind(unknown):
    device, _ = unknown
    key = ProofKey(device.device, CUBE, torch.bfloat16)
    for damaged in (3, {}, {"plain_ms": "x", "ms": 1, "right": True}, [1, 2]):
        facts.of_kernels(device.device).put(key.name(), damaged)
        assert routes.proof_of(key) is None
        assert table_entry(device.device) == []
    routes.keep_proof(key, Proof(2.5, 1.25, right=True))
    assert table_entry(device.device) == [
        "8x8 3x3x3 stride 1x1x1 video bfloat16: library 2.500 ms, tile 1.250 ms, right"
    ]


def test_every_entry_of_the_table_has_its_tile():
    for chip, entries in KERNELS.items():
        for kind, kernel in entries.items():
            assert kernel.backend == "triton"  # no row has another one yet
            assert tiles_of(chip, torch.bfloat16, kind.outputs)[kernel.tile].width >= 96
