"""A plan estimates the memory of its stream, and keeps the memory limit."""

import dataclasses
import gc
import weakref

import pytest
import torch

from fast_video_vae.kernels import Fused
from fast_video_vae.tests.benchmarks.bench_memory import Case
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.planning.live_bytes import live_peak
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers import conv, conv_weights
from fast_video_vae.vae.planning import device_memory, plan
from fast_video_vae.vae.planning.job import StreamJob
from fast_video_vae.vae.planning.measured import BASE_BYTES
from fast_video_vae.vae.planning.measured import measured as measure
from fast_video_vae.vae.planning.plan import Plan, make_plan, smaller_plan
from fast_video_vae.vae.planning.tiling import Tiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEAST, MOST = 0.99, 1.05  # the estimate next to allocated tensors


@pytest.fixture(scope="module")
def wan():
    return load_vae(random_state_dict(8), dtype=torch.float32)


def work_of(network, height=90, width=160, device=CUDA, single_frame=False):
    return StreamJob(network, (1, height, width), torch.bfloat16, device, single_frame)


# Videos in all ways: whole, in steps, in tiles, in the smallest steps, in a batch, of one frame.
CASES = [
    Case("wan2.1", False, chunk=1, size=(128, 192)),
    Case("wan2.1", False, latents=5, limit_bytes=1),
    Case("wan2.1", False, chunk=1, size=(128, 192), tile=(64, 96), cut=0),
    Case("wan2.1", True, latents=5, size=(256, 384), dtype="bfloat16", chunk=4, tile=(128, 128)),
    Case("wan2.2", False, latents=5, chunk=2, batch=2, size=(128, 160)),
    Case("wan2.2", True, size=(384, 384), chunk=1, dtype="bfloat16"),
    Case("seedvr2", False, latents=1),
    Case("seedvr2", True, chunk=1, size=(128, 192)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_estimate_matches_the_allocations_of_a_stream(case):
    peak, estimate = live_peak(case)
    assert LEAST * peak <= estimate <= MOST * peak + (estimate < 16 << 20) * BASE_BYTES


@pytest.mark.parametrize(
    ("case", "fused"),
    [
        (CASES[0], Fused(tail=True, sums=True, norm=True, bias=True)),  # our own kernel
        (CASES[5], Fused(tail=True)),  # slices
    ],
)
def test_the_estimate_is_enough_for_each_candidate(case, fused):
    peak, estimate = live_peak(case, fused)
    assert peak <= estimate / LEAST


# Cases, and limits as shares of their peak on whole frames. On a CPU the tails cannot be moved, so
# lower limits cannot be kept.
LIMITS = [(Case(latents=1, size=(640, 640)), 0.3), (Case("wan2.2", size=(192, 256)), 0.8)]


@pytest.mark.parametrize(("case", "share"), LIMITS, ids=str)
def test_a_stream_keeps_its_memory_limit(case, share):
    limit = int(share * live_peak(case)[1])
    peak, estimate = live_peak(dataclasses.replace(case, limit_bytes=limit))
    assert estimate <= limit
    assert peak <= limit / LEAST


def test_copies_of_large_weights_are_counted(monkeypatch):
    monkeypatch.setattr(conv_weights, "_KEPT_ELEMENTS", 1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):  # these weights are converted before
        network = load_vae(random_state_dict(8), dtype=torch.float32).decoder
        work = StreamJob(network, (1, 1, 1), dtype, CPU, single_frame=True)
        found.append(make_plan(work, 1, cuts=False).peak_bytes - BASE_BYTES)
    copies = 2 * 4 * max(each.numel() for each in network.parameters()) / 3
    assert all(copies <= each < 1.1 * copies for each in found)  # one frame of taps, in two orders


def test_a_smaller_limit_never_needs_more_memory(wan):
    """Every limit that is not below the smallest plan is kept."""
    work = work_of(wan.decoder)
    before = most = make_plan(work, 1 << 50).peak_bytes
    least = make_plan(work, 1).peak_bytes
    for step in range(13):
        limit = int(most * 1.1 * (least / most / 1.3) ** (step / 12))
        peak = make_plan(work, limit).peak_bytes
        assert peak <= before
        assert peak <= max(limit, least)
        before = peak


def test_the_fastest_setting_that_fits_is_taken(wan):
    """Long steps, a few tiles, parts of frames, then tiles whose tails wait on the host."""
    work = work_of(wan.decoder)
    found = [make_plan(work, 1 << 50)]
    while (other := make_plan(work, found[-1].peak_bytes - 1)) != found[-1]:
        found.append(other)
    kinds = [(bool(each.tiles), each.part_bytes >= 1 << 30, each.parked) for each in found]
    order = (False, True, False), (True, True, False), (False, False, False), (True, False, True)
    assert kinds == sorted(kinds, key=order.index)
    assert (found[0].chunk, kinds[0], kinds[-1]) == (3, order[0], order[-1])
    whole = [each.chunk for each in found if each.tiles is None]
    assert whole == sorted(whole, reverse=True)
    assert found[-1].peak_bytes < found[0].peak_bytes / 3
    assert min(found[-1].tiles.size) >= 32
    for other in ({"single_frame": True}, {"device": CPU}):
        assert not make_plan(work_of(wan.decoder, **other), 1).parked


def test_three_tiles_have_their_tails_on_the_device(wan):
    """The current one, the next one and the one before."""

    def peak(count, *, parked):
        tiles = Tiles(11, (128, 384 // count))
        return measure(work_of(wan.decoder, 16, 48), tiles, 1, 1 << 30, parked=parked)[0]

    assert peak(3, parked=True) == peak(3, parked=False)
    assert peak(4, parked=True) < peak(4, parked=False)


def test_what_is_wanted_is_kept(wan):
    for limit in (1 << 50, 1):
        made = make_plan(work_of(wan.decoder), limit, chunk=3, tile=(360, 200))
        assert (made.chunk, made.tiles.size) == (3, (360, 200))
        assert make_plan(work_of(wan.decoder), limit, chunk=-1).chunk == -1
        assert make_plan(work_of(wan.decoder), limit, cuts=False).tiles is None
    assert make_plan(work_of(wan.decoder), 1 << 50, tile=(720, 1280)).tiles is None


def test_a_smaller_plan_follows_until_there_is_none(wan, monkeypatch):
    monkeypatch.setattr(plan, "free_bytes", lambda _: 1 << 40)
    work, found = work_of(wan.decoder), []
    now = make_plan(work, 1 << 50)
    while now is not None:
        found.append(now.peak_bytes)
        now = smaller_plan(work, now)
        assert now is None or now.peak_bytes < found[-1]
    assert found[1] <= 0.75 * found[0]
    assert found[-1] == make_plan(work, 1).peak_bytes


def test_a_share_of_the_free_memory_is_used(wan, monkeypatch):
    """A plan uses four fifths of it; whole frames up to nine tenths, before frames are tiled."""
    work = work_of(wan.decoder)
    longest, shortest = make_plan(work, 1 << 50), make_plan(work, 1, cuts=False)

    def chosen(free_bytes, work=work):
        monkeypatch.setattr(plan, "free_bytes", lambda _: int(free_bytes))
        return make_plan(work)

    assert chosen(1.26 * longest.peak_bytes) == longest
    less = chosen(1.24 * longest.peak_bytes)
    assert less.tiles is None
    assert less.peak_bytes <= 0.8 * 1.24 * longest.peak_bytes
    assert chosen(1.12 * shortest.peak_bytes).tiles is None
    assert chosen(1.1 * shortest.peak_bytes).tiles is not None
    on_cpu = work_of(wan.decoder, device=CPU)
    most = make_plan(on_cpu, 1 << 50)
    assert chosen(2.01 * most.peak_bytes, on_cpu) == most
    assert chosen(1.99 * most.peak_bytes, on_cpu) != most


class Allocator:
    """Memory of a CUDA device with a caching allocator, as `torch.cuda` reports it."""

    def __init__(self, monkeypatch, total):
        self.total, self.reserved, self.active, self.other = total, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        free = lambda _: (total - self.reserved - self.other, total)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: self._stats())
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)

    def _stats(self):
        return {
            "reserved_bytes.all.current": self.reserved,
            "active_bytes.all.current": self.active,
        }

    def run(self, peak_bytes):
        """Allocate and free; the freed blocks stay reserved."""
        self.reserved = max(self.reserved, self.active + peak_bytes)


def test_a_second_decode_has_the_plan_of_the_first(wan, monkeypatch):
    memory = Allocator(monkeypatch, 8 << 30)
    memory.active = memory.reserved = 300 << 20  # the weights
    work = work_of(wan.decoder, 180, 320)
    first = make_plan(work)
    for _ in range(2):
        memory.run(first.peak_bytes)
        assert make_plan(work) == first
    # Memory of another program is not free.
    memory.other = 1 << 30
    memory.reserved = memory.active
    assert device_memory.free_bytes(CUDA) == memory.total - memory.active - memory.other


def test_a_limit_of_the_process_is_kept(monkeypatch):
    memory = Allocator(monkeypatch, 24 << 30)
    memory.active = memory.reserved = 1 << 30
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.25)
    assert device_memory.free_bytes(CUDA) == 5 << 30
    assert device_memory.total_bytes(CUDA) == 6 << 30


def test_an_empty_device_is_planned_by_its_whole_memory(wan, monkeypatch):
    memory = Allocator(monkeypatch, 12 << 30)
    memory.active = memory.reserved = 11 << 30  # of other models, which can be unloaded
    now = wan.plan(720, 1280, device=CUDA)
    empty = wan.plan(720, 1280, device=CUDA, empty=True)
    assert now.peak_bytes < empty.peak_bytes <= 0.8 * memory.total
    memory.active = memory.reserved = 0
    assert wan.plan(720, 1280, device=CUDA) == empty


def test_the_steps_of_a_size_are_measured_once(monkeypatch):
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    made, measure = [], plan.measured
    monkeypatch.setattr(plan, "measured", lambda *a, **o: made.append(1) or measure(*a, **o))
    vae.decode(torch.zeros(1, 16, 2, 4, 4))
    assert len(made) == 1
    vae.decode(torch.zeros(1, 16, 3, 4, 4))
    vae.plan(32, 32)
    assert len(made) == 1
    for options in ({"device": CUDA}, {"single_frame": True}, {"encode": True}):
        before = len(made)
        vae.plan(32, 32, StreamOptions(limit_bytes=1 << 40), **options)
        assert len(made) == before + 1


def test_kept_estimates_keep_no_network_and_not_every_size(monkeypatch):
    monkeypatch.setattr(conv, "_MOST", 3)
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    for height in range(8, 72, 8):
        vae.plan(height, 64)
    assert len(vae.decoder.kept) == 3
    network = weakref.ref(vae.decoder)
    gc.disable()
    try:
        del vae
        assert network() is None
    finally:
        gc.enable()


def test_a_plan_is_printed_in_words():
    words = str(Plan(1, 1, 300 << 20))
    assert words == "1 latent a step, whole frames, about 300 MiB"
    words = str(Plan(-1, 1, 1 << 20, Tiles(3, (24, 40)), True, pixels=2))
    assert words == "all latents a step, tiles of 80x48, caches on the host, about 1 MiB"
