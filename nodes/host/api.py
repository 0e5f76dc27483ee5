"""ComfyUI's interface for node packs, in the one version that the pack is written for.

`v0_0_2` is ComfyUI's newest numbered version: a later ComfyUI keeps it as it is, while `latest`
changes. A test compares the two.
"""

from comfy_api import feature_flags
from comfy_api.v0_0_2 import ComfyExtension, Input, InputImpl, Types, io, ui

__all__ = ["ComfyExtension", "Input", "InputImpl", "Types", "feature_flags", "io", "ui"]
