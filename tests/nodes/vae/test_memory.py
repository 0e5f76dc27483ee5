"""Stop, progress, and memory that runs out in every node that encodes or decodes."""

import contextlib
import itertools
import logging
import re

import pytest
import torch

from fast_video_vae.tests.nodes.vae.pairs import (
    accelerated,
    clip,
    latents,
    node,
    relative_error,
    small_latents,
    stopped_at,
    video,
    wrapped,
)
from fast_video_vae.tests.nodes.video.clips import decode, encode, frames_of, from_file, held, image
from fast_video_vae.tests.vae.streaming.failing_memory import ERRORS, FailingMemory
from fast_video_vae.vae import CLIP_PATH, StreamOptions

CPU = torch.device("cpu")

pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

LATENT, CLIP = latents(3, 2, 2), clip(9, 16, 16)
WIDE, VIDEO = {"samples": latents(3, 10, 8)}, video(9, 16, 16)
SMALL = {"width": 16, "height": 16, "max_frames": 9}


# What users run with a VAE. No tensor is made here: its allocation could fail.
RUNS = {
    "decode": lambda vae: image(vae, LATENT),
    "tiled decode": lambda vae: node("VAEDecodeTiled", vae, WIDE, 64, 0)[0],
    "encode": lambda vae: node("VAEEncode", vae, CLIP)[0]["samples"],
    "corrected encode": lambda vae: vae.encode(CLIP, corrections=2),
    "decode to a file": lambda vae: decode(vae, LATENT, codec="ffv1", bit_depth="8", chunk=1),
    "encode of a file": lambda vae: encode(vae, from_file(CLIP_PATH), **SMALL)[0],
    "WANVAE.decode": lambda vae: wrapped(vae).decode(LATENT, CPU),
    "WANVAE.encode": lambda vae: wrapped(vae).encode(VIDEO, CPU, pbar=False),
}


def check(result, expected):
    """A frame of a file may differ by a level of its bytes."""
    if isinstance(result, torch.Tensor):
        assert relative_error(result, expected) <= 1e-5
    else:
        assert (frames_of(result).int() - frames_of(expected).int()).abs().max() <= 1


def allocations(run):
    """Count the allocations of a run, the second one: the first one derives weights."""
    run()
    with FailingMemory() as memory:
        run()
    return memory.seen


@pytest.mark.parametrize(
    ("run", "in_a_row"), [*((run, 1) for run in RUNS), ("decode to a file", 10**9)]
)
def test_a_failed_allocation_gives_the_result_or_one_line(fast, output, progress, run, in_a_row):
    expected, count, done = RUNS[run](fast), allocations(lambda: RUNS[run](fast)), 3
    places, lines = range(1, count + 1, max(1, count // 4)), []
    for place, error in zip(places, itertools.cycle(ERRORS), strict=False):
        progress.clear()
        try:
            with FailingMemory(place, in_a_row, error=error):
                result = RUNS[run](fast)
        except torch.OutOfMemoryError as failure:
            lines.append(str(failure))
        else:
            check(result, expected)
            done += 1
            now = [value for value, total in progress if value <= total]
            assert in_a_row > 1 or now == sorted(set(now))  # no stream is repeated
    assert all(line.startswith("memory ran out in ") and line.isprintable() for line in lines)
    assert in_a_row > 1 or not lines
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) == (done if run == "decode to a file" else 0)  # a failure leaves none


@pytest.mark.parametrize(
    ("vae", "run"), [("wan", "decode"), ("wan", "encode of a file"), ("seedvr2", "decode")]
)
def test_a_stop_ends_the_work_at_the_next_block(request, output, vae, run):
    family = request.getfixturevalue(vae)
    model, reached = family.fast.first_stage_model, []
    network = model.encoder if "encode" in run else model.decoder
    expected = RUNS[run](family.fast)
    (*_, last) = network.layers()
    handle = last.register_forward_hook(lambda *_: reached.append(1))
    with stopped_at(network.get_submodule(family.block)):
        RUNS[run](family.fast)
    handle.remove()
    assert not reached
    check(RUNS[run](family.fast), expected)


def test_progress_counts_every_frame(fast, output, progress):
    fast.decode(small_latents(4, batch=2), options=StreamOptions(1))
    assert progress == [(done, 26) for done in (1, 5, 9, 13, 14, 18, 22, 26)]
    progress.clear()
    chunked = accelerated(fast, chunk=2)
    chunked.decode(small_latents(4))
    chunked.decode(small_latents(2), options=StreamOptions(1))  # that of the run is first
    assert progress == [(1, 13), (9, 13), (13, 13), (1, 5), (5, 5)]
    vae, two = wrapped(fast), small_latents(3, batch=2)
    for run, count in (
        (lambda: fast.encode(clip(9, 16, 16)), 3),
        (lambda: decode(fast, small_latents(3), frames="2-7"), 6),
        (lambda: encode(fast, held((clip(9, 16, 16) * 255).byte())), 3),
        (lambda: vae.decode(two, CPU), 18),
        (lambda: vae.encode(video(10, 16, 16), CPU, end_=True), 4),
    ):
        run()
        assert progress[-1] == (count, count)
    progress.clear()
    vae.decode(two, CPU, pbar=False)
    vae.encode(video(9, 16, 16), CPU, pbar=False)
    assert progress == []


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


@pytest.mark.parametrize("family", ["wan", "seedvr2, tiled"])
def test_a_decode_out_of_memory_continues_from_the_same_frame(
    request, stock, progress, caplog, family
):
    """Other models are unloaded then. SeedVR2 goes on without tiles too."""
    import comfy.model_management as management

    name, *tiled = family.split(", ")
    vae, latent = request.getfixturevalue(name).fast, latents(12 if name == "wan" else 3, 4, 4)
    tile = {"tile": (8, 8)} if tiled else {}
    run = lambda: vae.decode(latent, options=StreamOptions(1), **tile)  # noqa: E731
    expected, count = vae.decode(latent), allocations(run)
    management.load_models_gpu([stock.patcher])
    progress.clear()
    with caplog.at_level(logging.WARNING), FailingMemory(count * 3 // 4):
        images = run()
    loaded = [each.model for each in management.current_loaded_models]
    assert (vae.patcher in loaded, stock.patcher in loaded) == (True, False)
    assert relative_error(images, expected) <= 1e-5
    assert images.is_contiguous()
    (warning,) = (record.message for record in caplog.records)
    frame = int(re.search("memory ran out in a decode at frame ([0-9]+); going on", warning)[1])
    done = [at for at, _ in progress]
    assert done == sorted(set(done))  # nothing twice
    assert frame in done[:-1]
    assert progress[-1] == (expected.shape[1], expected.shape[1])
    assert name == "wan" or "tiles of" not in caplog.text


@pytest.fixture
def on_gpu(fast, monkeypatch):
    """ComfyUI's memory management, in which the VAE is on a GPU."""
    import comfy.model_management as management

    monkeypatch.setattr(fast, "device", torch.device("cuda"))
    monkeypatch.setattr(management, "cuda_device_context", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(management, "free_memory", lambda *_, **__: [])


def test_weights_without_room_stay_on_the_host(fast, request, monkeypatch, caplog):
    import comfy.model_management as management

    expected, loads = fast.decode(latents(2)), []

    def full(*_, **options):
        loads.append(options)
        raise management.OOM_EXCEPTION("no memory")

    request.getfixturevalue("on_gpu")
    monkeypatch.setattr(management, "load_models_gpu", full)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(fast.decode(latents(2)), expected)
    assert len(loads) == 2
    assert "memory ran out in the load of a VAE; trying again, on the CPU" in caplog.text


def test_weights_left_on_the_host_are_loaded(fast, monkeypatch):
    import comfy.model_management as management

    brought, kind = [], type(fast.first_stage_model)
    expected = fast.decode(latents(1))
    monkeypatch.setattr(management, "load_models_gpu", lambda *a, **k: None)  # as with --novram
    at_home = lambda self: torch.device("cpu" if brought else "meta")  # noqa: E731
    monkeypatch.setattr(kind, "device", property(at_home, lambda self, value: None))
    monkeypatch.setattr(fast.patcher, "partially_load", lambda *a, **k: brought.append((a, k)))
    assert torch.equal(fast.decode(latents(1)), expected)
    assert brought == [((torch.device("cpu"),), {"extra_memory": 1e32})]


@pytest.mark.parametrize("encode", [False, True])
def test_the_memory_that_is_requested_grows_with_the_tile_and_not_with_the_length(
    fast, on_gpu, monkeypatch, encode
):
    import comfy.model_management as management

    vae, asked, height, width = fast, [], 90, 160

    def load(models, memory_required=0, **options):
        asked.append(memory_required)
        raise InterruptedError

    monkeypatch.setattr(management, "load_models_gpu", load)
    given = {"samples": {"samples": latents(9, height, width)}}
    if encode:
        given = {"pixels": torch.zeros(()).expand(33, height * 8, width * 8, 3)}
    kind = "VAEEncode" if encode else "VAEDecode"
    for side in (256, 1024, None):
        tile = {} if side is None else {"tile_size": side, "overlap": 64}
        with pytest.raises(InterruptedError):
            node(f"{kind}Tiled" if tile else kind, vae=vae, **tile, **given)
    used, step = (vae.memory_used_encode, 8) if encode else (vae.memory_used_decode, 1)
    for count in (9, 900):
        asked.append(used((1, 16, count, 2 * height * step, 2 * width * step), None))
    assert 0 < asked[0] < min(asked[1], asked[-1] / 2)
    assert asked == sorted(asked)
    assert asked[-2] == asked[-1]
    if encode:  # with corrections, a decode is in memory too
        for corrections in (0, 1):
            with pytest.raises(InterruptedError):
                vae.encode(given["pixels"], corrections=corrections)
        assert asked[-1] > 1.2 * asked[-2]
