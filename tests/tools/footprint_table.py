"""Write `vae/planning/footprints.json`: the footprints of the layers of published VAEs.

`python tests/tools/footprint_table.py` after a change of what layers allocate. A test compares the
file with the layers.
"""

import dataclasses
import itertools
import json
import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))

import torch

from fast_video_vae.tests.benchmarks import count_bytes
from fast_video_vae.tests.wan22 import random_qwen21
from fast_video_vae.vae import read_checkpoint
from fast_video_vae.vae.models.base import Network
from fast_video_vae.vae.models.build import make_decoder, make_encoder
from fast_video_vae.vae.planning import footprint

_KINDS = (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16))


def networks() -> list[tuple[Network, bool]]:
    """Return the networks of published VAEs, and whether they take pictures only."""
    configs = dict(count_bytes.configs())
    narrow = read_checkpoint(random_qwen21()).config
    widths = {
        name: tuple(12 * width for width in getattr(narrow, name))
        for name in ("encoder_widths", "decoder_widths")
    }
    configs["qwen-image-2.1"] = dataclasses.replace(narrow, **widths)
    with torch.device("meta"):
        return [
            (make(config), config.is_of_pictures)
            for config in configs.values()
            for make in (make_decoder, make_encoder)
        ]


def table() -> dict[str, list]:
    """Return the content of the file: rows, and for each network the rows of its layers."""
    rows: dict[str, int] = {}
    found: dict[str, list] = {}
    for network, of_pictures in networks():
        for (device, dtype), single in itertools.product(_KINDS, (False, True)):
            if single or not of_pictures:
                given = network.to(dtype), torch.device(device), dtype
                layers = footprint.measured(*given, single_frame=single)
                found[footprint.name_of(*given, single_frame=single)] = [
                    rows.setdefault(json.dumps(layer), len(rows)) for layer in layers
                ]
    return {"rows": [json.loads(row) for row in rows], **found}


def main() -> None:
    """Write the file, one row a line."""
    found = table()
    rows = ",\n".join(map(_packed, found.pop("rows")))
    packed = {name: _packed(value) for name, value in found.items()}
    names = ",\n".join(f'"{name}":{value}' for name, value in packed.items())
    footprint.TABLE.write_text(f'{{"rows":[\n{rows}],\n{names}}}\n', encoding="utf-8")


def _packed(row: list) -> str:
    return json.dumps(row, separators=(",", ":"))


if __name__ == "__main__":
    main()
