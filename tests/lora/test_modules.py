"""Modules that other packs change or call in unusual ways: results, and the state afterwards."""

import contextlib

import pytest
import torch
from safetensors.torch import save_file

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.tests.lora.models import PREFIX
from fast_video_vae.tests.lora.nets import (
    CPU,
    LINEARS,
    MODES,
    WIDTH,
    Casting,
    Model,
    assert_close,
    called,
    each_way,
    session_of,
    video,
)

Q = "diffusion_model.blocks.1.self_attn.q"


class Stop(Exception):  # noqa: N818 - it is no error
    pass


@each_way
def test_a_module_that_is_called_again_after_an_error_is_right(stack, linear, mode):
    """Another pack catches the error and calls the module again, in the same call of the model."""
    model = Model(LINEARS[linear])
    made = stack(model)
    session, layer = made.session((1, 1, 1), mode), model.get_submodule(Q)
    expected, plain = made.oracle(model, (1, 1, 1))(video().double()), model(video())
    forward, failures = layer.forward, iter([True])

    def failing(x):
        y = forward(x)
        if next(failures, False):
            raise Stop
        return y

    def again(x):
        with contextlib.suppress(Stop):
            return layer(x)
        return layer(x)

    layer.forward = failing
    model.diffusion_model.blocks[1].self_attn.__dict__["q"] = again  # the module stays below it
    assert_close(called(session, model, video()), expected)
    assert torch.equal(model(video()), plain)


@pytest.mark.parametrize("mode", MODES)
def test_functions_of_other_packs_stay(stack, mode):
    """Those that were there, those that are added in a call, and a list in the place of ours."""
    model = Model(Casting)
    session, layer = stack(model, whole=False).session((1, 1, 1), mode), model.get_submodule(Q)
    theirs, added = (lambda weight: weight), (lambda weight: weight)
    layer.weight_function = own = [theirs]

    def call_with(change):
        handle = model.diffusion_model.blocks[0].register_forward_hook(lambda *_: change())
        called(session, model, video())
        handle.remove()

    call_with(lambda: None)
    assert layer.weight_function is own
    call_with(lambda: layer.weight_function.append(added))
    assert layer.weight_function == [theirs, added]
    assert own == [theirs]
    other = [theirs]
    call_with(lambda: setattr(layer, "weight_function", other))
    assert layer.weight_function is other
    assert other == [theirs]


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_another_function_keeps_is_not_written(stack, mode):
    model = Model(Casting)
    made, layer = stack(model, whole=False), model.get_submodule(Q)
    kept = layer.weight.detach().clone()
    layer.weight_function = [lambda _: kept]
    session, before = made.session((1, 1, 1), mode), kept.clone()
    first = called(session, model, video(16))
    assert torch.equal(called(session, model, video(16)), first)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_within_a_call_keeps_both_right(stack, mode):
    model = Model(Casting)
    made, strengths = stack(model), ((1, 0, 1), (0, 1, -1))
    outer, inner = (made.session(each, mode) for each in strengths)
    expected = [made.oracle(model, each)(video().double()) for each in strengths]
    plain, found = model(video()), []

    def within(*_):
        if not found:
            found.append(None)
            found[0] = called(inner, model, video())

    handle = model.diffusion_model.blocks[1].register_forward_hook(within)
    y = called(outer, model, video())
    handle.remove()
    assert_close(y, expected[0])
    assert_close(found[0], expected[1])
    assert torch.equal(model(video()), plain)
    assert_close(called(outer, model, video()), expected[0])


def test_a_module_that_is_replaced_between_runs_gets_the_lora(stack):
    model = Model(Casting)
    made = stack(model)
    session, first = made.session((1, 1, 1)), model.diffusion_model.blocks[1]
    called(session, model, video())
    other = Model(Casting, seed=4).diffusion_model.blocks[1]
    for block in (other, first, other):
        session.release()
        model.diffusion_model.blocks[1] = block
        expected = made.oracle(model, (1, 1, 1))(video().double())
        assert_close(called(session, model, video()), expected)
    assert not session.counts.unserved


@pytest.mark.parametrize("staged", [False, True])
def test_pairs_and_parts_of_other_parameters_are_applied(tmp_path, staged):
    model, expected = Model(Casting), Model(Casting).double()
    key, generator = f"{PREFIX}blocks.0.modulation", torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=generator) for shape in ((1, 2), (2, 6 * WIDTH)))
    tensors = {"whole.lora_up.weight": up, "whole.lora_down.weight": down}
    value = expected.get_parameter(key)
    value.add_(0.5 * (up.double() @ down.double()).view(value.shape))
    more = {"whole": Target(key)}
    for name, part in {"first": (1, 0, 2), "second": (1, 2, 3)}.items():
        tensors[f"{name}.diff"] = torch.randn(1, part[2], WIDTH, generator=generator)
        value.narrow(*part).add_(0.5 * tensors[f"{name}.diff"])
        more[name] = Target(key, part)
    path = tmp_path / "other.safetensors"
    save_file(tensors, path)
    bank = load_bank([path], Targets(model.shapes(), more))
    assert bank.reports[0].used == 4
    session = session_of(bank, [0.5], staged=staged)
    for _ in range(2):
        with session.call(model, CPU):
            y = model(video())
        assert_close(y, expected(video().double()))
