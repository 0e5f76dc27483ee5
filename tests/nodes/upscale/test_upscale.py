"""Upscale Video (Fast): ComfyUI's graph, a window at a time, from file to file."""

import contextlib
from pathlib import Path

import pytest
import torch

from fast_video_vae.tests.nodes.upscale.graph import stock_graph, upscale
from fast_video_vae.tests.nodes.upscale.models import seedvr2_model
from fast_video_vae.tests.nodes.vae.pairs import accelerated, narrow_seedvr2
from fast_video_vae.tests.nodes.video.clips import from_file, held
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.tests.videos import moving_clip, write
from fast_video_vae.vae.media import Audio, read_video

av = pytest.importorskip("av", reason="PyAV is not installed")
pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("inference")]


@pytest.fixture(scope="module")
def model(comfyui):
    return seedvr2_model()


@pytest.fixture(scope="module")
def stock(comfyui):
    return narrow_seedvr2(random_seedvr2())


@pytest.fixture(scope="module")
def vae(stock):
    return accelerated(stock)


def scenes(*lengths, height=18, width=26):
    """Clips that differ much from one another."""
    clips = [moving_clip(length, height, width) for length in lengths]
    return [clip if at % 2 == 0 else 255 - clip for at, clip in enumerate(clips)]


def images_of(path):
    frames = torch.stack([*read_video(path).frames()])
    return frames.float() / torch.iinfo(frames.dtype).max


# Windows of one size, with a shorter one at the end of a scene; of three that share latents; a
# scene within one window. Lengths that fill no latent, and one frame.
@pytest.mark.parametrize(
    ("lengths", "window", "overlap", "cuts"),
    [((30, 6), 13, 1, "auto"), ((34,), 13, 3, "none"), ((14, 1, 7), 9, 0, "14, 15")],
)
def test_the_frames_are_those_of_the_graph(
    lengths, window, overlap, cuts, model, stock, vae, output, tmp_path
):
    clips = scenes(*lengths)
    options = {"multiplier": 1.5, "seed": 3, "window": window, "overlap": overlap}
    expected = [
        stock_graph(clip.float() / 255, model, stock, color="adain", **options) for clip in clips
    ]
    video = from_file(write(tmp_path / "in.mkv", torch.cat(clips), 16, codec="ffv1"))
    path = upscale(video, model, vae, cuts=cuts, color="adain", codec="ffv1", **options)
    found, expected = images_of(path), torch.cat(expected)
    assert found.shape == expected.shape
    assert found.shape[1:3] == (26, 38)  # 27 x 39, to even sides
    assert (found - expected).abs().max() <= 1e-4
    assert not (output / "unfinished upscales").exists()


def test_a_video_in_memory_is_upscaled_like_a_file(model, vae, output, tmp_path):
    import io

    (clip,) = scenes(11)
    file = write(tmp_path / "in.mkv", clip, 16, codec="ffv1")
    videos = [from_file(file), from_file(file), held(clip)]
    videos[1]._VideoFromFile__file = io.BytesIO(file.read_bytes())
    options = {"window": 9, "overlap": 1, "codec": "ffv1", "multiplier": 1.0}
    first, *others = [images_of(upscale(each, model, vae, **options)) for each in videos]
    for other in others:
        assert (first - other).abs().max() <= 1e-4


class Stop:
    """The user presses Stop when a function has been called a number of times."""

    def __init__(self, monkeypatch, name, calls):
        from comfy import model_management

        from fast_video_vae.nodes.upscale import run, store

        owner = store.Store if name == "save" else run._Scene
        function, left = getattr(owner, name), [calls]

        def counted(*arguments):
            left[0] -= 1
            if left[0] == 0:
                model_management.interrupt_current_processing(True)
            result = function(*arguments)
            model_management.throw_exception_if_processing_interrupted()
            return result

        monkeypatch.setattr(owner, name, counted)


LONG = {"multiplier": 1.0, "window": 41, "overlap": 2}


@pytest.fixture(scope="module")
def long(model, vae, tmp_path_factory):
    """A file, and the bytes of an undisturbed run; its first scene is longer than a frame sees."""
    import folder_paths

    folder = tmp_path_factory.mktemp("long")
    clips = scenes(170, 14, height=16, width=16)
    sound = Audio(torch.sin(torch.arange(44100 * 11) / 20)[None] * 0.5, 44100)
    file = write(folder / "in.mkv", torch.cat(clips), 16, codec="ffv1", audio=sound)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(folder_paths, "output_directory", str(folder))
        return file, Path(upscale(from_file(file), model, vae, **LONG)).read_bytes()


# While a window is encoded, sampled, written, after it is written, after its state is saved.
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("_read", 1),
        pytest.param("_sampled", 5, marks=pytest.mark.slow),
        pytest.param("_finished", 30, marks=pytest.mark.slow),
        pytest.param("_write", 3, marks=pytest.mark.slow),
        ("save", 5),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_file(
    name, calls, long, model, vae, output, monkeypatch, caplog
):
    from comfy.model_management import InterruptProcessingException

    file, expected = long
    with monkeypatch.context() as patch:
        Stop(patch, name, calls)
        with pytest.raises(InterruptProcessingException):
            upscale(from_file(file), model, vae, **LONG)
    caplog.set_level("INFO")
    assert Path(upscale(from_file(file), model, vae, **LONG)).read_bytes() == expected
    assert ("going on after frame" in caplog.text) == (name != "_read")
    assert not (output / "unfinished upscales").exists()


def test_other_inputs_begin_anew(model, vae, output, tmp_path, monkeypatch):
    from comfy.model_management import InterruptProcessingException

    (clip,) = scenes(30, height=16, width=16)
    file = write(tmp_path / "in.mkv", clip, 16, codec="ffv1")
    options = {"multiplier": 1.0, "window": 9, "overlap": 1, "codec": "ffv1"}
    with monkeypatch.context() as patch:
        Stop(patch, "_write", 3)
        with pytest.raises(InterruptProcessingException):
            upscale(from_file(file), model, vae, **options)
    (left,) = (output / "unfinished upscales").iterdir()
    other = images_of(upscale(from_file(file), model, vae, **options | {"seed": 9}))
    write(tmp_path / "in.mkv", 255 - clip, 16, codec="ffv1")
    changed = images_of(upscale(from_file(file), model, vae, **options))
    fresh = images_of(upscale(from_file(file), seedvr2_model(1), vae, **options))
    assert left.is_dir()
    assert len(other) == len(changed) == len(fresh) == 30
    assert (changed - fresh).abs().max() > 1e-3


def test_sound_and_tags_are_kept_in_step(model, vae, output, tmp_path):
    clip = scenes(40, height=16, width=16)[0]
    click = torch.zeros(2, 48000 * 3)
    click[:, 48000:48480] = 0.8  # one second into the video
    tags = {"title": "a clip", "artist": "a painter"}
    source = write(tmp_path / "in.mp4", clip, 16, audio=Audio(click, 48000), metadata=tags)
    path = upscale(from_file(source), model, vae, multiplier=1.0, window=13, overlap=1)
    with av.open(path) as file:
        assert tags.items() <= file.metadata.items()
        blocks = [torch.from_numpy(each.to_ndarray()) for each in file.decode(audio=0)]
        first = file.streams.audio[0].start_time or 0
    sound = torch.cat(blocks, dim=1).abs().amax(0)
    start = sound.gt(0.4).nonzero()[0].item() + first
    assert abs(start - 48000) < 500  # 10 ms
    assert abs(len(sound) / 48000 - 2.5) < 0.05  # 40 frames
    trimmed = from_file(source).as_trimmed(0.5, 1.0, strict_duration=False)
    path = upscale(trimmed, model, vae, multiplier=1.0, window=13, overlap=1)
    with av.open(path) as file:
        blocks = [torch.from_numpy(each.to_ndarray()) for each in file.decode(audio=0)]
    sound = torch.cat(blocks, dim=1).abs().amax(0)
    assert abs(sound.gt(0.4).nonzero()[0].item() - 24000) < 500
    assert len([*read_video(path).frames()]) == 16


def bad(**inputs):
    return inputs


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (bad(window=12), "window: got 12 frames; expected 0, or 4 n"),
        (bad(cuts="here"), "cuts is 'here'; expected auto, none, or frames"),
        (bad(filename_prefix="../x"), "filename_prefix"),
        (bad(multiplier=0.05), "multiplier: it makes 1 x 1 of 26 x 18; expected at least 16"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(inputs, message, model, vae, output, tmp_path):
    video = held(scenes(5)[0])
    with pytest.raises(ValueError, match=message) as caught:
        upscale(video, model, vae, **inputs)
    assert "\n" not in str(caught.value)


def test_other_models_are_refused(model, vae, fast, output):
    from fast_video_vae.tests.nodes import dits

    video = held(scenes(5)[0])
    with pytest.raises(ValueError, match="model: got NextDiT; expected SeedVR2"):
        upscale(video, dits.patcher("lumina2"), vae)
    with pytest.raises(ValueError, match=r"vae: got the VAE of wan2.1; expected that of SeedVR2"):
        upscale(video, model, fast)


def test_stop_ends_the_threads_of_a_run(model, vae, output, tmp_path, monkeypatch):
    import threading

    from comfy.model_management import InterruptProcessingException

    before = threading.active_count()
    file = write(tmp_path / "in.mkv", scenes(30)[0], 16, codec="ffv1")
    Stop(monkeypatch, "_sampled", 2)
    with contextlib.suppress(InterruptProcessingException):
        upscale(from_file(file), model, vae, multiplier=1.0, window=9)
    assert threading.active_count() == before


def test_the_vae_leaves_the_device_for_the_model(model, vae, output, tmp_path, monkeypatch):
    from fast_video_vae.nodes.upscale import run

    file = write(tmp_path / "in.mkv", scenes(30, height=16, width=16)[0], 16, codec="ffv1")
    options = {"multiplier": 1.0, "window": 9, "overlap": 1, "codec": "ffv1"}
    expected = Path(upscale(from_file(file), model, vae, **options)).read_bytes()
    sample = run.Sampling.sample
    failed, moved = [], []

    def once(self, *arguments):
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError
        return sample(self, *arguments)

    monkeypatch.setattr(run.Sampling, "sample", once)
    monkeypatch.setattr(
        run._Scene,
        "_park",
        lambda self: [moved.append(1), self._encoder.park(), self._decoder.park()],
    )
    sampled = run._Scene._sampled
    monkeypatch.setattr(run._Scene, "_sampled", lambda self, x: [self._park(), sampled(self, x)][1])
    assert Path(upscale(from_file(file), model, vae, **options)).read_bytes() == expected
    assert failed
    assert len(moved) >= 4


def test_another_lora_and_a_changed_part_begin_anew(model, vae, output, tmp_path, monkeypatch):
    from comfy.model_management import InterruptProcessingException, unload_all_models

    file = write(tmp_path / "in.mkv", scenes(30, height=16, width=16)[0], 16, codec="ffv1")
    options = {"multiplier": 1.0, "window": 9, "overlap": 1, "codec": "ffv1"}
    weights = model.model.diffusion_model.state_dict()
    name = next(key for key, each in weights.items() if key.endswith("proj_qkv.vid.weight"))

    def lora(seed):
        change = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
        patched = model.clone()
        assert patched.add_patches({f"diffusion_model.{name}": ("diff", (0.1 * change,))})
        return patched

    def stopped(*, model):
        with monkeypatch.context() as patch:
            Stop(patch, "save", 3)
            with pytest.raises(InterruptProcessingException):
                upscale(from_file(file), model, vae, **options)
        return {*(output / "unfinished upscales").iterdir()}

    def sampled(model):
        from fast_video_vae.nodes.upscale import run

        counts, sample = [], run.Sampling.sample
        with monkeypatch.context() as patch:
            patch.setattr(run.Sampling, "sample", lambda *a: [counts.append(1), sample(*a)][1])
            upscale(from_file(file), model, vae, **options)
        return len(counts)

    first = lora(1)
    (folder,) = stopped(model=first)
    other = sampled(lora(2))
    unload_all_models()  # which restores the weights
    assert sampled(first) == other - 3
    (folder,) = stopped(model=first)
    part = folder / "00001.mkv"
    part.write_bytes(part.read_bytes()[:-100])
    assert sampled(first) == other
