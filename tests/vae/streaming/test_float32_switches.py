"""The switches of PyTorch that reduce float32: off in the block, then as they were.

The switches are those of this PyTorch, for CUDA and for oneDNN; they exist without a GPU.
"""

import contextlib
import itertools

import pytest
import torch

from fast_video_vae.vae.streaming.precision import full_float32

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BACKENDS = torch.backends
NEW = hasattr(BACKENDS.cudnn, "conv")  # torch >= 2.9


def tf32(owner, value):
    return lambda: setattr(owner, "allow_tf32", value)


def precision(value, *owners):
    return lambda: [setattr(owner, "fp32_precision", value) for owner in owners]


# What users and other nodes set before.
SETTINGS = {
    "cudnn.allow_tf32 = True": tf32(BACKENDS.cudnn, True),
    "cudnn.allow_tf32 = False": tf32(BACKENDS.cudnn, False),
    "matmul.allow_tf32 = True": tf32(BACKENDS.cuda.matmul, True),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}
if NEW:
    by_op = BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cuda.matmul
    onednn = BACKENDS.mkldnn.conv, BACKENDS.mkldnn.matmul
    SETTINGS |= {
        "by operation, tf32": precision("tf32", *by_op),
        "conv.fp32_precision = ieee": precision("ieee", BACKENDS.cudnn.conv),
        "matmul.fp32_precision = tf32": precision("tf32", BACKENDS.cuda.matmul),
        "cudnn.fp32_precision = tf32": precision("tf32", BACKENDS.cudnn),
        "backends.fp32_precision = tf32": precision("tf32", BACKENDS),
        "oneDNN, bf16": precision("bf16", *onednn),
    }
SEQUENCES = [
    (),
    *itertools.chain.from_iterable(itertools.permutations(SETTINGS, n) for n in (1, 2)),
]


@pytest.fixture(autouse=True)
def switches():
    reset()
    yield
    reset()


def reset():
    """Set the values of a new process."""
    if NEW:
        precision("none", BACKENDS, BACKENDS.cudnn, *by_op, *onednn)()
    torch.set_float32_matmul_precision("highest")
    tf32(BACKENDS.cudnn, True)()
    if NEW:
        precision("none", BACKENDS.cuda.matmul, *onednn)()


def read():
    """Return the value of every switch; "an error" where it cannot be read."""
    readers = {
        "cudnn": lambda: BACKENDS.cudnn.allow_tf32,
        "matmul": lambda: BACKENDS.cuda.matmul.allow_tf32,
        "products": torch.get_float32_matmul_precision,
    }
    if NEW:
        owners = {"all": (BACKENDS, BACKENDS.cudnn), CUDA: by_op, CPU: onednn}
        for name, group in owners.items():
            readers[name] = lambda group=group: [owner.fp32_precision for owner in group]
    found = dict.fromkeys(readers, "an error")
    for name, reader in readers.items():
        with contextlib.suppress(RuntimeError):
            found[name] = reader()
    return found


def later(names, device=None):
    """Set `names`, enter and leave the block for `device`, and return what other code sees then."""
    reset()
    for name in names:
        SETTINGS[name]()
    if device is not None:
        with full_float32(device):
            pass
    seen = [read()]
    # A later change of those from which others inherit shows which value a switch has itself.
    for value in ("tf32", "ieee", "none") if NEW else ():
        for owner in (BACKENDS, BACKENDS.cudnn):
            owner.fp32_precision = value
            seen.append(read())
    return seen


def is_full(seen, device):
    """Whether float32 is full in a block for the device."""
    if NEW:
        return set(seen[device]) <= {"ieee", "none"}
    return device == CPU or not (seen["cudnn"] or seen["matmul"])


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_float32_is_full_in_the_block_and_all_switches_are_restored(device):
    for names in SEQUENCES:
        reset()
        for name in names:
            SETTINGS[name]()
        before = read()
        with full_float32(device):
            during = read()
        assert is_full(during, device), names
        for name, value in during.items():
            assert value != "an error" or before[name] == "an error", (names, name)
        assert later(names, device) == later(names), names


@pytest.mark.parametrize("first", [CUDA, CPU], ids=str)
def test_blocks_of_two_devices_can_end_in_any_order(first):
    both = (first, CPU if first == CUDA else CUDA)
    for name in SETTINGS:
        reset()
        SETTINGS[name]()
        before = read()
        for ends in (both, both[::-1]):
            blocks = {device: full_float32(device) for device in both}
            for block in blocks.values():
                block.__enter__()
            for device in ends:
                assert all(is_full(read(), each) for each in both), name
                blocks[device].__exit__(None, None, None)
            assert read() == before, name
