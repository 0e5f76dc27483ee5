"""What a server needs so that the frontend shows nothing of a workflow as missing."""

import shutil
import wave
from collections.abc import Iterable
from pathlib import Path

from fast_video_vae import vae

from ...nodes.checkout import find_comfyui
from . import wrapper
from .graph import Graph


def furnish(base: Path, graphs: Iterable[Graph]) -> None:
    """Create the packs and files that workflows need.

    Args:
        base: Folder of the files of a server.
        graphs: The workflows; their models become empty files.
    """
    wrapper.place(base / "custom_nodes")
    (base / "input").mkdir(parents=True)
    shutil.copy(find_comfyui() / "input" / "example.png", base / "input")
    shutil.copy(vae.CLIP_PATH, base / "input" / "video.mp4")
    with wave.open(str(base / "input" / "speech.wav"), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(2 * 16000))
    for model in {model for graph in graphs for model in graph.models}:
        file = base / "models" / model.directory / model.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
