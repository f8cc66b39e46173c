"""Products of float8 matrices: `_scaled_mm` with every kind of scale, and torchao's linear layer, beside one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_device import parallel
from ranks import run_ranks
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import StrategyError

F8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore")
SCALES_OF_ROWS = pytest.mark.skipif(
    torch.__version__ < "2.10", reason=f"on CPUs torch {torch.__version__} has one scale a matrix alone"
)


class Scaled(nn.Module):
    """The product of two float8 matrices."""

    def __init__(self, strategy: Any = None, **given: Any) -> None:
        super().__init__()
        operator = torch._scaled_mm
        self.product = operator if strategy is None else sw.shard(operator, in_strategy=strategy)
        self.given = {"out_dtype": FP32} | given

    def forward(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *bias: Tensor) -> Tensor:
        return self.product(a, b.t(), scale_a, scale_b, *bias, **self.given)


def operands(rows: bool, bias: bool = False) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    a, b = torch.randn(32, 64).to(F8), torch.randn(48, 64).to(F8)
    scales = (torch.rand(32, 1) + 1, torch.rand(1, 48) + 1) if rows else (torch.tensor(1.5), torch.tensor(0.5))
    return a, b, *scales, *([torch.randn(48).to(BF16)] if bias else [])


@pytest.mark.parametrize(
    ("rows", "strategy"),
    [
        (False, ((4, 1), (1, 2), (), ())),
        (False, ((2, 4), (4, 1), (), ())),
        pytest.param(True, ((4, 1), (1, 2), (4, 1), (1, 2)), marks=SCALES_OF_ROWS),
        pytest.param(True, ((2, 4), (4, 1), (2, 1), (1, 1)), marks=SCALES_OF_ROWS),
    ],
)
def test_scaled_products(rows: bool, strategy: tuple) -> None:
    given = operands(rows)
    model = parallel(Scaled(strategy), devices=8)
    with torch.no_grad():
        got, expected = model(*given), Scaled()(*given)
    (op,) = [o for o in model.plan.operators if o.op == "_scaled_mm"]
    assert op.in_strategy == strategy
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)  # the order of float32 sums


def test_a_product_with_a_bias_keeps_its_sum_whole() -> None:
    given = operands(False, bias=True)
    whole = Scaled(out_dtype=BF16)
    model = parallel(Scaled(((4, 1), (1, 2), (), (), (2,)), out_dtype=BF16), devices=8)
    with torch.no_grad():
        assert torch.equal(model(*given), whole(*given))
        with pytest.raises(StrategyError, match="k"):
            parallel(Scaled(((2, 4), (4, 1), (), (), (1,)), out_dtype=BF16), devices=8)(*given)


def on_two_ranks(rank: int, world: int) -> Tensor:
    given = operands(True)
    model = sw.AutoParallel(Scaled(((2, 1), (1, 1), (2, 1), (1, 1)))).dataset_strategy("full_batch")
    with torch.no_grad():
        return model(*given)


@SCALES_OF_ROWS
def test_on_processes_float8_crosses_as_bytes() -> None:
    for got in run_ranks(on_two_ranks, 2):
        assert torch.equal(got, Scaled()(*operands(True)))


# -- torchao -----------------------------------------------------------------------------------------------------------


def converted(recipe: str, bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """A network with torchao's linear layers, and the same in bfloat16."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=bias)).bfloat16()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(copy.deepcopy(plain), config=config), plain


def away(got: Tensor, exact: Tensor) -> float:
    return ((got.float() - exact.float()).norm() / exact.float().norm()).item()


@pytest.mark.parametrize("marks", [False, True], ids=["data_parallel", "marks"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchao_is_as_far_from_bfloat16_as_on_one_device(recipe: str, marks: bool) -> None:
    """Each rank scales by the maxima of its own slices. Rows and their scales are cut together."""
    net, plain = converted(recipe, bias=not marks)
    one, x = copy.deepcopy(net), torch.randn(64, 64).to(BF16)
    if marks:  # the layer's second input is its weight, transposed
        sw.shard(net[0], ((2, 1), (1, 4)))
        sw.shard(net[2], ((2, 4), (4, 1)))
    model = parallel(net, devices=8, mode="semi_auto" if marks else "data_parallel")
    got, expected, exact = model(x), one(x), plain(x)
    for y in (got, expected, exact):
        (y.float() ** 2).sum().backward()
    products = [o.in_strategy for o in model.plan.operators if o.op == "matmul_with_hp_or_float8_args"]
    assert products == ([((2, 1), (1, 4)), ((2, 4), (4, 1))] if marks else [((8, 1), (1, 1))] * 2)
    if recipe != "tensorwise" and not marks:
        assert torch.equal(got, expected)
    assert away(got, exact) <= 1.2 * away(expected, exact)
    assert away(expected, exact) > 0.02, "nothing was rounded to float8"
    for p, q, r in zip(net.parameters(), one.parameters(), plain.parameters()):
        assert away(p.grad, r.grad) <= 1.2 * away(q.grad, r.grad)
