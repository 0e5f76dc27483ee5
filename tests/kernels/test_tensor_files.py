"""The kind of a file by its content, and checks of safetensors headers against the file."""

import io
import json
import pickle
import tarfile

import pytest
import torch
from safetensors.torch import save

from fast_video_vae.kernels import PICKLE, SAFETENSORS, ZIP, kind_of, read_header


def torch_file(zipped):
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.add(__file__, "storages")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (save({"a": torch.ones(2)}), SAFETENSORS),
        (save({"a": torch.ones(2)})[:40], SAFETENSORS),  # truncated within its header
        (torch_file(zipped=True), ZIP),
        (torch_file(zipped=False), PICKLE),
        (pickle.dumps({}), PICKLE),
        (b"", "empty"),
        (bytes(10_000), "filled with zeros"),
        (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a git-lfs pointer"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
        (tar(), "a tar archive"),
        (b"Repository not found", "a text"),
        (b'{"error": "gated"}', "a text"),
        (b"\x93\x01\xfe\xff\x00\x10", "of an unknown kind"),
    ],
)
def test_the_kind_of_a_file_is_read_from_its_content(content, kind):
    assert kind_of(io.BytesIO(content), len(content)).startswith(kind)


def test_the_header_of_a_file_is_read():
    content = save({"a": torch.ones(2, 3), "b": torch.ones(0)}, {"x": "y"})
    header = read_header(io.BytesIO(content), len(content))
    assert header.metadata == {"x": "y"}
    assert header.places["a"].shape == (2, 3)
    assert header.places["a"].torch_dtype == torch.float32
    first, last = header.places["a"].offsets
    assert content[header.start + first : header.start + last] == torch.ones(6).numpy().tobytes()


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"a": entry(shape=(3,))}, "but has 8 bytes"),
        ({"a": entry(offsets=(8, 16))}, "leave a gap"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": entry(shape=(1 << 60,))}, "invalid dtype, shape or offset"),
        ({"a": entry(shape=(True, 2))}, "invalid dtype, shape or offset"),
        ({"a": entry(shape=(1,) * 9 + (2,))}, "10 dimensions"),
        ({"a": [1]}, "other entries than dtype, shape and data_offsets"),
        ({"k" * 2000: entry()}, "has 2000 characters"),
        ({f"a{index}": entry() for index in range(100_001)}, "more than 20000 tensors"),
        ([], "its header is not a JSON object|it is"),
        (b'{"a":' * 50_000, "its header is not valid JSON"),
        (b'{"a":{},"a":{}}', "its header has a key twice"),
        (b'{"a":' + b"[" * 600_000, "more than 20000 tensors"),
        (b'{"__metadata__":{"a":1}}', "metadata is not text"),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(header, why):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(ValueError, match=f"it is not a complete safetensors file.*({why})"):
        read_header(io.BytesIO(content), len(content))
