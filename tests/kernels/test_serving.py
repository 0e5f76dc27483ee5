"""The kernels that serve: built in the background, right once per device, the same in a video."""

import json
import logging
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fast_video_vae import kernels
from fast_video_vae.kernels import errors
from fast_video_vae.kernels.cuda_ops import driver
from fast_video_vae.kernels.ready import background, facts, selfcheck, serving
from fast_video_vae.tests.kernels.own_kernels import bits, gpu, restart
from fast_video_vae.tests.vae.families import STATES, latent_for, random_frames, relative_error
from fast_video_vae.vae.checkpoint import load_vae
from fast_video_vae.vae.streaming.options import StreamOptions
from fast_video_vae.vae.streaming.prepared import preparation

__all__ = ["gpu"]
SIZE = 16

# What is known of int8, by the dtype of the other layers: a decode of a VAE without a chosen dtype
# computes in float16 next to it.
NAMES = defaultdict(frozenset, {torch.float16: frozenset("a")})


@pytest.fixture
def vae(gpu):
    return load_vae(STATES["wan2.1"](), device="cuda", dtype=torch.bfloat16)


def decoded(vae):
    latent = latent_for(vae, 3, SIZE, SIZE)
    return vae.decode(latent, 1)


def test_the_library_serves_whole_videos_until_all_is_built(gpu, vae):
    device, own = gpu
    before = decoded(vae)
    encoded = vae.encode(random_frames(1, 3, 9, SIZE, SIZE))
    assert not own.ran
    assert device.jobs  # begun by `load_vae`
    device.build()
    own.ran.clear()
    after = decoded(vae)
    assert {"rms_norm_silu", "conv3d", "bias_residual", "attention"} <= set(own.ran)
    assert "conv3d" in own.ran
    assert relative_error(after.cpu().float(), before.cpu().float()) <= 0.1
    own.ran.clear()
    vae.encode(random_frames(1, 3, 9, SIZE, SIZE))
    assert own.ran["rms_norm_silu"]
    assert encoded.shape[2] == 3


def forbidden(*_, **__):
    raise AssertionError("in the thread of a decode")


def test_nothing_is_built_checked_or_timed_in_a_video(gpu, vae, monkeypatch):
    device, _ = gpu
    device.build()
    for module, name in (
        (background, "submit"), (serving, "build"), (selfcheck, "checked"),
        (selfcheck, "running"), (torch.cuda, "synchronize"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, forbidden)
    for _ in range(2):
        vae.encode(random_frames(1, 3, 9, SIZE, SIZE))
        decoded(vae)


def test_a_device_without_an_index_is_that_of_its_tensors(gpu):
    device, _ = gpu
    x = torch.empty(4, 64, device="meta")
    kernels.Prepared(torch.device("cuda"), lambda: kernels.silu_mul(x, x))
    device.build()
    assert {key[1] for key in serving._found} == {torch.device("cuda", 0)}


def test_a_video_that_runs_is_not_changed_by_a_build(gpu, vae):
    device, own = gpu
    pieces = vae.decode_stream(latent_for(vae, 3, SIZE, SIZE), StreamOptions(chunk=1))
    first = [next(pieces)]
    device.build()
    own.ran.clear()
    frames = torch.cat([*first, *pieces], dim=2)
    assert not own.ran
    restarted = torch.cat(
        [*vae.decode_stream(latent_for(vae, 3, SIZE, SIZE), StreamOptions(chunk=1))], 2
    )
    assert own.ran
    assert frames.shape == restarted.shape


def test_the_next_process_checks_nothing_and_has_the_same_bits(gpu, vae, monkeypatch):
    device, _ = gpu
    device.build()
    expected = [bits(decoded(vae)) for _ in range(2)]
    restart(monkeypatch)
    monkeypatch.setattr(preparation, "_prepared", {})
    monkeypatch.setattr(selfcheck, "checked", forbidden)
    again = load_vae(STATES["wan2.1"](), device="cuda", dtype=torch.bfloat16)
    device.build()
    assert [bits(decoded(again)), *expected] == [expected[0]] * 3


def test_a_convolution_whose_kernel_the_table_no_longer_names_is_checked_again(gpu, monkeypatch):
    device, _ = gpu
    kept = facts.of_kernels(device.device)
    for known in (None, "hopper"):
        for name in kept.named("right: conv"):
            kept.put(name, known)
        restart(monkeypatch)
        monkeypatch.setattr(preparation, "_prepared", {})
        load_vae(STATES["wan2.1"](), device="cuda", dtype=torch.bfloat16)
        device.build()
        kept = facts.of_kernels(device.device)
        assert {*kept.named("right: conv").values()} == {"triton"}


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
    assert len([m for m in caplog.messages if "rms_norm_silu" in m]) == 1
    assert len([m for m in caplog.messages if "not writable" in m]) == 1


def test_a_call_that_was_not_foreseen_is_built_for_later_videos(gpu):
    device, own = gpu
    x, gate = (torch.randn(300, 64).to("cuda") for _ in range(2))
    expected = kernels.silu_mul(x, gate)
    assert not own.ran
    assert len(device.jobs) == 1
    kernels.silu_mul(x, gate)
    assert len(device.jobs) == 1
    device.build()
    own.ran.clear()
    assert bits(kernels.silu_mul(x, gate)) == bits(expected)
    assert own.ran == {"silu_mul": 1}


def test_a_kernel_that_ended_two_processes_is_not_tried_again(gpu, monkeypatch):
    device, own = gpu
    x = torch.randn(300, 64).to("cuda")
    tries = []

    def ends(*_):
        tries.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "checked", ends)
        for _ in range(3):
            restart(monkeypatch)
            kernels.silu_mul(x, x)
            job = device.jobs.pop()
            if len(tries) < 2:
                with pytest.raises(KeyboardInterrupt):
                    job.run()
            else:
                assert job.run()
    assert len(tries) == 2
    own.ran.clear()
    kernels.silu_mul(x, x)
    assert not own.ran


def test_a_build_without_memory_comes_back_later(gpu):
    device, own = gpu
    x = torch.randn(300, 64).to("cuda")
    kernels.silu_mul(x, x)
    job = device.jobs.pop()

    def short(op, y):
        raise torch.OutOfMemoryError("out of memory")

    own.change, keep = short, own.change
    assert not job.run()
    assert not job.is_done
    own.change = keep
    assert job.run()
    own.ran.clear()
    kernels.silu_mul(x, x)
    assert own.ran


def test_jobs_run_one_after_the_other_in_one_daemon_thread(monkeypatch):
    ran = []

    def work(number):
        time.sleep(0.01)
        ran.append((number, threading.current_thread().name, threading.current_thread().daemon))

    jobs = [background.submit(f"job {n}", lambda n=n: work(n)) for n in range(5)]
    assert background.wait(jobs, 10)
    assert ran == [(n, "kernels of fast-video-vae", True) for n in range(5)]


def test_a_job_that_fails_ends_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(errors, "_logged", set())

    def fails():
        raise ValueError("no compiler\nsecond line")

    with caplog.at_level(logging.WARNING):
        assert background.submit("the build", fails).wait(10)
    assert caplog.messages == [
        "Fast Video VAE: the build failed (no compiler); PyTorch runs instead"
    ]


def test_a_job_without_memory_runs_again(monkeypatch):
    monkeypatch.setattr(background, "_LATER_S", 0.05)
    tries = []

    def work():
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise MemoryError

    assert background.submit("the build", work).wait(10)
    assert len(tries) == 3
    assert tries[2] - tries[0] >= 0.09


def test_a_capture_of_others_is_not_broken(monkeypatch):
    calls = []
    fake = SimpleNamespace(exchange=lambda mode: calls.append(mode._obj.value))
    monkeypatch.setattr(driver, "driver", lambda: fake)
    with driver.relaxed_captures(torch.device("cuda", 0)):
        assert calls == [2]
    assert len(calls) == 2
    with driver.relaxed_captures(torch.device("cpu")):
        assert len(calls) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 1}', '{"format": 3, "made_on": {}, "facts": {"a": 1}}', "\x00" * 9],
)
def test_a_damaged_store_counts_as_empty(tmp_path, monkeypatch, content):
    monkeypatch.setattr(errors, "_logged", set())
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


def test_the_kernels_of_int8_are_prepared_in_the_dtype_of_its_decodes(gpu, monkeypatch):
    vae = load_vae(STATES["wan2.1"](), device="cuda")
    monkeypatch.setattr(vae, "planned_codes", lambda dtype, _: NAMES[dtype])
    vae.prepare()
    works = {(work.dtype, work.encodes, work.coded) for _, work in preparation._prepared}
    assert {(torch.float16, False, frozenset("a")), (torch.bfloat16, False, frozenset())} <= works
    assert not any(work.coded for _, work in preparation._prepared if work.encodes)
