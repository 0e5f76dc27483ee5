"""The ops in Triton for GPUs, on channels-last memory.

`ops.py` names the ops of the contract; `runtime.py` finds out whether Triton works here; the other
files are the kernels and what they refuse, imported when a call first needs them, because they
import Triton. All of them read a pixel as a row of neighbouring numbers, compute in float32
and round once. Offsets of frames are 64 bits wide and belong to the whole program; those inside of
a tile are 32.

Sizes of tiles and counts of warps were chosen by reasoning about registers and bytes in flight, and
wait for a measurement; nothing is tuned at run time.
"""
