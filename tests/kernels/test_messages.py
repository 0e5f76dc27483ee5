"""Messages about files (one short printable line with the file's name), and padded tables."""

import pytest

from fast_video_vae.kernels import LINE, guarded, line, padded, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decoder.conv1.weight", "decoder.conv1.weight"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egnp.exe", "\\u202egnp.exe"),  # read from right to left
        ("\ud800", "\\ud800"),  # half of a pair
        ("größe", "größe"),
        (7, "7"),
    ],
)
def test_unprintable_characters_of_a_key_are_escaped(text, expected):
    assert shown(text) == expected


@pytest.mark.parametrize("text", ["k" * 81, "\n" * 80, "\u202e" * 10**6])
def test_a_long_key_is_shortened(text):
    assert len(shown(text)) <= 80
    assert shown(text).isprintable()


@pytest.mark.parametrize(
    "path",
    ["vae.pth", f"/models/{'long ' * 80}/vae.pth", "/x/" + "n" * 251 + ".pth", "/x/\n\u202e.pth"],
)
@pytest.mark.parametrize("text", ["it is empty", "x" * 14_000, "a\nb " * 200])
def test_a_line_is_short_and_holds_the_name(path, text):
    for message_text in (text, f"{path} is this: {text}"):
        message = line(path, message_text)
        assert len(message) <= LINE
        assert message.isprintable()
        assert shown(path.rpartition("/")[2], 60) in message


def test_a_long_reason_keeps_its_beginning_and_end():
    message = line("n" * 300 + ".pth", f"{'k' * 80} is int64; {'x' * 80}; expected float32")
    assert len(message) <= LINE
    assert message.startswith("nnn")
    assert ": kkk" in message
    assert message.endswith("; expected float32")


RAISED = [
    ZeroDivisionError("division by zero"),
    KeyError("x"),
    NotImplementedError("Could not run 'aten::x'\nwith arguments"),
    RuntimeError("x" * 14_000),
    AssertionError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ValueError("it is\nodd"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_any_error_becomes_one_line(error):
    with (
        pytest.raises(ValueError, match=r"vae\.pth(:| is)") as caught,
        guarded("/models/vae.pth"),
    ):
        raise error
    assert type(caught.value) is ValueError
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= LINE


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_out_of_memory_errors_are_unchanged(error):
    with pytest.raises(type(error)) as caught, guarded("vae.pth"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", ["vae.pth", "/x" * 200 + "/vae.pth"])
def test_system_errors_keep_their_type(name):
    with (
        pytest.raises(PermissionError, match=r"Permission denied.*vae\.pth") as caught,
        guarded(name),
    ):
        raise PermissionError(13, "Permission denied", name)
    assert caught.value.errno == 13
    assert len(str(caught.value)) <= LINE


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, [["op  ", "count"], ["silu", "9    "]]),
        (1, [["op  ", "count"], ["silu", "    9"]]),
        (0, [["  op", "count"], ["silu", "    9"]]),
    ],
)
def test_words_are_left_aligned_and_numbers_right_aligned(words, expected):
    assert padded([["op", "count"], ["silu", "9"]], words) == expected
