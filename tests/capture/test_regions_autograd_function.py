"""A user's own `torch.autograd.Function` keeps its backward: whole on every rank, or cut by a rule."""

from __future__ import annotations

import contextlib
import inspect
import queue
from typing import Any

import pytest
import torch
from one_device import assert_as_one_device, close, squares
from ranks import run_ranks
from small_networks import Apply, D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.report.ir_dump import execute_text

X = draw(16, 8)


class Scaled(torch.autograd.Function):
    """A gradient that is not the forward's, by which one sees that it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * 10 + x, None


class Cut(Scaled):
    """The same, with a rule."""


class Product(torch.autograd.Function):
    """Two inputs of which one may need no gradient, a context of its own function, a result kept for the backward."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, torch.tanh(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, two: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, w, t = ctx.saved_tensors
        total = sum(g for g in (one, None if two is None else two * (1 - t * t)) if g is not None)
        return total @ w.T if ctx.needs_input_grad[0] else None, 3 * (x.T @ total) if ctx.needs_input_grad[1] else None


class Ranked(torch.autograd.Function):
    """A result that is not differentiable, one that is no tensor, arguments in a dict and by name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: dict[str, Any]) -> tuple[Tensor, Tensor, int, None]:
        order = (x > held["above"]).to(x.dtype)
        ctx.mark_non_differentiable(order)
        return x * order * held["by"], order, 3, None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        return gradient * 5, None


class Twice(torch.autograd.Function):
    """A function that calls another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Scaled.apply(x, 2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Scaled.apply(gradient, 7.0)


sw.rule(Cut, "... -> ...")
sw.rule(Product, "m k, k n -> m n, m n")


def scaled(m: Apply, x: Tensor) -> Tensor:
    return torch.tanh(Scaled.apply(x @ m.w, 2.0)) @ m.w


def scaled_and_cut(m: Apply, x: Tensor) -> Tensor:
    return torch.tanh(Cut.apply(x @ m.w, 2.0)) @ m.w


def product(m: Apply, x: Tensor) -> Tensor:
    y, t = Product.apply(x, m.w)
    return Product.apply(y + t, m.w)[1] + Product.apply(x, m.w)[0]


SCALED = Scaled.apply


def nested(m: Apply, x: Tensor) -> Tensor:
    return SCALED(Twice.apply(x @ m.w), 2.0)  # under a name of its own; of another function


def ranked(m: Apply, x: Tensor) -> Tensor:
    y, order, three, nothing = Ranked.apply(x @ m.w, {"above": 0.1, "by": m.v})
    assert nothing is None
    return y * three + order


def without_gradient(m: Apply, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = Scaled.apply(x @ m.w, 2.0)
    return y + Scaled.apply(x, 3.0) @ m.w


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("f", [scaled, scaled_and_cut, product, nested, ranked, without_gradient])
def test_as_one_device(f: Any, devices: int) -> None:
    net = Apply(f, v=draw(16, 8, seed=3))
    for mode in ("semi_auto", "data_parallel"):
        assert_as_one_device(net, (X.clone().requires_grad_(f is product),), (X,), devices=devices, mode=mode)


def test_whole_without_a_rule_and_cut_with_one() -> None:
    whole, cut = (
        sw.plan(Apply(f), (X,), devices=4).operator(name) for f, name in ((scaled, "Scaled"), (scaled_and_cut, "Cut"))
    )
    assert whole.in_strategy == ((1, 1),) and whole.op == "Scaled" and whole.local_shapes(0)[0] == ((16, 8),)
    assert cut.in_strategy == ((4, 1),) and cut.local_shapes(3) == (((4, 8),), ((4, 8),))
    _lines, first = inspect.getsourcelines(scaled)
    assert whole.source == f"test_regions_autograd_function.py:{first + 1}"


def test_gradients_flow_where_the_function_says() -> None:
    op = next(op for op in capture(Apply(ranked, v=draw(16, 8, seed=3)), (X,)).ops if op.kind == "Ranked")
    assert [v.requires_grad for v in op.outputs] == [True, False] and len(op.inputs) == 2


def test_marked() -> None:
    def net() -> Apply:
        return Apply(lambda m, x: m.op(x, m.w)[1], op=sw.shard(Product.apply, ((2, 2), (2, 2))))

    plan = sw.plan(net(), (X,), devices=8)
    assert plan.operator("op").op == "Product" and plan.operator("op").in_strategy == ((2, 2), (2, 2))
    # A tanh of a partial sum is no sum of tanhs: of this function rows and columns may be cut.
    for strategy in (((2, 1), (1, 4)), ((8, 1), (1, 1))):
        assert_as_one_device(Apply(lambda m, x: m.op(x, m.w)[1], op=sw.shard(Product.apply, strategy)), (X,), devices=8)


def test_recomputed() -> None:
    net = Apply(lambda m, x: m.part(x), part=sw.recompute(Apply(lambda m, x: scaled(m, torch.sigmoid(x)))))
    model = assert_as_one_device(net, (X,), (X,), devices=4)
    assert [region.operators for region in model.plan.regions] == [("sigmoid", "matmul", "Scaled", "tanh", "matmul_1")]
    assert "Scaled(" in execute_text(model.plan, 0).split("# backward")[1]


def test_evaluation_comes_first() -> None:
    net = Apply(scaled)
    sw.init(devices=4)
    model = sw.AutoParallel(net).dataset_strategy("full_batch")
    with torch.no_grad():  # of this call's plan the next one makes use
        close(model(X), net(X))
    squares(model(X)).backward()
    ours, net.w.grad = net.w.grad, None
    squares(net(X)).backward()
    close(ours, net.w.grad)


class Writes(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class WritesUnsaid(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


class Reads(Scaled):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().sum())


@pytest.mark.parametrize(
    ("function", "message", "legal"),
    [
        (Writes, "Writes, a torch.autograd.Function, marks an input as changed in place", "returns a new tensor"),
        (WritesUnsaid, "WritesUnsaid, a torch.autograd.Function, marks an input", "returns a new tensor"),
        (Reads, "the forward of Reads, a torch.autograd.Function, cannot run on tensors without values", "custom_op"),
    ],
)
def test_what_cannot_be_kept(function: type, message: str, legal: str) -> None:
    def f(m: Apply, x: Tensor) -> Tensor:
        return function.apply(x @ m.w)  # the user's line

    with pytest.raises(sw.CaptureError, match=message) as raised:
        sw.plan(Apply(f), (X,), devices=4)
    _lines, first = inspect.getsourcelines(f)
    assert raised.value.source == f"test_regions_autograd_function.py:{first + 1}" and legal in raised.value.legal
    assert_as_they_were()


def classes() -> dict[type, dict[str, Any]]:
    """The entries of every class of functions, torch's too, and of their metaclass."""
    found, rest = {}, [torch.autograd.Function]
    for cls in rest:
        found[cls] = dict(vars(cls))
        rest.extend(cls.__subclasses__())
    return found | {type(torch.autograd.Function): dict(vars(type(torch.autograd.Function)))}


BEFORE = classes()


def assert_as_they_were() -> None:
    now = classes()
    assert all(now[cls] == held for cls, held in BEFORE.items())


def fails(m: Apply, x: Tensor) -> Tensor:
    raise ZeroDivisionError(Scaled.apply(x, 2.0))


@pytest.mark.parametrize("f", [scaled_and_cut, product, fails])
def test_nothing_is_left_on_classes(f: Any) -> None:
    seen = queue.SimpleQueue()  # a list would be refused, as state that the forward changes

    def watched(m: Apply, x: Tensor) -> Tensor:
        seen.put(classes())
        return f(m, x)

    with contextlib.suppress(sw.CaptureError):
        sw.plan(Apply(watched), (X,), devices=4)
    during = [seen.get() for _ in range(seen.qsize())]
    assert during and all(held[Cut] != BEFORE[Cut] and "forward" not in BEFORE[Cut] for held in during)
    assert all(held[torch.autograd.Function] == BEFORE[torch.autograd.Function] for held in during)
    assert_as_they_were()


class Own(torch.autograd.Function):
    """An ``apply`` of its own."""

    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return super().apply(x * 3, 5.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Diamond(Product, Cut):
    """Two bases."""

    forward = Scaled.forward
    setup_context = torch.autograd.Function.setup_context
    backward = Scaled.backward


def by_hand(m: Apply, x: Tensor) -> Tensor:
    return Product.forward(x, m.w)[0]


def made_meanwhile(m: Apply, x: Tensor) -> Tensor:
    class Local(Scaled):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * 30, None

    return Local.apply(x @ m.w, 2.0)


@pytest.mark.parametrize(
    ("f", "kinds"),
    [
        (lambda m, x: Own.apply(x @ m.w), ["matmul", "mul", "Own"]),
        (lambda m, x: Diamond.apply(x @ m.w, 2.0), ["matmul", "Diamond"]),
        (by_hand, ["matmul"]),
        (made_meanwhile, ["matmul", "Local"]),
    ],
)
def test_in_unusual_ways(f: Any, kinds: list[str]) -> None:
    assert [op.kind for op in capture(Apply(f), (X,)).ops] == kinds
    assert_as_one_device(Apply(f), (X,), devices=4, mode="data_parallel")
    assert_as_they_were()


def test_bad_rules() -> None:
    with pytest.raises(sw.RuleError, match="not an operator"):
        sw.rule(Apply, "... -> ...")


def on_a_rank(rank: int, world: int) -> None:
    for f in (scaled, scaled_and_cut, product):
        net, one = Apply(f), Apply(f)
        sw.init()
        model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
        loss, expected = model(X, labels(16)), nn.functional.cross_entropy(one(X), labels(16))
        loss.backward(), expected.backward()
        close(loss, expected)
        close(net.w.grad.full_tensor(), one.w.grad, f.__name__)
        assert net.w.dtype is D


def test_in_processes() -> None:
    run_ranks(on_a_rank, 4)
