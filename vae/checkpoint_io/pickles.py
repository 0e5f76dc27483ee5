"""Pickles as data: the tensors described in a `.pth` file, without calling anything.

A pickle is a program that can call any function of the machine that reads it. This reader knows the
instructions but no functions: a call is only recorded (`PickleCall`), and the reader of the file
interprets it. It only creates numbers, texts, tuples, lists and dicts, no more of them than the
pickle has bytes, so that no number or length in it can cost memory or time.
"""

import struct
from collections.abc import Callable, Set
from typing import NamedTuple

# A tensor takes about 40 instructions and 170 bytes.
_MAX_INSTRUCTIONS = 300_000
_MAX_BYTES = 16 << 20

# Limits of keys: long texts are slow to compare, large numbers can have equal hashes, and nested
# tuples use the stack.
_MAX_TEXT, _MAX_NUMBER = 1000, 1 << 32

_ORDERED = "collections.OrderedDict"


class PickleGlobal(NamedTuple):
    """A name in a pickle: a function, a type, a dtype."""

    name: str


class PickleCall(NamedTuple):
    """A call in a pickle, which is not executed."""

    name: str
    arguments: tuple


class PersistentId(NamedTuple):
    """The identifier of data in the file outside the pickle."""

    place: object


class Pickle(NamedTuple):
    """The content of one pickle.

    Attributes:
        value: Dicts, lists, tuples, texts, numbers, and the classes above.
        end: Offset of its end in bytes.
        stored: All references to data outside the pickle.
    """

    value: object
    end: int
    stored: list[PersistentId]


def read_pickle(data: memoryview, first: int, known: Set[str]) -> Pickle:
    """Read one pickle.

    Args:
        data: The file.
        first: Offset of the pickle.
        known: The allowed names, such as "collections.OrderedDict".

    Returns:
        Its content.

    Raises:
        ValueError: It is damaged, too large, or holds unknown names.
    """
    reader = _Reader(data, first, known)
    try:
        return Pickle(reader.run(), reader.at, reader.stored)
    except (IndexError, KeyError, UnicodeDecodeError, struct.error):
        raise ValueError("its pickle is damaged") from None


class _Reader:
    """The stack machine that runs a pickle."""

    def __init__(self, data: memoryview, first: int, known: Set[str]) -> None:
        self.at = first
        self.stored: list[PersistentId] = []
        self._data, self._end = data, min(len(data), first + _MAX_BYTES)
        self._known = known
        self._stack: list = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        data, instructions = self._data, _INSTRUCTIONS
        for _ in range(_MAX_INSTRUCTIONS):
            if self.at >= self._end:
                raise ValueError("its pickle is truncated or too large")
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self._stack.pop()
            do = instructions.get(code)
            if do is None:
                raise ValueError(
                    f"its pickle has the unknown instruction {code:#04x}; expected a state dict"
                )
            do(self)
        raise ValueError(f"its pickle has more than {_MAX_INSTRUCTIONS} instructions")

    def _take(self, count: int) -> bytes:
        first, self.at = self.at, self.at + count
        if not 0 <= count <= self._end - first:
            raise ValueError("its pickle is truncated or too large")
        return bytes(self._data[first : self.at])

    def _number(self, form: str) -> int | float:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _bytes(self, form: str) -> bytes:
        return self._take(int(self._number(form)))

    def _text(self, form: str) -> None:
        self._stack.append(self._bytes(form).decode("utf-8", "surrogatepass"))

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _marked(self) -> list:
        first = self._marks.pop()
        items = self._stack[first:]
        del self._stack[first:]
        return items

    def _tuple(self, count: int) -> None:
        if count > len(self._stack):
            raise IndexError
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def _extend(self, items: list) -> None:
        into = self._stack[-1]
        if not isinstance(into, list):
            raise ValueError(f"its pickle appends to a {_kind(into)}; expected a list")
        into += items

    def _set(self, items: list) -> None:
        into = self._stack[-1]
        if not isinstance(into, dict) or len(items) % 2:
            raise ValueError(f"its pickle sets items of a {_kind(into)}; expected pairs and a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                raise ValueError(f"one of its keys is a {_kind(key)}; expected a short text")
            into[key] = value

    def _global(self) -> None:
        words = []
        for _ in range(2):
            line = bytes(self._data[self.at : min(self.at + 300, self._end)])
            word, newline, _ = line.partition(b"\n")
            if not newline:
                raise ValueError("its pickle is truncated or has a long name")
            self.at += len(word) + 1
            words.append(word.decode("utf-8"))
        self._named(*words)

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its pickle has a name that is not a text")
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self._known:
            raise ValueError(f"it holds more than tensors: {full}; expected a state dict")
        self._stack.append(PickleGlobal(full))

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, PickleGlobal) or not isinstance(arguments, tuple):
            raise ValueError(f"its pickle calls a {_kind(function)}; expected a known name")
        is_dict = function.name == _ORDERED and not arguments
        self._stack.append({} if is_dict else PickleCall(function.name, arguments))

    def _stored(self) -> None:
        self.stored.append(PersistentId(self._stack.pop()))
        self._stack.append(self.stored[-1])

    def _put(self, index: int | float) -> None:
        self._memo[int(index)] = self._stack[-1]

    def _get(self, index: int | float) -> None:
        self._stack.append(self._memo[int(index)])


def _is_key(key: object) -> bool:
    """Return whether a dict finds the key fast."""
    if isinstance(key, str):
        return len(key) <= _MAX_TEXT
    return isinstance(key, int) and abs(key) < _MAX_NUMBER


def _kind(value: object) -> str:
    return value.name if isinstance(value, PickleGlobal | PickleCall) else type(value).__name__


_STOP = ord(".")

# The instructions of protocols 2 to 5, which state dicts are written with.
_INSTRUCTIONS: dict[int, Callable[[_Reader], object]] = {
    ord(code): do
    for code, do in {
        "\x80": lambda m: m._take(1),  # the protocol
        "\x95": lambda m: m._take(8),  # a frame
        "(": _Reader._mark,
        "0": lambda m: m._stack.pop(),
        "1": _Reader._marked,
        "N": lambda m: m._stack.append(None),
        "\x88": lambda m: m._stack.append(True),
        "\x89": lambda m: m._stack.append(False),
        "K": lambda m: m._stack.append(m._take(1)[0]),
        "M": lambda m: m._stack.append(m._number("<H")),
        "J": lambda m: m._stack.append(m._number("<i")),
        "G": lambda m: m._stack.append(m._number(">d")),
        "\x8a": _Reader._long,
        "\x8c": lambda m: m._text("<B"),
        "X": lambda m: m._text("<I"),
        "\x8d": lambda m: m._text("<Q"),
        "U": lambda m: m._text("<B"),
        "T": lambda m: m._text("<I"),
        "C": lambda m: m._stack.append(m._bytes("<B")),
        "B": lambda m: m._stack.append(m._bytes("<I")),
        "\x8e": lambda m: m._stack.append(m._bytes("<Q")),
        "\x96": lambda m: m._stack.append(m._bytes("<Q")),
        "}": lambda m: m._stack.append({}),
        "]": lambda m: m._stack.append([]),
        "\x8f": lambda m: m._stack.append([]),  # a set, which is not used
        ")": lambda m: m._stack.append(()),
        "t": lambda m: m._stack.append(tuple(m._marked())),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "a": lambda m: m._extend([m._stack.pop()]),
        "e": lambda m: m._extend(m._marked()),
        "\x90": lambda m: m._extend(m._marked()),
        "s": lambda m: m._set([m._stack.pop(), m._stack.pop()][::-1]),
        "u": lambda m: m._set(m._marked()),
        "c": _Reader._global,
        "\x93": _Reader._stack_global,
        "R": _Reader._call,
        "\x81": _Reader._call,
        "b": lambda m: m._stack.pop(),  # attributes, which are not used
        "Q": _Reader._stored,
        "q": lambda m: m._put(m._take(1)[0]),
        "r": lambda m: m._put(m._number("<I")),
        "\x94": lambda m: m._put(len(m._memo)),
        "h": lambda m: m._get(m._take(1)[0]),
        "j": lambda m: m._get(m._number("<I")),
    }.items()
}
