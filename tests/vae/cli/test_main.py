"""The command line: its files, output lines and exit codes; a failure leaves no files."""

import os
import re
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fast_video_vae.tests.builders import (
    decoder_of,
    installed_command,
    random_state_dict,
    succeeded,
)
from fast_video_vae.tests.wan22 import random_qwen21, random_wan22

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.videos import write, write_clip  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.cli.loading import device_named  # noqa: E402
from fast_video_vae.vae.cli.main import REPOSITORY, main  # noqa: E402
from fast_video_vae.vae.demo import CLIP_PATH, VAE_PATH  # noqa: E402
from fast_video_vae.vae.media import frames_to_uint8, pictures_of, read_video  # noqa: E402
from fast_video_vae.vae.validation import available_devices  # noqa: E402

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
# A second thread gains nothing on such small frames, and waits for busy cores.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def video(tmp_path):
    return write_clip(tmp_path / "clip.mp4", 9, fps=Fraction(30000, 1001))


@pytest.fixture(params=["demo", "encode", "decode"])
def quiet_command(request, tmp_path, vae_path):
    """Return the arguments of a quiet command that writes into the folder `out`."""
    source = write_clip(tmp_path / "a.mp4", 6, 64, 96)  # 6 frames: one is dropped and reported
    latents, out = tmp_path / "l.safetensors", tmp_path / "out"
    out.mkdir()
    save_file({"latent": torch.randn(1, 16, 3, 8, 12)}, latents)
    given = {
        "demo": (source, "--out", out),
        "encode": (source, "-o", out / "l.safetensors"),
        "decode": (latents, "-o", out / "d.mp4"),
    }
    return request.param, *given[request.param], "--vae", vae_path, "--quiet"


def whole_clip(path):
    """The frames of a file as the API takes them, `[1, 3, T, H, W]`."""
    return torch.cat(list(read_video(path).pieces()), dim=2)


def test_demo_writes_a_video_and_a_sheet_and_ends_with_the_psnr(tmp_path, done, vae_path, video):
    out = tmp_path / "out" / "deeper"
    lines = done("demo", video, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["clip_decoded.mp4", "clip_sheet.png"]
    assert (out / "clip_sheet.png").read_bytes().startswith(b"\x89PNG")
    decoded = read_video(out / "clip_decoded.mp4")
    assert (decoded.estimated_frames, decoded.fps) == (9, Fraction(30000, 1001))
    assert (decoded.height, decoded.width) == (32, 48)

    frames = whole_clip(video)
    vae = load_vae(vae_path, dtype=torch.float32)
    result = frames_to_uint8(vae.decode(vae.encode(frames)))
    error = frames[0].permute(1, 2, 3, 0).double() - result.double()
    psnr = 10 * torch.log10(255**2 / error.square().mean()).item()
    found = re.fullmatch(r"PSNR (\d+\.\d\d) dB", lines[-1])
    assert float(found[1]) == pytest.approx(psnr, abs=0.02)
    text = "\n".join(lines)
    for figure in (r"encode +[\d.]+ s +[\d.]+ frames/s", r"decode +[\d.]+ s +[\d.]+ frames/s"):
        assert re.search(figure, text)
    assert re.search(r"peak memory \d+ MiB", text)


@pytest.mark.parametrize(
    ("frames", "height", "width", "kept", "note"),
    [
        (8, 32, 48, 5, "the last 3 frames were dropped"),
        (5, 36, 54, 5, "cropped about the centre to 48x32"),
    ],
)
def test_demo_crops_frames_and_drops_incomplete_latents(
    tmp_path, run, vae_path, frames, height, width, kept, note
):
    source = write_clip(tmp_path / "a.mp4", frames, height, width)
    code, lines, errors = run("demo", source, "--vae", vae_path, "--out", tmp_path)
    assert code == 0
    assert note in "\n".join(lines + errors)
    decoded = read_video(tmp_path / "a_decoded.mp4")
    assert (decoded.height, decoded.width) == (32, 48)
    assert len(list(decoded.frames())) == kept


@pytest.mark.slow
@pytest.mark.skipif(not CLIP_PATH.exists(), reason="the bundled clip has not been made")
def test_demo_reaches_22_db_on_the_bundled_clip(tmp_path, run):
    code, lines, _ = run("demo", "--out", tmp_path)
    assert code == 0
    assert float(lines[-1].split()[1]) >= 22
    assert VAE_PATH.stat().st_size + CLIP_PATH.stat().st_size <= 5e6


def test_encode_and_decode_equal_the_api(tmp_path, done, vae_path, video):
    latents, movie = tmp_path / "l.safetensors", tmp_path / "d.mp4"
    lines = done("encode", video, "-o", latents)
    assert lines[-1] == f"wrote {latents}: [1, 16, 3, 4, 6] for 9 frames at 29.97 fps"
    vae = load_vae(vae_path, dtype=torch.float32)
    expected = vae.encode(whole_clip(video))
    with safe_open(latents, framework="pt") as file:
        assert list(file.keys()) == ["latent"]
        latent, metadata = file.get_tensor("latent"), file.metadata()
    assert latent.dtype == torch.float32
    # Chunks may sum in another order: 2e-6 in float32 over about 30 layers.
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)
    assert metadata == {
        "format": "fast-video-vae 1",
        "family": "wan2.1",
        "fps": "30000/1001",
        "frames": "9",
        "height": "32",
        "width": "48",
    }

    lines = done("decode", latents, "-o", movie)
    assert lines[-1] == f"wrote {movie}: 9 frames at 29.97 fps"
    decoded = read_video(movie)
    assert decoded.fps == Fraction(30000, 1001)
    pictures = pictures_of(vae.decode(expected), torch.uint16)
    same = write(tmp_path / "same.mp4", pictures, decoded.fps)
    # Rounding can change a value by one level.
    difference = whole_clip(movie).int() - whole_clip(same).int()
    assert difference.abs().float().mean() < 0.5


@pytest.mark.parametrize(
    ("arguments", "fps"),
    [
        ([], 16),  # not in the file: the frame rate of Wan
        (["--fps", "12.5"], Fraction(25, 2)),
        (["--fps", "30000/1001"], Fraction(30000, 1001)),
    ],
)
def test_decode_reads_latents_of_comfyui(tmp_path, done, arguments, fps):
    tensors = {
        "latent_tensor": torch.randn(1, 16, 2, 4, 6),
        "latent_format_version_0": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "c.latent")
    movie = tmp_path / "d.mp4"
    done("decode", tmp_path / "c.latent", "-o", movie, *arguments)
    assert read_video(movie).fps == fps
    assert read_video(movie).estimated_frames == 5


def test_the_dtype_option_sets_the_dtype_of_the_vae(tmp_path, run, vae_path, video):
    latents = tmp_path / "l.safetensors"
    options = ("--dtype", "bf16")
    assert run("encode", video, "--vae", vae_path, "-o", latents, *options)[0] == 0
    vae = load_vae(vae_path, dtype=torch.bfloat16)
    with safe_open(latents, framework="pt") as file:
        assert torch.equal(file.get_tensor("latent"), vae.encode(whole_clip(video)).float())


def test_quiet_prints_only_the_result(run, quiet_command):
    code, lines, errors = run(*quiet_command)
    assert (code, len(lines), errors) == (0, 1, [])


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "paint",
        "encode a.mp4 -o x.safetensors",  # no VAE
        *(f"demo {option}" for option in ("--chunk 0", "--chunk x", "--dtype int8")),
        "demo --quality fast",
        "info",
        *(f"info a --limit {limit}" for limit in ("0", "-1", "much", "nan", "inf")),
        *(f"bench {option}" for option in ("--rounds 0", "--frames 0", "--size 5")),
        *(
            f"decode x --vae x -o x.mp4 {option}"
            for option in (
                *("--fps -3", "--frames 8-4", "--frames x", "--frames -3", "--codec divx"),
                *("--video-quality 101", "--video-quality x"),
            )
        ),
        *(
            f"encode x --vae x -o x.safetensors {option}"
            for option in (
                *("--size 640", "--size 0x480", "--start -1", "--duration x", "--frames-limit 0"),
            )
        ),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments):
    code, lines, errors = run(*arguments.split())
    assert code == 2
    assert not lines
    (error,) = errors
    assert error.startswith("fast-video-vae: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo none.mp4", "No such file or directory: .*none.mp4"),
        ("demo text.mp4 --vae VAE", "text.mp4 is not a video"),
        ("demo clip.mp4 --vae none", "none does not exist"),
        ("demo clip.mp4 --vae text.mp4", "text.mp4"),
        ("demo clip.mp4 --vae VAE --out text.mp4", "text.mp4 is a file; expected a folder"),
        ("demo clip.mp4 --vae VAE --out text.mp4/x", "Not a directory: .*text.mp4/x"),
        ("demo clip.mp4 --vae VAE --device moon", "device 'moon' is unknown; .* has cpu"),
        ("demo clip.mp4 --vae VAE --device cpu:3", "device is 'cpu:3'; this PyTorch has cpu"),
        ("bench --vae VAE --device cuda:256", "device is 'cuda:256'; this PyTorch has cpu"),
        ("demo clip.mp4 --vae VAE --tile 4x16", "tiles are 4x16; this VAE needs at least 8x8"),
        # an output that cannot be written is an error before the VAE is opened
        ("encode clip.mp4 --vae none -o folder/x.safetensors", "No such file .*folder/x"),
        ("encode clip.mp4 --vae none -o text.mp4/x.safetensors", "Not a directory"),
        ("encode clip.mp4 --vae none -o x.pt", "x.pt is not a latent file"),
        ("decode text.mp4 --vae VAE -o x.mp4", "text.mp4 is not a complete safetensors file"),
        ("decode other.safetensors --vae none -o folder/x.mp4", "No such file .*folder/x.mp4"),
        ("decode other.safetensors --vae none -o /dev/full", "not a video file"),
        ("decode other.safetensors --vae VAE -o x.mp4", "is a latent of other; .* is wan2.1"),
        ("decode wide.safetensors --vae VAE -o x.mp4", "8 channels; this VAE needs 16"),
        ("decode nan.safetensors --vae VAE -o x.mp4", "NaN"),
        ("decode tall.safetensors --vae none -o a.avi", "a.avi is not a video file; expected"),
        ("decode tall.safetensors --vae none -o a.mp4 --audio no.wav", "No such file .*no.wav"),
        ("decode tall.safetensors --vae none -o a.mp4 --audio text.mp4", "cannot be read as audio"),
        # found before a frame is decoded
        ("decode tall.safetensors --vae VAE -o a.mp4 --frames 0-1", "0-1; .*tall.* has 0-0"),
        ("decode tall.safetensors --vae VAE -o a.mkv --frames 1 --chunk 1", "1-1; .* has 0-0"),
        (
            "decode tall.safetensors --vae VAE -o a.mp4 --codec hevc",
            "frames are 32x64; hevc needs at least 64x64",
        ),
        ("encode clip.mp4 --vae VAE -o x.safetensors --start 9", "lasts 0.30 s; start is 9.0 s"),
        (
            "encode clip.mp4 --vae VAE -o x.safetensors --size 4x4",
            "clip.mp4 is 48x32, requested as 4x4; expected at least 8x8",
        ),
        ("bench --vae none --json x.json", "none does not exist"),
        ("bench --vae VAE -o chart.jpg", "chart.jpg is not a PNG file; expected x.png"),
        ("bench --vae none -o folder/x.png", "No such file .*folder/x.png"),
        (
            "bench --vae VAE --frames 1 --size 4x48",
            "1 frame of 4 x 48; .* at least 1 frame of 8 x 8",
        ),
        (
            "bench --vae decoder.safetensors --task both --json x.json",
            "decoder only; expected --task decode",
        ),
        ("info none", "none does not exist"),
        ("info --device gpu", "device 'gpu' is unknown"),
    ],
)
def test_a_failure_exits_with_1_and_one_line(
    tmp_path, run, vae_path, video, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("text.mp4").write_text("no" * 999)
    save_file({"latent": torch.zeros(1, 16, 1, 4, 4)}, "other.safetensors", {"family": "other"})
    save_file({"latent": torch.zeros(1, 8, 1, 4, 4)}, "wide.safetensors")
    save_file({"latent": torch.zeros(1, 16, 1, 8, 4)}, "tall.safetensors")
    save_file({"latent": torch.full((1, 16, 1, 4, 4), torch.nan)}, "nan.safetensors")
    save_file(decoder_of(random_state_dict(8)), "decoder.safetensors")
    before = set(tmp_path.iterdir())
    code, lines, errors = run(*arguments.replace("VAE", str(vae_path)).split(), "--quiet")
    assert (code, lines, len(errors)) == (1, [], 1)
    assert re.match(f"fast-video-vae: error: .*{message}", errors[0])
    left = {path for path in set(tmp_path.iterdir()) - before if path.name != "fast-video-vae-out"}
    assert not left


@pytest.mark.parametrize("name", ["cpu", "cpu:0", *available_devices()])
def test_an_available_device_is_used(name):
    assert device_named(name).type == name.partition(":")[0]


def test_the_version_matches_the_project_and_needs_no_torch():
    command = installed_command("--version", first="sys.modules['torch'] = None")
    done = succeeded(command)
    version = re.search('^version = "(.*)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert done.stdout == f"fast-video-vae {version[1]}\n"


def test_the_address_matches_the_project():
    assert f'Repository = "{REPOSITORY}"' in PROJECT.read_text(encoding="utf-8")


def test_a_file_that_exists_is_replaced_on_request_only(tmp_path, run, video, vae_path):
    latents, out = tmp_path / "l.safetensors", tmp_path / "a.mp4"
    chart = tmp_path / "a.png"
    small = ("--vae", vae_path, "--rounds", "1", "--size", "32x32", "--frames", "1")
    for given, path in (
        (("encode", video, "-o", latents, "--vae", vae_path), latents),
        (("decode", latents, "-o", out, "--vae", vae_path), out),
        (("bench", "-o", chart, *small), chart),
        (("bench", "--json", tmp_path / "a.json", *small), tmp_path / "a.json"),
    ):
        assert run(*given)[0] == 0
        before = path.read_bytes()
        code, _, errors = run(*given)
        assert (code, path.read_bytes()) == (1, before)
        assert f"{path} exists already; expected a new name" in errors[-1]
        path.write_bytes(b"older")
        if path != latents:
            assert run(*given, "--overwrite")[0] == 0
            assert path.read_bytes()[:5] != b"older"
        else:
            path.write_bytes(before)


@pytest.mark.parametrize("out_channels", [3, 12])  # 12: a decoder that doubles height and width
def test_tiles_do_not_change_the_result(tmp_path, run, video, out_channels):
    vae, latents = tmp_path / "v.safetensors", tmp_path / "l.safetensors"
    save_file(random_state_dict(8, out_channels=out_channels), vae)
    common = ("--vae", vae, "--dtype", "fp32", "-q")
    frames, latent = {}, {}
    for tile in ([], ["--tile", "16x32"]):
        name = f"{len(tile)}.mkv"  # lossless
        assert run("encode", video, "-o", latents, "--overwrite", *common, *tile)[0] == 0
        assert run("decode", latents, "-o", tmp_path / name, *common, *tile)[0] == 0
        with safe_open(latents, framework="pt") as file:
            latent[name] = file.get_tensor("latent")
        frames[name] = whole_clip(tmp_path / name)
    torch.testing.assert_close(*latent.values(), rtol=1e-5, atol=1e-5)
    # Rounding can change a value by one level.
    assert (frames["0.mkv"].int() - frames["2.mkv"].int()).abs().max() <= 1


def test_debug_raises_the_error(run):
    with pytest.raises(FileNotFoundError):
        main(["info", "none", "--debug"])


def test_a_full_disk_leaves_no_file(tmp_path, run, quiet_command, limited_files):
    with limited_files(3000):
        code, lines, errors = run(*quiet_command)
    assert (code, lines, len(errors)) == (1, [], 1)
    assert re.match(r"fast-video-vae: error: File too large: .*out/\w+\.\w+$", errors[0])
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "package",
    ["torch", *(pytest.param(each, marks=pytest.mark.slow) for each in ("av", "tqdm", "PIL"))],
)
def test_the_error_for_a_missing_package_has_the_command_to_install_it(
    package, tmp_path, video, vae_path
):
    given = map(str, ("demo", video, "--vae", vae_path, "--out", tmp_path))
    command = installed_command(*given, first=f"sys.modules[{package!r}] = None")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.match(
        f"fast-video-vae: error: {package}.* is missing; "
        r'install it with: pip install "\.\[cli\]" in a clone of https://\S+\n$',
        done.stderr,
    )


@pytest.mark.parametrize(
    ("state", "family", "compression", "latent"),
    [
        (random_wan22, "wan2.2", (16, 4), [1, 48, 3, 2, 3]),
        pytest.param(
            *(random_qwen21, "qwen-image-2.1", (16, 1), [1, 64, 9, 2, 3]), marks=pytest.mark.slow
        ),
    ],
)
def test_the_commands_support_the_wan_2_2_layout(
    run, tmp_path, video, state, family, compression, latent
):
    vae, file, out = (tmp_path / name for name in ("v.safetensors", "l.safetensors", "o.mp4"))
    save_file(state(), vae)
    code, lines, _ = run("info", vae)
    assert code == 0
    assert f"family        {family}" in lines
    assert "compression   {} in space, {} in time".format(*compression) in lines
    assert run("encode", video, "--vae", vae, "-o", file)[0] == 0
    with safe_open(file, framework="pt") as stored:
        assert stored.get_slice("latent").get_shape() == latent
        sizes = {key: stored.metadata()[key] for key in ("frames", "height", "width")}
    assert sizes == {"frames": "9", "height": "32", "width": "48"}
    assert run("decode", file, "--vae", vae, "-o", out)[0] == 0
    assert len(list(read_video(out).frames())) == 9
    assert run("demo", video, "--vae", vae, "--out", tmp_path / "demo")[0] == 0
