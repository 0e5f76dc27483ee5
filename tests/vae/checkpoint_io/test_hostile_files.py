"""Files that deserve no trust load, or are refused in one line; none costs or runs."""

import pickle

import pytest

from fast_video_vae.tests.hostile_files import archive, call, measure, name, program, text

# Of a message.
LINE = 300


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    found = measure(folder)
    assert not list(folder.iterdir()), "code in a file was run"
    return found


def check(outcomes):
    for each in outcomes:
        if each["kind"] is None:
            continue
        message = each["error"]
        assert not each["kind"].startswith("other"), each
        assert message.isprintable(), each
        assert each["name"] in message, each
        # The names of a LoRA's modules say which model it is for, and may take more room.
        assert len(message) <= (700 if message.startswith("nothing in ") else LINE), each
    assert max(each["bytes"] - each["size"] for each in outcomes) < 300 << 20
    assert max(each["seconds"] for each in outcomes) < 2


def test_every_outcome_is_a_load_or_one_line_with_the_name_and_takes_little(outcomes):
    assert len({each["name"] for each in outcomes}) >= 400
    check(outcomes)


def test_each_kind_is_refused_and_only_what_is_whole_loads(outcomes):
    loads = {each["name"].split()[0] for each in outcomes if each["kind"] is None}
    refused = {each["name"].split()[0] for each in outcomes if each["kind"]}
    # Numbers that flipped, fields of an archive that mean nothing, and names of another kind.
    assert loads <= {"archives", "cut", "flipped", "mistaken"}
    assert refused == {
        "archives", "cut", "flipped", "headers", "layouts", "mistaken", "noisy", "pickles",
        "tensors",
    }  # fmt: skip


def test_the_code_in_the_files_would_run(tmp_path):
    """What the tests above rely on: another reader does what the pickles say."""
    canary = tmp_path / "canary"
    data = program(call(name("builtins", "eval"), text(f"open({str(canary)!r}, 'w').close()")))
    assert archive(data)
    pickle.loads(data)
    assert canary.exists()


@pytest.mark.slow
def test_noise_is_refused_in_one_line(tmp_path):
    outcomes = measure(tmp_path, 2000)
    assert len(outcomes) >= 2000
    check(outcomes)
