"""From a module to a graph: what is captured, under which names and lines, and what cannot be."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from one_device import assert_as_one_device
from small_networks import Apply, D, Marked, draw, labels
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture

X, T = draw(16, 8), labels(16)


def kinds(graph) -> list[str]:
    return [op.kind for op in graph.ops]


def line_of(function, text: str) -> str:
    """``file.py:41`` of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function).rsplit('/', 1)[-1]}:{start + at}"


# -- what is captured --------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.GELU())
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, scale=None):
        self.steps += 1
        y = self.body(x)  # the body's line
        return {"y": y if scale is None else y * scale, "shape": x.shape[0]}


def test_operators_as_people_write_them() -> None:
    net = Layers()
    graph = capture(net, (X,), {"scale": torch.tensor(2.0)})
    assert kinds(graph) == ["add", "linear", "gelu", "mul"]
    linear = graph.ops[1]
    assert linear.module == "body.0" and linear.source == line_of(Layers.forward, "the body's line")
    assert [v.shape for v in linear.inputs] == [(16, 8), (8, 8), (8,)] and linear.outputs[0].dtype == D
    assert [v.name for v in linear.inputs[1:]] == ["body.0.weight", "body.0.bias"]
    assert set(graph.parameters) == {"body.0.weight", "body.0.bias"} and list(graph.buffers) == ["steps"]
    assert graph.updates["steps"] is graph.ops[0].outputs[0]
    assert [v.shape for v in graph.inputs] == [(16, 8), ()] and graph.outputs[1] == 16
    assert linear.outputs[0].requires_grad and not graph.ops[0].outputs[0].requires_grad


def test_names_are_the_models_own_with_a_loss_too() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layers()

        def forward(self, x):
            return self.net(x)["y"]

    graph = capture(Root(), (X, T), loss_fn=nn.CrossEntropyLoss(weight=torch.ones(8, dtype=D)))
    assert list(graph.parameters) == ["net.body.0.weight", "net.body.0.bias"]
    assert set(graph.buffers) == {"net.steps", "loss_fn.weight"}
    assert [op.module for op in graph.ops if op.kind == "linear"] == ["net.body.0"]
    assert kinds(graph)[-1] == "cross_entropy_loss" and graph.outputs[0].shape == ()


def test_nothing_is_allocated_or_changed() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1 << 20, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 1 << 20))
    graph = capture(net, (torch.empty(1 << 20, 1 << 20, device="meta"),))
    assert graph.parameters["0.weight"].numel == 1 << 36 and all(p.is_meta for p in net.parameters())
    net = Layers()
    before = {name: (id(x), x.clone()) for name, x in [*net.named_parameters(), *net.named_buffers()]}
    capture(net, (X,))
    for name, x in [*net.named_parameters(), *net.named_buffers()]:
        assert id(x) == before[name][0] and torch.equal(x, before[name][1])


def test_a_model_is_left_as_it_was_when_its_capture_fails() -> None:
    def f(m, x):
        raise ZeroDivisionError("the model's own")

    net = Apply(f)
    held = net.w
    with pytest.raises(sw.CaptureError, match="ZeroDivisionError: the model's own"):
        capture(net, (X,))
    assert net.w is held
    net.f = lambda m, x: x @ m.w
    assert kinds(capture(net, (X,))) == ["matmul"]


def test_tied_tensors_are_one_value() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    graph = capture(net, (X.float(),))
    assert list(graph.parameters) == ["0.weight", "0.bias", "1.bias"] and graph.aliases == {"1.weight": "0.weight"}
    assert graph.ops[0].inputs[1] is graph.ops[1].inputs[1]


def test_dead_operators_are_gone_unless_marked() -> None:
    def f(m, x):
        torch.sin(x)
        m.op(x)
        return x @ m.w

    assert kinds(capture(Apply(f, op=torch.cos), (X,))) == ["matmul"]
    assert kinds(capture(Apply(f, op=sw.shard(torch.cos, ((8, 1),))), (X,))) == ["cos", "matmul"]


def test_constants_of_the_forward() -> None:
    net = Apply(lambda m, x: x @ m.w + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=D) * torch.ones(8, dtype=D))
    net.table = draw(8)
    assert len(capture(net, (X,)).constants) == 1
    assert_as_one_device(net, (X,), (X,))
    net.f = lambda m, x: x @ m.w + m.table  # a tensor that is neither parameter nor buffer
    assert_as_one_device(net, (X,), (X,))


def test_evaluation_is_captured_as_such() -> None:
    net = Apply(lambda m, x: x @ m.w if m.training else x)
    assert kinds(capture(net, (X,))) == ["matmul"] and kinds(capture(net.eval(), (X,))) == []
    assert kinds(capture(net, (X, X), loss_fn=nn.L1Loss(reduction="sum")))[-1:] == ["l1_loss"]


# -- in place ----------------------------------------------------------------------------------------------------------


def test_in_place_becomes_plain() -> None:
    def f(m, x):
        y = x @ m.w
        y += 1
        return F.relu(y, inplace=True)

    graph = capture(Apply(f), (X,))
    assert kinds(graph) == ["matmul", "add", "relu"] and not any(op.target._schema.is_mutable for op in graph.ops)


def parameter_change(m, x):
    with torch.no_grad():
        m.w.clamp_(-1, 1)  # the parameter itself
    return x @ m.w


@pytest.mark.parametrize(("f", "text", "name"), [(parameter_change, "itself", "'w'")])
def test_changes_that_would_be_lost(f, text, name) -> None:
    with pytest.raises(sw.CaptureError, match=name) as raised:
        capture(Apply(f, table=torch.zeros(8, dtype=D)), (X,))
    assert raised.value.source == line_of(f, text)


# -- what cannot be captured -------------------------------------------------------------------------------------------


def branch(m, x):
    if (x @ m.w).sum() > 0:  # asks for a value
        return x
    return x @ m.w


def scale_by_item(m, x):
    top = x.max().item()  # reads a value
    return x @ m.w * top


def loop_over_value(m, x):
    for _ in range(int(x.abs().amax())):  # a value as a count
        x = x @ m.w
    return x


def masked(m, x):
    return (x @ m.w)[x[:, 0] > 0]  # as many rows as there are


def positions(m, x):
    return (x @ m.w).nonzero()  # as many as there are


@pytest.mark.parametrize(
    ("f", "text", "message"),
    [
        (branch, "asks for", "data-dependent"),
        (scale_by_item, "reads a", "depends on the values"),
        (loop_over_value, "as a count", "data-dependent"),
        (masked, "many rows", "depends on the values"),
        (positions, "as many", "depends on the values"),
    ],
)
def test_what_depends_on_values(f, text, message, capfd) -> None:
    with pytest.raises(sw.CaptureError, match=message) as raised:
        sw.plan(Apply(f), (X,), devices=8)
    assert raised.value.source == line_of(f, text)
    assert "values of tensors" in raised.value.legal
    assert "data-dependent" in raised.value.message or (
        "called on [(" in raised.value.message and raised.value.operator
    )
    assert capfd.readouterr() == ("", "")  # no half graphs beside it


def test_recomputed_without_a_function_is_captured() -> None:
    net = Apply(lambda m, x: torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(y @ m.w), x, use_reentrant=False))
    assert_as_one_device(net, (X,), (X,))


def test_errors_of_the_model_itself_have_its_line() -> None:
    def f(m, x):
        return x @ m.w @ m.w[:5]  # 8 against 5

    with pytest.raises(sw.CaptureError, match="RuntimeError") as raised:
        sw.AutoParallel(Apply(f))(X)
    assert raised.value.source == line_of(f, "8 against 5") and raised.value.__cause__ is not None
    for stranger in (lambda m, x, y: x, lambda m: m.w):
        with pytest.raises(sw.CaptureError, match="TypeError"):
            capture(Apply(stranger), (X,))


def mark_of_several(m, x):
    return m.op(x, m.w)  # two operators


def test_a_mark_is_on_one_operator() -> None:
    for function, count in ((lambda a, b: torch.relu(a @ b), "2: matmul, relu"), (lambda a, b: a, "0: none")):
        with pytest.raises(sw.CaptureError, match=f"holds {count}") as raised:
            capture(Apply(mark_of_several, op=sw.shard(function, ((1, 1), (1, 1)))), (X,))
        assert raised.value.operator == "op" and raised.value.source.startswith("test_export.py:")
        assert "each operator by itself" in raised.value.legal
    unmarked = Apply(mark_of_several, op=sw.Operator(lambda a, b: torch.relu(a @ b)))
    assert kinds(capture(unmarked, (X,))) == ["matmul", "relu"]
    with pytest.raises(sw.CaptureError, match="holds 3") as raised:
        capture(sw.shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ((1, 1),)), (X.float(),))


def test_the_plain_form_takes_what_the_one_in_place_takes() -> None:
    """``x.pow_(2)`` and ``torch.pow(2, x)`` are both overloads called Scalar."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1).pow_(2.0).add_(1).mul_(x)

    made = [op.target for op in capture(Net(), (torch.ones(4),)).ops]
    assert made[1] is torch.ops.aten.pow.Tensor_Scalar and all(
        str(t._schema.arguments[0].type) == "Tensor" for t in made
    )


def test_marks_leave_no_trace() -> None:
    plain, marked = Marked(None, None, None), Marked()
    assert kinds(capture(plain, (X,))) == kinds(capture(marked, (X,))) == ["matmul", "relu", "matmul", "tanh", "linear"]
    assert [op.outputs[0].shape for op in capture(plain, (X,)).ops] == [
        op.outputs[0].shape for op in capture(marked, (X,)).ops
    ]


def test_a_gradient_comes_to_those_outputs_alone_that_have_one() -> None:
    graph = capture(nn.Linear(3, 4), (torch.randn(2, 3), torch.randn(2, 4)), None, loss_fn=nn.MSELoss())
    (spread,) = (op for op in graph.ops if op.kind == "broadcast_tensors")
    assert [v.requires_grad for v in spread.outputs] == [True, False], "what is aimed at has none"


def test_lazy_modules_are_called_once_before():
    net, x = nn.Sequential(nn.LazyLinear(8), nn.Tanh()), draw(4, 8).float()
    with pytest.raises(sw.CaptureError) as raised:
        sw.AutoParallel(net, parallel_mode="semi_auto")(x)
    assert "uninitialized parameter" in str(raised.value) and "one call of the plain model" in raised.value.legal
    net(x)
    assert torch.equal(sw.AutoParallel(net, parallel_mode="stand_alone")(x), net(x))


def test_a_function_under_autocast_is_the_same_in_a_second_run() -> None:
    """The forward makes the class of each run anew."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def f(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return Doubled.apply(x.float() @ m.w.float())

    assert [op.kind for op in capture(Apply(f), (X,)).ops][-1] == "Doubled"
