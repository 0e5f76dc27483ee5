"""Devices that compute wrongly: each fault is found, and the frames are right afterwards."""

import contextlib
import re
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fast_video_vae.kernels import Fallback, errors, library_of
from fast_video_vae.kernels.convolution import onednn
from fast_video_vae.kernels.ready import background, facts
from fast_video_vae.tests.benchmarks.peers import diffusers_vae
from fast_video_vae.tests.faults import BF16, COPY, FAULTS, FP16, FP32, Fault, Planted
from fast_video_vae.tests.played_devices import played
from fast_video_vae.tests.vae.families import STATES, latent_for, relative_error
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.demo import VAE_PATH
from fast_video_vae.vae.streaming.bands.team import Team
from fast_video_vae.vae.streaming.prepared import cases, device_check, prepared_vae
from fast_video_vae.vae.streaming.prepared.cases import Case
from fast_video_vae.vae.streaming.settings import Setting
from fast_video_vae.vae.streaming.upload import to_unit

CPU = torch.device("cpu")
SIZE = 32
REPORT = "please report this line"


@pytest.fixture
def checking(monkeypatch, tmp_path):
    """Check devices with an empty store and an empty log."""
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path))
    monkeypatch.setattr(prepared_vae, "check_once", device_check.check_once)
    restart(monkeypatch)
    yield
    # A check that still runs has set switches of the whole process.
    assert background.queue_up(background.Job("the end of a test", lambda: None)).wait(60)
    facts.of_kernels.cache_clear()


def restart(monkeypatch):
    """Forget what this process knows, as a new one does."""
    monkeypatch.setattr(facts, "_opened", {})
    monkeypatch.setattr(errors, "_logged", set())
    for name in ("_jobs", "_verdicts"):
        monkeypatch.setattr(device_check, name, {})
    monkeypatch.setattr(device_check, "_unproved", set())
    monkeypatch.setattr(facts, "_BUSY_S", 0)  # a process that has begun has ended
    facts.of_kernels.cache_clear()


@pytest.fixture
def play(checking, monkeypatch, tmp_path):
    """Return a function that starts to play a device, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(
            played(kind, monkeypatch, tmp_path, **options)
        )


def reports(caplog):
    return [each for each in caplog.messages if REPORT in each]


# A fault of each kind, and the cases that are run.
SHOWN = {
    "conv3d: frames after the first are halved": "decoder of Wan 2.1|copy",
    "copies of bytes to the host": "images|copy|decoder of Wan 2.1",
}


@pytest.mark.parametrize(("name", "shown"), SHOWN.items())
def test_a_fault_is_found_and_the_frames_are_right(name, shown, play, caplog, monkeypatch):
    some = [case for case in cases.cases() if re.search(shown, case.name)]
    monkeypatch.setattr(device_check, "cases", lambda: some)
    fault = FAULTS[name]
    plain = load_vae(STATES["wan2.1"](), dtype=FP32)
    latent = latent_for(plain, 3, SIZE, SIZE)
    expected = plain.decode(latent).movedim(1, -1).add(1).div(2).clamp(0, 1)
    device = play("nvidia")
    planted = Planted(fault)
    device.plant = planted.changed
    vae = load_vae(STATES["wan2.1"](), device=device.device, dtype=fault.dtype)
    device.build()
    assert planted.shows
    found = device_check.fallback_of(device.device, fault.dtype)
    assert found == Fallback(**dict.fromkeys(fault.instead, True))
    (line,) = reports(caplog)
    assert "\n" not in line
    assert len(line) < 400
    images = torch.zeros(1, 9, SIZE, SIZE, 3)
    list(vae.decode_stream(latent, images=images))
    assert relative_error(images, expected) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_what_serves_in_place_of_each_fault(name, play):
    fault = FAULTS[name]
    device = play("nvidia")
    device.plant = Planted(fault).changed
    found = [*device_check.rows(device.device, fault.dtype)]
    verdict = device_check.judged(found, device.device, fault.dtype)
    assert verdict.fallback == Fallback(**dict.fromkeys(fault.instead, True))


def test_a_fault_of_a_cpu_is_found_in_the_background(checking, caplog, monkeypatch):
    if not onednn.serves(CPU, FP32):
        pytest.skip("oneDNN does not serve on this processor")
    latent = latent_for(load_vae(STATES["wan2.1"](), dtype=FP32), 3, SIZE, SIZE)
    expected = load_vae(STATES["wan2.1"](), dtype=FP32).decode(latent)
    restart(monkeypatch)
    convolve = onednn.convolve
    monkeypatch.setattr(onednn, "convolve", lambda *args: convolve(*args).div_(2))
    some = [case for case in cases.cases() if "decoder of Wan 2.1" in case.name]
    monkeypatch.setattr(device_check, "cases", lambda: some)
    vae = load_vae(STATES["wan2.1"](), dtype=FP32)
    assert vae.wait_until_prepared(60)
    assert device_check.fallback_of(CPU, FP32) == Fallback(reference=True)
    assert relative_error(vae.decode(latent), expected) <= 1e-5
    assert len(reports(caplog)) == 1


def test_a_device_is_checked_once_per_machine(checking, monkeypatch):
    calls, some = [], cases.cases()[:1]
    monkeypatch.setattr(device_check, "cases", lambda: calls.append(1) or some)
    for _ in range(3):
        for _ in range(2):
            assert device_check.check_once(CPU, FP32).wait(60)
        assert device_check.verdicts_of(CPU) == {FP32: device_check.Verdict(Fallback(), "")}
        assert len(calls) == 1
        restart(monkeypatch)  # what another process knows


def test_a_check_that_ends_the_process_twice_is_not_tried_again(checking, monkeypatch, caplog):
    def ends(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(device_check, "queue", lambda job: job.run())
    with monkeypatch.context() as patch:
        patch.setattr(device_check, "rows", ends)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                device_check.check_once(CPU, FP32)
            restart(monkeypatch)
        device_check.check_once(CPU, FP32)
    assert device_check.fallback_of(CPU, FP32) == Fallback()
    assert "the check of cpu ended the process twice" in caplog.text


def test_a_check_costs_seconds_of_one_core(checking):
    """Less than 3 s of a core for both dtypes of a CPU: a bound for machines of any load."""
    before = time.thread_time()
    for dtype in (FP32, BF16):
        assert all(row.is_right for row in device_check.rows(CPU, dtype))
    assert time.thread_time() - before < 6


@pytest.mark.slow
def test_every_set_is_right_on_a_right_device():
    for fallback in device_check.SETS:
        found = device_check.rows(CPU, FP16 if fallback == device_check.SETS[0] else FP32, fallback)
        assert not [row for row in found if not row.is_right], fallback


def test_the_stored_results_are_those_of_diffusers():
    """Of the bundled VAE, whose convolutions next to the latent are left out."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    state = {key: value.double() for key, value in load_file(VAE_PATH).items()}
    for name in ("conv1", "conv2"):
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = torch.eye(weight.shape[0]).view(weight.shape).double()
        state[f"{name}.bias"] = torch.zeros_like(state[f"{name}.bias"])
    peer, known = diffusers_vae(state, dtype=torch.float64).module, cases.expected()
    runs = {case.name: case.run for case in cases.cases()}
    clip = to_unit(known["clip"]).double()
    with torch.no_grad():
        moments = peer._encode(clip)
        frames = peer.decode(known["latent"].double()).sample
    encoded, decoded = "encoder of the bundled VAE", "decoder of the bundled VAE"
    assert cases.difference(cases.sketch(moments), known[encoded]) <= 1e-6
    ours = runs[decoded](CPU, torch.float64, library_of(CPU))
    assert cases.difference(cases.sketch(ours), known[decoded]) <= 1e-6
    assert relative_error(ours.clamp(-1, 1), frames) <= 1e-6  # it upsamples in float32


@pytest.mark.parametrize(("kind", "checked"), [("apple", True), ("amd", False), ("nvidia", False)])
def test_no_check_crashes_a_process_or_searches_for_minutes(kind, checked, play, monkeypatch):
    """Apple GPUs allow one thread; MIOpen searches each shape without its immediate mode."""
    monkeypatch.setattr(torch.backends, "miopen", SimpleNamespace(), raising=False)
    monkeypatch.setattr(device_check, "rows", lambda *_: [])
    device = play(kind)
    load_vae(STATES["wan2.1"](), device=device.device, dtype=FP32)
    assert bool(device_check.verdicts_of(device.device)) == checked
    waiting = [job for job in device.jobs if "check" in job.name]
    assert len(waiting) == (kind == "nvidia")


@pytest.mark.parametrize("early", [False, True])
def test_the_line_says_which_videos_to_repeat(early, play, caplog, monkeypatch):
    sliced = device_check.Verdict(Fallback(sliced=True), f"{REPORT}: a GPU")
    monkeypatch.setattr(device_check, "judged", lambda *_: sliced)
    monkeypatch.setattr(device_check, "rows", lambda *_: [])
    device = play("nvidia")
    vae = load_vae(STATES["wan2.1"](), device="cuda", dtype=FP32)
    if early:
        vae.decode(latent_for(vae, 1, SIZE, SIZE))
    device.build()
    vae.decode(latent_for(vae, 1, SIZE, SIZE))
    assert ["repeat what was decoded" in line for line in reports(caplog)] == [early]


def test_another_device_that_is_wrong_is_left_out(checking, monkeypatch):
    wrong = {(torch.device("meta"), FP32): device_check.Verdict(Fallback(cpu=True), "")}
    monkeypatch.setattr(device_check, "_verdicts", wrong)
    vae = load_vae(STATES["wan2.1"](), dtype=FP32)
    vae.team = Team(vae.replicas, [CPU, torch.device("meta"), CPU])
    (piece,) = vae.decode_stream(latent_for(vae, 1, SIZE, SIZE))
    assert piece.device == CPU
    assert list(vae.team.members(CPU)) == [0, 2]


def test_an_error_that_may_not_come_again_is_not_kept(checking, monkeypatch):
    """It is tried twice, and what serves instead serves in this process only."""
    calls = []

    def fails(times):
        def run(*_):
            calls.append(1)
            if len(calls) <= times:
                raise RuntimeError("the device is lost for a moment")
            return torch.zeros(1, 1, 1, 16, 16)

        return run

    monkeypatch.setattr(device_check, "queue", lambda job: job.run())
    monkeypatch.setattr(cases, "expected", lambda: {"it": torch.ones(1)})
    monkeypatch.setattr(cases, "difference", lambda *_: 0.0)
    for times, instead, kept in ((1, Fallback(), True), (2, Fallback(reference=True), False)):
        calls.clear()
        facts.of_kernels(CPU).put(device_check._name_of(CPU, FP32), {"tries": 0, "at": 0})
        restart(monkeypatch)
        monkeypatch.setattr(device_check, "cases", lambda times=times: [Case("it", fails(times))])
        device_check.check_once(CPU, FP32)
        assert device_check.fallback_of(CPU, FP32) == instead
        known = facts.of_kernels(CPU).get(device_check._name_of(CPU, FP32))
        assert ("instead" in known) == kept


def test_no_video_ends_by_a_check_that_fails(checking, monkeypatch):
    def fails(*_):
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(device_check, "kernel_facts", fails)
    vae = load_vae(STATES["wan2.1"](), dtype=FP32)
    assert vae.decode(latent_for(vae, 1, SIZE, SIZE)).isfinite().all()


def test_each_setting_of_a_video_avoids_what_is_wrong(play, monkeypatch):
    """A dtype that is wrong is not that of a video which goes on after an overflow."""
    device = play("nvidia")
    wrong = {(device.device, BF16): device_check.Verdict(Fallback(float32=True), "")}
    monkeypatch.setattr(device_check, "_verdicts", wrong)
    vae, dtypes = load_vae(STATES["wan2.1"](), device="cuda", dtype=BF16), []
    vae.allow_fp16 = True
    setting = Setting(device.device, FP16, BF16)
    for each in (setting, setting.widened(), setting.alone()):
        dtypes.append(vae.proved(each).dtype)
    assert dtypes == [FP16, FP32, FP16]


def test_weights_that_cannot_be_copied_are_an_error(play):
    """All copies to the host are wrong, whatever their form."""
    device = play("nvidia")
    vae = load_vae(STATES["wan2.1"](), device="cuda", dtype=FP32)
    planted = Planted(Fault(COPY, lambda _, __, y: y.zero_(), ()))
    latent = latent_for(vae, 1, SIZE, SIZE)
    device.plant = planted.changed
    setting = vae.proved(Setting(device.device, FP32, FP32)).instead(Fallback(cpu=True))
    assert setting.distrusts
    with pytest.raises(ValueError, match="copies of the weights from cuda:0 are wrong"):
        vae.replicas.on(CPU, "decoder", vae.decoder, proves=True)
    device.plant = None
    assert vae.decode(latent).isfinite().all()
