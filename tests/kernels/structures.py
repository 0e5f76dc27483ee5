"""The structures that the CUDA kernels read, from the text of their sources, for ctypes."""

import ctypes
import functools
import re

from fast_video_vae.kernels.cuda_ops.binaries import SOURCES, headers

_NUMBERS = {
    "int64": ctypes.c_int64,
    "uint32": ctypes.c_uint32,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
}


def argument(source: str, kernel: str, memory: bytes) -> ctypes.Structure:
    """Return the argument that a launch passes as `memory`, with the fields of its source."""
    form = arguments(source)[kernel]
    if len(memory) != ctypes.sizeof(form):
        raise ValueError(f"{kernel} gets {len(memory)} bytes; expected {ctypes.sizeof(form)}")
    return form.from_buffer_copy(memory)


@functools.cache
def arguments(source: str) -> dict[str, type[ctypes.Structure]]:
    """Return the structures by kernel of a source."""
    own = (SOURCES / f"{source}.cu").read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*", "", "\n".join((*headers().values(), own)))
    # A pointer is one to any type, so a template is a structure.
    names = dict(re.findall(r"^using (\w+) = (\w+)<\w+>;", text, re.MULTILINE))
    text = re.sub(r"(\w+)<\w+>", r"\1", text)
    text = re.sub(r"\b\w+\b", lambda word: names.get(word[0], word[0]), text)
    known: dict[str, type] = dict(_NUMBERS)
    for name, body in re.findall(r"^struct (\w+) \{([^{}]*)\};", text, re.MULTILINE):
        fields = _fields(body, known)
        if fields:
            known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    kernels = re.findall(r"^FVV_KERNEL (\w+)\(const (\w+) op\)", text, re.MULTILINE)
    return {kernel: known[name] for kernel, name in kernels}


def _fields(body: str, known: dict[str, type]) -> list[tuple[str, type]]:
    """Return names and types of the fields; none if the structure is not an argument."""
    fields = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        kind, declared = re.fullmatch(r"(?:const )?(\w+)(.*)", statement, re.DOTALL).groups()
        for one in declared.split(","):
            form = ctypes.c_void_p if "*" in one else known.get(kind)
            if form is None:
                return []
            fields.append((one.strip("* \n"), form))
    return fields
