"""The examples that the help page of LoRA Stack (Fast) shows."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "web" / "docs" / "FastVAE_LoraStack.md"


def examples_of(heading):
    """Of a part of the page."""
    section = _PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
