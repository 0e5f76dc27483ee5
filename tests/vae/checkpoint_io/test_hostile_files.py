"""Untrusted files are refused in one line by every reader, with little memory, and run no code."""

import contextlib
import io
import pickle
import re
import sys
import time
from pathlib import Path

import pytest

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.benchmarks.record import process_mib
from fast_video_vae.tests.hostile_files import CANARY, CASES, CHECKPOINTS, STATES, program
from fast_video_vae.tests.lora.models import wan
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.cli.main import main
from fast_video_vae.vae.media import load_latent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system counts no peak memory")

MOST_MIB = 300


def command(path):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(["info", str(path), "--quiet"])
    if code:
        raise ValueError(errors.getvalue().removesuffix("\n"))


@pytest.fixture(scope="module")
def readers():
    """The readers of each kind of file; the first call of each has imported what it needs."""
    targets = Targets(wan(blocks=1))
    readers = [load_vae, command, load_latent, lambda path: load_bank([path], targets)]
    for read in readers:
        with pytest.raises((ValueError, OSError)):
            read(Path("gone.pth"))
    return {"every": readers, "checkpoint": readers[:2], "lora": readers[3:]}


@pytest.mark.parametrize(
    ("kind", "case", "content", "words"),
    [pytest.param(kind, case, *content, id=f"{kind}-{case}") for kind, case, content in CASES],
)
def test_a_hostile_file_is_one_line_and_takes_little_memory(
    readers, tmp_path, monkeypatch, kind, case, content, words
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"{case}.pth"
    size = path.write_bytes(content() if callable(content) else content)
    for read in readers[kind]:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, began, error = process_mib("VmRSS"), time.process_time(), None
        try:
            read(path)
        except (ValueError, OSError) as caught:
            error = str(caught)
        took = time.process_time() - began
        assert took < 5
        assert process_mib("VmHWM") - before - size / 2**20 < MOST_MIB
        assert list(tmp_path.iterdir()) == [path], "code in the file was run"
        if error is None:
            assert words is None  # only a flipped value can load
            continue
        assert error.isprintable()
        assert f"{case}.pth" in error
        # The command names itself, and a LoRA of another model lists its modules.
        assert len(error) <= (700 if "nothing in " in error else 200)
        assert re.search(words or "", error), error


def test_the_code_in_the_files_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert b"touch canary" in CHECKPOINTS["system zip"][0]
    pickle.loads(program(STATES["system"][0]))
    assert (tmp_path / CANARY).exists()
