"""The commands, options and codecs that the README and docs/ name are those of the command line."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("av", reason="av is not installed")

from fast_video_vae.vae.cli.parser import parse
from fast_video_vae.vae.media import codecs

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")

# A command in a block or in a sentence.
COMMAND = re.compile(r"(?:fast-video-vae|-m fast_video_vae) ([^`\n#]*)")
COMMANDS = sorted(
    {found.strip() for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))}
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
