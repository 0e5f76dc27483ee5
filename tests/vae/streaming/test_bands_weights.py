"""Copies of the weights on other devices: made once, equal to the weights, and freed with them."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import latent_for, random_frames
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.layers.causal_conv import CausalConv3d
from fast_video_vae.vae.streaming.bands.team import Team

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # another device for PyTorch


@pytest.fixture
def vae():
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    vae.team = Team(vae.replicas, [CPU, OTHER])
    return vae


@pytest.fixture
def latent(vae):
    return latent_for(vae, 1, 16, 64)


def alone(vae, latent):
    """The frames from the weights themselves."""
    return load_vae(vae.state_dict(), dtype=torch.float32).decode(latent)


def test_copies_are_made_once_for_each_network(vae, latent):
    before, names = vae.weight_bytes(), list(vae.state_dict())
    frames, expected = random_frames(1, 3, 5, 32, 96), alone(vae, latent)
    for _ in range(2):
        assert torch.equal(vae.decode(latent), expected)
        vae.encode(frames)
    assert vae.replicas.made == 2
    parameters = sum(each.nbytes for net in (vae.encoder, vae.decoder) for each in net.parameters())
    assert vae.weight_bytes() - before >= parameters
    assert list(vae.state_dict()) == names
    vae.devices = ["cpu"] * 3  # the same device, and no other one
    assert not vae.replicas.nbytes()
    vae.decode(latent)
    assert vae.replicas.made == 2


def test_copies_follow_a_write_to_the_weights(vae, latent):
    """As LoRA patches write them."""
    vae.decode(latent)
    *_, conv = (module for module in vae.decoder.modules() if isinstance(module, CausalConv3d))
    conv.weight = nn.Parameter(conv.weight * 2, requires_grad=False)
    assert torch.equal(vae.decode(latent), alone(vae, latent))
    conv.weight.data.copy_(conv.weight.data * 2)  # which PyTorch does not count
    assert torch.equal(vae.decode(latent), alone(vae, latent))
    assert vae.replicas.made == 1


@pytest.mark.parametrize(
    "free",
    [
        lambda vae: vae.drop_derived(),
        lambda vae: nn.Sequential(vae).to(torch.float64),  # part of a model that is unloaded
    ],
)
def test_copies_are_freed_with_the_weights(vae, latent, free):
    vae.decode(latent)
    assert vae.replicas.nbytes()
    free(vae)
    assert not vae.replicas.nbytes()


@pytest.mark.parametrize(
    ("devices", "kept"),
    [([CPU, OTHER], False), ([CPU, OTHER, OTHER], True)],  # the third one uses the copy too
)
def test_copies_leave_a_device_that_fails(vae, latent, devices, kept):
    vae.team = Team(vae.replicas, devices)
    vae.decode(latent)
    vae.team.fail(1)
    assert bool(vae.replicas.nbytes()) == kept
    assert torch.equal(vae.decode(latent), alone(vae, latent))


def test_copied_and_pickled_vaes_have_no_copies(vae, latent):
    expected = vae.decode(latent)
    buffer = io.BytesIO()
    pickle.dump(vae, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(vae), pickle.load(buffer)):
        assert other.team.replicas is other.replicas
        assert not other.replicas.nbytes()
        assert other.devices == []
        other.devices = ["cpu", "cpu"]
        assert torch.equal(other.decode(latent), expected)
    assert vae.devices == [CPU, OTHER]


def test_threads_that_share_a_vae_share_the_copies(vae, latent):
    expected, results = alone(vae, latent), []
    videos = [threading.Thread(target=lambda: results.append(vae.decode(latent))) for _ in range(3)]
    for video in videos:
        video.start()
    for video in videos:
        video.join()
    assert vae.replicas.made == 1
    assert len(results) == 3
    assert all(torch.equal(each, expected) for each in results)


def test_weights_elsewhere_are_used_alone(vae, latent, caplog, monkeypatch):
    monkeypatch.setattr(errors, "_logged", set())
    vae.team = Team(vae.replicas, [torch.device("cuda", 0), torch.device("cuda", 1)])
    assert torch.equal(vae.decode(latent), alone(vae, latent))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the weights are on cpu" in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
@pytest.mark.parametrize("names", [["cuda:0", "cpu"], ["cuda:0"] * 3])
def test_a_gpu_shares_a_video(names):
    vae = load_vae(random_state_dict(16), dtype=torch.float32, device="cuda:0")
    latent, frames = latent_for(vae, 4, 128, 192).cuda(), random_frames(1, 3, 13, 128, 192)
    decoded, encoded = vae.decode(latent), vae.encode(frames)
    vae.devices = names
    torch.testing.assert_close(vae.decode(latent), decoded, rtol=0, atol=1e-3)
    torch.testing.assert_close(vae.encode(frames), encoded, rtol=0, atol=1e-3)
