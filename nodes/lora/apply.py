"""ComfyUI's MODEL with LoRAs of this pack: the contents of a clone, and its calls.

A clone carries its stack, one wrapper around its calls, and the bank as an additional model, which
ComfyUI loads, counts and frees together with the model. The model's patches and `patches_uuid`, by
which ComfyUI decides whether to reload weights, are the input's. Hooks on the modules are shared by
all clones and do the work of the clone that is called (`lora.session`).

The holder of a bank, the patcher by which ComfyUI loads it, is of the kind of the model: for a
dynamic model (DynamicVRAM) a dynamic one. One other patcher in a list of models to load makes
ComfyUI free memory by estimates, and unload dynamic models that it leaves alone otherwise.
"""

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ...lora import (
    Amounts,
    ApplyMode,
    Bank,
    Session,
    StackEntry,
    load_bank,
    rms_of,
    small_deltas,
    step_of,
)
from ..host import run_phase, timing
from .kinds import function_of, targets_of
from .merged import KEY, merge, save_with_loras, without_loras

_logger = logging.getLogger(__name__)

LoraMode = ApplyMode | Literal["merged"]

# Largest share of a device's memory for a bank. The pairs of a larger one are fetched by layer.
_MOST_OF_DEVICE = 1 / 8


@timing.span("LoRA attach")
def apply_lora(
    model: ModelPatcher,
    stack: Sequence[StackEntry],
    mode: LoraMode = "auto",
    phase: int | None = None,
) -> tuple[ModelPatcher, str]:
    """Return a clone of a model with a stack's LoRAs besides its own, and the key reports."""
    if mode == "merged":
        return merge(model, stack, phase or 0)
    clone, before = without_loras(model), model.get_attachment(KEY)
    parts = [*(before.parts if before else ()), *((entry, phase) for entry in stack)]
    parts = [each for each in parts if any(each[0].schedule.values(each[1]))]
    if not parts:
        return clone, "nothing to apply: every strength is 0"
    paths = list(dict.fromkeys(entry.path for entry, _ in parts))
    bank = load_bank(paths, targets_of(model), _compute_dtype(model), function_of)
    loras = AttachedLoras(parts, bank, mode, model.model)
    report = loras.report(model)
    _logger.info("Fast Video VAE: %s", report)
    clone.set_attachments(KEY, loras)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, loras)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, loras.around)
    save_with_loras(clone)
    room = comfy.model_management.get_total_memory(model.load_device) * _MOST_OF_DEVICE
    if 0 < bank.nbytes <= room:
        clone.set_additional_models(KEY, [_holder_of(bank, model)])
    return clone, report


class AttachedLoras:
    """LoRAs that are applied while a model is called."""

    def __init__(
        self,
        parts: Sequence[tuple[StackEntry, int | None]],
        bank: Bank,
        mode: ApplyMode,
        base: nn.Module,
    ) -> None:
        self._base = weakref.ref(base)
        self.parts, self.bank = tuple(parts), bank
        self._mode = _mode_of(mode)
        self._amounts = Amounts(bank, [entry for entry, _ in parts])
        values = [entry.schedule.values(phase) for entry, phase in parts]
        constant = all(len(each) == 1 for each in values)
        self._constants = [each[0] for each in values] if constant else None
        self.sessions: dict[tuple[Bank, torch.device], Session] = {}
        self._holders: weakref.WeakSet[ModelPatcher] = weakref.WeakSet()
        self._steps: tuple[object, list[float]] = (None, [])
        self._warned = False
        self._timed: Callable[..., AbstractContextManager[None]] | None = None

    def report(self, model: ModelPatcher) -> str:
        """Return the key reports for a model, and the size of the bank."""
        lines = [line for report in self.bank.reports for line in report.lines()]
        names = Counter(Path(entry.path).name for entry, _ in self.parts)
        more = ((name, count) for name, count in names.items() if count > 1)
        lines += [f"{name} is used {count} times; the strengths add up" for name, count in more]
        lines += self._small_deltas(model)
        size = f"{self.bank.nbytes / 2**20:.1f} MiB"
        lines.append(f"{len(self.bank.layers)} parameters, {size}, {self._mode}")
        return "\n".join(lines)

    def _small_deltas(self, model: ModelPatcher) -> list[str]:
        """Return a line about weak LoRAs in a mode that adds them to weights, or none."""
        dtype = self.bank.flat.dtype
        if self._mode == "bypass" or dtype == torch.float32:
            return []
        amounts = Amounts(self.bank, [entry for entry, _ in self.parts])
        amounts.set([max(entry.schedule.values(phase), key=abs) for entry, phase in self.parts])
        layers = self.bank.layers.values()
        if self._mode == "auto":  # which bypasses nothing else
            layers = [layer for layer in layers if len(layer.shape) == 2 and not layer.others]
        # By attributes: compiled blocks have other names.
        found = ((each, model.get_model_object(each.target.key)) for each in layers if each.rank)
        deltas = ((amounts.rms(each), rms_of(weight), dtype) for each, weight in found)
        return small_deltas(deltas, self._mode)

    def __call__(self, executor: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Wrap a call of the model: `apply_model(x, t, ..., transformer_options)`."""
        base = executor.class_obj  # type: ignore[attr-defined]
        patcher = getattr(base, "current_patcher", None)
        # A guider can call a second model with the wrappers of the first.
        is_own = base is self._base() or patcher is None
        owner: AttachedLoras | None = self if is_own else patcher.get_attachment(KEY)
        if owner is None:
            return executor(*args, **kwargs)
        device = args[0].device
        options = kwargs.get("transformer_options", args[5] if len(args) > 5 else {})
        owner._amounts.set(owner._strengths(options, args[1]))
        session = owner._session_for(base, device)
        with session.call(base, device):
            y = executor(*args, **kwargs)
        if session.counts.unserved and not owner._warned:
            owner._warned = True
            count, first = len(session.counts.unserved), min(session.counts.unserved)
            layers = f"{count} layers with inaccessible weights, for example {first}"
            _logger.warning("Fast Video VAE: a LoRA has no effect on %s", layers)
        return y

    def around(self, executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run a sampler; if requested, log counts, and add the times to the prompt's table."""
        _follow(getattr(executor.class_obj, "model_patcher", None))  # type: ignore[attr-defined]
        self._timed = partial(timing.span, "LoRA") if _is_set("WAN_LORA_TIMING") else None
        for session in self.sessions.values():
            session.counts.clear()
        try:
            return executor(*args, **kwargs)
        finally:
            for session in self.sessions.values():
                if self._timed is not None:
                    _logger.info("Fast Video VAE: LoRA: %s", self._counted(session))
                session.release()
            for holder in self._holders:
                _give_back(holder)
            # The banks of further GPUs go with their models.
            self.sessions = {key: one for key, one in self.sessions.items() if key[0] is self.bank}

    def _counted(self, session: Session) -> str:
        """Return the counts and bytes of a run."""
        counts = session.counts
        parts = [f"{kind} {getattr(counts, kind)}" for kind in ("stream", "bypass", "formula")]
        parts.append(f"held {self.bank.nbytes / 2**20:.1f} MiB")
        if counts.fetched_bytes:
            parts.append(f"fetched {counts.fetched_bytes / 2**20:.1f} MiB")
        return ", ".join(parts)

    def _session_for(self, base: nn.Module, device: torch.device) -> Session:
        bank = self.bank
        for holder in _holders_of(getattr(base, "current_patcher", None)):
            if holder.model.layers is bank.layers:  # not of another clone of the same model
                self._holders.add(holder)
                bank = holder.model
        if (bank, device) not in self.sessions:
            self.sessions[bank, device] = Session(bank, self._amounts, self._mode)
        session = self.sessions[bank, device]
        session.counts.timed = self._timed
        return session

    def _strengths(self, options: dict[str, Any], t: Tensor) -> list[float]:
        if self._constants is not None:
            return self._constants
        sigma = float(options.get("sigmas", t).flatten()[0])
        step, steps = 0, 1
        if (sigmas := options.get("sample_sigmas")) is not None:
            if self._steps[0] is not sigmas:
                self._steps = sigmas, [float(value) for value in sigmas]
            known = self._steps[1]
            step, steps = step_of(sigma, known), max(1, len(known) - 1)
        run, strengths = options.get(run_phase.KEY), list[float]()
        for entry, phase in self.parts:
            schedule, inside = entry.schedule, (phase or 0,)
            # The phase of the node, unless the sampler gives the same phase in more detail.
            given = phase, len(schedule.phases)
            if run is not None and (phase is None or given == (run.number, run.count)):
                inside = run.number, run.count, run.step(step), run.steps or None
            strengths.append(schedule.strength(step, steps, sigma, *inside))
        return strengths


def _compute_dtype(model: ModelPatcher) -> torch.dtype:
    dtype = getattr(model.model, "manual_cast_dtype", None) or model.model_dtype()
    return dtype if dtype in (torch.float32, torch.float16) else torch.bfloat16


def _mode_of(mode: ApplyMode) -> ApplyMode:
    """Return the node's mode; for "auto" that of the environment."""
    if mode == "auto" and _is_set("WAN_LORA_STREAMING"):
        return "stream"
    return "bypass" if mode == "auto" and _is_set("WAN_LORA_ONTHEFLY") else mode


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _holder_of(bank: Bank, model: ModelPatcher) -> ModelPatcher:
    """Return a patcher that loads a bank with a model; those of one bank have a common parent."""
    # ComfyUI warns of loaded models without a live patcher.
    known = model.load_device, model.offload_device, not model.is_dynamic()
    if known not in bank.companions:
        holder = _patcher(lambda: bank, *known)
        # ComfyUI makes the additional models of another GPU by this call.
        holder.cached_patcher_init = _patcher, (bank.copy, *known[:-1])
        bank.companions[known] = holder
    return bank.companions[known].clone()  # type: ignore[attr-defined]


def _patcher(
    bank: Callable[[], Bank],
    load_device: torch.device,
    offload_device: torch.device,
    disable_dynamic: bool = False,  # the name of ComfyUI
) -> ModelPatcher:
    kind = ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    return kind(bank(), load_device=load_device, offload_device=offload_device)


def _holders_of(patcher: Any) -> list[ModelPatcher]:  # noqa: ANN401 - a patcher, or None
    """Return the patchers of a model's banks; none if the bank stays on the host."""
    return [] if patcher is None else patcher.get_additional_models_with_key(KEY)


def _follow(patcher: Any) -> None:  # noqa: ANN401 - a patcher, or None
    """Give a model that was moved to another device, or made static, a holder of its kind."""
    for holder in _holders_of(patcher):
        theirs = patcher.load_device, patcher.is_dynamic()
        if (holder.load_device, holder.is_dynamic()) != theirs:
            patcher.set_additional_models(KEY, [_holder_of(holder.model, patcher)])


def _give_back(holder: ModelPatcher) -> None:
    """Free the device memory of a dynamic bank: ComfyUI expects to take it at any time."""
    if holder.is_dynamic():
        holder.partially_unload(holder.offload_device, 1e32)
