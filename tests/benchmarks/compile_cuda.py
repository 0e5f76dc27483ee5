"""Resources of the CUDA kernels by chip, and the seconds that NVRTC takes, without a GPU.

`python tests/benchmarks/compile_cuda.py` compiles each source for each dtype, with packs of 16
bytes and of one number, as a call on a GPU would. The seconds are processor time of this machine:
of each source in bfloat16, and of all binaries that a first decode of 17 frames of 480 x 832 needs.
"""

import runpy
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "conftest.py"))


from fast_video_vae.tests.benchmarks import record
from fast_video_vae.tests.kernels import nvrtc

_FAMILIES = ("wan2.1", "wan2.2", "seedvr2")
_TIMED_CHIP = 89


def main() -> None:
    """Print the tables, and append a row per chip, kernel and family."""
    args = record.parser(__doc__).parse_args()
    compiler = nvrtc.compiler()
    if compiler is None:
        sys.exit("error: NVRTC is not installed; pip install nvidia-cuda-nvrtc")
    print(f"{compiler.version}    most of all dtypes and packs")
    print("chip    kernel             registers  spilled  shared bytes  binaries")
    for chip in nvrtc.CHIPS:
        if chip not in compiler.chips():
            print(f"sm_{chip:<5}this NVRTC does not know it")
            continue
        for name, (used, binaries) in _resources(chip).items():
            registers, spilled, shared = used
            print(f"sm_{chip:<5}{name:18}{registers:10}{spilled:9}{shared:14}{binaries:10}")
            record.append(
                args.out,
                "compile_cuda",
                f"{name} sm_{chip}",
                nvrtc=compiler.version,
                registers=registers,
                spilled_bytes=spilled,
                shared_bytes=shared,
                binaries=binaries,
            )
    print(
        f"\nsm_{_TIMED_CHIP}                                  binaries   seconds of the processor"
    )
    cases = {"each source in bfloat16": _sources(), **_first_decodes()}
    for name, binaries in cases.items():
        seconds = [_seconds(*binary) for binary in binaries]
        print(f"{name:40}{len(seconds):3}{sum(seconds):12.2f}, at most {max(seconds):.2f} for one")
        record.append(
            args.out,
            "compile_cuda",
            f"{name} sm_{_TIMED_CHIP}",
            nvrtc=compiler.version,
            binaries=len(seconds),
            seconds=round(sum(seconds), 2),
            most_seconds_of_one=round(max(seconds), 2),
        )


def _resources(chip: int) -> dict[str, tuple[list[int], int]]:
    """Return the most registers, spilled and shared bytes of each kernel, and its binaries."""
    found: dict[str, tuple[list[int], int]] = {}
    for source, constants in nvrtc.variants():
        for name, used in nvrtc.resources(source, constants, chip).items():
            most, count = found.get(name, ([0, 0, 0], 0))
            now = used["registers"], used["spilled"] + used["stack"], used["shared"]
            found[name] = [max(pair) for pair in zip(most, now, strict=True)], count + 1
    return found


def _sources() -> list[tuple[str, dict[str, object]]]:
    wide = [each for each in nvrtc.variants() if each[1]["DTYPE"] == "bfloat16"]
    return [each for each in wide if each[1]["PACK"] > 1]


def _first_decodes() -> dict[str, list[tuple[str, dict[str, object]]]]:
    return {f"first decode {family}": nvrtc.first_decode(family) for family in _FAMILIES}


def _seconds(source: str, constants: dict[str, object]) -> float:
    started = time.process_time()
    nvrtc.compiled(source, constants, _TIMED_CHIP)
    return time.process_time() - started


if __name__ == "__main__":
    main()
