"""ComfyUI's interface for node packs, in the one version that the pack is written for.

`v0_0_2` is ComfyUI's newest numbered version: a later ComfyUI keeps it as it is, while `latest`
changes. A test runs the pack with `latest` in its place.
"""

from comfy_api import feature_flags
from comfy_api.v0_0_2 import ComfyAPI, ComfyExtension, Input, InputImpl, Types, io, ui

__all__ = ["ComfyAPI", "ComfyExtension", "Input", "InputImpl", "Types", "feature_flags", "io", "ui"]
