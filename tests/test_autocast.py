"""Autocast around a model, around its forward alone, and inside of it: parallel runs against one device in that
precision."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from one_device import parallel
from ranks import run_ranks
from torch import Tensor, nn

import shardwright as sw
from shardwright.autocast import Autocast, Like, UnderAutocast, casts_of
from shardwright.capture.export import capture
from shardwright.graph import Graph
from shardwright.planfile.encoding import read_graph, write_graph
from shardwright.planners.planning_problem import modes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten

#: Of a value in this precision, by how much the order of sums may change it: some units in the last place.
UNITS = {BF16: 2**-6, FP16: 2**-9, FP32: 1e-5}

pytestmark = pytest.mark.filterwarnings("ignore")


def near(got: Any, expected: Any, precision: torch.dtype, what: str = "") -> None:
    """Equal in dtype, and in value within this precision of the largest element."""
    assert got.dtype == expected.dtype, what
    scale = expected.detach().abs().max().item()
    torch.testing.assert_close(
        got, expected, rtol=UNITS[precision], atol=UNITS[precision] * scale, msg=lambda text: f"{what}: {text}"
    )


def gradients_near(net: nn.Module, one: nn.Module, precision: torch.dtype) -> None:
    for (name, ours), theirs in zip(net.named_parameters(), one.parameters()):
        near(ours.grad, theirs.grad, precision, name)


def kinds(graph: Graph) -> list[tuple[str, torch.dtype]]:
    return [(op.kind, op.outputs[0].dtype) for op in graph.ops]


def casts(graph: Graph) -> list[str]:
    return [op.inputs[0].name for op in graph.ops if op.kind == "to"]


def two_linears(mark: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if mark:
        sw.shard(net[0], ((2, 1), (2, 1)))
    return net


# -- two products one after the other ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("mode", modes())
def test_two_products(mode: str, dtype: torch.dtype) -> None:
    net = two_linears(mark=mode == "sharding_propagation")
    one, (x, y) = copy.deepcopy(net), torch.randn(2, 8, 8)
    feeding = "data_parallel" if mode in ("data_parallel", "hybrid_parallel") else "full_batch"
    model = parallel(net, F.mse_loss, devices=4, mode=mode, dataset=feeding)
    with torch.autocast("cpu", dtype):
        got, expected = model(x, y), F.mse_loss(one(x), y)
    got.backward(), expected.backward()
    near(got, expected, dtype)
    gradients_near(net, one, dtype)
    if mode != "hybrid_parallel":
        products = [op for op in model.plan.graph.ops if op.kind == "linear"]
        assert [{v.dtype for v in op.inputs} for op in products] == [{dtype}] * 2
    if mode in ("data_parallel", "semi_auto"):
        assert all(cuts != ((1, 1), (1, 1)) for cuts in [model.plan.operator(op.name).in_strategy for op in products])


def on_two_ranks(rank: int, world: int) -> list[Any]:
    out = []
    for mode in ("data_parallel", "semi_auto"):
        torch.manual_seed(1)
        net, (x, y) = two_linears(), torch.randn(2, 8, 8)
        part = slice(4 * rank, 4 * rank + 4)
        model = sw.AutoParallel(net, F.mse_loss, mode).dataset_strategy("data_parallel")
        losses = []
        for _ in range(3):
            with torch.autocast("cpu", BF16):
                loss = model(x[part], y[part])
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        out.append(losses)
    return out


def test_two_products_on_two_processes() -> None:
    torch.manual_seed(1)
    net, (x, y) = two_linears(), torch.randn(2, 8, 8)
    expected = []
    for _ in range(3):
        with torch.autocast("cpu", BF16):
            loss = F.mse_loss(net(x), y)
        loss.backward()
        expected.append(loss.item())
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    for of_rank in run_ranks(on_two_ranks, 2):
        for losses in of_rank:
            assert losses == pytest.approx(expected, rel=2**-9)


# -- where autocast is entered -----------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Autocast in the model's own forward, a part of it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.exact, self.down = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 16),
            nn.Linear(16, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            h = self.norm(self.up(x))
            with torch.autocast("cpu", enabled=False):
                h = h.float() + self.exact(h.float())
            return self.down(F.gelu(h)).softmax(-1)


@pytest.mark.parametrize("around", [None, BF16, FP16], ids=["alone", "in bfloat16", "in float16"])
def test_autocast_inside(around: torch.dtype | None) -> None:
    """The regions of the model itself hold, whatever is around the call."""
    torch.manual_seed(2)
    net = Inside()
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    model = parallel(net, devices=4)
    with torch.autocast("cpu", around) if around else contextlib.nullcontext():
        got, expected = model(x), one(x)
    linears = [op for op in model.plan.graph.ops if op.kind == "linear"]
    assert [op.outputs[0].dtype for op in linears] == [BF16, FP32, BF16]
    near(got, expected, BF16)
    got.float().square().sum().backward(), expected.float().square().sum().backward()
    gradients_near(net, one, BF16)


@pytest.mark.parametrize("loss_inside", [True, False], ids=["loss in autocast", "loss outside"])
def test_autocast_around_the_forward(loss_inside: bool) -> None:
    """The form that trainers write: the model returns its outputs, the loss is taken of them."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    one, x, y = copy.deepcopy(net), torch.randn(8, 8), torch.randint(0, 4, (8,))
    model = parallel(net, devices=4)
    losses = []
    for run in (model, one):
        with torch.autocast("cpu", BF16):
            logits = run(x)
            if loss_inside:
                loss = F.cross_entropy(logits, y)
        if not loss_inside:
            loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        losses.append(loss)
    near(*losses, BF16)
    gradients_near(net, one, BF16)


def test_no_cast_is_left_from_another_state() -> None:
    """Autocast on, off, in another precision, and on again: a program for each."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    model = parallel(net, devices=4)
    for state in (BF16, None, FP16, BF16, None):
        with torch.autocast("cpu", state) if state else contextlib.nullcontext():
            got, expected = model(x), one(x)
        assert got.dtype == (state or FP32)
        near(got, expected, state or FP32)
    other = parallel(copy.deepcopy(one), devices=4)  # the other way about
    assert other(x).dtype == FP32
    with torch.autocast("cpu", BF16):
        assert other(x).dtype == BF16


# -- which casts there are ---------------------------------------------------------------------------------------------


class Thrice(nn.Module):
    """One weight, and one input, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(x, self.weight.t()) + x @ self.weight @ self.weight


def test_a_cast_is_shared_within_a_region() -> None:
    x = torch.randn(8, 8)
    with torch.autocast("cpu", BF16):
        assert casts(capture(Thrice(), (x,))) == ["x", "weight", "t"]
    with torch.autocast("cpu", BF16, cache_enabled=False):
        assert casts(capture(Thrice(), (x,))) == ["x", "weight", "x", "t", "x", "weight", "weight"]

    class Regions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = []
            for _ in range(2):
                with torch.autocast("cpu", BF16):
                    made.append(x @ x)
            return made[0] + made[1]

    assert casts(capture(Regions(), (x,))) == ["x", "x"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_stages_of_a_pipeline_cast_the_weights_that_they_share() -> None:
    """A weight is in each stage that reads it; no cast of it is sent with every micro-batch."""
    torch.manual_seed(8)
    net = Tied()
    one, (x, y) = copy.deepcopy(net), torch.randn(2, 8, 8)
    model = parallel(net, F.mse_loss, devices=4).pipeline(2, micro_batches=2, stage_config={"first": 0, "last": 1})
    with torch.autocast("cpu", BF16):
        got, expected = model(x, y), F.mse_loss(one(x), y)
    got.backward(), expected.backward()
    near(got, expected, BF16)
    gradients_near(net, one, BF16)
    assert [t.name for t in model.plan.transfers if t.kind == "value"] == ["relu"]


def test_a_recomputed_region_has_casts_of_its_own() -> None:
    """A cast that is dropped with its region is not one that others read."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(
                lambda x: torch.tanh(F.linear(x, self.weight)), x, use_reentrant=False
            )
            return F.linear(y, self.weight) + F.linear(x, self.weight)

    net = Net()
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    model = parallel(net, devices=4)
    with torch.autocast("cpu", BF16):
        graph = capture(net, (x,))
        got, expected = model(x), one(x)
    assert casts(graph) == ["x", "x"]  # the weight is cast where it is stored
    near(got, expected, BF16)
    got.sum().backward(), expected.sum().backward()
    gradients_near(net, one, BF16)


def test_float64_and_integers_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    with torch.autocast("cpu", BF16):
        graph = capture(net, (x,))
        assert not casts(graph) and {v.dtype for op in graph.ops for v in op.outputs} == {torch.float64}


def test_a_mark_names_the_operator_and_not_its_casts() -> None:
    """Strategies speak of the operator's inputs in the order of the call, cast or not."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    sw.shard(net[0], ((2, 1), (2, 1), (2,)))
    sw.shard(net[2], ((1, 4), (1, 4), (1,)))
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    model = parallel(net, devices=4)
    with torch.autocast("cpu", BF16):
        got, expected = model(x), one(x)
    assert model.plan.operator("0").in_strategy == ((2, 1), (2, 1), (2,))
    assert model.plan.operator("2").in_strategy == ((1, 4), (1, 4), (1,))
    near(got, expected, BF16)

    class Swapped(nn.Module):  # weights in the order in which the module holds them
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    swapped = sw.shard(Swapped(), ((4, 1), (1,), (1, 1)))
    outer = nn.Sequential(swapped)
    with torch.autocast("cpu", BF16):
        plan = sw.plan(outer, (x,), devices=4)
    assert plan.operator("0").in_strategy == ((4, 1), (1, 1), (1,))


@pytest.mark.parametrize(
    ("target", "dtypes", "device", "casts_to", "dtype"),
    [
        (aten.linear.default, (FP32, FP32), "cpu", (BF16, BF16), None),
        (aten.linear.default, (BF16, FP32), "cpu", (None, BF16), None),
        (aten.linear.default, (torch.float64,) * 2, "cpu", (None, None), None),
        (aten.gelu.default, (BF16,), "cpu", (None,), None),
        (aten.mse_loss.default, (BF16, FP32), "cpu", (FP32, None), None),
        (aten.add.Tensor, (BF16, FP32), "cpu", (None, None), None),
        (aten.sum.dim_IntList, (BF16, [0]), "cpu", (None,), None),
        (aten.sum.dim_IntList, (BF16, [0]), "cuda", (None,), FP32),
        (aten.softmax.int, (BF16, 0), "cuda", (None,), FP32),
        (aten.norm.Scalar, (BF16,), "cuda", (FP32,), None),
        (aten.addcdiv.default, (FP32, BF16, FP32), "cuda", (None, FP32, None), None),
        (aten.linear.default, (FP32, FP32), "meta", (None, None), None),
    ],
    ids=lambda x: str(x).replace("torch.", ""),
)
def test_decisions(target: Any, dtypes: tuple, device: str, casts_to: tuple, dtype: torch.dtype | None) -> None:
    args = tuple(Like((8, 8), x, torch.device(device)) if isinstance(x, torch.dtype) else x for x in dtypes)
    found = casts_of(target, args, {}, Autocast((("cpu", BF16), ("cuda", BF16))))
    assert (found.inputs, found.dtype, found.whole) == (casts_to, dtype, False)


# -- operators that run under autocast themselves ----------------------------------------------------------------------


class Product(torch.autograd.Function):
    """A product that autocast sees within a function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gru = nn.Parameter(torch.randn(8, 8)), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            y = Product.apply(x, self.weight)
            return self.gru(y[:, None], torch.ones(1, x.shape[0], 8))[0].sum(
                1
            )  # a float32 state: products alone are cast


def test_operators_whose_inner_products_alone_are_cast() -> None:
    torch.manual_seed(6)
    net = Held()
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    graph = capture(net, (x,))
    under = [op.kind for op in graph.ops if isinstance(op.target, UnderAutocast)]
    assert under == ["Product", "gru"]
    model = parallel(net, devices=4, on_missing_rule="replicate")
    got, expected = model(x), one(x)
    assert torch.equal(got, expected)  # whole on every device: the same operators
    got.sum().backward(), expected.sum().backward()
    gradients_near(net, one, FP32)
    again = read_graph(write_graph(graph))
    assert [op.target for op in again.ops if op.kind == "gru"] == [op.target for op in graph.ops if op.kind == "gru"]
    assert [repr(op.target) for op in again.ops] == [repr(op.target) for op in graph.ops]


@torch.library.custom_op("autocast_tests::twice", mutates_args=())
def twice(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float() * 2


@twice.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=FP32)


def test_custom_operators_run_under_autocast_by_their_rule() -> None:
    """Autocast reaches the operators that a custom one calls; cut by its rule, too."""
    sw.rule(twice, "m k!, k! n -> m n")
    marked = sw.shard(twice, ((2, 1), (1, 2)))

    class Net(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return marked(x, w)

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    model = parallel(Net(), devices=4)
    with torch.autocast("cpu", BF16):
        got, expected = model(x, w), twice(x, w)
    assert model.plan.operators[-1].in_strategy == ((2, 1), (1, 2))
    assert torch.equal(got, expected) and not torch.equal(got, twice(x, w))


def test_vmap_under_autocast() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                half = torch.vmap(lambda row: self.layer(row).softmax(-1))(x)
                with torch.autocast("cpu", enabled=False):
                    return half + torch.vmap(lambda row: self.layer(row))(x)

    torch.manual_seed(7)
    net = Net()
    one, x = copy.deepcopy(net), torch.randn(8, 8)
    for around in (contextlib.nullcontext(), torch.autocast("cpu", BF16)):
        with around:
            near(parallel(copy.deepcopy(net), devices=4)(x), one(x), BF16)


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_quotients_of_integers_have_the_default_dtype(first: torch.dtype) -> None:
    """The casts of a call are remembered for one default dtype."""

    class Quotient(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    x = torch.arange(8)
    try:
        for dtype in (first, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with torch.autocast("cpu", BF16):
                assert kinds(capture(Quotient(), (x,))) == [("div", dtype)]
                model = parallel(Quotient(), devices=4)
                assert torch.equal(model(x), x / 2) and model(x).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)
