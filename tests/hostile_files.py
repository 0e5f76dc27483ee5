"""Untrusted files: damaged, of another kind, or malicious.

`CASES` has a content and the words of its error for the readers of a kind.
"""

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import warnings
import zipfile

import torch
from safetensors.torch import save

from fast_video_vae.tests.builders import random_state_dict

CANARY = "canary"


# A pickle, word by word.


def text(value):
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def row(*items):
    return b"(" + b"".join(items) + b"t"


def call(function, *arguments):
    return function + row(*arguments) + b"R"


def mapping(**entries):
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def storage(count=4):
    kind = name("torch", "FloatStorage")
    return row(text("storage"), kind, text("0"), text("cpu"), number(count)) + b"Q"


def tensor(shape, stride, stored=None, offset=0, subclass=False):
    sizes, steps = (row(*map(number, each)) for each in (shape, stride))
    place = storage() if stored is None else stored
    parts = place, number(offset), sizes, steps, b"\x89", ORDERED + b")R"
    if subclass:
        return call(FROM_TYPE, REBUILD, name("torch", "Tensor"), row(*parts), b"N")
    return call(REBUILD, *parts)


def program(value):
    return b"\x80\x02" + value + b"."  # protocol 2


def archive(value, storages=None, kind=zipfile.ZIP_STORED, more=()):
    """A zip archive as PyTorch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind, compresslevel=1) as file:
        file.writestr("archive/data.pkl", program(value))
        file.writestr("archive/version", b"3\n")
        for key, content in ({"0": bytes(16)} if storages is None else storages).items():
            file.writestr(f"archive/data/{key}", content)
        for member in more:
            file.writestr(member, b"")
    return buffer.getvalue()


def legacy(value, keys=("0",)):
    """A file as PyTorch wrote it before 1.6."""
    names = b"](" + b"".join(map(text, keys)) + b"e"
    described = value.replace(b"tQ", b"NtQ")  # None: the storage is no view of another one
    parts = (number(0x1950A86A20F9469CFC6C), number(1001), b"}", described, names)
    return b"".join(map(program, parts)) + struct.pack("<q", 4) + bytes(16)


def header(entries, length=None):
    """A safetensors file with any header: a value for JSON, or bytes."""
    data = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data + bytes(8)


def entry(shape=(2,), at=(0, 8)):
    return {"dtype": "F32", "shape": shape, "data_offsets": at}


def saved(zipped):
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(random_state_dict(2), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def flipped(data, seed):
    """The file with random bytes in its first 30,000 and its last 300."""
    draw, data = random.Random(seed), bytearray(data)
    for _ in range(draw.choice((1, 4, 64))):
        at = draw.randrange(min(len(data), 30_000))
        data[-at % 300 - 1 if draw.random() < 0.3 else at] = draw.randrange(256)
    return bytes(data)


def patched(data, offset, value):
    """A zip archive with a number of 4 bytes in the first record of its directory replaced."""
    at = data.index(b"PK\x01\x02") + offset
    return data[:at] + struct.pack("<I", value) + data[at + 4 :]


def tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.add(__file__, "storages")
    return buffer.getvalue()


ORDERED = name("collections", "OrderedDict")
BYTES = name("builtins", "bytearray")
TOUCH = text(f"touch {CANARY}")
FROM_TYPE = name("torch._tensor", "_rebuild_from_type_v2")
REBUILD = name("torch._utils", "_rebuild_tensor_v2")
SPARSE = name("torch._utils", "_rebuild_sparse_tensor")
TOO_FEW = "its tensors need 20 bytes; the file has 16"
GOOD = mapping(a=tensor((2, 2), (2, 1)))

# For every reader.
MISTAKEN = {
    "empty": (b"", "is empty"),
    "zeros": (bytes(100_000), "filled with zeros"),
    "page": (b"\n<!DOCTYPE html><html>no</html>", "an HTML page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a git-lfs pointer"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF file"),
    "packed": (gzip.compress(b"a" * 999), "a packed archive"),
    "tar": (tar(), "a tar archive"),
    "words": (b'{"error": "gated"}', "a text"),
    "noise": (b"\x93\x01\xfe\xff\x00\x10", "of an unknown kind"),
    "cut in the header": (save({"a": torch.ones(2)})[:40], "its header alone has"),
    "cut in the data": (save({"a": torch.ones(2)})[:-1], "its tensors need 8 bytes"),
    "long header": (header({"a": entry()}, length=1 << 63), "is"),
    "more": (save({"a": torch.ones(2)}) + b"x", "its tensors need 8 bytes"),
    "size": (header({"a": entry((3,))}), "but has 8 bytes"),
    "gap": (header({"a": entry(at=(8, 16))}), "leave a gap"),
    "overlap": (header({"a": entry(), "b": entry()}), "overlap"),
    "large": (header({"a": entry((1 << 60,))}), "invalid dtype, shape or offset"),
    "digits": (header({"a": entry((10**4000,))}), "invalid dtype, shape or offset"),
    "true": (header({"a": entry((True, 2))}), "invalid dtype, shape or offset"),
    "dimensions": (header({"a": entry((1,) * 9 + (2,))}), "10 dimensions"),
    "list": (header({"a": [1]}), "other entries than dtype"),
    "long key": (header({"k" * 2000: entry()}), "has 2000 characters"),
    "many": (lambda: header({f"a{i}": entry() for i in range(20_001)}), "more than 20000"),
    "deep": (header(b'{"a":' * 50_000), "not valid JSON"),
    "twice": (header(b'{"a":{},"a":{}}'), "has a key twice"),
    "lists": (lambda: header(b'{"a":[' + b"[]," * 2_500_000 + b"1]}"), "more than 20000 tensors"),
    "metadata": (header(b'{"__metadata__":{"a":1}}'), "metadata is not text"),
}  # fmt: skip

# Of checkpoints alone: pickles, in an archive and some from before PyTorch 1.6.
STATES = {
    "system": (call(name("os", "system"), TOUCH), "more than tensors: os.system"),
    "instance": (b"(S'a'\nios\nsystem\n", "more than tensors: os.system"),
    "bytearray": (call(BYTES, number(10**9)), "more than tensors: builtins.bytearray"),
    "hidden bytearray": (call(FROM_TYPE, BYTES, b"N", row(number(10**9)), b"N"), "bytearray"),
    "deep": (b")" + b"\x85" * 200_000, "holds a tuple|PyTorch cannot read it"),
    "long text": (b"X" + struct.pack("<I", 1 << 31) + b"a", "is damaged"),
    "many": (b"N" * 400_000, "more than 300000 instructions"),
    "tensor": (tensor((4,), (1,)), "holds a Tensor; expected a state dict"),
    "stride 0": (mapping(a=tensor((1 << 15, 1 << 15), (0, 0))), "tensors need 4294967296 bytes"),
    "beyond": (mapping(a=tensor((4,), (1,), offset=1)), "PyTorch cannot read it"),
    "subclass": (mapping(a=tensor((5,), (0,), subclass=True)), TOO_FEW),
    "large storage": (mapping(a=tensor((4,), (1,), storage(count=1 << 45))), "storages|cannot"),
    "sparse": (mapping(a=call(SPARSE, b"N", b")")), "tensors: .*sparse_tensor"),
    "nasty key": (mapping(**{"a\n\u202e\x1b": tensor((2,), (1,))}), "not a "),
}  # fmt: skip
LEGACY = ("system", "bytearray", "many", "stride 0", "large storage")
WIDE = storage(count=1 << 20)
VIEWS = mapping(**{f"a{i}": tensor((1 << 20,), (1,), WIDE) for i in range(500)})
SAVED = {"zip": saved(True), "legacy": saved(False)}
CHECKPOINTS = {
    "packed": (archive(GOOD, kind=zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "bomb": (
        lambda: archive(text("a"), {"0": bytes(400 << 20)}, zipfile.ZIP_DEFLATED),
        "is compressed or encrypted",
    ),
    "large pickle": (lambda: archive(text("a" * (20 << 20))), "is damaged or too large"),
    "short data": (archive(GOOD, {"0": bytes(8)}), "its storages need 16 bytes; the file has 8"),
    "document": (archive(GOOD).replace(b"data.pkl", b"word.xml"), "without a PyTorch state dict"),
    "program": (archive(GOOD, more=["archive/constants.pkl"]), "TorchScript"),
    "twins": (archive(GOOD, more=["archive/DATA.pkl"]), "have one name"),
    "cut": (archive(GOOD)[:-1], "a truncated zip archive"),
    "member size": (patched(archive(GOOD), 24, 1 << 30), "is compressed"),
    "member place": (patched(archive(GOOD), 42, 1 << 30), "archive|or incomplete"),
    "shared": (archive(VIEWS, {"0": bytes(4 << 20)}), "its tensors need 2097152000 bytes"),
    "other pickle": (pickle.dumps({"a": 1}), "a pickle, but not of PyTorch"),
    "keys": (legacy(GOOD, keys=("1",)), "PyTorch cannot read it"),
    "cut legacy": (SAVED["legacy"][:-9], "PyTorch cannot read it"),
    **{
        f"flipped {kind} {seed}": (flipped(data, seed), None)
        for kind, data in SAVED.items()
        for seed in range(2)
    },
    **{f"{what} zip": (archive(value), words) for what, (value, words) in STATES.items()},
    **{f"{what} legacy": (legacy(STATES[what][0]), STATES[what][1]) for what in LEGACY},
}  # fmt: skip
LORA = {"pickle": (SAVED["zip"], "is a pickle, which can run code; expected a .safetensors file")}

CASES = [
    *(("every", *each) for each in MISTAKEN.items()),
    *(("checkpoint", *each) for each in CHECKPOINTS.items()),
    *(("lora", *each) for each in LORA.items()),
]
