"""A bank on a model: results of all ways to apply a delta, the model afterwards, and memory."""

import contextlib
import functools
import gc
import itertools
import os
import random
import weakref
from unittest import mock

import pytest
import torch

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Targets
from fast_video_vae.tests.lora import nets
from fast_video_vae.tests.lora.nets import LINEARS, MODES, Model, Q, assert_close, called, video

each_way = pytest.mark.parametrize(("linear", "mode"), [*itertools.product(LINEARS, MODES)])


@pytest.fixture
def stack(tmp_path):
    return functools.partial(nets.Stack, tmp_path)


def stop(*_, **__):
    raise InterruptedError


def state_of(model):
    """Return the parameters of the modules, and the functions on them."""
    return [
        [*map(id, module._parameters.values())]
        + [len(getattr(module, f"{name}_function", ())) for name in ("weight", "bias")]
        for module in model.modules()
    ]


FILTERS = "", "!1", "2", "0-,1=0.5", "ffn", "self_attn,0-1=-1.5"
# The same processor as another device, where the bank is not: each layer copies its pairs.
ELSEWHERE = torch.device("cpu", 0)


@each_way
def test_any_stack_equals_the_dense_model_in_float64(stack, linear, mode):
    """Any files in any order, filters, tokens, and strengths that change between calls.

    Also with a bank on another device, a layer in bfloat16, and after a call that failed. DoRA is
    skipped for a layer with an inaccessible weight, and the layer is recorded.
    """
    model, draw = Model(LINEARS[linear], blocks=3), random.Random(linear + mode)
    if issubclass(LINEARS[linear], nets.Casting):
        model.diffusion_model.blocks[2].self_attn.q.bfloat16()
    made, state = stack(model), state_of(model)
    layers = [each for each in model.modules() if isinstance(each, LINEARS[linear])]
    called(made.session((0, 0, 0), mode), model, video())
    assert not any(module._forward_hooks for module in model.modules())  # nothing to do
    for device in (None, ELSEWHERE):
        entries = [(draw.randrange(3), draw.choice(FILTERS)) for _ in range(draw.randint(2, 4))]
        session = made.session([1] * len(entries), mode, entries)
        for _ in range(2):
            strengths = [draw.choice((0, 1, 0.5, -1.3, 2)) for _ in entries]
            x = video(2 * draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 3))
            session.amounts.set(strengths)
            layer, plain = draw.choice(layers), model(x)
            after = functools.partial(layer.register_forward_hook, prepend=True)
            register = draw.choice((layer.register_forward_pre_hook, after))
            with register(stop), pytest.raises(InterruptedError):
                called(session, model, x, device)
            assert state_of(model) == state
            assert_close(called(session, model, x, device), made.expected(x, strengths, entries))
            assert device or not session.counts.fetched_bytes
            assert state_of(model) == state
            assert torch.equal(model(x), plain)
    session = made.session(mode=mode)
    assert_close(called(session, model, video()), made.expected(video()))
    unserved = {f"{nets.PREFIX}{nets.DORAS[0]}"} if linear == "ignoring" else set()
    assert session.counts.unserved == unserved
    assert all(len(report.lines()) <= 2 for report in session.bank.reports)  # no key is left out


# For layers of 16 x 16, the break-even is 21.3 tokens of all batches together, or 10.7 for a weight
# that is cast.
@pytest.mark.parametrize(
    ("dtype", "batch", "tokens"), [(torch.float32, 3, 8), (torch.bfloat16, 1, 11)]
)
def test_auto_streams_above_the_break_even_and_not_below(stack, dtype, batch, tokens):
    model = Model(nets.Casting)
    for block in model.diffusion_model.blocks:
        block.self_attn.to(dtype)
    session = stack(model, "self_attn").session()
    for count, ways in {tokens - 1: (0, 6), tokens: (6, 0)}.items():
        session.counts.clear()
        called(session, model, torch.randn(batch, 4, count, 2, 2))
        assert (session.counts.stream, session.counts.bypass) == ways


@each_way
def test_a_layer_that_fails_and_is_called_again_has_its_lora_once(stack, linear, mode):
    model = Model(LINEARS[linear])
    made, layer, state = stack(model), model.get_submodule(Q), state_of(model)

    def again(x):
        with mock.patch.object(layer, "forward", stop), contextlib.suppress(InterruptedError):
            layer(x)
        return layer(x)

    expected = made.expected(video())
    model.diffusion_model.blocks[1].self_attn.__dict__["q"] = again  # the module stays below it
    assert_close(called(made.session(mode=mode), model, video()), expected)
    assert state_of(model) == state


@pytest.mark.parametrize("mode", MODES)
def test_functions_of_other_packs_stay_and_what_they_keep_is_not_written(stack, mode):
    """Those that were there, those that are added in a call, and a list in the place of ours."""
    model = Model(nets.Casting)
    session, layer = stack(model, "blocks").session(mode=mode), model.get_submodule(Q)
    kept = layer.weight.detach().clone()
    theirs, added, before = (lambda _: kept), (lambda weight: weight), kept.clone()
    layer.weight_function = own = [theirs]

    def call_with(change):
        with model.diffusion_model.blocks[0].register_forward_hook(lambda *_: change()):
            called(session, model, video(16))
        assert torch.equal(kept, before)
        return layer.weight_function

    assert call_with(lambda: None) is own
    assert call_with(lambda: layer.weight_function.append(added)) == [theirs, added]
    other = [theirs]
    assert call_with(lambda: setattr(layer, "weight_function", other)) is other
    assert own == other == [theirs]


@pytest.mark.parametrize("mode", MODES)
def test_a_call_within_a_call_keeps_both_right(stack, mode):
    model, found = Model(nets.Casting), []
    made, strengths = stack(model), ((1, 0.5, 1), (0, 1, -1))
    outer, inner = (made.session(each, mode) for each in strengths)

    def within(*_):
        handle.remove()
        found.append(called(inner, model, video()))

    handle = model.diffusion_model.blocks[1].register_forward_hook(within)
    found += called(outer, model, video()), called(outer, model, video())
    for y, each in zip(found, (strengths[1], strengths[0], strengths[0]), strict=True):
        assert_close(y, made.expected(video(), each))


def test_modules_that_are_replaced_between_runs_get_the_lora_and_missing_ones_are_named(stack):
    model = Model(nets.Casting)
    made, blocks = stack(model), model.diffusion_model.blocks
    session, first = made.session(), blocks[1]
    place = session.bank.flat.untyped_storage().data_ptr()
    for block in (first, Model(nets.Casting, seed=4).diffusion_model.blocks[1], first):
        blocks[1] = block
        assert_close(called(session, model, video()), made.expected(video()))
        session.release()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        assert place not in [each.untyped_storage().data_ptr() for each in tensors]  # views of it
    assert not session.counts.unserved
    del blocks[2]
    called(session, model, video())
    assert {name.split(".")[2] for name in session.counts.unserved} == {"2"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_pairs_reach_a_gpu_before_their_use(stack, mode):
    model = Model(nets.Casting, blocks=8)
    made, device = stack(model), torch.device("cuda", torch.cuda.current_device())
    expected = made.expected(video())
    model.to(device)
    for device_of_bank in ("cpu", device):
        session = made.session(mode=mode)
        session.bank.to(device_of_bank)
        for _ in range(4):
            with torch.backends.cudnn.flags(allow_tf32=False), session.call(model, device):
                assert_close(model(video().to(device)).cpu(), expected)
        assert (session.counts.fetched_bytes == 0) == (device_of_bank == device)


def test_a_model_of_compiled_blocks_gets_the_lora(stack, request):
    """Also if its layers do not read the functions on their weights, as here."""
    torch.compiler.reset()
    request.addfinalizer(torch.compiler.reset)
    model, x = Model(nets.Ignoring, blocks=2), video()
    made, strengths = stack(model, "self_attn"), ((0, 0, 0), (1, 1, 1), (0.5, -1, 1), (0, 0, 0))
    expected = [made.expected(x, each) for each in strengths]
    for number, block in enumerate(model.diffusion_model.blocks):
        model.diffusion_model.blocks[number] = torch.compile(block, backend="eager")
    with torch.no_grad():
        for each, y in zip(strengths, expected, strict=True):
            session = made.session(each)
            assert_close(called(session, model, x), y)
            assert not session.counts.unserved


def test_the_same_files_share_a_bank_in_use(stack):
    made, shapes = stack(model := Model()), Model(blocks=4).shapes()
    paths, targets = made.paths, made.targets
    bank = load_bank(paths, targets)
    assert load_bank(list(map(str, paths)), Targets(model.shapes(), nets.PARTS)) is bank
    assert bank.nbytes == sum(value.nbytes for value in bank.state_dict().values())
    places = [[value.data_ptr() for value in each.parameters()] for each in (bank, bank.copy())]
    assert places[0] == places[1]  # a copy of the bank moves to another device by itself
    others = [
        load_bank(paths[::-1], targets),
        load_bank(paths, targets, torch.bfloat16),
        load_bank(paths, Targets(shapes, nets.PARTS)),
        load_bank(paths, Targets(model.shapes())),
    ]
    for content in paths[:2]:  # another time, then another size
        paths[0].write_bytes(content.read_bytes())
        os.utime(paths[0], ns=(1, 1))
        others.append(load_bank(paths, targets))
    assert len({bank, *others}) == 1 + len(others)
    paths[2].write_bytes(paths[2].read_bytes()[:-2] + b"\xff\xff")  # a NaN
    for _ in range(2):  # what cannot be read is not kept
        with pytest.raises(ValueError, match=r"2\.safetensors: .* finite"):
            load_bank(paths, targets)
    gone = weakref.ref(bank)
    del bank
    gc.collect()
    assert gone() is None
