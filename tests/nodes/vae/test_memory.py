"""Stop, progress, and memory that runs out in an encode or decode of the fast VAE."""

import contextlib
import itertools
import logging

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import (
    clip,
    latents,
    node,
    out_of_memory,
    relative_error,
    stopped_at,
)
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory
from fast_video_vae.vae import StreamOptions

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_an_interrupt_ends_the_work_at_the_next_block(family, encode):
    fast = family.fast
    network = fast.first_stage_model.encoder if encode else fast.first_stage_model.decoder
    (*_, last), reached = network.layers(), []
    handle = last.register_forward_hook(lambda *_: reached.append(1))
    with stopped_at(network.get_submodule(family.block)):
        fast.encode(clip(9, 32, 48)) if encode else fast.decode(latents(3, 4, 6))
    handle.remove()
    assert not reached
    assert fast.decode(latents(1)).shape[1] == 1


def test_progress_counts_every_frame(fast, progress):
    fast.decode(latents(4, batch=2), options=StreamOptions(1))
    assert progress == [(done, 26) for done in (1, 5, 9, 13, 14, 18, 22, 26)]
    fast.encode(clip(9))
    assert progress[-1] == (3, 3)


def test_a_preview_of_the_last_frame_is_sent_if_previews_are_enabled(fast, monkeypatch):
    import comfy.utils
    from comfy.cli_args import LatentPreviewMethod, args

    previews = []
    hook = lambda value, total, preview, node_id=None: previews.append(preview)  # noqa: E731
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    monkeypatch.setattr("fast_video_vae.nodes.host.progress._PREVIEW_SECONDS", 0)
    fast.decode(latents(2))
    assert not any(previews)
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    images = fast.decode(latents(2))
    kind, picture, _ = previews[-1]
    assert (kind, picture.size) == ("JPEG", (72, 48))
    shown = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(48, 72, 3)
    assert (shown - images[0, -1] * 255).abs().max() <= 1.01


@pytest.mark.parametrize("tiled", [False, True])
def test_a_decode_out_of_memory_continues_from_the_same_frame(fast, monkeypatch, caplog, tiled):
    import comfy.model_management as management

    kind, latent = type(fast.first_stage_model), latents(4, 24, 24)
    expected = fast.decode(latent)
    real, tries = kind.decode_stream, []

    def failing(self, given, options, *, frames=None, **others):
        begins = 0 if frames is None else frames.start
        tries.append((begins, options.tile))
        stream = real(self, given, options, frames=frames, **others)
        for count, piece in enumerate(stream):
            yield piece
            if len(tries) < most and count == 0:
                raise management.OOM_EXCEPTION("no memory")

    monkeypatch.setattr(kind, "decode_stream", failing)
    monkeypatch.setattr(fast.first_stage_model, "chunk", 1)
    most = 3 if tiled else 4
    with caplog.at_level(logging.WARNING):
        options = {"tile_x": 20, "tile_y": 18, "overlap": 4}
        images = fast.decode_tiled(latent, **options) if tiled else fast.decode(latent)
    assert relative_error(images, expected) <= 1e-5
    assert images.is_contiguous()
    begins, tiles = zip(*tries, strict=True)
    assert list(begins) == sorted(set(begins))  # nothing twice
    assert len(begins) == most
    own = (144, 160) if tiled else None
    later = [(128, 128)] if tiled else [(512, 512), (256, 256)]
    assert list(tiles) == [own, own, *later][:most] or tiled
    assert sum("memory ran out" in record.message for record in caplog.records) == 1


def test_the_first_error_is_raised_if_no_way_fits_and_others_at_once(fast, monkeypatch):
    latent, kind = latents(2), type(fast.first_stage_model)
    expected = fast.decode(latent)
    first = r"^memory ran out in a decode.*\(no memory, try 0\)"
    with monkeypatch.context() as patch:
        calls = out_of_memory(patch, fast, "decode_stream", 99)
        with pytest.raises(torch.OutOfMemoryError, match=first):
            fast.decode(latent)
    assert len(calls) > 3
    assert torch.equal(fast.decode(latent), expected)
    calls.clear()

    def broken(self, *arguments, **options):
        calls.append(1)
        raise RuntimeError("something else")

    monkeypatch.setattr(kind, "decode_stream", broken)
    with pytest.raises(RuntimeError, match="something else"):
        fast.decode(latent)
    assert len(calls) == 1


def test_an_encode_out_of_memory_is_retried_in_tiles_with_all_models_unloaded(fast, monkeypatch):
    import comfy.model_management as management

    pixels, unloads, unload = clip(9, 96, 128), [], management.unload_all_models
    expected = fast.encode(pixels)
    calls = out_of_memory(monkeypatch, fast, "encode_stream", 3)
    noted = lambda: unloads.append(len(calls)) or unload()  # noqa: E731
    monkeypatch.setattr(management, "unload_all_models", noted)
    assert relative_error(fast.encode(pixels), expected) <= 1e-5
    assert [options.tile for options in calls] == [None, None, (512, 512), (256, 256)]
    assert unloads == [1, 2, 3]


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_tiled_nodes_request_the_memory_of_a_tile(fast, monkeypatch, encode):
    import comfy.model_management as management

    asked = []

    def load(models, memory_required=0, **options):
        asked.append(memory_required)
        raise InterruptedError

    monkeypatch.setattr(management, "load_models_gpu", load)
    # The request for a GPU; on a CPU the tails of tiles are not moved.
    monkeypatch.setattr(fast, "device", torch.device("cuda"))
    monkeypatch.setattr(management, "cuda_device_context", lambda _: contextlib.nullcontext())
    name, given = "VAEDecodeTiled", {"samples": {"samples": latents(2, 90, 160)}}
    if encode:
        name, given = "VAEEncodeTiled", {"pixels": clip(5, 720, 1280)}
    for tile in (1024, 512, 256):
        with pytest.raises(InterruptedError):
            node(name, vae=fast, tile_size=tile, overlap=64, **given)
    whole = fast.memory_used_encode if encode else fast.memory_used_decode
    shape = (1, 3, 5, 720, 1280) if encode else (1, 16, 2, 90, 160)
    asked.insert(0, whole(torch.Size(shape), torch.float32))
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < asked[0] / 2


def test_weights_left_on_the_host_are_loaded(fast, monkeypatch):
    import comfy.model_management as management

    brought, kind = [], type(fast.first_stage_model)
    expected = fast.decode(latents(1))
    monkeypatch.setattr(management, "load_models_gpu", lambda *a, **k: None)  # as with --novram
    at_home = lambda self: torch.device("cpu" if brought else "meta")  # noqa: E731
    monkeypatch.setattr(kind, "device", property(at_home, lambda self, value: None))
    monkeypatch.setattr(
        fast.patcher, "partially_load", lambda *a, **k: brought.append((a, k)), raising=True
    )
    assert torch.equal(fast.decode(latents(1)), expected)
    assert brought == [((torch.device("cpu"),), {"extra_memory": 1e32})]


def test_pictures_out_of_memory_are_tiled_too(picture_vae, monkeypatch):
    import comfy.model_management as management

    fast, kind = picture_vae, type(picture_vae.first_stage_model)
    latent = torch.randn(1, 64, 20, 20, generator=torch.Generator().manual_seed(0))
    expected, real = fast.decode(latent), kind.decode_stream

    def full(self, given, options, **others):
        if options.tile is None:
            raise management.OOM_EXCEPTION("no memory")
        return real(self, given, options, **others)

    monkeypatch.setattr(kind, "decode_stream", full)
    assert relative_error(fast.decode_tiled(latent, tile_x=16, tile_y=16), expected) <= 1e-5
    assert relative_error(fast.decode(latent), expected) <= 1e-5


# Nodes of ComfyUI, and what they are given while one allocation after the other fails.
TASKS = {
    "decode": ("VAEDecode", latents(3, 2, 2), ()),
    "pictures": ("VAEDecode", latents(1, 2, 2, batch=2), ()),
    "tiled": ("VAEDecodeTiled", latents(3, 10, 8), (64, 0)),
    "encode": ("VAEEncode", clip(9, 16, 16), ()),
    "tiled encode": ("VAEEncodeTiled", clip(9, 80, 64), (64, 0)),
}


def result(task, vae):
    name, given, options = TASKS[task]
    (got,) = node(name, vae, given if "Encode" in name else {"samples": given}, *options)
    return got["samples"] if isinstance(got, dict) else got


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_a_failed_allocation_gives_the_result_or_one_line(fast, task, in_a_row):
    result(task, fast)
    expected = result(task, fast)
    with FailingMemory() as memory:
        result(task, fast)
    errors = []
    places = range(1, memory.seen + 1, max(1, memory.seen // 8))
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        try:
            with FailingMemory(place, in_a_row, error=error):
                got = result(task, fast)
        except torch.OutOfMemoryError as failure:
            errors.append(failure)
            continue
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max(), place
    assert not errors or in_a_row > 1
    for each in map(str, errors):
        assert each.startswith("memory ran out in ")
        assert "\n" not in each


def test_a_long_decode_logs_short_memory_once(fast, caplog):
    latent = {"samples": latents(12, 2, 2)}
    (expected,) = node("VAEDecode", fast, latent)
    with FailingMemory() as memory:
        node("VAEDecode", fast, latent)
    often = FailingMemory(every=memory.seen // 24)
    with caplog.at_level(logging.INFO), often:
        (got,) = node("VAEDecode", fast, latent)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert often.failed > 12
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
