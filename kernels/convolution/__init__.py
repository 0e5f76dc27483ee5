"""The convolution: its weights, and its candidates other than Triton's, which `routes.py` selects.

Candidates have functions `conv2d` and `conv3d` with the arguments of the ops (the weight is a
`ConvWeight`), and `fuses`, which says what they do without another pass.
"""
