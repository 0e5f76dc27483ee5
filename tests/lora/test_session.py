"""The results of a bank on a model, for all methods of applying a delta."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fast_video_vae.lora.bank import load_bank
from fast_video_vae.lora.keys import Target, Targets
from fast_video_vae.tests.lora.models import PREFIX, random_pairs, spelled
from fast_video_vae.tests.lora.nets import (
    LINEARS,
    MODES,
    Casting,
    Ignoring,
    Model,
    Q,
    assert_close,
    called,
    dense,
    each_way,
    session_of,
    video,
)


@each_way
def test_every_mode_equals_the_dense_model_in_float64(stack, linear, mode):
    """With strengths that change between calls, and several numbers of tokens and batches."""
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session((0, 0, 0), mode)
    for strengths in ((1, 1, 1), (0.5, -1.3, 2), (0, 1, 0), (0, 0, 0), (1, 0, 0.1), (1, 1, 1)):
        session.amounts.set(strengths)
        oracle = made.oracle(model, strengths)
        for x in (video(), video(2, 1), video(4, 1, 3), video(6, 3), video(2, 5, 3)):
            plain = model(x)
            assert_close(called(session, model, x), oracle(x.double()))
            assert torch.equal(model(x), plain)
    assert not session.counts.unserved
    for report in session.bank.reports:  # no key is left out
        assert not any((report.absent, report.unfit, report.unknown))


def test_a_layer_stored_in_lower_precision_gets_the_lora_after_its_cast(stack):
    """For example a model stored in bfloat16 that computes in float32."""
    model = Model(Casting)
    for block in model.diffusion_model.blocks:
        block.self_attn.q.bfloat16()
    made = stack(model)
    for mode in MODES:
        expected = made.oracle(model, (1, 1, 1))(video().double())
        assert_close(called(made.session((1, 1, 1), mode), model, video()), expected)


# Rows and columns.

PARTS = {"rows": (0, 4, 8), "last": (0, 12, 4), "columns": (1, 2, 6), "all": (0, 0, 16)}


@each_way
def test_pairs_change_rows_or_columns_of_a_weight(tmp_path, linear, mode):
    model = Model(LINEARS[linear])
    more = {f"parts.{name}": Target(f"{Q}.weight", part) for name, part in PARTS.items()}
    targets = Targets(model.shapes(), more)
    shapes = model.shapes() | {
        f"{PREFIX}{name}.weight": targets.shape(target) for name, target in more.items()
    }
    pairs = random_pairs(shapes, [*more, "blocks.1.self_attn.q"])
    save_file(spelled(pairs), tmp_path / "parts.safetensors")
    bank = load_bank([tmp_path / "parts.safetensors"], targets)
    delta = torch.zeros(16, 16, dtype=torch.float64)
    for name, (up, down) in pairs.items():
        part = more[name].offset if name in more else (0, 0, 16)
        delta.narrow(*part).add_(0.5 * up.double() @ down.double())
    expected = dense(model, {f"{Q}.weight": delta})(video().double())
    for staged in (False, True):
        session = session_of(bank, [0.5], mode, staged=staged)
        assert_close(called(session, model, video()), expected)


# For layers of 16 x 16, the break-even is 21.3 tokens of all batches together, or 10.7 for a weight
# that is cast.


@pytest.mark.parametrize(
    ("dtype", "batch", "ways"),
    [
        (torch.float32, 1, {1: "bypass", 21: "bypass", 22: "stream", 500: "stream"}),
        (torch.float32, 3, {7: "bypass", 8: "stream"}),
        (torch.bfloat16, 1, {10: "bypass", 11: "stream"}),
    ],
)
def test_auto_streams_above_the_break_even_and_not_below(stack, dtype, batch, ways):
    model = Model(Casting)
    for block in model.diffusion_model.blocks:
        block.self_attn.to(dtype)
    session = stack(model, whole=False, ranks=(4,), only="self_attn").session((1,), "auto")
    for tokens, way in ways.items():
        session.counts.clear()
        called(session, model, torch.randn(batch, 4, tokens, 2, 2))
        assert getattr(session.counts, way) == 6, tokens
        assert session.counts.stream + session.counts.bypass == 6


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_a_layer_that_ignores_weight_functions_falls_back_to_bypass(stack, mode):
    seen = []

    class Watched(Ignoring):
        def forward(self, x):
            seen.append(len(self.weight_function))
            return super().forward(x)

    model = Model(Watched)
    made = stack(model, whole=False, only="self_attn")
    session = made.session((1, 1, 1), mode)
    expected = made.oracle(model, (1, 1, 1))(video(16).double())
    for _ in range(3):
        assert_close(called(session, model, video(16)), expected)
        assert session.counts.stream == 0
    assert session.counts.bypass == sum(seen) == 3 * 6
    assert not session.counts.unserved


def test_a_layer_called_by_keyword_gets_a_changed_weight(stack):
    class ByKeyword(nn.Linear):
        def __call__(self, x):
            return super().__call__(input=x)

    model = Model(ByKeyword)
    made = stack(model)
    session = made.session((1, 1, 1), "auto")
    assert_close(called(session, model, video()), made.oracle(model, (1, 1, 1))(video().double()))
    assert not session.counts.unserved


@each_way
def test_dora_between_pairs_is_applied_in_file_order(tmp_path, linear, mode):
    """DoRA is skipped for a layer with an inaccessible weight, and the layer is recorded."""
    model = Model(LINEARS[linear])
    magnitudes = torch.rand(16, 1) + 0.5
    paths, pairs, name = [], [], "blocks.1.self_attn.q"
    for number in range(3):
        up, down = random_pairs(model.shapes(), [name], seed=number)[name]
        pairs.append((0.2 * up.double()) @ (0.2 * down.double()))
        tensors = spelled({name: (0.2 * up, 0.2 * down)})
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(tensors | ({f"{Q}.dora_scale": magnitudes} if number == 1 else {}), paths[-1])
    bank = load_bank(paths, Targets(model.shapes()))
    sessions = [session_of(bank, (0, 0, 0), mode, staged=staged) for staged in (False, True)]
    own = model.get_parameter(f"{Q}.weight").double()
    for first, second, third in ((0.7, 1.0, -0.5), (0.0, 0.5, 1.0), (1.0, 0.0, 0.0)):
        weight = own + first * pairs[0]
        if second and linear != "ignoring":
            norms = weight.norm(dim=1, keepdim=True)
            turned = (weight + pairs[1]) * magnitudes.double() / norms
            weight = weight + second * (turned - weight)
        weight = weight + third * pairs[2]
        expected = dense(model, {f"{Q}.weight": weight - own})(video().double())
        for session in sessions:
            session.amounts.set((first, second, third))
            assert_close(called(session, model, video()), expected)
    assert session.counts.unserved == ({Q} if linear == "ignoring" else set())


@each_way
def test_gradients_flow_through_a_call(stack, linear, mode):
    model = Model(LINEARS[linear])
    made = stack(model)
    session = made.session((1, 1, 1), mode)
    x = video().requires_grad_()
    called(session, model, x).square().sum().backward()
    other = video().double().requires_grad_()
    made.oracle(model, (1, 1, 1))(other).square().sum().backward()
    assert_close(x.grad, other.grad)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            y = called(made.session((1, 1, 1), mode), model, video())
        assert_close(y, made.oracle(model, (1, 1, 1))(video().double()))
