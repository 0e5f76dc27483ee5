"""A bank on a model while it is called: in the weights, beside the layers, and never after."""

import gc
import hashlib
import weakref
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fast_video_vae.lora.apply import break_even
from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.lora.session import Session
from fast_video_vae.tests.lora.models import PREFIX, amounts_of, modules, random_pairs, spelled
from fast_video_vae.tests.lora.nets import Block, Casting, Ignoring, Model, dense, video

CPU = torch.device("cpu")
LINEARS = {"plain": nn.Linear, "casting": Casting, "ignoring": Ignoring}
MODES = ["stream", "beside", "auto"]
Q = f"{PREFIX}blocks.1.self_attn.q"


class Stack:
    """Files for a model, and what they add to its parameters in float64."""

    def __init__(self, folder, model, ranks=(4, 3, 16), whole=True, only=""):
        self.shapes, self.folder = model.shapes(), folder
        self.paths, self.deltas = [], []
        names = [name for name in modules(self.shapes) if only in name]
        for number, rank in enumerate(ranks):
            pairs = random_pairs(self.shapes, names, rank, seed=number)
            pairs = {name: (0.2 * up, 0.2 * down) for name, (up, down) in pairs.items()}
            tensors = spelled(pairs, alpha=2)
            exact = {name: [part.double().flatten(1) for part in pairs[name]] for name in pairs}
            deltas = {
                f"{PREFIX}{name}.weight": 2 / rank * up @ down for name, (up, down) in exact.items()
            }
            if whole and number == 1:
                deltas |= self._differences(tensors)
            self._write(tensors, deltas)
        self.targets = Targets(self.shapes)

    def _differences(self, tensors):
        """Of norms, biases and parameters that are nobody's weight."""
        generator = torch.Generator().manual_seed(9)
        keys = {
            f"{PREFIX}blocks.0.norm3.diff": f"{PREFIX}blocks.0.norm3.weight",
            f"{PREFIX}blocks.0.norm3.diff_b": f"{PREFIX}blocks.0.norm3.bias",
            f"{Q}.diff_b": f"{Q}.bias",
            f"{PREFIX}blocks.2.diff_m": f"{PREFIX}blocks.2.modulation",
            f"{PREFIX}patch_embedding.diff_b": f"{PREFIX}patch_embedding.bias",
        }
        for name, key in keys.items():
            tensors[name] = 0.3 * torch.randn(self.shapes[key], generator=generator)
        return {key: tensors[name].double() for name, key in keys.items()}

    def _write(self, tensors, deltas):
        path = self.folder / f"{len(self.paths)}.safetensors"
        save_file(tensors, path)
        self.paths.append(path)
        self.deltas.append(deltas)

    def session(self, strengths, mode="auto", dtype=torch.float32, **more):
        bank = load_bank(self.paths, self.targets, dtype)
        amounts = amounts_of(bank)
        amounts.set(strengths)
        return Session(bank, amounts, mode, **more)

    def oracle(self, model, strengths):
        total = Counter()
        for strength, deltas in zip(strengths, self.deltas, strict=True):
            for key, delta in deltas.items():
                total[key] = total[key] + strength * delta
        return dense(model, total)


@pytest.fixture
def stack(tmp_path):
    def made(model, **more):
        return Stack(tmp_path, model, **more)

    return made


def called(session, model, x):
    with session.call(model, CPU):
        return model(x)


def assert_close(y, expected):
    assert not torch.isnan(y).any()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def fingerprint(model):
    state = [value.view(torch.uint8).numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(state)).hexdigest()


def state_of(model):
    """What a call may not leave changed."""
    state = {}
    for name, module in model.named_modules():
        parameters = {key: id(value) for key, value in module._parameters.items()}
        functions = [len(getattr(module, f"{key}_function", [])) for key in ("weight", "bias")]
        state[name] = parameters, functions
    return state


@pytest.mark.parametrize("strengths", [(1, 1, 1), (0.5, -1.3, 2), (0, 1, 0), (1, 0, 0.1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("linear", LINEARS)
def test_every_way_is_the_dense_model_in_float64(stack, linear, mode, strengths):
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session(strengths, mode)
    before, state, x = fingerprint(model), state_of(model), video()
    plain = model(x)
    expected = made.oracle(model, strengths)(x.double())
    for _ in range(2):
        assert_close(called(session, model, x), expected)
    assert fingerprint(model) == before
    assert state_of(model) == state
    assert torch.equal(model(x), plain)
    assert not session.counts.unserved


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_any_batch_and_number_of_tokens(stack, mode, batch):
    model = Model(Casting)
    made = stack(model)
    session = made.session((1, 1, 1), mode)
    oracle = made.oracle(model, (1, 1, 1))
    for side, frames in ((2, 1), (4, 1), (6, 3), (2, 5)):
        x = video(side, frames, batch)
        assert_close(called(session, model, x), oracle(x.double()))


@pytest.mark.parametrize("mode", MODES)
def test_strengths_change_between_calls(stack, mode):
    model = Model(Casting)
    made = stack(model)
    session = made.session((0, 0, 0), mode)
    for strengths in ((1, 0, 0), (1, 0, 0.5), (-1, 2, 0.5), (0, 0, 0), (1, 0, 0)):
        session.amounts.set(strengths)
        expected = made.oracle(model, strengths)(video().double())
        assert_close(called(session, model, video()), expected)


# One layer, where each rounding can be counted.


@pytest.mark.parametrize("tokens", [(6,), (2, 5), (1, 2, 3), (1,)], ids=str)
@pytest.mark.parametrize("mode", ["stream", "beside"])
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_within_half_an_eps_per_rounding(tmp_path, linear, mode, dtype, tokens):
    model = nn.Module()
    model.diffusion_model = nn.Module()
    torch.manual_seed(0)
    model.diffusion_model.q = layer = LINEARS[linear](16, 24).to(dtype).requires_grad_(False)
    shapes = {f"{PREFIX}q.weight": (24, 16), f"{PREFIX}q.bias": (24,)}
    up, down = random_pairs(shapes, ["q"], 8, dtype=dtype)["q"]
    save_file(spelled({"q": (up, down)}), tmp_path / "q.safetensors")
    bank = load_bank([tmp_path / "q.safetensors"], Targets(shapes), dtype)
    amounts = amounts_of(bank)
    amounts.set([0.7])
    session = Session(bank, amounts, mode)
    x = torch.randn(*tokens, 16).to(dtype)
    with session.call(model, CPU):
        y = layer(x)
    assert y.dtype == dtype

    weight, bias = layer.weight.double(), layer.bias.double()
    amount, x, up, down = float(torch.tensor(0.7)), x.double(), up.double(), down.double()
    delta = amount * up @ down
    size = x.abs() @ (amount * up.abs() @ down.abs()).T
    expected = x @ (weight + delta).T + bias
    if session.counts.stream:
        # `down` times its amounts, and the sum in the weight.
        roundings = size + x.abs() @ (weight + delta).abs().T
    else:
        # The layer's own output, the narrow product, and the same times the amounts.
        roundings = (x @ weight.T + bias).abs() + 2 * size
    # The output, and a CPU's product before its bias.
    roundings = roundings + 2 * expected.abs() + bias.abs()
    bound = torch.finfo(dtype).eps / 2 * roundings * 1.02
    assert ((y.double() - expected).abs() <= bound + 1e-6).all()


def test_a_layer_in_less_precision_than_its_input_is_added_to_as_it_is_cast(stack):
    """As a model that is stored in bfloat16 and computes in float32."""
    model = Model(Casting)
    for block in model.diffusion_model.blocks:
        block.self_attn.q.bfloat16()
    made = stack(model)
    for mode in MODES:
        expected = made.oracle(model, (1, 1, 1))(video().double())
        assert_close(called(made.session((1, 1, 1), mode), model, video()), expected)


# Rows and columns.

PARTS = {
    "rows": (0, 4, 8),
    "last-rows": (0, 12, 4),
    "columns": (1, 2, 6),
    "all-rows": (0, 0, 16),
}


@pytest.mark.parametrize("mode", ["stream", "beside"])
@pytest.mark.parametrize("linear", LINEARS)
def test_pairs_for_rows_and_columns_of_a_weight(tmp_path, linear, mode):
    model = Model(LINEARS[linear])
    more = {f"parts.{name}": Target(f"{Q}.weight", part) for name, part in PARTS.items()}
    targets = Targets(model.shapes(), more)
    shapes = model.shapes() | {
        f"{PREFIX}{name}.weight": targets.shape(target) for name, target in more.items()
    }
    pairs = random_pairs(shapes, [*more, "blocks.1.self_attn.q"])
    save_file(spelled(pairs), tmp_path / "parts.safetensors")
    bank = load_bank([tmp_path / "parts.safetensors"], targets)
    amounts = amounts_of(bank)
    amounts.set([0.5])
    delta = torch.zeros(16, 16, dtype=torch.float64)
    for name, (up, down) in pairs.items():
        part = more[name].offset if name in more else (0, 0, 16)
        delta.narrow(*part).add_(0.5 * up.double() @ down.double())
    expected = dense(model, {f"{Q}.weight": delta})(video().double())
    for staged in (False, True):
        session = Session(bank, amounts, mode, staged=staged)
        assert_close(called(session, model, video()), expected)


# The rule.


def test_auto_streams_above_the_break_even_and_not_below(stack):
    """A layer of 16 x 16 at c = 6: 32 tokens."""
    assert break_even(16, 16, 6.0) == 32
    model = Model(Casting)
    session = stack(model, whole=False, ranks=(4,), only="self_attn").session((1,), "auto", c=6.0)
    ways = {1: "beside", 31: "beside", 32: "beside", 33: "stream", 500: "stream"}
    for tokens, way in ways.items():
        session.counts.clear()
        called(session, model, torch.randn(1, 4, tokens, 2, 2))
        assert getattr(session.counts, way) == 6, tokens
        assert session.counts.stream + session.counts.beside == 6


def test_a_batch_counts_with_all_its_tokens(stack):
    model = Model(Casting)
    session = stack(model, whole=False, ranks=(4,), only="self_attn").session((1,), "auto", c=6.0)
    called(session, model, torch.randn(3, 4, 11, 2, 2))
    assert (session.counts.stream, session.counts.beside) == (6, 0)


def test_a_weight_that_is_cast_anyway_is_streamed_into_from_half_as_many_tokens(stack):
    model = Model(Casting)
    for block in model.diffusion_model.blocks:
        block.self_attn.bfloat16()
    session = stack(model, whole=False, ranks=(4,), only="self_attn").session((1,), "auto", c=6.0)
    for tokens, way in ((16, "beside"), (17, "stream")):
        session.counts.clear()
        called(session, model, torch.randn(1, 4, tokens, 2, 2))
        assert getattr(session.counts, way) == 6


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_a_layer_that_ignores_weight_functions_is_served_beside_from_its_first_call(stack, mode):
    model = Model(Ignoring)
    made = stack(model, whole=False, only="self_attn")
    session = made.session((1, 1, 1), mode)
    expected = made.oracle(model, (1, 1, 1))(video(16).double())
    for _ in range(3):
        assert_close(called(session, model, video(16)), expected)
        assert session.counts.stream == 0
    assert session.counts.beside == 3 * 6
    assert not session.counts.unserved


def test_a_layer_that_ignores_weight_functions_is_asked_once(stack):
    seen = []

    class Watched(Ignoring):
        def forward(self, x):
            seen.append(len(self.weight_function))
            return super().forward(x)

    model = Model(Watched, blocks=1)
    session = stack(model, whole=False, only="self_attn.q").session((1, 1, 1), "stream")
    for _ in range(3):
        called(session, model, video())
    assert max(seen[5:], default=1) == 0
    assert sum(seen) == 1


class Whole(nn.Module):
    """A layer of whole numbers with a product of its own."""

    def __init__(self, inner, out):
        super().__init__()
        self.in_features, self.out_features = inner, out
        self.weight = nn.Parameter(torch.randint(-9, 9, (out, inner), dtype=torch.int8), False)

    def forward(self, x):
        return (x @ self.weight.float().T) / 8


@pytest.mark.parametrize("mode", MODES)
def test_a_quantised_layer_is_served_beside(tmp_path, mode):
    model = nn.Module()
    model.diffusion_model = nn.Module()
    model.diffusion_model.q = layer = Whole(16, 24)
    shapes = {f"{PREFIX}q.weight": (24, 16)}
    up, down = random_pairs(shapes, ["q"])["q"]
    save_file(spelled({"q": (up, down)}), tmp_path / "q.safetensors")
    bank = load_bank([tmp_path / "q.safetensors"], Targets(shapes))
    amounts = amounts_of(bank)
    amounts.set([1.0])
    session, x = Session(bank, amounts, mode), torch.randn(500, 16)
    with session.call(model, CPU):
        y = layer(x)
    x = x.double()
    assert_close(y, x @ layer.weight.double().T / 8 + x @ (up.double() @ down.double()).T)
    assert (session.counts.stream, session.counts.beside) == (0, 1)


def test_a_layer_that_is_called_by_keyword_is_served_through_its_weight(stack):
    class ByKeyword(nn.Linear):
        def __call__(self, x):
            return super().__call__(input=x)

    model = Model(ByKeyword)
    made = stack(model)
    session = made.session((1, 1, 1), "auto")
    assert_close(called(session, model, video()), made.oracle(model, (1, 1, 1))(video().double()))
    assert not session.counts.unserved


# What costs nothing, and what is left behind.


def test_strength_zero_costs_nothing(stack):
    model = Model(Casting)
    session = stack(model).session((0, 0, 0), "stream")
    plain = model(video())
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    with session.call(model, CPU):
        assert torch.equal(model(video()), plain)
        assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    assert session._works == {}
    assert session._values == {}
    assert (session.counts.stream, session.counts.beside, session.counts.formula) == (0, 0, 0)


def test_rows_of_files_at_strength_zero_are_cut_off(stack):
    model = Model(Casting)
    made = stack(model, whole=False)
    session = made.session((0, 0, 0))
    for strengths, ranks in (((1, 0, 0), 4), ((0, 1, 0), 3), ((0, 0, 1), 16), ((1, 1, 0), 7)):
        session.amounts.set(strengths)
        called(session, model, video())
        for work in session._works.values():
            (low,) = work.now()
            assert low.down.shape[0] == low.up.shape[1] == low.amounts.numel() == ranks


class Stop(Exception):  # noqa: N818 - it is no error
    pass


@pytest.mark.parametrize("mode", ["stream", "beside"])
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_an_exception_inside_a_call_leaves_the_model_as_it_was(stack, linear, mode, where):
    """Before, inside and after the product of a layer, whose weight is changed meanwhile."""
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session((1, 1, 1), mode)
    called(session, model, video())
    state, before, plain = state_of(model), fingerprint(model), model(video())
    layer = model.diffusion_model.blocks[2].ffn[2]

    def broken(*_):
        raise Stop

    if where == "inside":
        layer.forward = broken
    elif where == "before":
        handle = layer.register_forward_pre_hook(broken)
    else:
        handle = layer.register_forward_hook(broken, prepend=True)
    with pytest.raises(Stop):
        called(session, model, video())
    if where == "inside":
        del layer.forward
    else:
        handle.remove()
    assert state_of(model) == state
    assert fingerprint(model) == before
    assert torch.equal(model(video()), plain)
    assert_close(called(session, model, video()), made.oracle(model, (1, 1, 1))(video().double()))


def test_a_model_may_have_several_sessions_and_a_session_several_models(stack):
    one, two = Model(Casting, seed=1), Model(Casting, seed=2)
    made = stack(one)
    sessions = {s: made.session(s, "auto") for s in ((1, 0, 0), (0, -1, 1))}
    for _ in range(2):
        for model in (one, two):
            for strengths, session in sessions.items():
                expected = made.oracle(model, strengths)(video().double())
                assert_close(called(session, model, video()), expected)


@pytest.mark.parametrize("staged", [False, True])
def test_after_a_run_the_memory_of_a_bank_may_go_elsewhere(stack, staged):
    """ComfyUI moves a bank off the device, whose memory nobody else may hold then."""
    model, x = Model(), video()
    session = stack(model).session((1, 0.5, 2), staged=staged)
    expected = called(session, model, x)
    session.release()
    held = session.bank.flat.data.untyped_storage()
    before = torch._C._storage_Use_Count(held._cdata)
    session.bank.flat.data = session.bank.flat.data.clone()  # as a module's `to` does
    # One less: the parameter's own; the one that is left is `held`.
    assert (before, torch._C._storage_Use_Count(held._cdata)) == (2, 1)
    assert torch.equal(called(session, model, x), expected)


def test_a_model_is_let_go(stack):
    model = Model()
    session = stack(model).session((1, 1, 1))
    called(session, model, video())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_modules_that_are_not_there_are_told(stack):
    session = stack(Model(blocks=3)).session((1, 1, 1))
    called(session, Model(blocks=1), video())
    assert any("blocks.2" in name for name in session.counts.unserved)
    assert not any("blocks.0" in name for name in session.counts.unserved)


@pytest.mark.parametrize("linear", ["plain", "casting"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_go_through_a_call(stack, linear, mode):
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session((1, 1, 1), mode)
    x = video().requires_grad_()
    called(session, model, x).square().sum().backward()
    other = video().double().requires_grad_()
    made.oracle(model, (1, 1, 1))(other).square().sum().backward()
    assert_close(x.grad, other.grad)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_and_inference_give_the_same(stack, mode, how):
    model = Model(Casting)
    made = stack(model)
    with how():
        y = called(made.session((1, 1, 1), mode), model, video())
    assert_close(y, made.oracle(model, (1, 1, 1))(video().double()))


# Other kinds of adapters, in the order of their files.


def mixed(tmp_path, shapes, own):
    """A pair, then `own` for the layer `Q`, then another pair."""
    paths, pairs = [], []
    for number in range(3):
        up, down = random_pairs(shapes, ["blocks.1.self_attn.q"], seed=number)[
            "blocks.1.self_attn.q"
        ]
        pairs.append((0.2 * up.double()) @ (0.2 * down.double()))
        tensors = spelled({"blocks.1.self_attn.q": (0.2 * up, 0.2 * down)})
        if number == 1:
            tensors = own(tensors)
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(tensors, paths[-1])
    bank = load_bank(paths, Targets(shapes))
    return bank, amounts_of(bank), pairs


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("linear", ["plain", "casting"])
def test_dora_between_pairs_is_applied_in_its_turn(tmp_path, linear, mode, staged):
    model = Model(LINEARS[linear])
    magnitudes = torch.rand(16, 1) + 0.5
    bank, amounts, pairs = mixed(
        tmp_path, model.shapes(), lambda tensors: {**tensors, f"{Q}.dora_scale": magnitudes}
    )
    session = Session(bank, amounts, mode, staged=staged)
    own = model.get_parameter(f"{Q}.weight").double()
    for first, second, third in ((0.7, 1.0, -0.5), (0.0, 0.5, 1.0), (1.0, 0.0, 0.0)):
        amounts.set((first, second, third))
        weight = own + first * pairs[0]
        if second:
            norms = weight.norm(dim=1, keepdim=True)
            turned = (weight + pairs[1]) * magnitudes.double() / norms
            weight = weight + second * (turned - weight)
        weight = weight + third * pairs[2]
        expected = dense(model, {f"{Q}.weight": weight - own})(video().double())
        assert_close(called(session, model, video()), expected)


def lokr(tensors):
    torch.manual_seed(3)
    return {f"{Q}.lokr_w1": 0.3 * torch.randn(4, 4), f"{Q}.lokr_w2": torch.randn(4, 4)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("linear", LINEARS)
def test_a_kronecker_product_has_a_delta_for_layers_whose_weight_is_out_of_reach(
    tmp_path, linear, mode
):
    model = Model(LINEARS[linear])
    bank, amounts, pairs = mixed(tmp_path, model.shapes(), lokr)
    amounts.set((1, 0.5, 1))
    factors = lokr(None)
    delta = pairs[0] + pairs[2] + 0.5 * torch.kron(*(part.double() for part in factors.values()))
    session = Session(bank, amounts, mode)
    expected = dense(model, {f"{Q}.weight": delta})(video().double())
    assert_close(called(session, model, video()), expected)
    assert not session.counts.unserved


def test_dora_on_a_layer_whose_weight_is_out_of_reach_is_told(tmp_path):
    model = Model(Ignoring)
    bank, amounts, pairs = mixed(
        tmp_path, model.shapes(), lambda tensors: {**tensors, f"{Q}.dora_scale": torch.ones(16, 1)}
    )
    amounts.set((1, 1, 1))
    session = Session(bank, amounts)
    expected = dense(model, {f"{Q}.weight": pairs[0] + pairs[2]})(video().double())
    assert_close(called(session, model, video()), expected)
    assert session.counts.unserved == {Q}


# Pairs that are fetched block by block.


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", ["stream", "beside"])
def test_staged_pairs_are_the_same_and_come_ahead(stack, mode, blocks):
    model = Model(Casting, blocks=blocks)
    made = stack(model, whole=False, only="blocks")
    direct, staged = made.session((1, 1, 1), mode), made.session((1, 1, 1), mode, staged=True)
    assert staged.bank is direct.bank
    calls = 3
    for _ in range(calls):
        assert torch.equal(called(staged, model, video()), called(direct, model, video()))
    traffic = staged.loader.traffic
    assert traffic.misses == 1  # the first block of the first call
    if blocks > 1:
        assert traffic.hits == calls * blocks - 1
        assert traffic.nbytes == (calls * blocks + 1) * staged.bank.nbytes // blocks
    else:
        assert traffic.nbytes == staged.bank.nbytes
    assert direct.loader.is_here
    assert not staged.loader.is_here


def test_staged_pairs_outside_of_blocks_and_other_kinds(stack):
    model = Model(Casting)
    made = stack(model)
    for strengths in ((1, 1, 1), (0, 1, 0), (0.5, 0, 0)):
        session = made.session(strengths, "stream", staged=True)
        expected = made.oracle(model, strengths)(video().double())
        for _ in range(2):
            assert_close(called(session, model, video()), expected)


@pytest.mark.parametrize("text", ["!1", "2", "0-,1=0.5", "0,2"])
def test_staged_pairs_of_some_blocks_are_the_same(stack, text):
    model = Model(Casting, blocks=4)
    made = stack(model, whole=False)
    direct, staged = (made.session((1, 1, 1), staged=staged) for staged in (False, True))
    for session in (direct, staged):
        session.amounts = amounts_of(session.bank, *((number, text) for number in range(3)))
        session.amounts.set((1, 0.5, -1))
    for _ in range(3):
        assert torch.equal(called(staged, model, video()), called(direct, model, video()))


def test_a_call_that_was_broken_off_leaves_staged_pairs_right(stack):
    model = Model(Casting)
    made = stack(model, whole=False)
    session = made.session((1, 1, 1), "stream", staged=True)
    expected = made.oracle(model, (1, 1, 1))(video().double())
    for stop in (0, 1, 2):
        block = model.diffusion_model.blocks[stop]
        handle = block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            called(session, model, video())
        handle.remove()
        assert_close(called(session, model, video()), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_pairs_come_to_a_gpu_in_time(stack, mode, on_host):
    model = Model(Casting, blocks=8)
    made, device = stack(model), torch.device("cuda", torch.cuda.current_device())
    expected = made.oracle(model, (1, 1, 1))(video().double())
    session = made.session((1, 1, 1), mode)
    if not on_host:
        session.bank.to(device)
    model.to(device)
    for _ in range(4):
        with torch.backends.cudnn.flags(allow_tf32=False), session.call(model, device):
            y = model(video().to(device))
        assert_close(y.cpu(), expected)
    assert session.loader.is_here is not on_host


# torch.compile.


class Graphs:
    """Counts what is compiled, and runs it as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.mark.parametrize(
    ("linear", "mode"),
    [("casting", "stream"), ("plain", "stream"), ("plain", "auto")],
)
def test_a_compiled_model_is_right_and_not_compiled_again_for_a_strength(stack, linear, mode):
    torch.compiler.reset()
    model = Model(LINEARS[linear], blocks=1)
    made = stack(model, whole=False, only="self_attn")
    graphs, x = Graphs(), video()
    compiled = torch.compile(model, backend=graphs)
    with torch.no_grad():
        plain = model(x)
        torch.testing.assert_close(compiled(x), plain)
        session = made.session((1, 1, 1), mode)
        for _ in range(2):
            with session.call(model, CPU):
                y = compiled(x)
            assert_close(y, made.oracle(model, (1, 1, 1))(x.double()))
        torch.testing.assert_close(compiled(x), plain)
        known = graphs.count
        for strengths in ((0.5, 1, 1), (0.25, -2, 3), (1, 1, 1)):
            session.amounts.set(strengths)
            with session.call(model, CPU):
                y = compiled(x)
            assert_close(y, made.oracle(model, strengths)(x.double()))
            torch.testing.assert_close(compiled(x), plain)
        assert graphs.count == known
    torch.compiler.reset()


def test_blocks_that_are_compiled_each_are_served(stack):
    torch.compiler.reset()
    model = Model(Casting, blocks=2)
    made = stack(model, whole=False)
    expected = made.oracle(model, (1, 1, 1))(video().double())
    blocks = model.diffusion_model.blocks
    for number in range(2):
        blocks[number] = torch.compile(blocks[number], backend="eager")
    with torch.no_grad():
        session = made.session((1, 1, 1), "beside")
        assert_close(called(session, model, video()), expected)
    assert not session.counts.unserved
    assert isinstance(blocks[0]._orig_mod, Block)
    torch.compiler.reset()
