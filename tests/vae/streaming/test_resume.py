"""A failure: the video goes on with its next frame under another setting, and one line is logged.

`test_any_way.py` lets any allocation of any stream fail.
"""

import contextlib
import gc
import logging
import weakref
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.kernels import is_out_of_memory
from fast_video_vae.tests.vae.families import (
    STATES,
    VIDEO,
    close,
    joined,
    latent_for,
    overwritten,
    random_frames,
)
from fast_video_vae.tests.vae.streaming.failing_memory import FailingMemory
from fast_video_vae.vae import Rereadable, StreamOptions, VideoVAE, load_vae
from fast_video_vae.vae.cli.main import main
from fast_video_vae.vae.media import save_latent
from fast_video_vae.vae.models.receptive_field import frames_before, latents_before
from fast_video_vae.vae.streaming.source import Source

STEP = StreamOptions(1)


@pytest.fixture(scope="module")
def vaes():
    return {name: load_vae(STATES[name](), dtype=torch.float32) for name in VIDEO}


@pytest.fixture
def wan(vaes):
    return vaes["wan2.1"]


class Fault:
    """Calls of a layer raise, by number; counts the frames that reach the first one."""

    def __init__(self, network, at, error=None, layer=4):
        self.calls, self.frames, self.at = 0, 0, at
        self.error = error or torch.OutOfMemoryError("no memory")
        layers = network.layers()
        self.handles = [
            layers[0].register_forward_pre_hook(self._counts),
            layers[layer].register_forward_pre_hook(self._fails),
        ]

    def _counts(self, layer, inputs):
        self.frames += inputs[0].shape[2]

    def _fails(self, layer, inputs):
        self.calls += 1
        if self.calls in self.at:
            raise self.error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def task_of(vae, decode, latents, side=2):
    """The stream of a task, its network, and a video for it."""
    side *= vae.config.spatial_compression
    if decode:
        return vae.decode_stream, vae.decoder, latent_for(vae, latents, side, side)
    video = random_frames(1, 3, vae.config.frames(latents), side, side)
    return vae.encode_stream, vae.encoder, video


def given_as(kind, video):
    """The video as a tensor, or in pieces that do not begin with a latent."""
    pieces = video.split(3, dim=2)
    return {
        "tensor": video,
        "list": list(pieces),
        "file": Rereadable(lambda: (piece.clone() for piece in pieces)),
        "iterator": overwritten(pieces),
    }[kind]


@pytest.mark.parametrize(
    ("family", "decode", "given", "at", "layer"),
    [
        ("wan2.1", True, "tensor", 1, 0),
        ("wan2.2", False, "list", 5, 6),
        ("seedvr2", True, "file", 5, 0),
        ("wan2.1", False, "iterator", 5, 6),
    ],
)
def test_a_step_that_fails_is_repeated_from_the_next_frame(
    vaes, family, decode, given, at, layer, caplog
):
    vae = vaes[family]
    stream, network, video = task_of(vae, decode, 9)
    expected = joined(stream(video, STEP))
    with caplog.at_level(logging.DEBUG), Fault(network, (at,), layer=layer) as fault:
        pieces = list(stream(given_as(given, video), STEP))
    assert fault.calls > at
    close(torch.cat(pieces, dim=2), expected)
    (line,) = [each.getMessage() for each in caplog.records if "memory" in each.getMessage()]
    assert "memory ran out in " in line
    assert " at frame " in line
    assert "\n" not in line


@pytest.mark.parametrize("decode", [True, False])
def test_a_failure_costs_the_receptive_field_and_the_step(wan, decode):
    stream, network, video = task_of(wan, decode, 45, side=1)
    expected = joined(stream(video, STEP))
    reach = latents_before(network) if decode else frames_before(network.layers())
    assert reach == (38 if decode else 112)
    with Fault(network, (43,)) as fault:
        close(joined(stream(given_as("iterator", video), STEP)), expected)
    assert 0 < fault.frames - video.shape[2] <= reach + (1 if decode else 4)
    if decode:  # a part of the video
        with Fault(network, (43,)) as fault:
            close(joined(stream(video, STEP, frames=range(150, 177))), expected[:, :, 150:])
        assert fault.frames <= 45 + reach + 1


def test_failures_that_follow_each_other_lead_to_smaller_plans(wan, caplog):
    stream, network, latent = task_of(wan, True, 3, side=24)
    expected = joined(stream(latent))
    with caplog.at_level(logging.DEBUG), Fault(network, (1, 2, 3), layer=0):
        pieces = list(stream(latent))
    close(torch.cat(pieces, dim=2), expected)
    lines = [each for each in caplog.records if "memory" in each.getMessage()]
    assert [each.levelno for each in lines] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    sizes = [int(line.getMessage().split("about ")[1].split()[0]) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]


def test_a_setting_that_delivers_is_tried_again(wan, caplog):
    """Another program takes the memory from time to time: a long video goes on nevertheless."""
    stream, network, latent = task_of(wan, True, 13)
    expected = joined(stream(latent, STEP))
    with caplog.at_level(logging.INFO), Fault(network, (3, 9, 17, 27)) as fault:
        close(joined(stream(latent, STEP)), expected)
    assert fault.calls > 27
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_what_a_failed_run_held_is_free_before_the_next_one_begins(wan):
    stream, network, latent = task_of(wan, True, 5)
    held, alive, asked = [], [], []

    def release(device):
        asked.append(device)
        alive.extend(each for each in held if each() is not None)

    gc.disable()
    try:
        handle = network.layers()[2].register_forward_hook(
            lambda layer, inputs, result: held.append(weakref.ref(result))
        )
        with Fault(network, (3,)):
            joined(stream(latent, StreamOptions(1, release=release)))
        handle.remove()
    finally:
        gc.enable()
    assert held
    assert not alive
    assert asked == [wan.device]  # first of all the caller frees memory


@pytest.mark.parametrize(("decode", "place"), [(True, "layer"), (False, "piece")])
def test_what_a_video_held_is_free_when_its_error_is_dropped(wan, decode, place):
    """Not at the next garbage collection."""
    stream, network, video = task_of(wan, decode, 5)
    pieces, held = list(video.split(3, dim=2)), []

    def hook(layer, inputs, result):
        held.append(weakref.ref(inputs[1]))  # the cache
        if place == "layer" and len(held) == 3:
            raise KeyError("a fault")

    if place == "piece":
        pieces[1] = pieces[1][..., :-1]
    gc.disable()
    handle = network.layers()[0].register_forward_hook(hook)
    try:
        with contextlib.suppress(KeyError, ValueError):
            joined(stream(pieces, STEP))
        assert held
        assert not [each for each in held if each() is not None]
    finally:
        handle.remove()
        gc.enable()


def test_another_error_is_raised_at_once(wan):
    stream, network, latent = task_of(wan, True, 5)
    with Fault(network, (2,), RuntimeError("a fault")) as fault:
        with pytest.raises(RuntimeError, match="a fault"):
            joined(stream(latent, STEP))
        assert fault.calls == 2


def test_an_error_of_an_iterator_ends_the_video(wan):
    """It cannot be asked for the same piece again."""
    _, _, latent = task_of(wan, True, 3)

    def pieces():
        yield latent[:, :, :2]
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory") as caught:
        joined(wan.decode_stream(pieces(), STEP))
    assert "\n" not in str(caught.value)


def test_an_iterator_keeps_what_later_results_need():
    """Their number does not grow with the video."""
    pieces = torch.arange(12.0).view(1, 1, 12, 1, 1).split(4, dim=2)
    source = Source(overwritten(pieces), lambda piece, at=0: None)
    stream = source.read(0)
    assert [next(stream).shape[2] for _ in range(2)] == [4, 4]
    source.release(4)
    assert [each.flatten().tolist() for each in source._kept] == [[4, 5, 6, 7]]
    assert joined(source.read(5)).flatten().tolist() == list(range(5, 12))


def test_out_of_memory_errors_are_recognised():
    short = [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("MPS backend out of memory. Tried to allocate 1.00 GiB"),
    ]
    others = [RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory")]
    assert [*map(is_out_of_memory, short + others)] == [True] * 5 + [False] * 2


def test_memory_that_stays_short_raises_one_line(wan, caplog):
    latent = torch.randn(1, wan.config.latent_channels, 3, 2, 2)
    message = r"^memory ran out in a decode \([^\n]+\); use smaller tiles, frames or chunks$"
    failing = pytest.raises(torch.OutOfMemoryError, match=message)
    with caplog.at_level(logging.INFO), failing, FailingMemory(1, 1 << 40, error="linux"):
        list(wan.decode_stream(latent, STEP))
    assert len(caplog.records) <= 1


def test_the_command_line_ends_with_one_line(tmp_path, capsys, monkeypatch):
    latents, path, out = (tmp_path / name for name in ("l.safetensors", "v.safetensors", "x.mkv"))
    save_latent(latents, torch.randn(1, 16, 2, 2, 2), family="wan2.1", fps=Fraction(16), frames=5)
    save_file(STATES["wan2.1"](), path)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no\nmemory")

    monkeypatch.setattr(VideoVAE, "decode_stream", fails)
    command = ["decode", str(latents), "--vae", str(path), "-o", str(out), "--quiet"]
    assert main(command) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("fast-video-vae: error: memory ran out in ")
    assert printed.count("\n") == 1
    assert {each.name for each in tmp_path.iterdir()} == {latents.name, path.name}
