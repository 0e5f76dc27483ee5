"""The node that joins the latents of a long video's windows, as they were sampled."""

from typing import Any

import torch
from torch import Tensor

from ..host.api import io
from ..host.error_text import require
from ..host.input_checks import checked
from ..host.latents import first_of
from ..host.widgets import CATEGORY

# Video frames per latent frame, except for the first, which is one. A LATENT does not have it; it
# is that of all VAEs of videos here.
_FRAMES = 4

_TEXTS = {
    "samples": "Latent of the video so far, or of its start.",
    "overlap": "Latent frames at the start of next that repeat the end of samples: as many as were "
    "handed over. Those of samples are kept.",
    "hand_over": "Latent frames that the next window begins with (4 video frames each).",
    "window": "Latent frames of the next window: 21 for 81 video frames. A sampler keeps those "
    "that are handed over and samples the others. 0: the output has only those that are handed "
    "over, without a noise mask.",
    "next": "Latent of the window that continues the video. Without it, LATENT is the video so "
    "far.",
    "the next": "The next window, for the latent input of a sampler.",
    "new_frames": "Video frames that next added, or all without it, such as 81-156: for frames of "
    "VAE Decode to Video (Fast).",
}


class JoinLatents(io.ComfyNode):
    """Join two windows, and begin the next one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        return io.Schema(
            node_id="FastVAE_JoinLatents",
            display_name="Join Latents (Fast)",
            category=CATEGORY,
            description="Joins the windows of a long video before they are decoded, and begins the "
            "next window with the last latent frames as they were sampled. Nothing is decoded and "
            "encoded again, so the windows do not drift, and one decode of the joined latent has "
            "no seam.",
            search_aliases=["long video", "concat latents", "extend video", "next window"],
            inputs=[
                io.Latent.Input("samples", tooltip=_TEXTS["samples"]),
                *(
                    io.Int.Input(name, default=default, min=least, max=4096, tooltip=_TEXTS[name])
                    for name, default, least in (
                        ("overlap", 2, 0),
                        ("hand_over", 2, 1),
                        ("window", 21, 0),
                    )
                ),
                io.Latent.Input("next", optional=True, tooltip=_TEXTS["next"]),
            ],
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The video so far."),
                io.Latent.Output(display_name="hand_over", tooltip=_TEXTS["the next"]),
                io.String.Output(display_name="new_frames", tooltip=_TEXTS["new_frames"]),
            ],
        )

    @classmethod
    @checked
    def execute(
        cls,
        samples: dict[str, Any],
        next: dict[str, Any] | None = None,
        overlap: int = 2,
        hand_over: int = 2,
        window: int = 21,
    ) -> io.NodeOutput:
        """Join, and cut off the end."""
        joined = _video("samples", samples)
        first = 0  # of the latent frames that are new
        if next is not None:
            following = _video("next", next)
            _check_fit(joined, following, overlap)
            first = joined.shape[2]
            joined = torch.cat([joined, following[:, :, overlap:].to(joined)], dim=2)
        if hand_over > joined.shape[2]:
            raise ValueError(f"hand_over: got {hand_over}; the video has {_count(joined)}")
        more = f"more than the {hand_over} of hand_over, or 0"
        require(window == 0 or window > hand_over, window, more, "window: got")
        kept = {key: value for key, value in samples.items() if key != "noise_mask"}
        end = kept | _begun(joined[:, :, -hand_over:], window)
        new = _FRAMES * (first - 1) + 1 if first else 0, _FRAMES * (joined.shape[2] - 1)
        return io.NodeOutput(kept | {"samples": joined}, end, "{}-{}".format(*new))


def _video(name: str, given: dict[str, Any]) -> Tensor:
    """Return the videos `[B, C, t, h, w]` of a LATENT."""
    latent, expected = first_of(given["samples"]), "the latent of a video [B, C, t, h, w]"
    return require(latent.ndim == 5 and latent.numel() > 0, latent, expected, f"{name}: got")


def _check_fit(joined: Tensor, following: Tensor, overlap: int) -> None:
    """Raise a `ValueError` if a window does not continue the video."""
    fits = joined.shape[:2] == following.shape[:2] and joined.shape[3:] == following.shape[3:]
    expected = f"the batch, channels, height and width of samples, {list(joined.shape)}"
    require(fits, following, expected, "next: got")
    if overlap > joined.shape[2] or overlap >= following.shape[2]:
        raise ValueError(
            f"overlap: got {overlap}; samples has {_count(joined)} and next {_count(following)}, "
            "of which at least one is new"
        )


def _begun(end: Tensor, window: int) -> dict[str, Tensor]:
    """Return a LATENT of `window` latent frames with those of `end`, which a sampler keeps."""
    if not window:
        return {"samples": end.clone()}
    batch, channels, count, height, width = end.shape
    latent = end.new_zeros(batch, channels, window, height, width)
    latent[:, :, :count] = end
    mask = torch.ones(batch, 1, window, height, width, device=end.device)
    mask[:, :, :count] = 0
    return {"samples": latent, "noise_mask": mask}


def _count(latent: Tensor) -> str:
    count = latent.shape[2]
    return f"{count} latent frame{'' if count == 1 else 's'}"
