"""Pages of Markdown with tables that are written from rows.

A page marks the place of a table with `<!-- rows: NAME -->` and `<!-- end of rows -->`.
`python tests/tools/figures/write.py` fills them; a test compares them.
"""

import re

from .tables import TABLES

_BLOCK = re.compile(r"(<!-- rows: ([\w.-]+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return a page of Markdown with its tables written anew.

    Raises:
        KeyError: A mark names no table.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


def without_tables(page: str) -> str:
    """Return a page of Markdown without the tables that are written from rows."""
    return _BLOCK.sub("", page)


def named(page: str) -> list[str]:
    """Return the names of the tables that a page marks, also where the mark is incomplete."""
    return re.findall(r"<!-- rows: (.*?) -->", page)
