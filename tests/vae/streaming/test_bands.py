"""Several devices, or processes, give the result of one, each with a band of the frames."""

import contextlib
import re
import threading

import pytest
import torch
from hypothesis import given

from fast_video_vae.kernels import errors, has_bfloat16
from fast_video_vae.tests.vae.families import STATES, close, joined, latent_for, random_frames
from fast_video_vae.tests.vae.streaming.processes import Processes, failing
from fast_video_vae.tests.vae.test_any_way import SEEDS, check_both, same, vae_of
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.planning import plan, tiling
from fast_video_vae.vae.streaming.bands.banded_executor import BandedExecutor
from fast_video_vae.vae.streaming.tiled_executor import TiledExecutor

DIVIDED = ("wan2.1", "wan2.2", "qwen-image-2.1")


@pytest.fixture(scope="module", params=DIVIDED)
def vae(request):
    return load_vae(STATES[request.param](), dtype=torch.float32)


@pytest.fixture
def wan():
    return load_vae(STATES["wan2.1"](), dtype=torch.float32)


@pytest.fixture
def banded(monkeypatch):
    """The spans of the bands of each chunk."""
    spans, advance, begin = [], BandedExecutor.advance, BandedExecutor.__init__

    def begun(self, work, plan, *arguments):
        self.plan = plan
        begin(self, work, plan, *arguments)

    def noted(self, x):
        yield from advance(self, x)
        spans.append([band.span(self.plan.axis) for band in self.plan.members])

    monkeypatch.setattr(BandedExecutor, "__init__", begun)
    monkeypatch.setattr(BandedExecutor, "advance", noted)
    return spans


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("fast-video-vae")]


def inputs(vae, latents, height, width, batch=1):
    frames = vae.config.frames(latents)
    video = random_frames(batch, vae.config.image_channels, frames, height, width)
    return latent_for(vae, latents, height, width, batch), video


@same(max_examples=20)
@given(SEEDS)
def test_devices_give_the_same_video(seed):
    check_both(seed, shared=True)


@pytest.mark.slow
@same(max_examples=100)
@given(SEEDS)
def test_many_devices_give_the_same_video(seed):
    check_both(seed, shared=True)


@pytest.fixture(scope="module")
def processes():
    processes = Processes(4)
    yield processes
    processes.close()


def among(processes):
    """Let the devices of a case be those of processes."""

    @contextlib.contextmanager
    def share(case, vae):
        made = vae_of, case.family, case.gain, "whole", "auto"
        with processes.shared(vae, case.devices, case.shares, *made):
            yield

    return share


@same(max_examples=3)
@given(SEEDS)
def test_ranks_give_the_same_video(processes, seed):
    check_both(seed, among(processes), shared=True, fails=False)


@pytest.mark.slow
@same(max_examples=30)
@given(SEEDS)
def test_many_ranks_give_the_same_video(processes, seed):
    check_both(seed, among(processes), shared=True, fails=False)


@pytest.mark.parametrize("calls", [0, 7])
@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("gone\n"), "gone"), (torch.OutOfMemoryError("no room"), "memory ran out .*")],
)
def test_a_video_goes_on_without_a_rank_that_fails(processes, wan, caplog, calls, error, text):
    latent, video = inputs(wan, 9, 32, 96)
    options = StreamOptions(1)
    for run, source in ((wan.decode_stream, latent), (wan.encode_stream, video)):
        expected = joined(run(source, options))
        with processes.shared(wan, 3, None, failing, 1, calls, error):
            assert torch.equal(joined(run(source, options)), expected)
            assert torch.equal(joined(run(source, options)), expected)
    lines = [x.getMessage() for x in caplog.records if "Fast Video VAE" in x.getMessage()]
    line = rf".* rank 1 of 4 failed: {text} in .*; going on with cpu, rank 2 of 4"
    assert len(lines) == 2
    assert all(re.fullmatch(line, each) for each in lines)


# Devices, their shares, height and width of the frames, latents, chunk, batch.
CASES = [
    (2, None, 96, 160, 3, None, 1),
    (3, None, 96, 256, 3, 1, 1),
    (2, [1, 3], 144, 112, 3, -1, 1),  # unequal, rows
    (3, [1, 4, 2], 96, 256, 4, 2, 2),  # unequal, a batch, a last chunk of its own length
    (2, "memory", 96, 160, 1, None, 1),  # one frame
    (4, None, 48, 48, 5, 1, 1),  # oneDNN sums in another order on more cores than the caller's
]


@pytest.mark.parametrize(("count", "shares", "height", "width", "latents", "chunk", "batch"), CASES)
def test_bands_give_the_bits_of_one_device(
    vae, banded, count, shares, height, width, latents, chunk, batch
):
    latent, video = inputs(vae, latents, height, width, batch)
    vae.devices = []
    decoded, encoded = vae.decode(latent, chunk), vae.encode(video, chunk)
    assert not banded
    vae.devices, vae.shares = ["cpu"] * count, shares
    assert torch.equal(vae.decode(latent, chunk), decoded)
    assert torch.equal(vae.encode(video, chunk), encoded)
    assert min(map(len, banded)) > 1
    assert not threads()


@pytest.mark.parametrize("axis", [0, 1])
def test_every_cut_and_axis_give_the_same_result(wan, banded, monkeypatch, axis):
    latent, video = inputs(wan, 3, 96, 96)
    decoded, encoded = wan.decode(latent), wan.encode(video)
    find, made = tiling.band_cuts, plan.divide
    counts = [len(find(network)) for network in (wan.decoder, wan.encoder)]
    assert min(counts) >= 3
    wan.devices = ["cpu"] * 2
    monkeypatch.setattr(plan, "divide", lambda job, cut, _, *rest: made(job, cut, axis, *rest))
    for index in range(max(counts)):
        monkeypatch.setattr(
            plan, "band_cuts", lambda each, i=index: find(each)[i : i + 1] or find(each)[:1]
        )
        assert torch.equal(wan.decode(latent), decoded)
        assert torch.equal(wan.encode(video), encoded)
    assert min(map(len, banded)) == 2


@pytest.mark.parametrize("chunk", [1, -1])
def test_a_static_end_is_skipped_in_bands(wan, banded, chunk):
    video = random_frames(1, 3, 1, 48, 96).repeat(1, 1, 81, 1, 1)
    video[:, :, :7] = random_frames(1, 3, 7, 48, 96)
    options = StreamOptions(chunk)
    skipped = joined(wan.encode_stream(video, options))
    wan.devices = ["cpu"] * 2
    assert torch.equal(joined(wan.encode_stream(video, options)), skipped)
    assert banded


def test_a_band_can_run_in_tiles(wan, banded):
    latent, video = inputs(wan, 3, 96, 128)
    options = StreamOptions(1, tile=(32, 40))
    decoded = joined(wan.decode_stream(latent, options))
    encoded = joined(wan.encode_stream(video, options))
    wan.devices = ["cpu"] * 2
    plan = wan.plan(96, 128, options)
    assert all(band.count > 2 for band in plan.bands.members)
    close(joined(wan.decode_stream(latent, options)), decoded)
    close(joined(wan.encode_stream(video, options)), encoded)
    assert banded


def test_threads_end_with_the_stream(wan):
    latent, _ = inputs(wan, 6, 32, 96)
    wan.devices = ["cpu"] * 3
    stream = wan.decode_stream(latent, StreamOptions(1))
    next(stream)
    same = set(threads())
    assert len(same) in (2, 3)
    next(stream).add_(1).requires_grad_()  # no inference tensor
    assert set(threads()) == same
    stream.close()
    assert not threads()


@pytest.fixture
def two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_cores")
def test_each_device_has_its_share_of_the_cores_and_the_caller_all_of_them(wan, monkeypatch):
    """Also after the first op of the native library in its thread, and in later threads."""
    found, work = [], TiledExecutor.fill

    def noted(self, *arguments):
        work(self, *arguments)
        found.append(torch.get_num_threads())

    monkeypatch.setattr(TiledExecutor, "fill", noted)
    latent, _ = inputs(wan, 3, 32, 96)
    wan.devices = ["cpu"] * 2
    for _ in wan.decode_stream(latent, StreamOptions(1)):
        pass
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [1] * 6 + [2]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_cores")
def test_bands_on_several_cores_give_the_values_of_one_device(wan, banded):
    """OneDNN sums in another order for this size on two cores."""
    latent, video = inputs(wan, 3, 32, 128)
    decoded, encoded = wan.decode(latent, 1), wan.encode(video, 1)
    wan.devices = ["cpu"] * 2
    assert (wan.decode(latent, 1) - decoded).abs().max() <= 1e-5
    assert (wan.encode(video, 1) - encoded).abs().max() <= 1e-5
    assert min(map(len, banded)) == 2


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu", "gpu9"], "gpu9"),
        ("cpu", "expected a list"),
        ([None], "None"),
        (["cpu", "meta"], "meta"),
        (["cpu:300"], "cpu:300"),
    ],
)
def test_unknown_devices_are_refused_in_one_line(wan, devices, message):
    with pytest.raises(ValueError, match="device") as caught:
        wan.devices = devices
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert wan.devices == []


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, float("nan")], [1, -1], "1,2", [1, "2"], 2])
def test_unknown_shares_are_refused_in_one_line(wan, shares):
    wan.devices = ["cpu"] * 2
    with pytest.raises(
        ValueError, match=r"^shares are .*; expected 2 positive numbers or .memory.$"
    ):
        wan.shares = shares
    assert wan.shares is None


def test_seedvr2_runs_on_its_own_device(monkeypatch, caplog):
    vae = load_vae(STATES["seedvr2"](), dtype=torch.float32)
    latent, video = inputs(vae, 2, 16, 16)
    decoded, encoded = vae.decode(latent), vae.encode(video)
    monkeypatch.setattr(errors, "_logged", set())
    vae.devices = ["cpu"] * 2
    assert torch.equal(vae.decode(latent), decoded)
    assert torch.equal(vae.encode(video), encoded)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cpu computes each video alone: the norms of SeedVR2" in line


def test_bfloat16_is_asked_of_each_device(monkeypatch):
    """PyTorch answers for the current GPU, which may be another one."""
    now = [0]

    @contextlib.contextmanager
    def current(device):
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: now[0] == 1)
    found = [has_bfloat16(torch.device("cuda", index)) for index in (0, 1, 2)]
    assert found == [False, True, False]
    assert now == [0]
