"""The path of one latent through `decode`: how many files of the VAE, how many nested calls."""

import sys
import traceback
from pathlib import Path

import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae import load_vae
from fast_video_vae.vae.planning import plan

VAE = Path(plan.__file__).parents[1]
# Limits for following a decode; `eager` wraps two of the calls, which are no hands.
MOST_FILES, MOST_HANDS, MOST_FRAMES = 9, 10, 12


def in_vae(frame):
    return VAE in Path(frame.f_code.co_filename).parents


def test_a_decode_step_uses_few_files_and_calls(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # no code compiles
    vae = load_vae(random_state_dict(8), dtype=torch.float32)
    latent = torch.randn(1, 16, 3, 4, 4)
    vae.decode(latent, 1)  # derives the weights
    files, stack, entered = set(), [], []

    def note(frame, event, called):
        nonlocal stack
        if event == "call" and in_vae(frame):
            files.add(Path(frame.f_code.co_filename).relative_to(VAE).as_posix())
        elif event == "c_call" and "conv" in getattr(called, "__name__", ""):
            codes = [each.f_code for each, _ in traceback.walk_stack(frame) if in_vae(each)]
            names = [(Path(code.co_filename).name, code.co_name) for code in codes]
            stack = max(stack, names, key=len)

    def enters(*_):
        entered.append(1)
        if len(entered) == 3:  # all later steps are like that of the third latent
            sys.setprofile(note)

    vae.conv2.register_forward_pre_hook(enters)
    try:
        vae.decode(latent, 1)
    finally:
        sys.setprofile(None)
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(stack) <= MOST_FRAMES, stack
    hands = [each for each in stack if each != ("precision.py", "run")]
    assert len(hands) <= MOST_HANDS, hands
    assert {("model.py", "decode"), ("executor.py", "advance")} < set(stack)
