"""Messages about files (one short printable line with the file's name), tables and the log."""

import pytest

from fast_video_vae.kernels import LINE, guarded, line, padded, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202egnp.exe", "\\u202egnp.exe"),  # read from right to left
        ("\ud800", "\\ud800"),  # half of a pair
        ("größe", "größe"),
        (7, "7"),
        ("k" * 30 + "-" * 51, "k" * 30 + "-" * 21 + "..." + "-" * 26),
    ],
)
def test_a_key_is_printable_and_short(text, expected):
    assert shown(text) == expected
    assert len(shown("\u202e" * 10**6)) <= 80


@pytest.mark.parametrize("path", ["vae.pth", "/x/" + "n" * 251 + ".pth", "/x/\n\u202e.pth"])
@pytest.mark.parametrize("text", ["x" * 14_000, "a\nb " * 200])
def test_a_line_is_short_and_holds_the_name(path, text):
    for begun in ("", f"{path} is this: "):
        message = line(path, begun + text)
        assert len(message) <= LINE
        assert message.isprintable()
        assert shown(path.rpartition("/")[2], 60) in message


def test_a_line_keeps_the_beginning_and_the_end_of_a_long_reason():
    message = line("n" * 300 + ".pth", f"{'k' * 80} is int64; {'x' * 80}; expected float32")
    assert len(message) <= LINE
    assert message.startswith("nnn")
    assert ": kkk" in message
    assert message.endswith("; expected float32")
    assert (
        line("vae.pth", "it is empty") == line("vae.pth", "vae.pth is empty") == "vae.pth is empty"
    )
    assert line("vae.pth", "no tensors") == "vae.pth: no tensors"


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("x" * 14_000), AssertionError(), ValueError("it is\nodd")]
)
def test_any_error_becomes_one_line(error):
    with pytest.raises(ValueError, match=r"vae\.pth(:| is)") as caught, guarded("/models/vae.pth"):
        raise error
    assert type(caught.value) is ValueError
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= LINE


def test_errors_of_memory_and_wanted_classes_keep_their_type():
    for error in (MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")):
        with pytest.raises(type(error)) as caught, guarded("vae.pth"):
            raise error
        assert caught.value is error
    with (
        pytest.raises(UnicodeError, match=r"^vae\.pth: odd$"),
        guarded("vae.pth", keep=(UnicodeError,)),
    ):
        raise UnicodeError("odd")


@pytest.mark.parametrize(
    ("words", "expected"),
    [(None, [["op  ", "count"], ["silu", "9    "]]), (1, [["op  ", "count"], ["silu", "    9"]])],
)
def test_words_are_left_aligned_and_numbers_right_aligned(words, expected):
    assert padded([["op", "count"], ["silu", "9"]], words) == expected
