"""What a first decode and encode on a GPU needs is built before it: on `meta`, at full widths."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="the launches need triton")

from fast_video_vae.kernels.backends import Kernel
from fast_video_vae.kernels.ready import serving
from fast_video_vae.kernels.tables import Kind
from fast_video_vae.tests.kernels.meta_gpu import Machine, new_vae, stream

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wan2.2", "seedvr2")]
FAMILIES = ["wan2.1", *SLOW]
RUNS = [("decode", 17, 480, 832), ("decode", 1, 1024, 1024), ("decode", 5, 720, 1280),
        ("encode", 9, 480, 832), ("encode", 1, 512, 512)]  # fmt: skip


# The kinds with most of the products, run by a kernel of `hopper`.
LARGE = {
    Kind(inputs, outputs, (3, 3, 3), (1, 1, 1), video=True): Kernel("hopper", 1)
    for inputs, outputs in product((96, 128, 160, 192, 256, 320, 384, 512, 640, 1024), repeat=2)
}


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_runs_was_built_before(backend, family, monkeypatch, tmp_path):
    vae = new_vae(family)
    machine = Machine(backend, monkeypatch, tmp_path, LARGE)
    for prepared in vae.prepare():
        assert not prepared.seen().kernels
    machine.build()
    assert not any(job.failed for job in machine.jobs)
    built, found = set(machine.compiled), len(serving._found)
    assert built
    for run in RUNS:
        machine.compiled.clear()
        with machine.running():
            stream(vae, *run)
        assert machine.compiled, run
        sources = {name for name, *_ in machine.compiled}
        assert backend != "cuda" or run[1] == 1 or "hopper_conv" in sources, run
        assert machine.compiled <= built, run
        assert not machine.jobs, [job.name for job in machine.jobs]
    assert len(serving._found) == found
