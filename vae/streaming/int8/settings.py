"""The precision of a VAE, as its attribute: which convolutions of a decode run in int8.

Encodes never do: a latent in int8 is another start of a sampling, which turns a small difference
into another picture.
"""

import contextlib
import functools
import weakref
from concurrent.futures import CancelledError

import torch
from torch import Tensor

from ....kernels import Job, default_device, int8_lacks, log_once, submit
from ...layers.conv import PointwiseConv
from ...models.base import Network, unwrapped
from ...models.config import VAEConfig
from ..bands.team import Team
from ..memory import retried
from ..options import AUTOMATIC, StreamOptions
from ..precision import decode_dtype
from .layers import Choice, Int8Choices, Int8Layers, probe

AUTO, INT8 = "auto", "int8"

PRECISIONS = (AUTO, INT8)

# Side of the measured frames in pixels.
_PIXELS = 48

# float8 has 3 bits of a mantissa: the same convolutions lose 39.0 dB in int8, 48.4 in float8.
_FP8 = "it loses 9 dB more than int8, at the same speed"


class Int8VAE:
    """The part of a VAE that says which of its convolutions run in int8."""

    config: VAEConfig
    device: torch.device
    dtype: torch.dtype
    encode_dtype: torch.dtype
    allow_fp16: bool
    encoder: Network | None
    decoder: Network
    conv2: PointwiseConv | None  # before the decoder
    team: Team
    _precision = AUTO
    _int8: Int8Choices

    @property
    def precision(self) -> str:
        """The precision of a decode: "auto", or "int8".

        With "int8" the large convolutions after a norm multiply 8-bit numbers, at up to four times
        the speed. `int8_layers` chooses those that cost least, so that the frames have at most
        about 1 dB less than in bfloat16. They are chosen in the background, once for these weights
        on a device; until then decodes are those of "auto". A decode whose values are out of their
        range continues in 16 bits. Where int8 does not pay, the log has the reason, and the
        precision is that of "auto".
        """
        return self._precision

    @precision.setter
    def precision(self, precision: str) -> None:
        """Set the `precision`, or raise a `ValueError` of one line for another one."""
        if precision == "fp8":
            raise ValueError(f"precision is 'fp8', but {_FP8}; expected auto or int8")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; expected auto or int8")
        self._precision = precision
        # Weights on their way to a GPU wait for their first video.
        if precision == INT8 and self.device.type == default_device().type:
            self._jobs()

    def int8_layers(self, dtype: torch.dtype) -> Int8Layers:
        """Return the convolutions that run in int8 next to layers in `dtype`.

        The first call measures them, as long as about 30 decodes of 48 x 48 pixels. A `ValueError`
        is raised where int8 is not supported, or does not pay.
        """
        if reason := self._lacks_int8(dtype):
            raise ValueError(f"precision is int8, but {reason}; expected auto")
        return self._int8.of(unwrapped(self.decoder), self._probed(), (dtype, self.device))

    def int8_dtype(self, options: StreamOptions = AUTOMATIC) -> torch.dtype:
        """Return the dtype of the other layers of a decode that has some in int8."""
        allowed = self.allow_fp16 and options.dtype is None
        return decode_dtype(options.dtype or self.dtype, self.device, allow_fp16=allowed, deep=True)

    def planned_codes(self, dtype: torch.dtype, device: torch.device) -> frozenset[str]:
        """Return the names of the convolutions in int8 of the next decode, as far as known."""
        return frozenset() if self._precision == AUTO else self._int8.known((dtype, device))

    def codes(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the convolutions in int8 of a new decode, next to layers in `dtype`."""
        if self._precision == AUTO:
            return frozenset()
        if reason := self._lacks_int8(dtype):
            log_once(f"int8 is not used: {reason}")
            return frozenset()
        choice = dtype, self.device
        find = functools.partial(self._int8.find, unwrapped(self.decoder), choice)
        layers = retried(find, self.device, "the choice of int8")
        if layers is None:
            self._job(choice)
            log_once(
                "int8 begins with a later decode: its layers are being chosen in the background"
            )
            return frozenset()
        if layers.rows and not layers.names:
            log_once("int8 is not used: every convolution would cost more than 1 dB")
        return layers.names

    def _jobs(self) -> list[Job]:
        """Return the jobs that prepare the next decodes, after a submission of those that lack."""
        return [self._job((self.int8_dtype(), self.device))] if self._precision == INT8 else []

    def _job(self, choice: Choice) -> Job:
        """Return the job that makes a choice, submitted if it is not waiting or running."""
        job = self._int8.jobs.get(choice)
        if job is None or job.is_done:
            work = functools.partial(_choose, weakref.ref(self), choice)
            job = self._int8.jobs[choice] = submit("the choice of int8", work)
        return job

    @torch.no_grad()
    def _probed(self) -> Tensor:
        """Return the input `[B, C, T, H, W]` of the decoder for a measurement."""
        config = self.config
        x = probe(config.latent_channels, _PIXELS // config.spatial_compression).to(self.device)
        x = x / config.latent_scale if self.conv2 is None else self.conv2(x)
        # No picture comes after another.
        return x.transpose(0, 2) if config.is_of_pictures else x

    def _lacks_int8(self, dtype: torch.dtype) -> str:
        """Return why int8 is not used with layers in `dtype`; empty: it can be."""
        devices = dict.fromkeys([self.device, *self.team.devices])
        return next(filter(None, (int8_lacks(each, dtype) for each in devices)), "")


def _choose(vae: weakref.ref[Int8VAE], choice: Choice) -> None:
    """Make a choice for a VAE, until the VAE is freed."""
    found = vae()
    if found is None or found.device != choice[1] or found._lacks_int8(choice[0]):
        return
    choices, network, x = found._int8, unwrapped(found.decoder), found._probed()
    del found
    with contextlib.suppress(CancelledError):
        choices.of(network, x, choice, lambda: vae() is not None)
