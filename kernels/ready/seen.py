"""What the calls of a video run, fixed while it runs: the kernels found before it, and fallbacks.

A `Fallback` names what a device computes wrongly, so that something else serves there.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from ..backends import within


@dataclass(frozen=True)
class Fallback:
    """What is used on a device in place of what is wrong there; nothing by default.

    Attributes:
        reference: The ops of the reference, attention in blocks of products, plain convolutions.
        sliced: Convolutions of single frames in place of those over time.
        contiguous: Convolutions in contiguous memory, channels first.
        float32: Layers in float32.
        cpu: The CPU.
    """

    reference: bool = False
    sliced: bool = False
    contiguous: bool = False
    float32: bool = False
    cpu: bool = False

    def __bool__(self) -> bool:
        return self != _NONE

    def __or__(self, other: "Fallback") -> "Fallback":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Fallback(*(a or b for a, b in pairs))

    @property
    def convolves(self) -> bool:
        """Whether other convolutions run."""
        return self.reference or self.sliced or self.contiguous

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what is used, as attributes."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name))

    @property
    def words(self) -> str:
        """What is used, for people."""
        return ", ".join(_WORDS[name] for name in self.names) or "nothing else"


_WORDS = {
    "reference": "plain ops",
    "sliced": "convolutions of single frames",
    "contiguous": "contiguous convolutions",
    "float32": "float32",
    "cpu": "the CPU",
}

_NONE = Fallback()


@dataclass(frozen=True)
class Snapshot:
    """What a video sees of what is found."""

    kernels: int  # number of the last kernel; 0: the library alone
    proofs: int  # number of the last proof
    native: bool  # the C++ kernels of the CPU are loaded
    fallback: Fallback = _NONE  # in place of what is wrong


_snapshot: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)


def snapshot() -> Snapshot | None:
    """Return what the calls of this thread see; None: all that there is."""
    return _snapshot.get()


def fallback() -> Fallback:
    """Return what the calls of this thread use in place of what is wrong."""
    seen = _snapshot.get()
    return _NONE if seen is None else seen.fallback


def seeing(seen: Snapshot) -> AbstractContextManager[object]:
    """Let ops in this thread run what `seen` has, until the end of the block."""
    return within(_snapshot, seen)
