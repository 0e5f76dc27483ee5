"""The command line: files, lines and exit codes; no files after a failure; what pages name."""

import re
import shlex
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fast_video_vae.tests import builders
from fast_video_vae.tests.builders import installed_command, random_state_dict

for _package in ("av", "tqdm", "PIL"):
    pytest.importorskip(_package, reason=f"{_package} is not installed")

from fast_video_vae.tests.videos import write, write_clip  # noqa: E402
from fast_video_vae.vae import load_vae  # noqa: E402
from fast_video_vae.vae.cli.main import REPOSITORY, main  # noqa: E402
from fast_video_vae.vae.cli.parser import parse  # noqa: E402
from fast_video_vae.vae.media import codecs, pictures_of, read_video  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")

# A command in a block or in a sentence.
COMMAND = re.compile(r"(?:fast-video-vae|-m fast_video_vae) ([^`\n#]*)")
COMMANDS = sorted(
    {found.strip() for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))}
)


@pytest.fixture
def video(tmp_path):
    return write_clip(tmp_path / "clip.mp4", 9, fps=Fraction(30000, 1001))


def whole_clip(path):
    """The frames of a file as the API takes them, `[1, 3, T, H, W]`."""
    return torch.cat(list(read_video(path).pieces()), dim=2)


def test_encode_and_decode_equal_the_api(tmp_path, done, vae_path, video):
    options = ("--tile", "16x32")
    latents, movie = tmp_path / "l.safetensors", tmp_path / "d.mp4"
    lines = done("encode", video, "-o", latents, *options)
    assert lines[-1] == f"wrote {latents}: [1, 16, 3, 4, 6] for 9 frames at 29.97 fps"
    vae = load_vae(vae_path, dtype=torch.float32)
    expected = vae.encode(whole_clip(video))
    with safe_open(latents, framework="pt") as file:
        assert list(file.keys()) == ["latent"]
        latent, metadata = file.get_tensor("latent"), file.metadata()
    assert latent.dtype == torch.float32
    # Chunks may sum in another order: 2e-6 in float32 over about 30 layers.
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-5)
    known = {"format": "fast-video-vae 1", "family": "wan2.1", "fps": "30000/1001", "frames": "9"}
    assert metadata == {**known, "height": "32", "width": "48"}

    lines = done("decode", latents, "-o", movie, *options)
    assert lines[-1] == f"wrote {movie}: 9 frames at 29.97 fps"
    pictures = pictures_of(vae.decode(expected), torch.uint16)
    same = write(tmp_path / "same.mp4", pictures, Fraction(30000, 1001))
    assert read_video(movie).fps == read_video(same).fps
    # Rounding can change a value by one level.
    difference = whole_clip(movie).int() - whole_clip(same).int()
    assert difference.abs().float().mean() < 0.5


def test_the_dtype_options_set_the_dtypes(tmp_path, run, vae_path, video):
    for options, encodes in ([], "bfloat16"), (["--encode-dtype", "fp32"], "float32"):
        given = "-o", tmp_path / "l.safetensors", "--device", "cpu:0", "--dtype", "bf16", *options
        code, lines, _ = run("encode", video, "--vae", vae_path, *given, "--overwrite")
        assert code == 0
        assert f"on cpu, encodes in {encodes}, decodes in bfloat16" in "".join(lines)


def test_wrong_usage_exits_with_2(run):
    for arguments in (
        *("", "paint", "encode a.mp4 -o x.safetensors", "demo --quality fast", "info"),
        *("info --devices cpu,cpu", "info --device --precision int8"),  # they need a file
    ):
        code, lines, errors = run(*arguments.split())
        assert (code, lines, len(errors)) == (2, [], 1)
        assert errors[0].startswith("fast-video-vae: error: ")


WHOLE = ("0", "x", "-3", "1_0", "+5", "1.5")
WRONG = {
    "demo": {
        "chunk": (*WHOLE, "--1"), "dtype": ("int8",), "fps": ("-3", "1/0", "nan"),
        "size": ("640", "0x480", "1x2x3"), "start": ("-1", "nan", "inf"), "duration": ("x",),
        "frames-limit": WHOLE,
    },
    "info": {"limit": ("0", "-1", "much", "nan", "inf")},
    "bench": {"rounds": WHOLE, "frames": WHOLE, "size": ("5",), "task": ("all",)},
    "decode x --vae x -o x.mp4": {
        "frames": ("8-4", "x", "-3", "1-2-3"), "codec": ("divx",), "bit-depth": ("12",),
        "video-quality": ("101", "x"), "devices": ("", "cpu,,cpu"), "shares": ("2,much",),
    },
}  # fmt: skip


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_value_is_named_and_exits_with_2(run, command):
    for option, values in WRONG[command].items():
        for value in values:
            code, lines, (error,) = run(*command.split(), f"--{option}={value}")
            assert (code, lines) == (2, [])
            assert re.match(f"fast-video-vae: error: argument --{option}", error)
            assert repr(value) in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo none.mp4", "No such file or directory: .*none.mp4"),
        ("demo text.mp4 --vae VAE", "text.mp4 is not a video"),
        ("demo clip.mp4 --vae VAE --out text.mp4", "text.mp4 is a file; expected a folder"),
        ("demo clip.mp4 --vae VAE --device moon", "device 'moon' is unknown; .* has cpu"),
        ("demo clip.mp4 --vae VAE --tile 4x16", "tiles are 4x16; this VAE needs at least 8x8"),
        ("demo clip.mp4 --vae decoder.safetensors", "a decoder only; expected one that can encode"),
        ("encode clip.mp4 --vae decoder.safetensors -o x.safetensors", "has a decoder only"),
        # an output that cannot be written is an error before the VAE is opened
        ("encode clip.mp4 --vae none -o folder/x.safetensors", "No such file .*folder/x"),
        ("encode clip.mp4 --vae none -o x.pt", "x.pt is not a latent file"),
        ("decode other.safetensors --vae none -o /dev/full", "not a video file"),
        ("decode other.safetensors --vae VAE -o x.mp4", "is a latent of other; .* is wan2.1"),
        ("decode wide.safetensors --vae VAE -o x.mp4", "8 channels; this VAE needs 16"),
        ("decode nan.safetensors --vae VAE -o x.mp4", "NaN"),
        ("decode tall.safetensors --vae none -o a.mp4 --audio no.wav", "No such file .*no.wav"),
        # found before a frame is decoded
        ("decode tall.safetensors --vae VAE -o a.mp4 --frames 0-1", "0-1; .*tall.* has 0-0"),
        ("decode tall.safetensors --vae VAE -o a.mp4 --codec hevc", "32x64; .* at least 64x64"),
        ("encode clip.mp4 --vae VAE -o x.safetensors --start 9", "lasts 0.30 s; start is 9.0 s"),
        ("encode clip.mp4 --vae VAE -o x.safetensors --size 4x4", "requested as 4x4; .* least 8x8"),
        ("bench --vae VAE -o chart.jpg", "chart.jpg is not a PNG file; expected x.png"),
        ("bench --vae VAE --frames 1 --size 4x48", "1 frame of 4 x 48; .* at least 1 frame of 8 x"),
        ("bench --vae decoder.safetensors --task both --json x.json", "expected --task decode"),
        ("info VAE --devices cpu,gpu9", "device 'gpu9' is unknown"),
        ("info VAE --devices cpu,cpu --shares 2", r"shares are \[2.0\]; expected 2 positive numb"),
        ("info --device cuda:256", "device is 'cuda:256'; this PyTorch has cpu"),
    ],
)
def test_a_failure_exits_with_1_and_one_line(
    tmp_path, run, vae_path, video, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("text.mp4").write_text("no" * 999)
    latent = torch.zeros(1, 16, 1, 8, 4)
    save_file({"latent": latent}, "tall.safetensors")
    save_file({"latent": latent}, "other.safetensors", {"family": "other"})
    save_file({"latent": latent[:, :8].contiguous()}, "wide.safetensors")
    save_file({"latent": latent / 0}, "nan.safetensors")
    save_file(builders.decoder_of(random_state_dict(8)), "decoder.safetensors")
    before = {*tmp_path.iterdir(), tmp_path / "fast-video-vae-out"}
    code, lines, errors = run(*arguments.replace("VAE", str(vae_path)).split(), "--quiet")
    assert (code, lines, len(errors)) == (1, [], 1)
    assert re.match(f"fast-video-vae: error: .*{message}", errors[0])
    assert not {*tmp_path.iterdir()} - before


def test_the_version_and_the_address_match_the_project_and_need_no_torch():
    command = installed_command("--version", first="sys.modules['torch'] = None")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search('^version = "(.*)"$', project, re.MULTILINE)
    assert builders.succeeded(command).stdout == f"fast-video-vae {version[1]}\n"
    assert f'Repository = "{REPOSITORY}"' in project


def test_a_file_that_exists_is_replaced_on_request_only(tmp_path, run, video, vae_path):
    latents, out = tmp_path / "l.safetensors", tmp_path / "a.mp4"
    assert run("encode", video, "-o", latents, "--vae", vae_path)[0] == 0
    for given, path in (
        (("decode", latents, "-o", out, "--vae", vae_path), out),
        (("encode", video, "-o", latents, "--vae", vae_path), latents),
    ):
        path.write_bytes(b"older")
        code, _, errors = run(*given)
        assert (code, path.read_bytes()) == (1, b"older")
        assert f"{path} exists already; expected a new name" in errors[-1]
        assert run(*given, "--overwrite")[0] == 0
        assert path.read_bytes()[:5] != b"older"


def test_a_full_disk_leaves_no_file_and_quiet_prints_only_the_result(
    tmp_path, run, vae_path, limited_files
):
    out = tmp_path / "out"
    out.mkdir()
    # 6 frames: one is dropped, which a run that is not quiet notes.
    source = write_clip(tmp_path / "a.mp4", 6, 64, 96)
    given = "encode", source, "--vae", vae_path, "-o", out / "l.safetensors", "--quiet"
    with limited_files(3000):
        code, lines, errors = run(*given)
    assert (code, lines, len(errors)) == (1, [], 1)
    assert re.match(r"fast-video-vae: error: File too large: .*out/\w+\.\w+$", errors[0])
    assert not list(out.iterdir())
    code, lines, errors = run(*given)
    assert (code, len(lines), errors) == (0, 1, [])


def test_debug_raises_the_error():
    with pytest.raises(FileNotFoundError):
        main(["info", "none", "--debug"])


def test_the_error_for_a_missing_package_has_the_command_to_install_it(video, vae_path):
    given = map(str, ("demo", video, "--vae", vae_path, "--out", video.parent))
    command = installed_command(*given, first="sys.modules['torch'] = None")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        "fast-video-vae: error: torch.* is missing; "
        r'install it with: pip install "\.\[cli\]" in a clone of https://\S+\n',
        done.stderr,
    )


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        parse([command, "--help"], "1")
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_is_accepted(command):
    assert parse(shlex.split(command), "1").command == command.split()[0]


def test_the_options_on_the_page_exist(capsys):
    helps = "".join(help_of(name, capsys) for name in ("demo", "encode", "decode", "bench", "info"))
    options = {*re.findall(r"`(--[\w-]+)", PAGE)} - {"--help"}
    assert options
    assert [option for option in options if not re.search(rf"{option}\b", helps)] == []


def test_the_table_of_suffixes_is_that_of_the_codecs():
    rows = re.findall(r"^\| `(\.\w+)` \| (\w+)[^|]*\| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert rows
    known = [codecs.codec_named(name) for name in codecs.CODECS]
    for suffix, default, others in rows:
        assert codecs.codec_for(Path(f"x{suffix}")).name == default
        able = {codec.name for codec in known if suffix in codec.suffixes}
        assert {default, *filter(None, others.split(", "))} == able
