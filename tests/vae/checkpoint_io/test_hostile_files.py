"""Untrusted files are refused in one line by every reader, with little memory, and run no code."""

import json
import pickle
import re
import sys

import pytest

from fast_video_vae.tests.builders import script_command, succeeded
from fast_video_vae.tests.hostile_files import (
    CANARY,
    CASES,
    CHECKPOINTS,
    STATES,
    program,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system counts no peak memory")

READ = "import sys\nfrom fast_video_vae.tests.hostile_files import report\nreport(sys.argv[1])"
MOST_BYTES = 300 << 20


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What every reader did with every file, by kind and case; code runs in the folder."""
    folder = tmp_path_factory.mktemp("hostile")
    done = succeeded(script_command(READ, folder), cwd=folder)
    assert not list(folder.iterdir()), "code in a file was run"
    found = {}
    for one in map(json.loads, done.stdout.splitlines()):
        found.setdefault((one["kind"], one["case"]), []).append(one)
    return found


@pytest.mark.parametrize(
    ("kind", "case", "words"),
    [pytest.param(kind, case, words, id=f"{kind}-{case}") for kind, case, (_, words) in CASES],
)
def test_a_hostile_file_is_one_line_and_takes_little_memory(outcomes, kind, case, words):
    for one in outcomes[kind, case]:
        assert one["bytes"] < MOST_BYTES, one
        assert one["seconds"] < 2, one
        if one["error"] == "None":
            assert words is None, one  # only a flipped value can load
            continue
        assert {"ValueError", "OSError"} & set(one["types"]), one
        assert one["error"].isprintable(), one
        assert f"{case}.pth" in one["error"], one
        # The command names itself, and a LoRA of another model lists its modules.
        assert len(one["error"]) <= (700 if "nothing in " in one["error"] else 200), one
        if words is not None:
            assert re.search(words, one["error"]), one


def test_the_code_in_the_files_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert b"touch canary" in CHECKPOINTS["system zip"][0]
    pickle.loads(program(STATES["system"][0]))
    assert (tmp_path / CANARY).exists()
