"""The demo: what it uses of a video, its files and figures, restarts, and its contact sheet."""

import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.tests.builders import random_state_dict

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from PIL import Image  # noqa: E402

from fast_video_vae.tests.videos import write_clip  # noqa: E402
from fast_video_vae.vae import StreamOptions, load_vae  # noqa: E402
from fast_video_vae.vae.cli import contact_sheet as sheets  # noqa: E402
from fast_video_vae.vae.cli.demo import afford, round_trip  # noqa: E402
from fast_video_vae.vae.media import pictures_of, read_video  # noqa: E402
from fast_video_vae.vae.media.video_reader import VideoFile  # noqa: E402
from fast_video_vae.vae.models.config import read_configs  # noqa: E402


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


@pytest.mark.parametrize(
    ("state", "scale"),
    [({"out_channels": 12}, 2), ({"image_channels": 4, "out_channels": 4}, 1)],
    ids=["2x", "alpha"],
)
def test_demo_writes_a_video_and_a_sheet_and_ends_with_the_psnr(tmp_path, run, state, scale):
    video = write_clip(tmp_path / "clip.mp4", 9, fps=Fraction(30000, 1001))
    path, out = tmp_path / "vae.safetensors", tmp_path / "out" / "deeper"
    save_file(random_state_dict(8, **state), path)
    code, lines, _ = run("demo", video, "--out", out, "--vae", path, "--dtype", "fp32")
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["clip_decoded.mp4", "clip_sheet.png"]
    assert (out / "clip_sheet.png").read_bytes().startswith(b"\x89PNG")
    decoded = read_video(out / "clip_decoded.mp4")
    assert (decoded.estimated_frames, decoded.fps) == (9, Fraction(30000, 1001))
    assert (decoded.height, decoded.width) == (32 * scale, 48 * scale)

    vae = load_vae(path, dtype=torch.float32)
    frames = torch.cat(list(read_video(video).pieces()), dim=2)
    opaque = torch.full_like(frames[:, :1], 255)
    given = torch.cat([frames, opaque], 1) if vae.config.image_channels == 4 else frames
    result = pictures_of(vae.decode(vae.encode(given)), torch.uint8).double()
    small = result.unflatten(2, (-1, scale)).unflatten(1, (-1, scale)).mean(dim=(2, 4)).round()
    error = frames[0].permute(1, 2, 3, 0).double() - small
    psnr = 10 * torch.log10(255**2 / error.square().mean()).item()
    found = re.fullmatch(r"PSNR (\d+\.\d\d) dB", lines[-1])
    assert float(found[1]) == pytest.approx(psnr, abs=0.02)
    rate = r" +[\d.]+ s +[\d.]+ frames/s\n"
    assert re.search(f"encode{rate}decode{rate}peak memory \\d+ MiB", "\n".join(lines))


@pytest.mark.parametrize("network", [None, "decoder"])
def test_the_pairs_are_in_step_after_a_restart_too(tmp_path, vae, network):
    clip, calls, taken = read_video(write_clip(tmp_path / "a.mp4", 17)), [], []

    def read(**options):
        for piece in clip.pieces(dtype=torch.uint8, **options):
            taken.append(piece.shape[2])
            yield piece

    def short(*_):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")

    layer = getattr(vae, network).layers()[-1] if network else torch.nn.Identity()
    handle = layer.register_forward_pre_hook(short)
    seconds = {"read": 0.0, "encode": 0.0, "decode": 0.0}
    sources, results, ahead = [], [], []
    for source, result in round_trip(vae, read, StreamOptions(1), seconds):
        sources += source
        results += result
        ahead.append(sum(taken) - len(results))
    handle.remove()
    frames = torch.stack(list(clip.frames()))
    assert torch.equal(torch.stack(sources), frames)
    given = frames.permute(3, 0, 1, 2).unsqueeze(0)
    whole = pictures_of(vae.decode(vae.encode(given)), torch.uint8)
    # Chunks round differently from the whole, which can change a value by one level.
    assert (torch.stack(results).int() - whole.int()).abs().max() <= 1
    assert 0 < seconds["read"] < seconds["encode"] < seconds["decode"]
    # The piece that was just read, and the frames of one latent that is not decoded yet.
    assert network or max(ahead) <= 8


def test_demo_reads_a_range_at_another_size_and_rate(tmp_path, run, vae_path):
    source = write_clip(tmp_path / "a.mp4", 25)
    options = ("--duration", "0.5", "--size", "66x39", "--fps", "12", "--start", "0.25")
    _, lines, errors = run("demo", source, "--out", tmp_path, "--vae", vae_path, *options)
    decoded = read_video(tmp_path / "a_decoded.mp4")
    assert (decoded.width, decoded.height, decoded.fps) == (64, 32, 12)
    assert decoded.estimated_frames == 5  # half a second is 6 frames; a VAE takes 4 n + 1
    assert errors == ["note: the last 1 frame was dropped; the VAE needs 4 n + 1 frames"]
    assert "note: cropped about the centre to 64x32, multiples of 8" in lines
    assert not [line for line in lines if "on a CPU" in line]


@pytest.mark.parametrize(
    ("width", "height", "frames", "asked", "changed"),
    [
        (256, 256, 33, {}, {}),  # the bundled clip
        (1280, 720, 132, {}, {"size": (360, 640), "limit": 49}),
        (48, 32, 20_000, {}, {"limit": 7809}),
        (3840, 2160, 132, {"size": (2160, 3840)}, {"limit": 5}),
        (720, 1280, 132, {"duration": 5.0}, {"size": (640, 360)}),
        (1280, 720, 132, {"size": (720, 1280), "limit": 100}, {}),
        (640, 360, None, {}, {"limit": 49}),  # the length is unknown
    ],
)
def test_demo_reduces_a_video_to_half_a_minute_of_cpu_work(width, height, frames, asked, changed):
    (config, *_) = read_configs({k: tuple(v.shape) for k, v in random_state_dict(8).items()})
    video = VideoFile(Path("a.mp4"), height, width, Fraction(24), frames)
    wanted = {"fps": None, "size": None, "start": 0.0, "duration": None, "limit": None} | asked
    args = SimpleNamespace(**wanted)
    note = afford(args, video, config)
    assert vars(args) == wanted | changed
    limited = f" of {frames} frames" if frames else "at most 49 frames"
    for key, word in (("size", f" instead of {width}x{height}"), ("limit", limited)):
        assert (word in note) == (key in changed)


def test_videos_of_the_same_name_and_files_of_others_are_kept(tmp_path, run, vae_path):
    """Only the bundled VAE is marked as small, in a line of the sheet too."""
    (tmp_path / "clip_2_sheet.png").write_bytes(b"holiday")
    small, heights = ("--frames-limit", "1", "--size", "32x32"), []
    for options, name in (
        ([], "clip"),
        (["--vae", vae_path], "clip_3"),
        (["--vae", vae_path, "--overwrite"], "clip"),
    ):
        lines = run("demo", "--out", tmp_path, *small, *options)[1]
        assert ("small and blurs; --vae FILE" in "\n".join(lines)) == (not options)
        with Image.open(tmp_path / f"{name}_sheet.png") as sheet:
            heights.append(sheet.height)
    assert heights[0] > heights[1] == heights[2]
    kept = {f"clip{n}_{end}" for n in ("", "_3") for end in ("decoded.mp4", "sheet.png")}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"clip_2_sheet.png"}
    assert (tmp_path / "clip_2_sheet.png").read_bytes() == b"holiday"


def collected(frames, height=32, width=48, error=10, run=5):
    """Return the sheet of a clip: frame i has level i % 200, its result is `error` levels above."""
    level = (torch.arange(frames) % 200).to(torch.uint8).view(-1, 1, 1, 1)
    source = level.expand(-1, height, width, 3)
    result = source + error
    drawn = sheets.ContactSheet()
    for start in range(0, frames, run):
        drawn.add(source[start : start + run], result[start : start + run])
    return drawn


@pytest.mark.parametrize("frames", [1, 7, 43, 500])
def test_columns_are_spread_over_the_clip(frames, monkeypatch):
    held, words, write = collected(frames), [], sheets.write
    monkeypatch.setattr(sheets, "write", lambda *given: (words.append(given[2]), write(*given)))
    held.draw("\u65e5\u672c.mp4", "PSNR inf dB")  # any characters
    places = [int(each) for word in words for each in re.findall(r"^frame (\d+)$", word)]
    assert len(held._columns) <= sheets.KEPT  # so memory does not grow with the clip
    assert len(places) == min(frames, sheets.COLUMNS)
    assert places == sorted(set(places))
    assert places[0] == 0
    ideal = np.linspace(0, frames - 1, len(places))
    assert np.abs(np.subtract(places, ideal)).max() <= max(0.5, frames / 20)


@pytest.mark.parametrize(
    ("height", "width", "error", "shown"),
    [
        (32, 48, 1, sheets.MAX_FACTOR),  # enlarged
        (480, 832, 10, 160),  # reduced; a factor of 32 would exceed 255
        (512, 304, 55, 220),  # portrait
    ],
)
def test_each_row_shows_its_frames_and_an_amplified_difference(height, width, error, shown):
    drawn = collected(9, height, width, error)
    picture = np.array(drawn.draw("a clip", "PSNR 28.13 dB"))
    cell = sheets.CELL // max(height, width) or sheets.CELL / max(height, width)
    middle = sheets.MARGIN + sheets.LABELS + round(width * cell) // 2
    rows = [
        sheets.HEAD + row * (round(height * cell) + sheets.GAP) + round(height * cell) // 2
        for row in range(3)
    ]
    # Frame 0: the source has level 0, the result `error`, the difference is amplified.
    assert [picture[row, middle].tolist() for row in rows] == [[0] * 3, [error] * 3, [shown] * 3]
