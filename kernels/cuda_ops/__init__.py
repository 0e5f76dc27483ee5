"""The ops in CUDA C++ (`csrc/cuda`) for GPUs without Triton: no compiler and no toolkit is needed.

PyTorch ships a compiler as a library, NVRTC (hiprtc for AMD GPUs). `ops.py` has a function for each
op. Kernels compute in float32 and round once; they are compiled for a dtype and for packs of 16
bytes or of one number, and all sizes are arguments.
"""
