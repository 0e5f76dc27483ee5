"""The command line of the scripts that draw graphs."""

import argparse
from collections.abc import Collection
from pathlib import Path


def chosen(doc: str, names: Collection[str], folder: Path) -> tuple[list[str], Path]:
    """Read the command line of this process; an unknown name ends it.

    Args:
        doc: Docstring of the script.
        names: Names of the graphs.
        folder: Where the pictures or workflows go by default.

    Returns:
        The names on the command line, or all; and the folder.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--to", type=Path, default=folder, metavar="FOLDER")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}; expected names of {', '.join(names)}")
    return arguments.names or [*names], arguments.to
