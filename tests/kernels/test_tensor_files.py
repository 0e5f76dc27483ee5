"""The header of a safetensors file, compared with the file, and what other files are."""

import io
import json

import pytest
import torch
from safetensors.torch import save

from fast_video_vae.kernels import PICKLE, SAFETENSORS, ZIP, kind_of, read_header

TENSORS = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(2).bfloat16()}
WHOLE = save(TENSORS, {"name": "x"})


def header_of(data):
    return read_header(io.BytesIO(data), len(data))


def changed(change=lambda content: None, data=b"\0" * 28):
    """Return the file with a changed header."""
    size = int.from_bytes(WHOLE[:8], "little")
    content = json.loads(WHOLE[8 : 8 + size])
    text = json.dumps(change(content) or content).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_the_places_of_the_tensors_hold_their_numbers():
    header = header_of(WHOLE)
    assert header.metadata == {"name": "x"}
    for name, tensor in TENSORS.items():
        place = header.places[name]
        start, end = (header.start + offset for offset in place.offsets)
        read = torch.frombuffer(bytearray(WHOLE[start:end]), dtype=place.torch_dtype)
        assert torch.equal(read.view(place.shape), tensor)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (WHOLE[:-1], "its tensors need 28 bytes; the file has 27 of data"),
        (WHOLE + b"x", "its tensors need 28 bytes; the file has 29 of data"),
        (WHOLE[:100], "it has 100 bytes; its header alone has"),
        (changed(lambda c: c["a"].update(data_offsets=[0, 20])), "a is F32 [2, 3], but has 20"),
        (changed(lambda c: c.update(c=c["b"])), "its tensors overlap or leave a gap at byte"),
        (changed(lambda c: c["b"].update(data_offsets=[28, 32]), b"\0" * 32), "a gap at byte 28"),
        (changed(lambda c: c["a"].update(shape=[2, -3])), "a has an invalid dtype, shape or"),
        (changed(lambda c: c["a"].update(shape=[1] * 9)), "a has 9 dimensions or invalid"),
        (changed(lambda c: c["a"].update(more=1)), "a has other entries than dtype"),
        (changed(lambda c: c.update({"k" * 1001: c["a"]})), "has 1001 characters; expected at"),
        (changed(lambda c: c.update(__metadata__={"x": 1})), "its metadata is not text"),
        ((9).to_bytes(8, "little") + b'{"a":1,}}', "its header is not valid JSON"),
        ((17).to_bytes(8, "little") + b'{"a":{},  "a":{}}', "its header has a key twice"),
        ((17 << 20).to_bytes(8, "little") + b"{" * (17 << 20), "bytes; expected at most 16777216"),
        (b"", "it is empty"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_the_file_is_an_error(data, why):
    with pytest.raises(ValueError, match=r"^it is not a complete safetensors file: ") as caught:
        header_of(data)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (WHOLE, SAFETENSORS), (WHOLE[:60], SAFETENSORS), (b"PK\x03\x04" * 9, ZIP),
        (b"\x80\x02" + b"x" * 20, PICKLE), (b" <!DOCTYPE html>", "an HTML page"),
        (b"version https://git-lfs.github.com", "a git-lfs pointer and not the file itself"),
        (b"\0" * 99, "filled with zeros"), (b"hello, world", "a text"),
        (b"\x01\x02\xff\xfe" * 9, "of an unknown kind"), (b"", "empty"),
    ],
)  # fmt: skip
def test_a_file_is_known_by_its_first_bytes(data, kind):
    file = io.BytesIO(data)
    assert kind_of(file, len(data)) == kind
    assert file.tell() == 0
