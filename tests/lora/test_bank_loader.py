"""Where the tensors of a bank are when a layer needs them, and what is copied from the host."""

from collections import Counter
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.lora.offload import BankLoader
from fast_video_vae.tests.lora.models import PREFIX
from fast_video_vae.tests.lora.nets import (
    WIDTH,
    Casting,
    Model,
    session_of,
    video,
)

BLOCKS = 50


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def adapters(tmp_path):
    """Return a model and a bank with 200 differences of biases, and 50 adapters and modulations."""
    model = Model(Casting, blocks=BLOCKS)
    tensors = {}
    for number in range(BLOCKS):
        block = f"{PREFIX}blocks.{number}"
        for name in ("self_attn.q", "self_attn.o", "ffn.0", "ffn.2"):
            tensors[f"{block}.{name}.diff_b"] = normal(24 if name == "ffn.0" else WIDTH)
        tensors[f"{block}.self_attn.q.lokr_w1"] = 0.3 * normal(4, 4)
        tensors[f"{block}.self_attn.q.lokr_w2"] = 0.3 * normal(4, 4).half()
        tensors[f"{block}.diff_m"] = normal(1, 6, WIDTH)
    path = tmp_path / "adapters.safetensors"
    save_file(tensors, path)
    return model, load_bank([path], Targets(model.shapes())), tensors


class HostCopies(TorchDispatchMode):
    """Counts the operations that read the host's memory for a result on another device."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.device.type != "cpu":
            for each in given:
                if each.device.type == "cpu" and each.ndim:
                    self.bytes[str(function)] += each.nbytes
        return result


@pytest.mark.parametrize("mode", ["stream", "bypass"])
def test_nothing_is_copied_from_the_host_after_the_first_call(adapters, mode):
    """Once the bank is on the device, as ComfyUI loads it; the device here has no values."""
    model, bank, _ = adapters
    device, x = torch.device("meta"), video().to("meta")
    model.to(device)
    bank.to(device)
    session = session_of(bank, [0.5], mode)
    with torch.no_grad(), session.call(model, device):
        model(x)
    with HostCopies() as copies, torch.no_grad():
        for _ in range(3):
            with session.call(model, device):
                model(x)
    assert not copies.bytes
    assert session.counts.formula == 4 * 2 * BLOCKS


def test_a_bank_counts_and_moves_all_of_its_tensors(adapters):
    _, bank, tensors = adapters
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held <= bank.nbytes <= held + 16 * len(tensors)
    assert bank.nbytes == sum(value.nbytes for value in bank.state_dict().values())
    found = dict(bank.copy().named_parameters())
    assert {name: value.data_ptr() for name, value in found.items()} == {
        name: value.data_ptr() for name, value in bank.named_parameters()
    }


def test_a_buffer_is_kept_until_its_copy_is_done(adapters, monkeypatch):
    """The allocator knows of each copy, so a run that ends early frees nothing too soon."""
    _, bank, _ = adapters
    copied, recorded, stream = [], [], mock.MagicMock()
    new_empty, copy = torch.Tensor.new_empty, torch.Tensor.copy_

    def copy_(target, source, *, non_blocking=False):
        if non_blocking:
            copied.append(target.data_ptr())
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda tensor, n, **_: new_empty(tensor, n))
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, _: recorded.append(tensor.data_ptr())
    )
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    loader = BankLoader(bank, torch.device("cuda", 0))
    for layer in bank.layers.values():
        loader.adapters(layer)
    assert len(copied) == BLOCKS + 1
    assert recorded == copied
