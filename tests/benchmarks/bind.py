"""Bind the checkout to its import name, for the scripts next to this file: `import bind`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))
