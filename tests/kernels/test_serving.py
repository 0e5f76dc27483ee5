"""The kernels that serve: built in the background, right once per device, the same in a video."""

import json
import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import errors, modules
from fast_video_vae.kernels.ready import background, facts, selfcheck, serving
from fast_video_vae.tests.kernels.own_kernels import Network, OwnKernels, gpu, restart
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames, relative_error
from fast_video_vae.vae.checkpoint import load_vae

__all__ = ["gpu"]


def forbidden(*_, **__):
    raise AssertionError("in the thread of a decode")


def test_a_vae_is_served_by_the_library_and_after_the_build_by_its_kernels(gpu, monkeypatch):
    """Nothing is built, checked or timed in a video."""
    device, own = gpu
    vae = load_vae(STATES["wan2.1"](), device="cuda", dtype=torch.bfloat16)
    assert device.jobs
    latent = latent_for(vae, 2, 8, 8)
    before = vae.decode(latent, 1)
    assert not own.ran
    device.build()
    own.ran.clear()
    for module, name in (
        (background, "submit"), (serving, "build"), (selfcheck, "checked"),
        (selfcheck, "running"), (torch.cuda, "synchronize"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, forbidden)
    after = vae.decode(latent, 1)
    assert {"rms_norm_silu", "conv3d", "bias_residual", "attention"} <= set(own.ran)
    assert relative_error(after.cpu().float(), before.cpu().float()) <= 0.1
    own.ran.clear()
    vae.encode(random_frames(1, 3, 5, 16, 16))
    assert own.ran["rms_norm_silu"]


def test_a_video_that_runs_is_not_changed_by_a_build(gpu):
    device, own = gpu
    network = Network()
    seen = network.prepared.seen()
    first = network.video(seen)
    device.build()
    own.ran.clear()
    assert network.video(seen) == first
    assert not own.ran
    network.video()
    assert own.ran == {"rms_norm_silu": 4, "conv3d": 4}


def test_the_next_process_checks_nothing_and_has_the_same_bits(gpu, monkeypatch):
    device, _ = gpu
    network = Network()
    device.build()
    expected = [network.video() for _ in range(2)]
    restart(monkeypatch)
    monkeypatch.setattr(selfcheck, "checked", forbidden)
    again = Network()
    device.build()
    assert [again.video(), *expected] == [expected[0]] * 3


def test_a_convolution_whose_kernel_the_table_no_longer_names_is_checked_again(gpu, monkeypatch):
    device, _ = gpu
    Network()
    device.build()
    kept = facts.of_kernels(device.device)
    (name,) = kept.named("right: conv")
    kept.put(name, "hopper")
    restart(monkeypatch)
    Network()
    device.build()
    assert facts.of_kernels(device.device).get(name) == "triton"


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_a_broken_kernel_is_replaced_by_the_library_in_one_line(
    gpu, monkeypatch, caplog, tmp_path, fault
):
    """And a folder that cannot be written costs one line too."""
    device, own = gpu
    monkeypatch.setattr(errors, "_logged", set())

    def change(op, y):
        if op != "rms_norm_silu":
            return y
        if fault == "fails":
            raise RuntimeError("no kernel image is available for execution on the device")
        y[..., -1].mul_(1.01)
        return y

    own.change = change
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAST_VIDEO_VAE_CACHE", str(tmp_path / "file"))
    restart(monkeypatch)
    x, gamma = torch.randn(1, 2, 5, 5, 64).movedim(-1, 1).to("cuda"), torch.ones(64).to("cuda")

    def run():
        kernels.rms_norm_silu(x, gamma)
        kernels.bias_residual(x, gamma)

    with caplog.at_level(logging.WARNING):
        run()
        device.build()
        own.ran.clear()
        run()
    assert own.ran == {"bias_residual": 1}
    assert sorted(kernels.checked_kernels(torch.device("cuda")).values()) == [False, True]
    assert len([m for m in caplog.messages if "rms_norm_silu" in m]) == 1
    assert len([m for m in caplog.messages if "not writable" in m]) == 1


def test_the_first_of_our_backends_that_is_right_serves(gpu, monkeypatch):
    device, own = gpu
    other, x, gamma = OwnKernels(), torch.randn(2, 64).to("cuda"), torch.ones(64).to("cuda")
    monkeypatch.setitem(modules._loaded, "cuda", other)
    own.change = lambda op, y: y.mul_(1.01) if op == "bias_residual" else y

    def run():
        kernels.silu_mul(x, x)
        kernels.bias_residual(x.view(2, 64, 1, 1, 1), gamma)

    run()
    device.build()
    own.ran.clear()
    other.ran.clear()
    run()
    assert (own.ran, other.ran) == ({"silu_mul": 1}, {"bias_residual": 1})


def test_a_kernel_that_ended_two_processes_is_not_tried_again(gpu, monkeypatch):
    device, own = gpu
    x = torch.randn(300, 64).to("cuda")
    tries = []

    def ends(*_):
        tries.append(1)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "checked", ends)
        for _ in range(3):
            restart(monkeypatch)
            kernels.silu_mul(x, x)
            job = device.jobs.pop()
            if len(tries) < 2:
                with pytest.raises(SystemExit):
                    job.run()
            else:
                assert job.run()
    assert len(tries) == 2
    own.ran.clear()
    kernels.silu_mul(x, x)
    assert not own.ran


def test_jobs_run_in_order_in_a_daemon_thread_again_without_memory_and_fail_in_one_line(
    monkeypatch, caplog
):
    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setattr(background, "_LATER_S", 0.05)
    ran = []

    def work(number):
        thread = threading.current_thread()
        assert (thread.name, thread.daemon) == ("kernels of fast-video-vae", True)
        assert background.is_here()
        assert not torch.is_grad_enabled()
        ran.append((number, time.monotonic()))
        if number == 2:
            raise ValueError("no compiler\nsecond line")
        if number == 3 and len(ran) < 6:
            raise MemoryError

    assert not background.is_here()
    with caplog.at_level(logging.WARNING):
        jobs = [background.submit(f"job {n}", lambda n=n: work(n)) for n in range(4)]
        assert not background.wait([background.Job("never", work)], 0.01)
        assert background.wait(jobs, 10)
    assert [number for number, _ in ran] == [0, 1, 2, 3, 3, 3]
    assert ran[-1][1] - ran[3][1] >= 0.09
    assert [job.failed for job in jobs] == [False, False, True, False]
    assert caplog.messages == ["Fast Video VAE: job 2 failed (no compiler); PyTorch runs instead"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 3, "made_on": {}, "facts": {"a": 1}}'])
def test_a_damaged_store_counts_as_empty(tmp_path, content):
    path, made_on = tmp_path / "facts.json", {"device": "x"}
    path.write_text(content)
    store = facts.Facts(path, made_on)
    assert store.get("a") is None
    store.put("b", [1.5, "c"])
    assert facts.Facts(path, made_on).get("b") == [1.5, "c"]
    assert facts.Facts(path, {"device": "y"}).get("b") is None


def test_two_processes_keep_what_both_have_found(tmp_path):
    path = tmp_path / "facts.json"
    one, two = (facts.Facts(path, {}) for _ in range(2))
    one.put("a", 1)
    two.put("b", 2)
    assert facts.Facts(path, {}).named("") == {"a": 1, "b": 2}
    assert one.once("b", forbidden, lambda kept: kept == 2) == 2
    assert json.loads(path.read_text())["format"] == 3


def test_the_sources_and_switches_decide_what_is_known(gpu, monkeypatch):
    device, _ = gpu
    before = facts.of_kernels(device.device)
    before.put("right: x", "none")
    with monkeypatch.context() as patch:
        patch.delenv("FAST_VIDEO_VAE_CUDA")  # which disables it on a played GPU
        facts.of_kernels.cache_clear()
        assert facts.of_kernels(device.device).get("right: x") is None
    read = Path.read_bytes
    changed = lambda path: read(path) + (b"#" if path.name == "rows.py" else b"")  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", changed)
    monkeypatch.setattr(facts, "sources", facts.sources.__wrapped__)
    facts.of_kernels.cache_clear()
    assert facts.of_kernels(device.device).get("right: x") is None
