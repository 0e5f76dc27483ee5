"""Which part of a run a model serves, as a sampler tells what runs inside the model's calls."""

from dataclasses import dataclass

# In `transformer_options`.
KEY = "fast_video_vae.phase"


@dataclass(frozen=True)
class Phase:
    """One of the models that a run goes through.

    Attributes:
        number: From 0, in the order of the run.
        count: How many the run has.
        first: The step of the run that it begins with, from 0.
        steps: How many it has; 0: none, and a call belongs to the step before.
    """

    number: int
    count: int
    first: int
    steps: int

    def step(self, step: int) -> int | None:
        """A step of the run, counted from the first of this phase; None: the phase has none."""
        return min(max(step - self.first, 0), self.steps - 1) if self.steps else None
