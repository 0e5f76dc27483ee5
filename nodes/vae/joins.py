"""The node that joins the latents of a long video's windows, as they were sampled."""

from typing import Any

import torch
from torch import Tensor

from ..host.api import io
from ..host.error_text import described
from ..host.input_checks import checked
from ..host.widgets import CATEGORY

# Video frames per latent frame, except for the first, which is one. A LATENT does not have it; it
# is that of all VAEs of videos here.
_FRAMES = 4


class JoinLatents(io.ComfyNode):
    """Join two windows, and begin the next one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's schema."""
        limits = {"min": 0, "max": 4096}
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
                io.Latent.Input("samples", tooltip="Latent of the video so far, or of its start."),
                io.Int.Input(
                    "overlap",
                    default=2,
                    **limits,
                    tooltip="Latent frames at the start of next that repeat the end of samples: "
                    "as many as were handed over. Those of samples are kept.",
                ),
                io.Int.Input(
                    "hand_over",
                    default=2,
                    **(limits | {"min": 1}),
                    tooltip="Latent frames that the next window begins with (4 video frames each).",
                ),
                io.Int.Input(
                    "window",
                    default=21,
                    **limits,
                    tooltip="Latent frames of the next window: 21 for 81 video frames. A sampler "
                    "keeps those that are handed over and samples the others. 0: the output has "
                    "only those that are handed over, without a noise mask.",
                ),
                io.Latent.Input(
                    "next",
                    optional=True,
                    tooltip="Latent of the window that continues the video. Without it, LATENT is "
                    "the video so far.",
                ),
            ],
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The video so far."),
                io.Latent.Output(
                    display_name="hand_over",
                    tooltip="The next window, for the latent input of a sampler.",
                ),
                io.String.Output(
                    display_name="new_frames",
                    tooltip="Video frames that next added, or all without it, such as 81-156: for "
                    "frames of VAE Decode to Video (Fast).",
                ),
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
        if window and hand_over >= window:
            raise ValueError(
                f"window: got {window}; expected more than the {hand_over} of hand_over, or 0"
            )
        kept = {key: value for key, value in samples.items() if key != "noise_mask"}
        end = kept | _begun(joined[:, :, -hand_over:], window)
        new = _FRAMES * (first - 1) + 1 if first else 0, _FRAMES * (joined.shape[2] - 1)
        return io.NodeOutput(kept | {"samples": joined}, end, "{}-{}".format(*new))


def _video(name: str, given: dict[str, Any]) -> Tensor:
    """Return the videos `[B, C, t, h, w]` of a LATENT; of one with audio, those without it."""
    latent = given["samples"]
    if latent.is_nested:
        latent = latent.unbind()[0]
    if latent.ndim != 5 or not latent.numel():
        raise ValueError(
            f"{name}: got {described(latent)}; expected the latent of a video [B, C, t, h, w]"
        )
    return latent


def _check_fit(joined: Tensor, following: Tensor, overlap: int) -> None:
    """Raise a `ValueError` if a window does not continue the video."""
    if joined.shape[:2] != following.shape[:2] or joined.shape[3:] != following.shape[3:]:
        raise ValueError(
            f"next: got {described(following)}; expected the batch, channels, height and width of "
            f"samples, {list(joined.shape)}"
        )
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
