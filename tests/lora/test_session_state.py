"""State of a model around a session: memory, staged pairs and compiled calls."""

import hashlib

import pytest
import torch

from fast_video_vae.tests.lora.nets import (
    CPU,
    LINEARS,
    MODES,
    Block,
    Casting,
    Model,
    assert_close,
    called,
    each_way,
    video,
)


def state_of(model):
    """Return the state that a call must restore: parameters, their bits, and functions on them."""
    state = []
    for name, module in model.named_modules():
        parameters = {key: id(value) for key, value in module._parameters.items()}
        functions = [len(getattr(module, f"{key}_function", [])) for key in ("weight", "bias")]
        state.append((name, parameters, functions))
    values = [value.view(torch.uint8).numpy().tobytes() for value in model.state_dict().values()]
    return state, hashlib.sha256(b"".join(values)).hexdigest()


class Stop(Exception):  # noqa: N818 - it is no error
    pass


def stop(*_):
    raise Stop


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@each_way
def test_a_call_restores_every_parameter_even_if_it_fails(stack, linear, mode, where):
    """The exception is raised before, inside or after the forward of a layer."""
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session((1, 1, 1), mode)
    state, plain = state_of(model), model(video())
    called(session, model, video())
    assert state_of(model) == state
    layer = model.diffusion_model.blocks[2].ffn[2]
    with pytest.MonkeyPatch.context() as patch:
        if where == "inside":
            patch.setattr(layer, "forward", stop)
        elif where == "before":
            handle = layer.register_forward_pre_hook(stop)
        else:
            handle = layer.register_forward_hook(stop, prepend=True)
        with pytest.raises(Stop):
            called(session, model, video())
    if where != "inside":
        handle.remove()
    assert state_of(model) == state
    assert torch.equal(model(video()), plain)
    assert_close(called(session, model, video()), made.oracle(model, (1, 1, 1))(video().double()))


def test_strength_zero_adds_no_hooks_or_deltas(stack):
    model = Model(Casting)
    session = stack(model).session((0, 0, 0), "stream")
    plain = model(video())
    state = state_of(model)
    with session.call(model, CPU):
        assert torch.equal(model(video()), plain)
        assert state_of(model) == state
    assert not any(len(module._forward_hooks) for module in model.modules())
    assert (session.counts.stream, session.counts.bypass, session.counts.formula) == (0, 0, 0)


@pytest.mark.parametrize("staged", [False, True])
def test_the_memory_of_a_bank_can_move_after_a_run(stack, staged):
    """ComfyUI moves a bank off the device; no other reference to its memory may remain."""
    model, x = Model(), video()
    session = stack(model).session((1, 0.5, 2), staged=staged)
    expected = called(session, model, x)
    session.release()
    held = session.bank.flat.data.untyped_storage()
    before = torch._C._storage_Use_Count(held._cdata)
    session.bank.flat.data = session.bank.flat.data.clone()  # like a module's `to`
    # The reference of the parameter is gone; the remaining one is `held`.
    assert (before, torch._C._storage_Use_Count(held._cdata)) == (2, 1)
    assert torch.equal(called(session, model, x), expected)


def test_missing_modules_are_reported(stack):
    session = stack(Model(blocks=3)).session((1, 1, 1))
    called(session, Model(blocks=1), video())
    assert any("blocks.2" in name for name in session.counts.unserved)
    assert not any("blocks.0" in name for name in session.counts.unserved)


# Pairs that are fetched block by block.


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("mode", ["stream", "bypass"])
def test_staged_pairs_match_direct_ones_and_are_copied_ahead(stack, mode, blocks):
    model = Model(Casting, blocks=blocks)
    made = stack(model, whole=False, only="blocks")
    direct, staged = made.session((1, 1, 1), mode), made.session((1, 1, 1), mode, staged=True)
    assert staged.bank is direct.bank
    calls = 3
    for _ in range(calls):
        assert torch.equal(called(staged, model, video()), called(direct, model, video()))
    loader = staged.loader
    assert loader.misses == 1  # the first block of the first call
    if blocks > 1:
        assert loader.hits == calls * blocks - 1
        assert loader.fetched_bytes == (calls * blocks + 1) * staged.bank.nbytes // blocks
    else:
        assert loader.fetched_bytes == staged.bank.nbytes
    assert direct.loader.is_here
    assert not loader.is_here


@pytest.mark.parametrize("text", ["", "!1", "2", "0-,1=0.5", "0,2"])
def test_staged_pairs_of_any_layers_match_direct_ones(stack, text):
    """Including layers outside of blocks, and together with other kinds of adapters."""
    model = Model(Casting, blocks=4)
    made = stack(model)
    direct, staged = (
        made.session((1, 0.5, -1), blocks=text, staged=staged) for staged in (False, True)
    )
    for _ in range(3):
        assert torch.equal(called(staged, model, video()), called(direct, model, video()))


def test_staged_pairs_are_correct_after_an_aborted_call(stack):
    model = Model(Casting)
    made = stack(model, whole=False)
    session = made.session((1, 1, 1), "stream", staged=True)
    expected = made.oracle(model, (1, 1, 1))(video().double())
    for block in model.diffusion_model.blocks:
        handle = block.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            called(session, model, video())
        handle.remove()
        assert_close(called(session, model, video()), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_pairs_reach_a_gpu_before_their_use(stack, mode):
    model = Model(Casting, blocks=8)
    made, device = stack(model), torch.device("cuda", torch.cuda.current_device())
    expected = made.oracle(model, (1, 1, 1))(video().double())
    model.to(device)
    for on_host in (True, False):
        session = made.session((1, 1, 1), mode)
        if not on_host:
            session.bank.to(device)
        for _ in range(4):
            with torch.backends.cudnn.flags(allow_tf32=False), session.call(model, device):
                y = model(video().to(device))
            assert_close(y.cpu(), expected)
        assert session.loader.is_here is not on_host


# torch.compile.


@pytest.fixture
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.usefixtures("_nothing_compiled")
def test_a_model_that_was_compiled_first_gets_the_lora(stack, linear):
    """Also if its layers do not read the functions on their weights."""
    model, x = Model(LINEARS[linear], blocks=1), video()
    made, call = stack(model, whole=False, only="self_attn"), torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = call(x)
        for strengths in ((1, 1, 1), (0.5, -1, 1)):
            with made.session(strengths).call(model, CPU):
                y = call(x)
            assert_close(y, made.oracle(model, strengths)(x.double()))
            assert torch.equal(call(x), plain)


@pytest.mark.usefixtures("_nothing_compiled")
def test_separately_compiled_blocks_get_the_lora(stack):
    model = Model(Casting, blocks=2)
    made = stack(model, whole=False)
    expected = made.oracle(model, (1, 1, 1))(video().double())
    blocks = model.diffusion_model.blocks
    for number in range(2):
        blocks[number] = torch.compile(blocks[number], backend="eager")
    with torch.no_grad():
        session = made.session((1, 1, 1), "bypass")
        assert_close(called(session, model, video()), expected)
    assert not session.counts.unserved
    assert isinstance(blocks[0]._orig_mod, Block)
