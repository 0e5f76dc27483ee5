"""The phase of a sampling run, passed from the sampler to code in the model's calls."""

from dataclasses import dataclass

# Key in `transformer_options`.
KEY = "fast_video_vae.phase"


@dataclass(frozen=True)
class Phase:
    """The part of a run that one model denoises; 0 steps: a call belongs to the step before."""

    number: int
    count: int
    first: int  # step within the run, from 0
    steps: int

    def step(self, step: int) -> int | None:
        """Return a `step` of the run counted from the start of this phase; None: no steps."""
        return min(max(step - self.first, 0), self.steps - 1) if self.steps else None
