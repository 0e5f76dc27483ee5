"""One run of a sampler over several models: ComfyUI's guider, with a model for each noise level.

The sampler is called once, over one list of noise levels, so a solver with a memory of earlier
steps keeps it across the switch, and the latent is passed on without new noise. The guider's own
attributes are those of the current model, so that ComfyUI's base class cleans up after that model
in every case.
"""

import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
from comfy.model_patcher import ModelPatcher, create_model_options_clone
from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers
from torch import Tensor

from ...vae import resumed
from ..host import run_phase, timing
from ..host.oom import free_others
from .plan import SamplingPlan

_logger = logging.getLogger(__name__)

Conds = dict[str, list[dict[str, Any]]]


# A model of the run before it is loaded: the attributes of the guider by ComfyUI's names.
_State = tuple[ModelPatcher, dict[str, Any], Conds]


class StagedGuider(comfy.samplers.CFGGuider):
    """A guider that calls the model of each stage of a plan, and names each that starts."""

    def __init__(
        self,
        models: Sequence[ModelPatcher],
        plan: SamplingPlan,
        conds: dict[str, list],
        *,
        free: bool,
        on_stage: Callable[[str], None],
    ) -> None:
        """Take the model of each stage, and conditionings by `positive` and `negative`."""
        if any(map(comfy.sampler_helpers.cond_has_hooks, conds.values())):
            # Hooks patch weights, which is not possible for models streamed from the host.
            models = [
                model.get_non_dynamic_delegate() if model.is_dynamic() else model
                for model in models
            ]
        self._first = self.stage = plan.stage_at(plan.run[0])
        self._last = max(self._first, plan.stage_at(plan.run[-1]))
        super().__init__(models[self._first])
        self.inner_set_conds(conds)
        self._models, self._plan, self._free, self._on_stage = models, plan, free, on_stage
        self._prepared: dict[int, _State] = {}
        self._given: dict[str, Any] = {}
        self._merged: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._multigpu: list[ModelPatcher] = []
        self._since = timing.instant()

    @property
    def _state(self) -> _State:
        return self.model_patcher, self.model_options, self.conds

    @_state.setter
    def _state(self, state: _State) -> None:
        self.model_patcher, self.model_options, self.conds = state

    def outer_sample(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Prepare the other models within their wrappers, then run as the base class."""
        first = self._take(self._first)
        try:
            return self._prepare(self._first + 1, args, kwargs)
        finally:
            for one in self._multigpu:
                one.cleanup()
            self._state = first
            self._prepared, self._given, self._merged, self._multigpu = {}, {}, None, []

    def inner_sample(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Keep the arguments for the other models, then run as the base class."""
        self.add_time("load")
        call = super().inner_sample
        self._given = inspect.signature(call).bind(*args, **kwargs).arguments
        self._on_stage(self._plan.stages[self.stage].name)
        return call(*args, **kwargs)

    def outer_predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Call the model of a noise level, with the guidance of its step."""
        sigma = float(timestep.flatten()[0])
        stage = min(max(self._plan.stage_at(sigma), self._first), self._last)
        if stage != self.stage:
            self._switch(stage)
        self.cfg = self._plan.cfg_at(stage, sigma)
        options = self._options_of_call(model_options or {})
        call = super().outer_predict_noise
        return self._with_room(lambda: call(x, timestep, options, seed))

    def _prepare(self, stage: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Enter the wrappers of a stage's model and of the following ones, then run."""
        if stage > self._last:
            self._state = _fresh(self._prepared[self._first])
            self._since = timing.instant(self.model_patcher.load_device)
            return super().outer_sample(*args, **kwargs)
        patcher = self._models[stage]
        options = create_model_options_clone(patcher.model_options)
        conds = _copy(self.original_conds)
        comfy.samplers.preprocess_conds_hooks(conds)
        self._state = patcher, options, conds
        hook_mode = patcher.hook_mode

        def inside(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            state = self._take(stage)
            try:
                return self._prepare(stage + 1, args, kwargs)
            finally:  # its wrappers end with the attributes that they began with
                self._state = state

        try:
            if comfy.samplers.get_total_hook_groups_in_conds(conds) <= 1:
                patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
            comfy.sampler_helpers.prepare_model_patcher(patcher, conds, options)
            comfy.samplers.filter_registered_hooks_on_conds(conds, options)
            wrappers = get_all_wrappers(WrappersMP.OUTER_SAMPLE, options, is_model_options=True)
            executor = WrapperExecutor.new_class_executor(inside, self, wrappers)
            return executor.execute(*args, **kwargs)
        finally:
            comfy.samplers.cast_to_load_options(options, device=patcher.offload_device)
            patcher.hook_mode = hook_mode
            patcher.restore_hook_patches()

    def _take(self, stage: int) -> _State:
        """Store the guider's current attributes as those of a stage."""
        known = {run_phase.KEY: self._plan.phase(stage)}
        self.model_options.setdefault("transformer_options", {}).update(known)
        self._prepared[stage] = self._state
        return self._state

    def _switch(self, stage: int) -> None:
        """Leave the current model, and load that of a stage."""
        given, left, state = self._given, self.model_patcher, self._prepared[stage]
        start = timing.instant(left.load_device)
        for one in (left, *self._multigpu):
            one.cleanup()
        self._multigpu = []
        comfy.sampler_helpers.cleanup_models(self.conds, self.loaded_models)
        if self._free and left.model is not state[0].model:
            comfy.model_management.unload_model_and_clones(left)
        pool = self.model_options.pop("multigpu_thread_pool", None)
        self._state = _fresh(state)
        if pool is not None:  # the base class ends the pool through the current options
            self.model_options["multigpu_thread_pool"] = pool
        patcher, options, device = self.model_patcher, self.model_options, given["device"]
        self._load()
        self._multigpu = comfy.sampler_helpers.prepare_model_patcher_multigpu_clones(
            patcher, self.loaded_models, options
        )
        comfy.samplers.cast_to_load_options(options, device=device, dtype=patcher.model_dtype())
        for one in (patcher, *self._multigpu):
            one.pre_run()
        shapes, latent_image = given.get("latent_shapes"), given["latent_image"]
        self.inner_model.latent_shapes = shapes
        if latent_image is not None and latent_image.any():  # an empty latent is not normalised
            latent_image = self.inner_model.process_latent_in(latent_image)
        self.conds = comfy.samplers.process_conds(
            self.inner_model, given["noise"], self.conds, device, latent_image,
            given["denoise_mask"], given["seed"], latent_shapes=shapes,
        )  # fmt: skip
        self.stage = stage
        self._since = timing.instant(patcher.load_device)
        name = self._plan.stages[stage].name
        timing.add("switch", start, self._since, f"to {name}")
        self._on_stage(name)

    def _load(self, *, on_host: bool = False) -> None:
        """Load the next model; on the host if its weights are to be streamed."""
        self.inner_model, self.conds, self.loaded_models = comfy.sampler_helpers.prepare_sampling(
            self.model_patcher, self._given["noise"].shape, self.conds, self.model_options,
            force_offload=on_host,
        )  # fmt: skip

    def _with_room(self, call: Callable[[], Tensor]) -> Tensor:
        """Call a model; if memory runs out, retry without other models, then stream weights."""

        def short(words: str) -> None:
            text = "Fast Video VAE: memory ran out in a step of %s; trying again, %s"
            _logger.warning(text, self._plan.stages[self.stage].name, words)

        def settings() -> Iterator[None]:
            yield
            short("with the other models unloaded")
            free_others(self.model_patcher.load_device, self.model_patcher, *self.loaded_models)
            yield
            short("with the weights on the host")
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
            self._load(on_host=True)
            yield

        def run(_: None) -> Generator[Tensor, None, None]:
            yield call()

        (result,) = resumed(settings(), run, comfy.model_management.is_oom)
        return result

    def _options_of_call(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the current model, with what a sampler adds to the first one's."""
        if self.stage == self._first:
            return given
        key, name = (self.stage, id(given)), "sampler_post_cfg_function"
        if self._merged is None or self._merged[0] != key:
            _, first, _ = self._prepared[self._first]
            own, known = create_model_options_clone(self.model_options), first.get(name, [])
            own[name] = [*own.get(name, []), *(x for x in given.get(name, []) if x not in known)]
            if given.get("disable_cfg1_optimization"):  # the negative pass is needed
                own["disable_cfg1_optimization"] = True
            old, new = (each.get("transformer_options", {}) for each in (first, given))
            own["transformer_options"].update({k: v for k, v in new.items() if k not in old})
            self._merged = key, own
        return self._merged[1]

    def add_time(self, kind: str) -> None:
        """Record the time since the last call as work of `kind` in the current stage."""
        now = timing.instant(self.model_patcher.load_device)
        timing.add(kind, self._since, now, self._plan.stages[self.stage].name)
        self._since = now


def _copy(conds: Conds) -> Conds:
    return {name: [dict(cond) for cond in group] for name, group in conds.items()}


def _fresh(state: _State) -> _State:
    """Return a state with conditionings of its own, because a run changes them."""
    return *state[:2], _copy(state[2])
