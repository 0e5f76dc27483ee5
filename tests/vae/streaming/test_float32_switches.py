"""The switches of PyTorch that reduce float32: off in the block, then as they were.

The switches are those of this PyTorch, for CUDA and for oneDNN; they exist without a GPU.
"""

import itertools

import pytest
import torch

from fast_video_vae.vae.streaming.precision import full_float32

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BACKENDS = torch.backends
NEW = hasattr(BACKENDS.cudnn, "conv")  # torch >= 2.9


def older(owner, value):
    return lambda: setattr(owner, "allow_tf32", value)


def newer(value, *owners):
    def change():
        for owner in owners:
            owner.fp32_precision = value

    return change


def products(value):
    return lambda: torch.set_float32_matmul_precision(value)


# What users and other nodes set before.
SETTINGS = {
    "cudnn.allow_tf32 = True": older(BACKENDS.cudnn, True),
    "cudnn.allow_tf32 = False": older(BACKENDS.cudnn, False),
    "matmul.allow_tf32 = True": older(BACKENDS.cuda.matmul, True),
    "matmul.allow_tf32 = False": older(BACKENDS.cuda.matmul, False),
    "high": products("high"),
    "medium": products("medium"),
}
if NEW:
    by_op = BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cuda.matmul
    onednn = BACKENDS.mkldnn.conv, BACKENDS.mkldnn.matmul
    SETTINGS |= {
        "by operation, tf32": newer("tf32", *by_op),
        "by operation, ieee": newer("ieee", *by_op),
        "conv.fp32_precision = ieee": newer("ieee", BACKENDS.cudnn.conv),
        "matmul.fp32_precision = tf32": newer("tf32", BACKENDS.cuda.matmul),
        "cudnn.fp32_precision = tf32": newer("tf32", BACKENDS.cudnn),
        "backends.fp32_precision = tf32": newer("tf32", BACKENDS),
        "backends.fp32_precision = ieee": newer("ieee", BACKENDS),
        "oneDNN, bf16": newer("bf16", *onednn),
    }
SEQUENCES = [
    (),
    *itertools.chain.from_iterable(itertools.permutations(SETTINGS, n) for n in (1, 2)),
]


def reset():
    """Set the values of a new process."""
    if NEW:
        newer("none", BACKENDS, BACKENDS.cudnn, *by_op, *onednn)()
    products("highest")()
    older(BACKENDS.cudnn, True)()
    if NEW:
        newer("none", BACKENDS.cuda.matmul, *onednn)()


@pytest.fixture(autouse=True)
def switches():
    reset()
    yield
    reset()


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
    found = {}
    for name, reader in readers.items():
        try:
            found[name] = reader()
        except RuntimeError:
            found[name] = "an error"
    return found


def later(names, device=None):
    """Set `names`, enter and leave the block for `device`, and return what other code sees then.

    Some switches inherit from others, so a later change of those shows which value a switch has
    itself.
    """
    reset()
    for name in names:
        SETTINGS[name]()
    if device is not None:
        with full_float32(device):
            pass
    seen = [read()]
    for value in ("tf32", "ieee", "none") if NEW else ():
        for owner in (BACKENDS, BACKENDS.cudnn):
            owner.fp32_precision = value
            seen.append(read())
    return seen


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_float32_is_full_and_all_switches_can_be_read_in_the_block(device):
    for names in SEQUENCES:
        reset()
        for name in names:
            SETTINGS[name]()
        before = read()
        with full_float32(device):
            during = read()
        if NEW:
            assert set(during[device]) <= {"ieee", "none"}, names
        elif device == CUDA:
            assert not during["cudnn"], names
            assert not during["matmul"], names
        for name, value in during.items():
            assert value != "an error" or before[name] == "an error", (names, name)


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_all_switches_are_restored(device):
    for names in SEQUENCES:
        assert later(names, device) == later(names), names


@pytest.mark.parametrize("first", [CUDA, CPU], ids=str)
def test_blocks_of_two_devices_can_end_in_any_order(first):
    other = CPU if first == CUDA else CUDA
    for name in SETTINGS:
        reset()
        SETTINGS[name]()
        before = read()
        for ends in ((first, other), (other, first)):
            blocks = {device: full_float32(device) for device in (first, other)}
            for block in blocks.values():
                block.__enter__()
            for device in ends:
                for used in (CUDA, CPU) if NEW else ():
                    assert set(read()[used]) <= {"ieee", "none"}, name
                blocks[device].__exit__(None, None, None)
            assert read() == before, name
