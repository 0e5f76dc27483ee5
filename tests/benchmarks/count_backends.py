"""Launches and bytes of Triton's backend, counted for a steady step and a whole decode.

`python tests/benchmarks/count_backends.py` runs its launching code on the `meta` device, up to the
launch, whose arguments give its bytes. `reference` is what a GPU without kernels runs, op by op.
The convolutions are those of the library and are not in the bytes. Attention is PyTorch's fused
kernel, and in the rows `with attention` the backend's own.
"""

import itertools
import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))


from fast_video_vae.tests.benchmarks import count_bytes, record

_SIZE = 720, 1280
_FRAMES = 81
_FREE_BYTES = 22 << 30
_LIMIT_BYTES = 16 << 30

# Backend, and whether it runs attention too.
_KINDS = (("triton", False), ("triton", True), ("reference", False))


def main() -> None:
    """Print the tables."""
    args = record.parser(__doc__).parse_args()
    print("720 x 1280, bfloat16, per latent            GB without convolutions    launches")
    configs = count_bytes.configs()
    for family, direction in itertools.product(configs, ("decode", "encode")):
        for backend, attends in _KINDS:
            counter, latents = count_bytes.steady_step(
                configs[family], direction, *_SIZE, _LIMIT_BYTES, backend=backend, attends=attends
            )
            name = f"{family}, {backend}{' with attention' if attends else ''}"
            gigabytes, launches = counter.passes / latents / 1e9, counter.launches / latents
            print(f"{direction} {name:40}{gigabytes:20.2f}{launches:12.1f}")
            record.append(
                args.out,
                "count_backends",
                f"{direction} step 720x1280 bfloat16 {name}",
                gigabytes_without_convolutions_per_latent=round(gigabytes, 2),
                launches_per_latent=round(launches, 1),
            )
    print("81 x 720 x 1280, 22 GiB free                GB without convolutions    launches")
    for backend, attends in _KINDS:
        counter, _ = count_bytes.whole_video(
            configs["wan2.1"], "decode", (_FRAMES, *_SIZE), _FREE_BYTES,
            backend=backend, attends=attends,
        )  # fmt: skip
        name = f"wan2.1, {backend}{' with attention' if attends else ''}"
        print(f"decode {name:40}{counter.passes / 1e9:20.0f}{counter.launches:12}")
        record.append(
            args.out,
            "count_backends",
            f"decode 81x720x1280 bfloat16 {name}",
            gigabytes_without_convolutions=round(counter.passes / 1e9),
            launches=counter.launches,
        )


if __name__ == "__main__":
    main()
