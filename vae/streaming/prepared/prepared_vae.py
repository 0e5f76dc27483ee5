"""The kernels of a VAE that the background thread builds, as its methods."""

import math
import time
from dataclasses import replace

import torch

from ....kernels import Fallback, Prepared, Snapshot, log_once, wait
from ..bands.ranks import Rank
from ..int8.settings import Int8VAE
from ..precision import compute_dtype, decode_dtype
from ..settings import Setting
from .device_check import check_once, fallback_of
from .preparation import Work, prepared


class PreparedVAE(Int8VAE):
    """The part of a VAE that has its kernels built before they are needed."""

    def prepare(self, device: torch.device | None = None) -> list[Prepared]:
        """Begin to build the kernels of decodes and encodes in the background.

        `load_vae` does this, and so does the first video on a device. Until they are built the
        library serves whole videos. `device` is that of the next videos; None: of the weights.
        """
        device = device or self.device
        works = zip(self._dtypes(device), (False, True), strict=False)
        made = [self._prepared(device, dtype, encodes, frozenset()) for dtype, encodes in works]
        # Those of int8 too: next to it layers can be in another dtype, and a video out of its range
        # goes on without.
        dtype = self.int8_dtype()
        if names := self.planned_codes(dtype, device):
            made.append(self._prepared(device, dtype, False, names))
        return made

    def ready_codes(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the `codes` of a new decode if their kernels are built; else none."""
        coded, devices = self.codes(dtype), {self.device, *self.team.devices}
        # All are begun before one that is not ready is found.
        made = [self._prepared(each, dtype, False, coded) for each in devices if coded]
        if all(each.is_ready for each in made):
            return coded
        log_once("int8 begins with a later video: its kernels are being built in the background")
        return frozenset()

    def wait_until_prepared(
        self, timeout_s: float | None = None, device: torch.device | None = None
    ) -> bool:
        """Wait until what `prepare` builds serves the next videos; return whether it is built.

        At most `timeout_s` seconds are waited; None: until it is built.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if math.isinf(end) else max(0, end - time.monotonic())

        # The kernels of int8 follow from the choice of its layers.
        chosen = wait(self._jobs(), left_s())
        devices = {self.device, *self.team.devices} if device is None else {device}
        made = [each.job for where in devices for each in self.prepare(where)]
        made += [check_once(where, dtype) for where in devices for dtype in self._dtypes(where)]
        return chosen and wait(made, left_s())

    def proved(self, setting: Setting) -> Setting:
        """Return the setting with what serves in place of what its device computes wrongly.

        All devices are in float32 if one of them needs that. Others that do not compute rightly at
        all are left out, now and later.
        """
        found = fallback_of(setting.device, setting.dtype)
        for number, device in enumerate(self.team.all if setting.is_open else ()):
            if isinstance(device, Rank) or device == setting.device:
                continue
            other = fallback_of(device, setting.dtype)
            if other.cpu:
                self.team.fail(number)
            found |= Fallback(float32=other.float32)
        return setting.instead(found)

    def kernels_of(
        self, device: torch.device, dtype: torch.dtype, coded: frozenset[str], *, encodes: bool
    ) -> Snapshot:
        """Return what a video may run on a device in addition to the library."""
        seen = self._prepared(device, dtype, encodes, coded).seen()
        return replace(seen, fallback=fallback_of(device, dtype))

    def built_kernels(
        self, device: torch.device, dtype: torch.dtype, coded: frozenset[str], *, encodes: bool
    ) -> Snapshot:
        """Return the same once they are built, which is waited for."""
        wait([self._prepared(device, dtype, encodes, coded).job, check_once(device, dtype)])
        return self.kernels_of(device, dtype, coded, encodes=encodes)

    def _dtypes(self, device: torch.device) -> list[torch.dtype]:
        """Return the dtypes of the computation of a decode, and of an encode if there is one."""
        found = [decode_dtype(self.dtype, device, allow_fp16=self.allow_fp16)]
        if self.encoder is not None:
            found.append(compute_dtype(self.encode_dtype, device))
        return found

    def _prepared(
        self, device: torch.device, dtype: torch.dtype, encodes: bool, coded: frozenset[str]
    ) -> Prepared:
        weights = next(self.decoder.parameters()).dtype
        made = prepared(device, Work(self.config, encodes, dtype, weights, coded))
        check_once(device, dtype)  # after the C++ kernels, which it uses
        return made
