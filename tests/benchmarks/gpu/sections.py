"""The sections of a run, what decides most first.

The seconds are those of a run of 25 minutes on a large GPU, in three blocks of about eight minutes.
"""

from . import (
    ablation,
    attention,
    conv,
    host,
    kernel_profile,
    kernel_tests,
    limits,
    lora,
    ops,
    plans,
    reference,
    streams,
    twice,
    users,
    vae,
)
from .schedule import Section

# What runs, and where the time goes.
_FIRST = (
    Section("copy", limits.cases, 15),
    Section("tests", kernel_tests.cases, 170),
    Section("profile", kernel_profile.cases, 90),
    Section("conv", conv.cases, 205),
)

# What users have next to other implementations, and with the memory of their cards.
_SECOND = (
    Section("vae", vae.cases, 310),
    Section("users", users.cases, 130),
    Section("twice", twice.cases, 50),
    Section("reference", reference.cases, 50),
)

# What each part is worth.
_THIRD = (
    Section("ablation", ablation.cases, 140),
    Section("host", host.cases, 60),
    Section("attention", attention.cases, 20),
    Section("ops", ops.cases, 100),
    Section("plans", plans.cases, 60),
    Section("lora", lora.cases, 60),
    Section("streams", streams.cases, 40),
)

BLOCKS = (_FIRST, _SECOND, _THIRD)
SECTIONS = {section.name: section for block in BLOCKS for section in block}
