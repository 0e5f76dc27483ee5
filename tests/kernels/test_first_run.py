"""The trials and compilations of a first decode and encode, counted at the published widths."""

import dataclasses

import pytest

pytest.importorskip("triton", reason="the launches need triton")

from fast_video_vae.tests.kernels.first_run import Process, Run, meta_vae

DECODE = Run(17, 480, 832)
ENCODE = dataclasses.replace(DECODE, encode=True)

# Most trials and most compiled variants of kernels. A variant takes about a second to compile.
MOST = {
    ("wan2.1", DECODE): (14, 14),
    ("wan2.1", ENCODE): (9, 9),
    ("wan2.2", DECODE): (14, 14),
    ("wan2.2", ENCODE): (13, 13),
    ("seedvr2", DECODE): (14, 20),  # a group norm is three kernels
    ("seedvr2", ENCODE): (9, 15),
}

# Most binaries of the CUDA backend. A source has all kernels of an op, for any number of channels.
MOST_BINARIES = {
    ("wan2.1", DECODE): 7,
    ("wan2.1", ENCODE): 3,
    ("wan2.2", DECODE): 8,
    ("wan2.2", ENCODE): 6,
    ("seedvr2", DECODE): 6,
    ("seedvr2", ENCODE): 3,
}


@pytest.mark.parametrize(
    ("family", "run"),
    [
        pytest.param(*case, marks=() if case == ("wan2.1", DECODE) else pytest.mark.slow)
        for case in MOST
    ],
    ids=str,
)
def test_a_first_run_tries_and_compiles_only_what_it_needs(family, run):
    process = Process()
    trials, compiled = process.run(meta_vae(family), run)
    most_trials, most_compiled = MOST[family, run]
    assert trials.total() <= most_trials
    assert compiled.total() <= most_compiled
    # A variant that only a trial launches would be compiled for nothing, and what runs unchecked.
    assert process.compiled == process.used


@pytest.mark.parametrize(
    ("family", "run"),
    [
        pytest.param(*case, marks=() if case == ("wan2.1", DECODE) else pytest.mark.slow)
        for case in MOST_BINARIES
    ],
    ids=str,
)
def test_a_first_run_without_triton_compiles_a_few_binaries(family, run):
    process = Process("cuda")
    trials, compiled = process.run(meta_vae(family), run)
    assert trials.total() <= MOST[family, run][0]
    assert compiled.total() <= MOST_BINARIES[family, run]


@pytest.mark.parametrize(
    "family",
    [
        "wan2.1",
        pytest.param("wan2.2", marks=pytest.mark.slow),
        pytest.param("seedvr2", marks=pytest.mark.slow),
    ],
)
def test_trials_without_triton_compile_what_runs_afterwards(family):
    process, vae = Process("cuda"), meta_vae(family)
    for run in (DECODE, ENCODE):
        process.run(vae, run)
    assert process.compiled == process.used


@pytest.mark.parametrize("width", [64, 72, 88, 96])
def test_the_trial_of_attention_runs_the_softmax_of_its_rows(width):
    """A row of scores of 8 x 9 or 7 x 8 latent pixels has packs of 16 bytes, one of 7 x 9 not."""
    for height in (56, 64):
        process = Process("cuda")
        process.run(meta_vae("wan2.1"), Run(5, height, width))
        assert {each for each in process.compiled if each[0] == "softmax"} == {
            each for each in process.used if each[0] == "softmax"
        }


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_other_lengths_and_sizes_need_no_trial_and_no_compilation(backend):
    process, vae = Process(backend), meta_vae("wan2.1")
    process.run(vae, DECODE)
    for run in (Run(33, 480, 832), Run(1, 480, 832), Run(9, 720, 1280)):
        trials, compiled = process.run(vae, run)
        assert not trials, run
        assert not compiled, run
