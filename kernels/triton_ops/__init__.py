"""The ops in Triton for GPUs, on channels-last memory; `ops.py` has a function for each.

Files with kernels import Triton, so the first call that needs them imports them. Kernels compute in
float32 and round once. Offsets of frames are 64 bits wide and the same for a whole program, offsets
within a tile have 32. Tile sizes and warps follow from registers and bytes in flight.
"""
