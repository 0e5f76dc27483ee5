"""What the words of the command line mean: each function takes one as it was typed."""

import argparse
import math
from fractions import Fraction

DTYPES = {
    "float32": "float32", "fp32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip


def dtype(text: str) -> str:
    """PyTorch's name of a dtype."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def chunk(text: str) -> int:
    """Latents per step; -1: all."""
    if not text.removeprefix("-").isdecimal() or not (int(text) > 0 or int(text) == -1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither -1 nor a number of at least 1")
    return int(text)


def count(text: str) -> int:
    """A number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def gib(text: str) -> int:
    """Bytes of what is given in GiB."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB such as 6 or 0.5")
    return int(value * 2**30)


def quality(text: str) -> int:
    """A quality from 0 to 100."""
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds such as 2.5")
    return value


def size(text: str) -> tuple[int, int]:
    """Height and width, of what is written the other way round."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 832x480")
    return int(height), int(width)


def frame_range(text: str) -> range:
    """Frames from the first to the last, both taken."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of frames such as 40-80")
    return range(int(first), int(last) + 1)


def fps(text: str) -> Fraction:
    """Frames per second."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 24 or 30000/1001")
    return value
