"""The library of `csrc/cuda`, built on the user's machine for its GPUs.

Environment:
    CUDA_HOME: The CUDA toolkit, if nvcc is not on PATH.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..build import Failure, Library, extension


class _Cuda(Library):
    name = namespace = "fast_video_vae_cuda"
    title = "CUDA kernels"
    minutes = "a minute"
    sources = Path(__file__).parents[1] / "csrc" / "cuda"

    compiler = ("-O3", "-g0")

    def made_from(self) -> Sequence[str]:
        return (*self.compiler, f"CUDA {torch.version.cuda}", *self._architectures())

    def check_tools(self) -> None:
        super().check_tools()
        home = extension().CUDA_HOME
        if home is None or not (Path(home) / "bin" / "nvcc").exists():
            raise Failure(
                f"nvcc is not installed ({home or 'CUDA_HOME is not set'})",
                f"install the CUDA toolkit {torch.version.cuda}, and set CUDA_HOME to its folder",
            )

    def options(self) -> dict[str, Any]:
        sources = [*self.sources.glob("*.cpp"), *self.sources.glob("*.cu")]
        return {
            "sources": [str(path) for path in sorted(sources)],
            "extra_cflags": list(self.compiler),
            "extra_cuda_cflags": ["-O3", *self._architectures()],
        }

    def failed(self, error: str) -> Failure:
        return Failure(
            f"nvcc or the C++ compiler failed ({error})",
            f"install the CUDA toolkit {torch.version.cuda} and a g++ that it supports",
        )

    def _architectures(self) -> list[str]:
        """Return the flags for the GPUs of this machine."""
        if torch.version.cuda is None:
            raise Failure(
                "this PyTorch is built without CUDA", "install a PyTorch for CUDA (pytorch.org)"
            )
        found = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
        names = (f"{major}{minor}" for major, minor in sorted(found))
        return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


CUDA = _Cuda()
