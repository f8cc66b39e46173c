"""Operators worked out into simpler ones, against numbers that are easy to get wrong."""

import math

import pytest
import torch
from rule_reference import Case, Sliced, Whole, check

from shardwright.errors import StrategyError
from shardwright.graph import Op, Value
from shardwright.layout import Digit
from shardwright.rules import Builder, bound_rule, expand, find_rule

aten = torch.ops.aten


def sliced(target, *args, cut: str, devices: int = 2, keep_open: bool = True, **kwargs) -> Sliced:
    """The call with one factor cut over all devices."""
    whole = Whole(Case(0, target, args, kwargs))
    rule = find_rule(whole.op)
    bound = bound_rule(whole.op, rule)
    factor = [f.name for f in bound.factors].index(cut)
    assignment = bound.cut_by(devices, {factor: (Digit(devices, 1),)})
    assert bound.is_consistent(assignment)
    return Sliced(whole, rule, bound, assignment, keep_open)


def kinds(run: Sliced) -> list[str]:
    return [ran.op.kind for ran in run.ran]


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


# -- cross entropy ---------------------------------------------------------------------------------------------------


def test_cross_entropy_counts_targets_that_are_unevenly_spread() -> None:
    """Three of the first rank's four targets are ignored: the mean is over 5, not the mean of the ranks' means."""
    x, target = logits(8, 3), torch.tensor([0, -100, -100, -100, 1, 2, 0, 1])
    run = sliced(aten.cross_entropy_loss.default, x, target, cut="n")
    each = -torch.log_softmax(x.detach(), 1)[torch.arange(8), target.clamp(min=0)]
    kept = target >= 0
    torch.testing.assert_close(run.outputs()[0], each[kept].sum() / 5)
    assert abs(run.outputs()[0] - (each[0] + each[4:].mean()) / 2) > 1e-3
    assert run.gradients()["x0"][1:4].abs().max() == 0


@pytest.mark.parametrize("more", [(), (torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64), 1, 2, 0.1)])
def test_cross_entropy_needs_one_reduction(more: tuple) -> None:
    run = sliced(aten.cross_entropy_loss.default, logits(8, 3), torch.arange(8) % 3, *more, cut="n")
    assert len(run.reduced) == 1


def test_cross_entropy_with_weights_and_smoothing() -> None:
    x, target = logits(8, 3), torch.tensor([0, 0, 0, 0, 1, 2, 7, 1])
    weight = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    run = sliced(aten.cross_entropy_loss.default, x, target, weight, 1, 7, 0.3, cut="n")
    p = torch.log_softmax(x.detach(), 1)
    kept = torch.tensor([i for i in range(8) if i != 6])
    nll = -(weight[target[kept]] * p[kept, target[kept]]).sum()
    smooth = -(weight * p[kept]).sum()
    torch.testing.assert_close(run.outputs()[0], (0.7 * nll + 0.3 / 3 * smooth) / weight[target[kept]].sum())


def test_cross_entropy_with_all_targets_ignored_is_no_number_and_its_gradient_zero() -> None:
    run = sliced(aten.cross_entropy_loss.default, logits(8, 3), torch.full((8,), -100), cut="n")
    assert run.outputs()[0].isnan()
    assert run.gradients()["x0"].abs().max() == 0


def test_cross_entropy_with_all_targets_of_one_rank_ignored() -> None:
    target = torch.tensor([-100] * 4 + [0, 1, 2, 0])
    run = sliced(aten.cross_entropy_loss.default, logits(8, 3), target, cut="n")
    torch.testing.assert_close(run.outputs()[0], run.whole.outputs[0])


def test_cross_entropy_over_a_whole_batch_stays_one_operator() -> None:
    whole = Whole(Case(0, aten.cross_entropy_loss.default, (logits(8, 3), torch.arange(8) % 3), {}))
    rule, bound = find_rule(whole.op), bound_rule(whole.op)
    steps, renamed = expand(whole.op, rule, bound, bound.whole(4))
    assert [s[0] for s in steps] == [whole.op] and not renamed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_in_half_precision_are_summed_wide(dtype: torch.dtype) -> None:
    """65536 losses of 8 are beyond float16; and 1001 of them are no number of bfloat16's."""
    x = torch.zeros(65536, 2, dtype=dtype)
    x[:, 0] = 8
    target = torch.ones(65536, dtype=torch.int64)
    target[1001:] = -100
    for labels in (target, torch.ones_like(target)):
        run = sliced(aten.cross_entropy_loss.default, x, labels, cut="n")
        assert run.outputs()[0].dtype == dtype and run.outputs()[0].item() == 8
    run = sliced(aten.mse_loss.default, x, torch.zeros_like(x), cut="...0")
    assert run.outputs()[0].item() == 32


def test_probability_targets_are_averaged_over_the_global_batch() -> None:
    x = logits(8, 3)
    target = torch.softmax(logits(8, 3).detach(), 1)
    run = sliced(aten.cross_entropy_loss.default, x, target, cut="n")
    torch.testing.assert_close(run.outputs()[0], -(target * torch.log_softmax(x.detach(), 1)).sum() / 8)


def test_mean_losses_divide_by_the_global_count_and_stay_open() -> None:
    run = sliced(aten.mse_loss.default, logits(4, 6), logits(4, 6).detach() + 1, cut="...0")
    assert run.outputs()[0] == 1 and kinds(run) == ["mse_loss", "div"]
    assert run.held[run.results[0].name].layout.partial == (Digit(2, 1),)


# -- softmax ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [aten.softmax.int, aten.log_softmax.int])
def test_softmax_over_a_cut_dim_does_not_overflow(target) -> None:
    x = (logits(2, 8).detach() * 1000 + 5000).float().requires_grad_()
    run = sliced(target, x, 1, cut="d1")
    assert run.outputs()[0].isfinite().all()
    torch.testing.assert_close(run.outputs()[0], run.whole.outputs[0])
    torch.testing.assert_close(run.gradients()["x0"], run.whole.gradients["x0"])


def test_softmax_with_one_rank_all_masked() -> None:
    x = logits(2, 8).detach()
    x[:, :4] = -math.inf
    run = sliced(aten.softmax.int, x.requires_grad_(), 1, cut="d1")
    torch.testing.assert_close(run.outputs()[0], run.whole.outputs[0])
    torch.testing.assert_close(run.gradients()["x0"], run.whole.gradients["x0"])


def test_logsumexp_of_infinities() -> None:
    x = torch.tensor([[-math.inf] * 4, [math.inf, 0, 0, 0], [-math.inf, 0, 0, 1]], dtype=torch.float64)
    run = sliced(aten.logsumexp.default, x, [1], cut="d1")
    torch.testing.assert_close(run.outputs()[0], torch.logsumexp(x, 1))


@pytest.mark.parametrize("target", [aten.softmax.int, aten.log_softmax.int])
def test_softmax_in_half_precision_works_in_single(target) -> None:
    x = logits(2, 8).detach().to(torch.bfloat16)
    run = sliced(target, x, 1, cut="d1")
    assert run.outputs()[0].dtype == torch.bfloat16
    torch.testing.assert_close(run.outputs()[0], run.whole.outputs[0], rtol=2**-7, atol=0)


def test_softmax_maximum_takes_no_part_in_the_backward() -> None:
    run = sliced(aten.softmax.int, logits(2, 8), 1, cut="d1")
    assert len(run.reduced) == 2  # the maximum and the sum
    top = next(ran for ran in run.ran if ran.op.kind == "amax")
    assert not top.op.inputs[0].requires_grad and not top.op.outputs[0].requires_grad


# -- moments ---------------------------------------------------------------------------------------------------------


def test_var_with_a_large_mean() -> None:
    """E[x²] - E[x]² would have no correct digit left here."""
    x = (torch.tensor([1.0, 2.0, 3.0, 4.0]) + 1e6).requires_grad_()
    run = sliced(aten.var.correction, x, [0], cut="d0", correction=1)
    torch.testing.assert_close(run.outputs()[0], torch.tensor(5 / 3))
    torch.testing.assert_close(run.gradients()["x0"], run.whole.gradients["x0"])


def test_no_gradient_goes_through_the_mean_of_a_var() -> None:
    run = sliced(aten.var.correction, logits(8), [0], cut="d0")
    away = next(ran.op for ran in run.ran if ran.op.kind == "sub")
    assert [v.requires_grad for v in away.inputs] == [True, False]


def test_std_of_equal_numbers_has_a_zero_gradient() -> None:
    run = sliced(aten.std.correction, torch.full((4, 2), 3.0).requires_grad_(), [0], cut="d0")
    assert run.outputs()[0].abs().max() == 0
    assert torch.equal(run.gradients()["x0"], run.whole.gradients["x0"])


def test_var_of_one_number_is_no_number() -> None:
    run = sliced(aten.var.correction, torch.ones(4), [0], cut="d0", correction=4)
    assert run.outputs()[0].isnan() == run.whole.outputs[0].isnan()


@pytest.mark.parametrize("p", [2, 1, 0, 3, 1.5, 0.5, math.inf, -math.inf])
def test_norm_and_its_gradient_at_zero(p: float) -> None:
    x = torch.tensor([[0.0, 0, 0, 0], [3, 0, 4, 0]], dtype=torch.float64).requires_grad_()
    run = sliced(aten.linalg_vector_norm.default, x, p, [1], cut="d1")
    torch.testing.assert_close(run.outputs()[0], run.whole.outputs[0])
    if not math.isinf(p):  # ties of a maximum over ranks are the runtime's to share out
        torch.testing.assert_close(run.gradients()["x0"], run.whole.gradients["x0"])


def test_float16_mean_of_many_does_not_overflow() -> None:
    run = sliced(aten.mean.default, torch.full((4096,), 100.0, dtype=torch.float16), cut="d0")
    assert run.outputs()[0].dtype == torch.float16 and run.outputs()[0] == 100


def test_no_term_is_rounded_before_it_is_summed() -> None:
    """A cast to a narrower type waits for the sum; one to a wider type does not."""
    rule = find_rule(Op("to", aten.to.dtype, (), {}, (), ()))
    wide_, narrow = Value("a", (2,), torch.float32), Value("b", (2,), torch.bfloat16)
    assert not rule.is_linear(Op("to", aten.to.dtype, (wide_, torch.bfloat16), {}, (wide_,), (narrow,)))
    assert rule.is_linear(Op("to", aten.to.dtype, (narrow, torch.float32), {}, (narrow,), (wide_,)))


# -- bias, beta ------------------------------------------------------------------------------------------------------


def test_a_bias_is_added_once_to_the_first_term() -> None:
    x, w, bias = torch.ones(2, 4), torch.ones(3, 4), torch.full((3,), 100.0)
    run = sliced(aten.linear.default, x, w, bias, cut="k")
    assert kinds(run) == ["count", "linear_part"] and (run.outputs()[0] == 104).all()
    assert kinds(sliced(aten.linear.default, x, w, bias, cut="...0")) == ["linear"]


def test_addmm_with_beta_zero_does_not_read_what_is_added() -> None:
    run = sliced(aten.addmm.default, torch.full((2, 2), math.nan), torch.ones(2, 4), torch.ones(4, 2), beta=0, cut="k")
    assert (run.outputs()[0] == 4).all()


# -- the builder -----------------------------------------------------------------------------------------------------


def test_steps_are_named_after_the_operator_and_keep_its_place() -> None:
    whole = Whole(Case(0, aten.mean.dim, (logits(4, 2), [0]), {}))
    bound = bound_rule(whole.op)
    steps, renamed = expand(whole.op, find_rule(whole.op), bound, bound.cut_by(2, {0: (Digit(2, 1),)}))
    assert [op.name for op, *_ in steps] == ["op.0", "op.1"]
    assert {op.origin for op, *_ in steps} == {"op"}
    assert renamed["y0"] == steps[-1][0].outputs[0]


def test_a_value_that_is_wanted_in_two_layouts_cannot_be_worked_out() -> None:
    x = Value("x", (4, 4), torch.float32)
    op = Op("op", aten.addmm.default, (x, x, x), {}, (x, x, x), (Value("y", (4, 4), torch.float32),))
    bound = bound_rule(op)
    with pytest.raises(StrategyError, match="takes %x twice"):
        expand(op, find_rule(op), bound, bound.cut_by(2, {1: (Digit(2, 1),)}))


def test_the_builder_refuses_what_cannot_follow() -> None:
    a, b = Value("a", (4, 4), torch.float32), Value("b", (4, 4), torch.float32)
    op = Op("op", aten.add.Tensor, (a, b), {}, (a, b), (Value("y", (4, 4), torch.float32),))
    bound = bound_rule(op)
    rows = bound.input_layout(0, bound.cut_by(2, {0: (Digit(2, 1),)}))
    columns = bound.input_layout(0, bound.cut_by(2, {1: (Digit(2, 1),)}))
    with pytest.raises(StrategyError, match="add cannot follow"):
        Builder(op, {"a": rows, "b": columns}).call(aten.add.Tensor, a, b)


def test_every_way_to_cut_a_loss_of_uneven_targets() -> None:
    target = torch.tensor([[0, 3], [3, 3], [3, 3], [1, 2]])
    assert check(Case(2, aten.cross_entropy_loss.default, (logits(4, 4, 2), target, None, 1, 3, 0.1), {}), 4) > 5
