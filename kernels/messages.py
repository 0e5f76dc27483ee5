"""What is said of a file of unknown origin: one line, with its name, short and printable.

The names of keys come out of the file and may hold line breaks, characters that turn a line around,
or a million letters; what a reader raises may be a page. All of it passes here before it is shown.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import is_out_of_memory

# A line with what callers put before it ("vae_name: ") has at most 300 characters.
LINE = 290

# The longest name that file systems have.
_NAME = 255

# What of a key is shown.
_KEY = 80


def shown(text: object, limit: int = _KEY) -> str:
    r"""A name from a file, fit for a line: `a\nb`, shortened in the middle to `limit`.

    Escapes are in place of all that does not print, such as line breaks and marks that change the
    direction of writing.
    """
    # Cut twice: a text can be as long as a file, and escapes are longer than what they stand for.
    return _cut(_printable(_cut(str(text), limit)), limit)


def line(name: str, text: str) -> str:
    """A message about a file: one line of at most `LINE` characters with the file's name.

    Args:
        name: Of the file, or its path, which is cut down to the name where there is no room.
        text: What is said; it may begin with `name`, or with "it".

    Returns:
        `name: text`, or `text` where that begins with `name`, or with `name` in place of "it".
    """
    rest = f": {text}"
    if text.startswith(name):
        rest = text[len(name) :]
    elif text.startswith("it "):
        rest = text[2:]
    rest = _printable(rest[: 2 * LINE])
    place = shown(name, LINE)
    if len(place) + len(rest) > LINE or len(name) > LINE:
        place = shown(Path(name).name or name, _NAME)
    room = LINE - len(place)
    return place + (rest if len(rest) <= room else f"{rest[: room - 3]}...")


@contextmanager
def guarded(name: str, keep: tuple[type[ValueError], ...] = ()) -> Iterator[None]:
    """Make one line of whatever is raised while a file is read.

    Args:
        name: Of the file, or its path.
        keep: Kinds of errors that are raised again as what they are.

    Raises:
        OSError: The file cannot be opened or read.
        MemoryError: There is no memory, which says nothing of the file; so may a `RuntimeError`.
        ValueError: All else.
    """
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
        first = str(error).partition("\n")[0]
        why = f"it is damaged ({type(error).__name__}: {first})"
        raise ValueError(line(name, why)) from None


def _os_error(error: OSError, name: str) -> OSError:
    """The same with a name that fits a line."""
    if error.errno is None or error.strerror is None:
        return type(error)(line(name, str(error)))
    room = LINE - len(str(OSError(error.errno, error.strerror, "")))
    place = name if len(repr(name)) - 2 <= room else shown(Path(name).name, min(_NAME, room))
    return OSError(error.errno, error.strerror, place)


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long."""
    end = limit // 3
    return text if len(text) <= limit else f"{text[: limit - end - 3]}...{text[-end:]}"


def _printable(text: str) -> str:
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in text)


def padded(rows: Sequence[Sequence[str]], words: int | None = None) -> list[list[str]]:
    """Give every cell of a table the width of its column.

    Args:
        rows: Of equal length.
        words: Columns whose cells stand to the left, as words do; those after them stand to the
            right, as numbers do. None: all of them are words.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = len(widths) if words is None else words
    return [
        [
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
