"""Upscale Video (Fast): ComfyUI's graph, a window at a time, from file to file."""

import io
import threading
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.builders import refused
from fast_video_vae.tests.nodes.sampling.sampler_models import expert
from fast_video_vae.tests.nodes.upscale.models import seedvr2_model
from fast_video_vae.tests.nodes.vae.pairs import accelerated, narrow_seedvr2, node, v3_node
from fast_video_vae.tests.nodes.video.clips import from_file, held
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.videos import moving_clip, write
from fast_video_vae.vae.media import Audio, read_video

av = pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]

SHORT = {"multiplier": 1.0, "window": 9, "overlap": 1, "cuts": "none", "codec": "ffv1"}
# What the node has by default.
KSAMPLER = {"steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}


def stock_graph(
    images, model, vae, *, multiplier, seed, window, overlap, color="lab", scale_method="lanczos",
    **sampling,
):  # fmt: skip
    """The IMAGE of ComfyUI's graph for one scene, an IMAGE."""
    seedvr = lambda name, **inputs: v3_node("nodes_seedvr", name, **inputs)  # noqa: E731
    kind = {"resize_type": "scale by multiplier", "multiplier": multiplier}
    resizing = {"input": images, "scale_method": scale_method, "resize_type": kind}
    (resized,) = v3_node("nodes_post_processing", "ResizeImageMaskNode", **resizing)
    (padded,) = seedvr("SeedVR2Preprocess", resized_images=resized)
    (latent,) = node("VAEEncode", pixels=padded, vae=vae)
    mode = {"chunking_mode": "manual", "frames_per_chunk": window}
    chunks, shared = seedvr(
        "SeedVR2TemporalChunk", latent=latent, temporal_overlap=overlap, chunking_mode=mode
    )
    sampled = []
    for chunk in chunks:
        positive, negative = seedvr("SeedVR2Conditioning", model=model, vae_conditioning=chunk)
        options = KSAMPLER | sampling
        options |= {"positive": positive, "negative": negative, "seed": seed}
        sampled += node("KSampler", model=model, latent_image=chunk, **options)
    (merged,) = seedvr("SeedVR2TemporalMerge", latents=sampled, temporal_overlap=[shared])
    (decoded,) = node("VAEDecode", samples=merged, vae=vae)
    inputs = {"original_resized_images": resized, "color_correction_method": color}
    return seedvr("SeedVR2PostProcessing", images=decoded, **inputs)[0]


def upscale(video, model, vae, **inputs):
    """The file that our node writes, with the defaults of its widgets."""
    from fast_video_vae.nodes.upscale.nodes import UpscaleVideo

    schema = UpscaleVideo.define_schema().inputs
    defaults = {each.id: each.default for each in schema if hasattr(each, "default")}
    inputs = defaults | {"video": video, "model": model, "vae": vae} | inputs
    made = UpscaleVideo.PREPARE_CLASS_CLONE({"hidden_inputs": {}}).execute(**inputs)
    return made.args[0].get_stream_source()


@pytest.fixture(scope="module")
def model(comfyui):
    return seedvr2_model()


@pytest.fixture(scope="module")
def stock(comfyui):
    return narrow_seedvr2(random_seedvr2())


@pytest.fixture(scope="module")
def vae(stock):
    return accelerated(stock)


def scenes(*lengths, height=16, width=16):
    """Clips that differ much from one another."""
    clips = [moving_clip(length, height, width) for length in lengths]
    return [clip if at % 2 == 0 else 255 - clip for at, clip in enumerate(clips)]


def images_of(path):
    frames = torch.stack([*read_video(path).frames()])
    return frames.float() / torch.iinfo(frames.dtype).max


# A shorter window at the end of a scene; windows that share latents; a scene within one window.
# Lengths that fill no latent, and one frame.
SAMPLING = {"steps": 2, "cfg": 1.5, "sampler_name": "dpmpp_2m", "scheduler": "karras"}


@pytest.mark.parametrize(
    ("lengths", "window", "overlap", "cuts", "more"),
    [
        ((22, 6), 13, 1, "auto", {}),
        ((26,), 13, 2, "none", {"scale_method": "bicubic"}),
        ((6, 1, 3), 5, 0, "0, 6;7", SAMPLING | {"denoise": 0.7}),
    ],
)
def test_the_frames_are_those_of_the_graph(
    lengths, window, overlap, cuts, more, model, stock, vae, output, tmp_path
):
    clips = scenes(*lengths, height=18, width=26)
    options = {"multiplier": 1.5, "seed": 3, "window": window, "overlap": overlap, "color": "adain"}
    expected = [stock_graph(clip.float() / 255, model, stock, **options | more) for clip in clips]
    video = from_file(write(tmp_path / "in.mkv", torch.cat(clips), 16, codec="ffv1"))
    path = upscale(video, model, vae, cuts=cuts, codec="ffv1", **options | more)
    found, expected = images_of(path), torch.cat(expected)
    assert found.shape == expected.shape
    assert found.shape[1:3] == (26, 38)  # 27 x 39, to even sides
    assert (found - expected).abs().max() <= 1e-4
    assert not (output / "unfinished upscales").exists()


def test_a_video_in_memory_is_upscaled_like_a_file(model, vae, output, tmp_path):
    (clip,) = scenes(7)
    file = write(tmp_path / "in.mkv", clip, 16, codec="ffv1")
    videos = [from_file(file), from_file(file), held(clip)]
    videos[1]._VideoFromFile__file = io.BytesIO(file.read_bytes())
    options = SHORT | {"multiplier": 8.0, "shorter_side": 18, "bit_depth": "10", "color": "none"}
    paths = [upscale(each, model, vae, **options) for each in videos]
    first, *others = map(images_of, paths)
    assert first.shape == (7, 18, 18, 3)
    assert read_video(paths[0]).bit_depth == 10
    for other in others:
        assert (first - other).abs().max() <= 1e-4


@pytest.fixture
def stopped(monkeypatch, model, vae):
    """Upscales until the user presses Stop, when a method has been called a number of times."""
    from comfy import model_management

    from fast_video_vae.nodes.upscale import run, store

    def until(name, calls, file, model=model, **options):
        owner, left = store.Store if name == "save" else run.Run, [calls]
        function = getattr(owner, name)

        def counted(*arguments):
            left[0] -= 1
            if left[0] == 0:
                model_management.interrupt_current_processing(True)
            result = function(*arguments)
            model_management.throw_exception_if_processing_interrupted()
            return result

        before = threading.active_count()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, counted)
            with pytest.raises(model_management.InterruptProcessingException):
                upscale(from_file(file), model, vae, **options)
        assert threading.active_count() == before

    return until


# While a window is encoded, after its state is saved, while one is sampled, finished, written.
SHORT_STOPS = [("_read", 1), ("save", 1), ("_sampled", 1), ("_finished", 2), ("_write", 2)]


# The second scene is longer than the latents that a frame depends on.
@pytest.mark.parametrize(
    ("lengths", "options", "stops"),
    [
        ((6, 26), SHORT, SHORT_STOPS),
        ((3, 170), SHORT | {"window": 85, "overlap": 2}, [("save", 3)]),
    ],
    ids=["short", "long"],
)
def test_a_stopped_run_goes_on_to_the_same_file(
    lengths, options, stops, stopped, model, vae, output, tmp_path, caplog
):
    sound = Audio(torch.sin(torch.arange(44100 * 14) / 20)[None] * 0.5, 44100)
    file = write(tmp_path / "in.mkv", torch.cat(scenes(*lengths)), 16, codec="ffv1", audio=sound)
    options = options | {"cuts": str(lengths[0])}
    expected = Path(upscale(from_file(file), model, vae, **options)).read_bytes()
    caplog.set_level("INFO")
    for number, stop in enumerate(stops):
        stopped(*stop, file, **options)
        assert ("going on after frame" in caplog.text) == (number > 1)
        assert (output / "unfinished upscales").exists() == (stop[0] != "_read")
        assert ("frames are finished, in" in caplog.text) == (stop[0] != "_read")
    found = Path(upscale(from_file(file), model, vae, **options))
    assert found.name == "upscaled_00002_.mkv"
    assert found.read_bytes() == expected
    assert not (output / "unfinished upscales").exists()


def test_other_inputs_begin_anew(stopped, model, vae, output, tmp_path, monkeypatch):
    from comfy.model_management import unload_all_models

    from fast_video_vae.nodes.upscale import wanted

    (clip,) = scenes(18)
    file = write(tmp_path / "in.mkv", clip, 16, codec="ffv1")
    weights = model.model.diffusion_model.state_dict()
    name = next(key for key in weights if key.endswith("proj_qkv.vid.weight"))

    def lora(seed):
        change = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
        patched = model.clone()
        assert patched.add_patches({f"diffusion_model.{name}": ("diff", (0.1 * change,))})
        return patched

    def sampled(model=model, **more):
        counts, sample = [], wanted.Wanted.sampled
        with monkeypatch.context() as patch:
            patch.setattr(wanted.Wanted, "sampled", lambda *a: [counts.append(1), sample(*a)][1])
            upscale(from_file(file), model, vae, **SHORT | more)
        return len(counts)

    first = lora(1)
    stopped("save", 2, file, model=first, **SHORT)
    others = [{"model": lora(2)}, {"model": seedvr2_model(1)}, {"seed": 9}]
    whole = sampled()
    assert {sampled(**each) for each in others} == {whole}
    unload_all_models()  # which restores the weights
    assert sampled(first, filename_prefix="other") == whole - 2
    stopped("save", 2, file, model=first, **SHORT)
    (folder,) = (output / "unfinished upscales").iterdir()
    part = folder / "00001.mkv"
    part.write_bytes(part.read_bytes()[:-100])
    assert sampled(first) == whole
    stopped("save", 2, file, **SHORT)
    write(tmp_path / "in.mkv", 255 - clip, 16, codec="ffv1")
    assert sampled() == whole


def test_the_nodes_before_this_one_count_whatever_their_names_are(comfyui):
    from fast_video_vae.nodes.upscale.store import graph_mark

    def mark(load="1", strength=1, seed=1):
        prompt = {
            load: {"class_type": "Load", "inputs": {"name": "a"}},
            "2": {"class_type": "Lora", "inputs": {"model": [load, 0], "strength": strength}},
            "9": {"class_type": "Up", "inputs": {"model": ["2", 0], "seed": seed}},
        }
        return graph_mark(prompt, "9")

    assert mark() == mark("5") == mark(seed=7) != mark(strength=2)
    assert graph_mark(None, "9") == graph_mark({}, None) == ""


def test_sound_and_tags_are_kept_in_step(model, vae, output, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr("fast_video_vae.nodes.upscale.run.show_text", texts.append)
    click = torch.zeros(2, 48000 * 3)
    click[:, 24000:24480] = 0.8  # half a second into the video
    tags = {"title": "a clip", "artist": "a painter"}
    sound = Audio(click, 48000)
    source = write(tmp_path / "in.mp4", *scenes(20), 16, audio=sound, metadata=tags)
    trimmed = from_file(source).as_trimmed(0.25, 0.5, strict_duration=False)
    for video, moment, frames in ((from_file(source), 0.5, 20), (trimmed, 0.25, 8)):
        path = upscale(video, model, vae, multiplier=1.0, window=13, overlap=1)
        assert len([*read_video(path).frames()]) == frames
        with av.open(path) as file:
            assert tags.items() <= file.metadata.items()
            blocks = [torch.from_numpy(each.to_ndarray()) for each in file.decode(audio=0)]
            first = file.streams.audio[0].start_time or 0
        heard = torch.cat(blocks, dim=1).abs().amax(0)
        start = heard.gt(0.4).nonzero()[0].item() + first
        assert abs(start / 48000 - moment) < 0.01
        assert abs(len(heard) / 48000 - frames / 16) < 0.05
        assert any(f" of {frames} frames, " in text and " left: " in text for text in texts)


def test_wrong_inputs_are_refused_in_one_line(model, vae, fast, output):
    for inputs, message in (
        ({"window": 12}, "window: got 12 frames; expected 0, or 4 n"),
        ({"cuts": "here"}, "cuts is 'here'; expected auto, none, or frames"),
        ({"filename_prefix": "../x"}, "filename_prefix"),
        ({"multiplier": 0.05}, "multiplier: it makes 1 x 1 of 16 x 16; expected at least 16"),
        ({"shorter_side": 8}, "shorter_side: it makes 8 x 8 of 16 x 16"),
        ({"vae": fast}, "vae: got the VAE of wan2.1; expected that of SeedVR2"),
        ({"model": expert()}, "model: got WanModel; expected SeedVR2"),
    ):
        with refused(message):
            upscale(held(scenes(5)[0]), **{"model": model, "vae": vae} | inputs)
    assert not any(output.rglob("*"))


def test_a_window_follows_the_memory(comfyui, monkeypatch, caplog):
    import comfy.model_management as management
    from comfy_extras.nodes_seedvr import SeedVR2TemporalChunk

    from fast_video_vae.nodes.upscale.wanted import Wanted

    def latents(gib, **widgets):
        monkeypatch.setattr(management, "get_free_memory", lambda *_, **__: gib * 2**30)
        widgets = dict.fromkeys(Wanted.__annotations__, 0) | {"overlap": 2} | widgets
        return Wanted(**widgets).latents((720, 1280))

    assert latents(0, window=17) == (5, 2)
    assert latents(0, window=1) == (1, 0)
    assert latents(0) == (5, 2)
    assert "memory is short for frames of 1280 x 720" in caplog.text
    assert latents(10_000, overlap=99) == (61, 60)
    found, _ = latents(40)
    assert 5 < found < 61
    video = {"samples": torch.zeros(1, 16, 99, 90, 160)}
    mode = {"chunking_mode": "auto"}
    chunks, *_ = SeedVR2TemporalChunk.execute(video, 0, mode).args
    assert chunks[0]["samples"].shape[2] == found


def test_the_vae_leaves_the_device_for_the_model(model, vae, output, tmp_path, monkeypatch):
    """Where memory runs out: first other models leave, then what the VAE remembers."""
    from fast_video_vae.nodes.upscale import run, wanted

    file = write(tmp_path / "in.mkv", *scenes(18), 16, codec="ffv1")
    expected = Path(upscale(from_file(file), model, vae, **SHORT)).read_bytes()
    sample, park, events = wanted.Wanted.sampled, run.Run._park, []

    def failing(*arguments):
        events.append("sampled")
        if events.count("sampled") in (2, 3):  # in the second window
            raise torch.OutOfMemoryError
        return sample(*arguments)

    monkeypatch.setattr(wanted.Wanted, "sampled", failing)
    monkeypatch.setattr(run.Run, "_park", lambda self: [events.append("parked"), park(self)])
    assert Path(upscale(from_file(file), model, vae, **SHORT)).read_bytes() == expected
    assert events[:5] == ["sampled"] * 3 + ["parked", "sampled"]
