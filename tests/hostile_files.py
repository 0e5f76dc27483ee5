"""Untrusted files: truncated, corrupted, of another kind, or malicious, from a seed.

`hostile_files` yields them, and `outcome` reads one and returns the error, the processor time and
the memory.
"""

import functools
import gzip
import io
import json
import pickle
import random
import re
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load, save

from fast_video_vae.tests.builders import diffusers_name, random_state_dict

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")

NASTY_KEYS = ("a\nb", "\u202egnp.exe", "\x1b[31mred", "\x00", "k" * 900, "\ud800", "é\u0301" * 50)


def hostile_files(canary, every=1):
    """Names and contents of at least 400 files; code in them would create the file `canary`.

    `every`: only one in `every` of each kind.
    """
    draw = random.Random(0)
    for make in (_cut, _flipped, _mistaken, _headers, _layouts, _archives, _tensors, _pickles):
        for number, (name, content) in enumerate(make(draw, canary)):
            if number % every == 0:
                content = content() if callable(content) else content
                yield f"{make.__name__[1:]} {number} {name}", content


def noise(count):
    """Names and contents of `.pth` files: random bytes behind beginnings of real ones."""
    draw = random.Random(1)
    heads = [b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95", *_honest().values()]
    for number in range(count):
        head = draw.choice(heads)[: draw.randrange(3000)]
        yield (
            f"noise {number} x.pth",
            head + draw.randbytes(draw.choice([0, 1, 7, 64, 512, 5000])),
        )


def outcome(read, path):
    """The error, if any, and its type; seconds of the processor, and bytes beyond those before."""
    if _RESET.exists():
        _RESET.write_text("5", encoding="ascii")
    before, began = _status("VmRSS"), time.process_time()
    error = None
    try:
        read(path)
    except Exception as caught:
        error = caught
    seconds = time.process_time() - began
    return {"error": error, "seconds": seconds, "bytes": _status("VmHWM") - before}


def _status(field):
    """Bytes that the system says the process has; 0: it does not say."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.exists() else [f"{field} 0"]
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


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


def mapping(pairs):
    return b"}(" + b"".join(text(key) + value for key, value in pairs) + b"u"


def storage(key="0", count=4, kind="FloatStorage", module="torch", location="cpu"):
    parts = text("storage"), name(module, kind), text(key), text(location), number(count)
    return row(*parts) + b"Q"


def tensor(shape, stride, stored=None, offset=0):
    """A call for a tensor."""
    sizes, steps = (row(*map(number, each)) for each in (shape, stride))
    hooks = call(name("collections", "OrderedDict"))
    stored = storage() if stored is None else stored
    return rebuild("tensor_v2", stored, number(offset), sizes, steps, b"\x89", hooks)


def rebuild(what, *arguments):
    return call(name("torch._utils", f"_rebuild_{what}"), *arguments)


def program(value):
    return b"\x80\x02" + value + b"."


def archive(data, storages=None, kind=zipfile.ZIP_STORED, more=()):
    """A zip archive as PyTorch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind, compresslevel=1) as file:
        file.writestr("archive/data.pkl", data)
        for key, content in ({"0": bytes(16)} if storages is None else storages).items():
            file.writestr(f"archive/data/{key}", content)
        for member, content in more:
            file.writestr(member, content)
    return buffer.getvalue()


def legacy(value, keys=("0",), storages=(4,), count=None):
    """A file as PyTorch wrote it before 1.6."""
    system = mapping([("protocol_version", number(1001)), ("little_endian", b"\x88")])
    names = b"](" + b"".join(map(text, keys)) + b"e"
    content = b"".join(
        struct.pack("<q", size if count is None else count) + bytes(4 * size) for size in storages
    )
    pickles = (number(0x1950A86A20F9469CFC6C), number(1001), system, value, names)
    return b"".join(map(program, pickles)) + content


def header(entries, numbers=b"", length=None):
    """Return a safetensors file with any header: a value for JSON, or bytes."""
    data = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data + numbers


def patched(data, at, size, value):
    """The bytes with a number of another value in them."""
    return data[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


# The kinds of files. Contents that are slow to create are functions.


@functools.cache
def _honest():
    state = random_state_dict(2)
    honest = {"safetensors": save(state)}
    for suffix, zipped in (("pth", True), ("pt", False)):
        buffer = io.BytesIO()
        torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
        honest[suffix] = buffer.getvalue()
    return honest


def _cut(draw, canary):
    for suffix, data in _honest().items():
        for length in (1, 7, 8, 9, 100, 1000, len(data) - 1, len(data) - 30):
            yield f"x.{suffix}", data[:length]
        for _ in range(12):
            yield f"x.{suffix}", data[: draw.randrange(len(data))]
        yield f"x.{suffix}", data + b"more"


def _flipped(draw, canary):
    for suffix, data in _honest().items():
        begin = min(len(data), 30000)
        for count in (1, 1, 1, 2, 4, 8, 16, 64, 256) * 3:
            changed = bytearray(data)
            ends = draw.random() < 0.3
            for _ in range(count):
                at = draw.randrange(begin)
                changed[-at - 1 if ends else at] = draw.randrange(256)
            yield f"x.{suffix}", bytes(changed)


def _mistaken(draw, canary):
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.add(__file__, "storages")
    others = [
        b"", b"\0", bytes(8), bytes(100_000), b"\n" * 50, b"<!DOCTYPE html><html>no</html>",
        b"  <HTML><head></head>", b"<?xml version='1.0'?>", b"Not found", b"{}",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b'{"a": 1}',
        b"Access denied\n" * 9,
        b"GGUF\x03\0\0\0" + bytes(64), gzip.compress(b"a" * 999), tar.getvalue(), b"PK\x05\x06",
        b"PK\x05\x06" + bytes(18), b"\x89HDF\r\n\x1a\n" + bytes(50),
        b"\x89PNG\r\n\x1a\n" + bytes(9),
        b"\0\0\0\x18ftypmp42" + bytes(50), b"\xff\xfeh\0i\0", b"7z\xbc\xaf\x27\x1c",
        b"RIFF" + bytes(9),
        *(pickle.dumps({"a": 1}, protocol) for protocol in range(6)),
    ]  # fmt: skip
    for content in others:
        for suffix in draw.sample(["safetensors", "pth", "PTH", "SafeTensors", "ckpt", "bin"], 2):
            yield f"x.{suffix}", content
    for suffix, data in _honest().items():
        for other in ("PTH", "SAFETENSORS", "latent", "txt"):
            yield f"{suffix}.{other}", data


def _headers(draw, canary):
    def entry(dtype="F32", shape=(2,), at=(0, 8), **more):
        return {"dtype": dtype, "shape": shape, "data_offsets": at, **more}

    bad = [
        entry(shape=(1 << 40,)), entry(shape=(1 << 62, 1 << 62)), entry(shape=(-1,)),
        entry(shape=(0,)), entry(shape=(0, 1 << 63), at=(0, 0)), entry(shape=(0,), at=(0, 0)),
        entry(shape=(2.0,)), entry(shape=(True, 2)), entry(shape=None), entry(shape="2"),
        entry(shape=(1,) * 1000 + (2,)), entry(shape=("2",)), entry(shape=[[2]]), entry(at=(8, 0)),
        entry(at=(0,)), entry(at=(0, 4, 8)), entry(at=(0, 1 << 63)), entry(at=(-8, 0)),
        entry(at=(4, 12)), entry(at=None), entry(at=("0", "8")), entry(dtype="F33"),
        entry(dtype=None), entry(dtype=7), entry(dtype="F4"), entry(dtype="F64"), entry(x=1),
        {"dtype": "F32"}, {}, [], None, 1, "a", [entry()], {"dtype": "F32", "shape": [2]},
        entry(dtype="A" * 9999), entry(shape=(10**4000,)), entry(dtype="\n"),
    ]  # fmt: skip
    for each in bad:
        yield "x.safetensors", header({"a": each}, bytes(8))
    for key in NASTY_KEYS:
        yield "x.safetensors", header({key: entry()}, bytes(8))
        yield "x.safetensors", header({key: entry(shape=(3,))}, bytes(8))
        yield "x.safetensors", header({"latent": entry(), key: entry(at=(8, 16))}, bytes(16))
    texts = [
        b"{" + b"[" * 100_000, b'{"a":' * 50_000, b"[]", b"null", b"{" + b" " * 50, b"{\xff\xfe}",
        b'{"a":1,"a":2}', b'{"__metadata__":[]}', b'{"__metadata__":{"a":1}}', b"{NaN:1}",
        b'{"a":' + b"9" * 6000 + b"}", b'{"a":-' + b"1e999999}", b'{"\\ud800":{}}',
        b"{}" + b"\0" * 9,
        b'{"__metadata__":{"fps":"1e999999999"},"latent":{"dtype":"F32","shape":[1,1,1,1,2],'
        b'"data_offsets":[0,8]}}',
        b'{"__metadata__":{"lora_adapter_metadata":"' + b"[" * 90_000 + b'"}}',
    ]  # fmt: skip
    for data in texts:
        yield "x.safetensors", header(data, bytes(8))
    for length in (0, 1, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
        yield "x.safetensors", header({"a": entry()}, bytes(8), length)
    for begin in (0, 4, 16):
        two = {"a": entry(), "b": entry(at=(begin, begin + 8))}
        yield "x.safetensors", header(two, bytes(begin + 8))

    def many(count):
        keys = {f"key.{i}.lora_A.weight": entry(at=(8 * i, 8 * i + 8)) for i in range(count)}
        return header(keys, bytes(8 * count))

    yield "many.safetensors", lambda: many(100_001)
    yield "many.safetensors", lambda: many(20_000)
    yield "lists.safetensors", lambda: header(b'{"a":[' + b"[]," * 2_500_000 + b"1]}")
    yield "numbers.safetensors", lambda: header(b'{"a":[' + b"999," * 2_500_000 + b"1]}")
    yield "long.safetensors", header({"model." * 20_000 + "lora_A.weight": entry()}, bytes(8))


def _layouts(draw, canary):
    state = load(_honest()["safetensors"])
    anchors = [
        "encoder.conv1.weight", "decoder.conv1.weight", "decoder.head.0.gamma",
        "decoder.head.2.weight", "decoder.upsamples.4.residual.6.weight", "conv1.weight",
        "decoder.middle.0.residual.0.gamma", "conv2.weight",
        "encoder.downsamples.3.residual.6.weight",
    ]  # fmt: skip
    shapes = [(), (0,), (1,), (0, 0, 3, 3, 3), (4, 0), (1, 70_000), (100_000, 1, 1)]
    for key in anchors:
        for shape in draw.sample(shapes, 4):
            yield "x.safetensors", save({**state, key: torch.ones(shape)})
    yield "zeros.safetensors", save({**state, "conv2.weight": torch.zeros(16, 16, 1, 1, 1)})
    yield "nan.safetensors", save({**state, "conv2.bias": torch.full((16,), torch.nan)})
    yield "whole.safetensors", save({key: value.int() for key, value in state.items()})
    theirs = {diffusers_name(key): value.clone() for key, value in state.items()}
    yield "twice.safetensors", save({**theirs, **state})
    digits = f"decoder.up_blocks.{'9' * 900}.resnets.0.conv_in.weight"
    yield "digits.safetensors", save({**theirs, digits: torch.ones(1)})
    for key in NASTY_KEYS[:3]:
        yield "key.safetensors", save({**state, key: torch.ones(1)})
        yield "key.safetensors", save({key: torch.ones(1)})


def _archives(draw, canary):
    data = _honest()["pth"]
    good = program(mapping([("a", tensor((2, 2), (2, 1)))]))
    yield "packed.pth", archive(good, kind=zipfile.ZIP_DEFLATED)
    yield "bomb.pth", lambda: archive(bytes(200 << 20), kind=zipfile.ZIP_DEFLATED)
    yield "bomb.pth", archive(good, {"0": bytes(16 << 20)}, kind=zipfile.ZIP_DEFLATED)
    yield "large.pth", lambda: archive(program(text("a" * (20 << 20))))
    yield "none.pth", archive(good, {})
    yield "script.pth", archive(good, more=[("archive/constants.pkl", b"")])
    yield "two.pth", archive(good, more=[("other/data.pkl", good)])
    yield "big.pth", archive(good, more=[("archive/byteorder", b"big")])
    yield "members.pth", archive(good, {str(index): b"" for index in range(3000)})
    yield "document.pth", archive(good, {}).replace(b"data.pkl", b"word.xml")
    end = data.rindex(b"PK\x05\x06")
    central = data.index(b"PK\x01\x02")
    # Fields of the directory and of its end, in bytes and their size.
    for at, size in ((8, 2), (10, 2), (12, 4), (16, 4)):
        for value in (0, 1, 0xFFFF, 0xFFFFFFFF):
            yield "end.pth", patched(data, end + at, size, value)
    for at, size in ((8, 2), (10, 2), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4)):
        for value in (1, 0x7FFF, 0xFFFFFFFF):
            yield "central.pth", patched(data, central + at, size, value)
    # Every entry of the directory is the first member.
    several = archive(good, {str(index): bytes(16) for index in range(50)})
    for found in re.finditer(b"PK\x01\x02", several):
        several = patched(several, found.start() + 42, 4, 0)
    yield "overlap.pth", several


def _tensors(draw, canary):
    wide = bytes(4 << 20)
    bad = [
        tensor((1 << 15, 1 << 15), (0, 0)), tensor((1000, 1000), (1, 1), storage(count=4)),
        tensor((1 << 31,), (0,)), tensor((4,), (1 << 40,)), tensor((5,), (1,)), tensor((2,), (-1,)),
        tensor((0,), (1,)), tensor((1 << 62,), (1,)), tensor((-1,), (1,)), tensor((4,), ()),
        tensor((1,) * 200, (1,) * 200), tensor((4,), (1,), offset=1 << 40),
        tensor((4,), (1,), offset=-1), tensor((4,), (1,), storage(count=1 << 60)),
        tensor((4,), (1,), storage(count=-4)), tensor((4,), (1,), storage("no\nne")),
        tensor((4,), (1,), storage(kind="QInt8Storage")), tensor((4,), (1,),
        storage(kind="Linear")),
        tensor((4,), (1,), storage(kind="UntypedStorage", module="torch.storage")),
        tensor((4,), (1,), storage(location="meta")), tensor((4,), (1,), text("0")),
        tensor((4,), (1,), text("0") + b"Q"), tensor((4,), (1,), b"NQ"),
        rebuild("tensor_v2"), rebuild("tensor_v2", *[b"N"] * 6), rebuild("parameter"),
        rebuild("parameter", b"N"), rebuild("meta_tensor_no_storage", name("torch", "float32"),
                                            row(number(1 << 40)), row(number(1)), b"\x89"),
        rebuild("sparse_tensor", name("torch", "sparse_coo"), b")"),
        rebuild("sparse_tensor", b"N", b")"), rebuild("nested_tensor", *[b"N"] * 4),
        rebuild("qtensor", storage(kind="QInt8Storage"), b"N"), rebuild("wrapper_subclass", b"N"),
        rebuild("device_tensor_from_numpy", b"N"),
        call(name("torch._tensor", "_rebuild_from_type_v2"), name("torch", "float32"), b"N", b")",
        b"N"),
        call(name("torch", "Size"), row(number(4))), b"N", b"\x88", number(7), text("a"), b"]",
        b"}",
        number(1 << 900), b"G" + bytes(8),
    ]  # fmt: skip
    for each in bad:
        state = program(mapping([("decoder.conv1.weight", each)]))
        yield "x.pth", archive(state)
        if draw.random() < 0.4:
            yield "x.pth", legacy(mapping([("decoder.conv1.weight", each)]))
    # Tensors of one storage, again and again; half of them with gaps between the numbers.
    whole = storage(count=1 << 20)
    views = [(f"a{index}", tensor((1 << 20,), (1,), whole)) for index in range(500)]
    yield "shared.pth", archive(program(mapping(views)), {"0": wide})
    views = [(f"a{index}", tensor((2,), (1 << 19,), whole)) for index in range(500)]
    yield "gaps.pth", archive(program(mapping(views)), {"0": wide})
    plain = mapping([("a", tensor((4,), (1,)))])
    yield "count.pth", legacy(plain, count=1 << 60)
    for keys in (("0", "0"), ("1",), ()):
        yield "keys.pth", legacy(plain, keys=keys)
    yield "huge.pth", legacy(mapping([("a", tensor((1,), (1,), storage(count=1 << 50)))]))


def _pickles(draw, canary):
    path, touch = text(str(canary)), text(f"touch '{canary}'")
    code = text(f"open({str(canary)!r}, 'w').close()")
    calls = [
        call(name("os", "system"), touch), call(name("posix", "system"), touch),
        call(name("builtins", "eval"), code), call(name("builtins", "exec"), code),
        call(name("__builtin__", "open"), path, text("w")), call(name("pathlib", "Path"), path),
        call(name("subprocess", "check_output"), touch), call(name("torch.hub", "load"), path),
        call(name("torch", "save"), text("a"), path), call(name("torch", "load"), path),
        call(name("torch", "zeros"), number(1 << 40)),
        call(name("torch.storage", "_load_from_bytes"), b"B" + struct.pack("<I", 3) + b"abc"),
        call(name("numpy.core.multiarray", "_reconstruct"), b"N"),
        call(name("builtins", "bytearray"), number(10**10)),
        call(name("builtins", "getattr"), name("os", "system"), text("__call__")),
        call(name("collections", "Counter"), text("a" * 9000)),
        call(name("_codecs", "encode"), text("a" * 9000), text("rot13")),
        name("collections", "OrderedDict") + b")R" + mapping([("__class__", b"N")]) + b"b",
        text("os") + text("system") + b"\x93" + row(touch) + b"R",
        f"(S'touch {canary}'\nios\nsystem\n".encode(),
        b"(" + name("os", "system") + touch + b"o",
        b"\x82\x01", b"P0\n", b"I1\n", b"L9\n", b"F1\n", b"V" + b"a" * 500 + b"\n",
    ]  # fmt: skip
    laughs = b"]q\0" + b"".join(
        b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1]) for i in range(60)
    )
    words = [
        b"\x8e" + struct.pack("<Q", 1 << 62), b"B" + struct.pack("<I", 0xFFFFFFFF),
        b"X" + struct.pack("<I", 0xFFFFFFFF), b"\x8d" + struct.pack("<Q", 1 << 63),
        b"Nr" + struct.pack("<I", 0x7FFFFFFF), b"\x8b" + struct.pack("<i", 0x7FFFFFFF),
        b"\x8b" + b"\xff" * 4, b")" + b"\x85" * 400_000, b"]" + b"]" * 900_000, b"(" * 990_000,
        laughs, b"N" * 1_200_000,
        b"}" + b"".join(number(i * ((1 << 61) - 1)) + b"Ns" for i in range(20_000)),
        b"})" + b"\x85" * 300_000 + b"Ns", b"}NNs", b"}]Ns", b"}" + text("k" * 5000) + b"Ns",
        mapping([(f"k{i}", b"N") for i in range(120_000)]), b"]q\0h\0a",
        b"}q\0" + text("state_dict")
        + b"h\0s", b"", b"0", b"t", b"R", b"b", b"Q", b"h\0", b"u", b"e", b"a", b"s", b"\x93",
        b"c", b"1",
        b"c" + b"a" * 5000, b"c\xff\n\xff\n", b"}" * 3, b"NNs", b"\x95" + bytes(7),
    ]  # fmt: skip
    for each in calls + words:
        yield "x.pth", archive(program(each))
        if len(each) < 100_000:  # long ones are slow
            yield "x.pth", archive(program(mapping([("a", each)])))
            yield "x.pth", draw.choice([legacy, program])(each)
    for key in NASTY_KEYS:
        yield "x.pth", archive(program(mapping([(key, tensor((4,), (1,)))])))
        yield "x.pth", archive(program(mapping([(key, tensor((4,), (0,)))])))
        yield "x.pth", archive(program(mapping([(key, b"N")])))
