"""The convolution: its weights, its candidates other than Triton's, and the choice between them.

Candidates have functions `conv2d` and `conv3d` with the arguments of the ops in
`kernels/__init__.py` (the weight is a `ConvWeight`), and `fuses`, which says what they do without
another pass. `choice.py` orders them for a call.
"""
