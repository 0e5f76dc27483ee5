"""Write the tables of the texts anew from the rows: `python tests/tools/figures/write.py`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "conftest.py"))  # binds the import name

from fast_video_vae.tests.tools.figures.claims import TEXTS  # noqa: E402
from fast_video_vae.tests.tools.figures.page import filled  # noqa: E402


def main() -> None:
    """Write each text whose tables differ."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
