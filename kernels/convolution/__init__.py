"""The convolution: its weights, and the candidates without own kernels; `routes.py` selects.

Candidates have functions `conv2d` and `conv3d` with the arguments of the ops (the weight is a
`ConvWeight`), and `fuses`, which says what they do without another pass.
"""
