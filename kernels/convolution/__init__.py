"""The convolution: its weights, and the candidates without own kernels; `routes.py` selects.

Candidates have the launch `conv3d`, and `fuses`, which says what it does without another pass.
"""
