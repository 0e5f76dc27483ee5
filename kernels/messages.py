"""Messages about files: one short, printable line that starts with the file's name.

Keys come from the file and can hold line breaks, bidirectional marks or a million letters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import first_line, is_out_of_memory

# Characters of a message about a file; with a prefix such as "vae_name: " it has at most 160.
LINE = 145

# Characters of a file name; file systems allow 255, which would leave no room for the reason.
_NAME = 60

# Characters of a key.
_KEY = 80


def shown(text: object, limit: int = _KEY) -> str:
    r"""Escape a text from a file as `\n` is, and shorten it in the middle to `limit` characters."""
    # Cut before escaping too: the text can be as long as the file.
    return _cut(_printable(_cut(str(text), limit)), limit)


def line(name: str, text: str) -> str:
    """Return a message of at most `LINE` characters that starts with a file's name."""
    # The text may start with the name or with "it". A path that is too long is reduced to the name.
    rest = f": {text}"
    if text.startswith(name):
        rest = text[len(name) :]
    elif text.startswith("it "):
        rest = text[2:]
    rest = _printable(_cut(rest, 2 * LINE))
    place = shown(name, LINE)
    if len(place) + len(rest) > LINE or len(name) > LINE:
        place = shown(Path(name).name or name, _NAME)
    return place + _cut(rest, LINE - len(place))


@contextmanager
def guarded(name: str, keep: tuple[type[ValueError], ...] = ()) -> Iterator[None]:
    """Turn every error of a block that reads a file into one line with the file's name."""
    # `OSError`, errors of memory and the classes in `keep` keep their type; all others become a
    # `ValueError`.
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        raise _os_error(error, name) from None
    except ValueError as error:
        kind = next((kind for kind in keep if isinstance(error, kind)), ValueError)
        raise kind(line(name, str(error) or type(error).__name__)) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = f"it is damaged ({type(error).__name__}: {first_line(error)})"
        raise ValueError(line(name, why)) from None


def _os_error(error: OSError, name: str) -> OSError:
    """Return a copy of `error` whose name fits into one line."""
    if error.errno is None or error.strerror is None:
        return type(error)(line(name, str(error)))
    room = LINE - len(str(OSError(error.errno, error.strerror, "")))
    place = name if len(repr(name)) - 2 <= room else shown(Path(name).name, min(_NAME, room))
    return OSError(error.errno, error.strerror, place)


def _cut(text: str, limit: int) -> str:
    """Keep the beginning and the end of a long text."""
    end = limit // 3
    return text if len(text) <= limit else f"{text[: limit - end - 3]}...{text[-end:]}"


def _printable(text: str) -> str:
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in text)


def padded(rows: Sequence[Sequence[str]], words: int | None = None) -> list[list[str]]:
    """Pad the cells of a table to its columns: the first `words` to the left, None: all of them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = len(widths) if words is None else words
    return [
        [
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
