"""The ops in CUDA C++ for GPUs without Triton: no compiler and no toolkit is needed.

`csrc/cuda` has the kernels. PyTorch ships a compiler for them as a library, NVRTC (hiprtc for AMD
GPUs), which `compiler.py` calls. `binaries.py` keeps its output on disk, and `driver.py` loads and
launches it. `ops.py` has a function for each op; the other files hold their refusals and
arguments. Kernels compute in float32 and round once. A kernel is compiled for a dtype and for packs
of 16 bytes or of one number; all sizes are arguments.
"""
