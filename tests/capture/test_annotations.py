"""`sw.shard` and `sw.Operator`: on functions and modules, tuples and Layouts, at construction and later."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close, parallel
from small_networks import Apply, D, Marked, draw, labels
from torch import nn

import shardwright as sw

X, T = draw(16, 8), labels(16)
L = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))


def planned(net: nn.Module, *inputs: torch.Tensor, devices: int = 8, **options) -> sw.Plan:
    return sw.plan(net, inputs or (X,), devices=devices, **options)


def product(*marks, **named) -> Apply:
    return Apply(lambda m, x: m.op(x, m.w), op=sw.shard(torch.matmul, *marks, **named))


# -- one device --------------------------------------------------------------------------------------------------------


def test_a_mark_does_nothing_on_one_device() -> None:
    operator = sw.shard(torch.matmul, ((2, 4), (4, 1)))
    assert isinstance(operator, sw.Operator) and operator.in_strategy == ((2, 4), (4, 1))
    assert torch.equal(operator(X, X.mT), X @ X.mT) and torch.equal(operator(input=X, other=X.mT), X @ X.mT)
    relu = nn.ReLU()
    assert sw.shard(relu, ((8, 1),)) is relu and torch.equal(relu(X), X.relu())
    assert relu.shard(((4, 2),)) is relu
    assert "matmul" in repr(operator) and "((2, 4), (4, 1))" in repr(operator)
    assert operator.source.startswith("test_annotations.py:")


def test_an_operator_may_be_marked_again_and_wrapped_again() -> None:
    operator = sw.Operator(torch.matmul)
    assert operator.in_strategy is None
    assert operator.shard(((8, 1), (1, 1)), ((4, 2),)) is operator
    assert sw.shard(operator, ((1, 8), (8, 1))) is operator
    assert operator.in_strategy == ((1, 8), (8, 1)) and operator.out_strategy is None


def test_marked_models_can_be_copied_and_pickled() -> None:
    net = Marked()
    sw.shard(net.head, ((2, 1), (4, 1), (4,)))
    counterpart = copy.deepcopy(net)
    counterpart.matmul1.shard(((8, 1), (1, 1))), counterpart.head.shard(((8, 1), (1, 1), (1,)))
    assert planned(net).operator("matmul1").in_strategy == ((2, 4), (4, 1))
    assert planned(net).operator("head").in_strategy == ((2, 1), (4, 1), (4,))
    assert planned(counterpart).operator("matmul1").in_strategy == ((8, 1), (1, 1))
    assert planned(counterpart).operator("head").in_strategy == ((8, 1), (1, 1), (1,))
    read = pickle.loads(pickle.dumps(net))
    assert planned(read).operator("head").in_strategy == ((2, 1), (4, 1), (4,))
    assert planned(read).fingerprint == planned(net).fingerprint


# -- tuples, Layouts, mixtures -----------------------------------------------------------------------------------------

A_MATRIX = (L("dp", "mp"), L("mp", "sp"))


@pytest.mark.parametrize(
    ("marks", "first", "weight"),
    [
        ((((2, 4), (4, 1)),), (2, 4), (4, 1)),
        ((([2, 4], [4, 1]),), (2, 4), (4, 1)),
        (([(2, 4), (4, 1)],), (2, 4), (4, 1)),
        ((A_MATRIX,), (2, 2), (2, 2)),
        (((L("dp", "mp"), (2, 2)),), (2, 2), (2, 2)),
        ((((2, 2), L("mp", "sp")),), (2, 2), (2, 2)),
        ((((2, 2), (2, 2)), ((4, 2),)), (2, 2), (2, 2)),
        ((((2, 2), (2, 2)), (L(("sp", "dp"), "mp"),)), (2, 2), (2, 2)),
        ((A_MATRIX, (L("None", ("mp", "sp", "dp")),)), (2, 2), (2, 2)),
        ((None, ((1, 8),)), (8, 1), (1, 1)),
        ((None, (L("None", "mp"),)), (8, 1), (1, 1)),
    ],
    ids=str,
)
def test_strategies_of_a_product(marks, first, weight) -> None:
    net = product(*marks)
    operator = planned(net).operator("op")
    assert operator.in_strategy == (first, weight)
    for layout, entry in zip(operator.in_layouts, marks[0] or ()):
        if isinstance(entry, sw.Layout):
            assert layout == entry
    if len(marks) > 1:
        entry = marks[1][0]
        assert operator.out_layouts == (entry if isinstance(entry, sw.Layout) else sw.Layout.from_cuts(8, entry),)
    assert_as_one_device(net, (X,), (X,))


def test_cuts_of_an_output_are_read_on_the_matrix_that_layouts_of_inputs_build() -> None:
    """Columns keep the axis that cuts them, then take the axis of the partial sum, then the one that cut rows."""
    net = product(A_MATRIX, ((1, 8),))
    assert planned(net).operator("op").out_layouts == (L("None", ("sp", "mp", "dp")),)
    assert_as_one_device(net, (X,), (X,))


@pytest.mark.parametrize("ranks", [(0, 2, 1, 3), (0, 4, 1, 5, 2, 6, 3, 7), (0, 1, 4, 5, 2, 3, 6, 7)], ids=str)
def test_marks_by_layouts_with_a_rank_list(ranks: tuple[int, ...], tmp_path: Path) -> None:
    matrix = {4: (2, 2), 8: (2, 4)}[len(ranks)]
    mesh = sw.Layout(matrix, name=("dp", "mp"), rank_list=ranks)
    net = product((mesh("dp", ("mp", "None")), mesh("mp", "None")), (mesh(("dp", "mp"), "None"),))
    plan = planned(net, devices=len(ranks))
    plain = sw.Layout(matrix, ("dp", "mp"))("mp", "None")
    for position, rank in enumerate(ranks):
        assert plan.parameters["w"].slice(rank) == plain.slice((8, 8), position)
    plan.save(tmp_path / "plan.json")
    again = sw.plan(net, (X,), devices=len(ranks), strategies=tmp_path / "plan.json")
    assert again.collectives(1) == plan.collectives(1)
    assert_as_one_device(net, (X,), (X,), devices=len(ranks))


@pytest.mark.parametrize("mode", ["semi_auto", "sharding_propagation", "recursive_programming", "dynamic_programming"])
@pytest.mark.parametrize("cuts", [(2, 4), (4, 2), (8, 1), (1, 4)], ids=str)
def test_a_product_gathers_what_it_contracts_of_both_operands(cuts: tuple[int, int], mode: str) -> None:
    """((a, b), (a, b)): the operands lie as on the matrix (a, b), and so does the result."""
    a, b = cuts
    net = product((cuts, cuts))
    plan = planned(net, parallel_mode=mode)
    operator, grid = plan.operator("op"), sw.Layout.from_cuts(8, cuts)
    assert operator.in_strategy == (cuts, cuts) and operator.out_layouts == (grid,)
    assert [layout.cuts for layout in operator.in_layouts] == [(a, 1), (1, b)]
    assert f"(({a}, {b}), ({a}, {b})) gathers the contracted dim of both operands" in "".join(plan.notes)
    weight = plan.parameters["w"]
    assert weight.storage == grid and weight.local_shape(0) == (8 // a, 8 // b)
    gathers = [c.ranks for c in plan.collectives(5) if c.phase == "storage"]
    assert gathers == [next(group for group in grid.groups(grid.dims[0]) if 5 in group)] * (a > 1)
    assert_as_one_device(net, (X,), (X,), mode=mode)


def test_a_product_that_gathers_both_operands_has_its_parameters_cut_further_and_saved(tmp_path: Path) -> None:
    net = product(((2, 1), (2, 1)))
    plan = planned(net, hsdp={"threshold": 0})
    assert plan.parameters["w"].local_shape(0) == (1, 8)
    plan.save(tmp_path / "plan.json")
    again = planned(net, strategies=tmp_path / "plan.json", hsdp={"threshold": 0})
    assert again.parameters == plan.parameters and again.collectives(3) == plan.collectives(3)
    assert_as_one_device(net, (X,), (X,))


def test_two_products_that_gather_a_parameter_of_two_layouts_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(draw(8, 8))
            self.a, self.b = sw.shard(torch.matmul, ((2, 4), (2, 4))), sw.shard(torch.matmul, ((4, 2), (4, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x, self.w), self.w)

    with pytest.raises(sw.PlanError, match=r"'w' .* is wanted in two layouts: a .* \(2, 4\) .* b .* \(4, 2\)"):
        planned(Twice())


def test_a_tuple_lays_out_as_the_contract_says() -> None:
    plan = planned(product(((2, 4), (4, 1))))
    x, w = plan.operator("op").in_layouts
    assert x.slice((16, 8), 5) == (slice(8, 16), slice(2, 4)) and w.slice((8, 8), 5) == (slice(2, 4), slice(0, 8))
    assert next(c.ranks for c in plan.collectives(5) if c.phase == "forward") == (4, 5, 6, 7)
    relu = Apply(lambda m, x: m.op(x), op=sw.shard(torch.relu, ((4, 1),)))
    layout = planned(relu).operator("op").in_layouts[0]
    assert layout.slice((16, 8), 0) == layout.slice((16, 8), 1) != layout.slice((16, 8), 2)  # the rest on the right
    transposed = Apply(lambda m, x: m.op("km,kn->mn", x, m.w), op=sw.shard(torch.einsum, ((2, 4), (2, 1))))
    k_by_m = planned(transposed, draw(8, 16)).operator("op").in_layouts[0]
    assert k_by_m == sw.Layout((4, 2), ("m", "k"))("k", "m")  # m is the major factor


def test_unmarked_operators_keep_the_name_of_their_attribute() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(draw(8, 8))
            self.first, self.gate = sw.Operator(torch.matmul), sw.Operator(torch.relu)
            self.steps = [sw.Operator(torch.tanh), sw.Operator(torch.exp)]
            self.several = sw.Operator(lambda x: x.exp() + 1)
            self.inner = Apply(lambda m, x: m.op(x), op=sw.Operator(torch.sin))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.gate(self.gate(self.first(x, self.w)))
            return self.inner(self.several(self.steps[1](self.steps[0](x.relu()))))

    net = Net()
    names = [op.name for op in planned(net).operators]
    assert names == ["first", "gate", "gate_1", "relu_2", "steps.0", "steps.1", "exp_1", "add", "inner.op"]
    assert all(op.cause != "mark" for op in planned(net).operators)
    plan = planned(net, marks={"gate": ((2, 4),), "steps.1": ((1, 8),)})
    assert plan.operator("gate").in_strategy == ((2, 4),) and plan.operator("gate_1").in_strategy == ((8, 1),)
    assert plan.operator("steps.1").in_strategy == ((1, 8),)
    assert_as_one_device(net, (X,), (X,))


# -- modules that are one operator -------------------------------------------------------------------------------------


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = sw.shard(nn.Linear(8, 16, dtype=D), ((2, 2), (2, 2), (2,)), ((8, 1),))
        self.relu = sw.shard(nn.ReLU(inplace=True), (L("dp", "mp"),))
        self.plain = sw.shard(nn.Linear(16, 8, bias=False, dtype=D), ((2, 4), (1, 4)))
        self.softmax = sw.shard(nn.Softmax(-1), ((2, 4),))
        self.loss = sw.shard(nn.CrossEntropyLoss(), ((4, 1), (4,)))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.softmax(self.plain(self.relu(self.linear(x)))), target)


def test_modules() -> None:
    plan = planned(Modules(), X, T)
    assert {o.name: (o.op, o.in_strategy, o.cause) for o in plan.operators} == {
        "linear": ("linear", ((2, 2), (2, 2), (2,)), "mark"),
        "relu": ("relu", ((2, 2),), "mark"),
        "plain": ("linear", ((2, 4), (1, 4)), "mark"),
        "softmax": ("softmax", ((2, 4),), "mark"),
        "loss": ("cross_entropy_loss", ((4, 1), (4,)), "mark"),
    }
    assert plan.parameters["linear.weight"].layout.cuts == (2, 2) and plan.parameters["linear.bias"].layout.cuts == (2,)
    assert plan.operator("linear").out_strategy == ((8, 1),)
    assert_as_one_device(Modules(), (X, T), (X, T))


def test_the_bias_of_a_module_may_be_left_out() -> None:
    net = nn.Sequential(sw.shard(nn.Linear(8, 8, dtype=D), ((2, 2), (2, 2))))
    assert planned(net).operator("0").in_strategy == ((2, 2), (2, 2), (2,))
    assert_as_one_device(net, (X,), (X,))


def test_a_marked_loss_function_and_a_marked_model() -> None:
    net = Marked()
    loss = sw.shard(nn.CrossEntropyLoss(), ((2, 1), (2,)))
    assert_as_one_device(net, (X, T), loss_fn=loss)
    plan = sw.plan(net, (X,), loss, T, devices=8)
    assert plan.operators[-1].in_strategy == ((2, 1), (2,)) and plan.operators[-1].cause == "mark"
    whole = sw.shard(nn.Linear(8, 8, dtype=D), ((2, 2), (2, 2), (2,)))  # the model itself is the operator
    assert planned(whole).operators[0].in_strategy == ((2, 2), (2, 2), (2,))
    assert_as_one_device(whole, (X,))


# -- where marks may stand ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(8, 8))
        self.matmul1 = sw.shard(torch.matmul, ((4, 2), (2, 1)))
        self.steps = [sw.shard(torch.tanh, ((8, 1),)), sw.Operator(torch.relu)]
        self.by_name = {"scale": sw.shard(torch.mul, ((2, 1), ()))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.matmul1(x, self.w)
        for step in self.steps:
            x = step(x)
        return self.by_name["scale"](x, torch.tensor(2.0, dtype=D))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.layers = nn.Sequential(nn.Linear(8, 8, dtype=D), sw.shard(nn.ReLU(), ((2, 2),)), nn.Identity())
        self.blocks[1].matmul1.shard(((1, 8), (8, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.block, *self.blocks):
            x = x + block(x)
        return self.layers(x)


def test_marks_in_lists_dicts_and_nested_modules() -> None:
    plan = planned(Nested())
    expected = {
        "block.matmul1": ((4, 2), (2, 1)),
        "blocks.0.matmul1": ((4, 2), (2, 1)),
        "blocks.1.matmul1": ((1, 8), (8, 1)),
        "block.steps.0": ((8, 1),),
        "block.by_name.scale": ((2, 1), ()),
        "layers.1": ((2, 2),),
    }
    for name, strategy in expected.items():
        operator = plan.operator(name)
        assert operator.in_strategy == strategy and operator.cause == "mark", name
        assert operator.source.startswith("test_annotations.py:")
    assert plan.operator("blocks.1.matmul1").module == "blocks.1"
    assert plan.operator("layers.0").op == "linear" and plan.operator("layers.0").cause == "batch"
    assert_as_one_device(Nested(), (X,), (X,))


def test_an_operator_called_twice() -> None:
    def f(m, x):
        first = torch.relu(x @ m.w)  # unmarked ones of the same kind before, between and after
        second = m.relu(first - 0.1)
        third = m.relu(second.mT)
        return torch.relu(third - 0.2) + m.other(third)

    net = Apply(f, relu=sw.shard(torch.relu, ((1, 8),)), other=sw.shard(torch.relu, ((8, 1),)))
    plan = planned(net)
    names = [o.name for o in plan.operators]
    assert len(set(names)) == len(names)
    twice = [o for o in plan.operators if o.cause == "mark" and o.in_strategy == ((1, 8),)]
    assert [o.in_shapes for o in twice] == [((16, 8),), ((8, 16),)] and twice[0].name == "relu"
    assert plan.operator("other").in_strategy == ((8, 1),)
    assert_as_one_device(net, (X,), (X,))


def test_marks_that_nothing_holds() -> None:
    free = sw.shard(torch.matmul, ((2, 4), (4, 1)))
    plan = planned(Apply(lambda m, x: free(x, m.w)))
    assert plan.operators[0].in_strategy == ((2, 4), (4, 1)) and plan.operators[0].cause == "mark"
    assert_as_one_device(Apply(lambda m, x: free(x, m.w)), (X,))


# -- the order of a strategy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "call", "marks"),
    [
        (torch.matmul, lambda m, x: m.op(x, m.w), ((2, 4), (4, 1))),
        (torch.matmul, lambda m, x: m.op(other=m.w, input=x), ((4, 1), (2, 4))),
        (lambda a, b: torch.matmul(b, a), lambda m, x: m.op(m.w, x), ((4, 1), (2, 4))),
        (lambda pair: torch.matmul(pair[0], pair[1]), lambda m, x: m.op((x, m.w)), ((2, 4), (4, 1))),
        (lambda number, a, b: torch.matmul(a, b), lambda m, x: m.op(3, x, m.w), ((2, 4), (4, 1))),
    ],
    ids=["plain", "named", "swapped", "nested", "numbers"],
)
def test_entries_stand_in_the_order_of_the_call(function, call, marks) -> None:
    plan = planned(Apply(call, op=sw.shard(function, marks)))
    assert plan.operators[0].in_strategy == ((2, 4), (4, 1))
    assert plan.parameters["w"].layout.cuts == (4, 1)


def test_one_tensor_in_two_places() -> None:
    def f(m, x):
        y = x @ m.w
        return m.mul(y, y), m.gram(y, y.mT), m.square(y[:8], y[:8])

    net = Apply(
        f,
        mul=sw.shard(torch.mul, ((2, 4), (2, 4))),
        gram=sw.shard(torch.matmul, ((2, 4), (4, 1))),
        square=sw.shard(torch.matmul, ((2, 2), (2, 2))),
    )
    assert_as_one_device(net, (X,), (X,))


# -- before the first step ---------------------------------------------------------------------------------------------


def test_the_last_mark_before_the_first_step_holds() -> None:
    net = Marked()
    model = parallel(net, nn.CrossEntropyLoss())
    net.matmul1.shard(((4, 1), (1, 2)))
    sw.shard(net.head, ((1, 8), (1, 8), (1,)))
    net.head.shard(((2, 2), (2, 2), (2,)), ((8, 1),))
    model.matmul2.shard(((8, 1), (1, 1)))
    close(model(X, T), nn.functional.cross_entropy(net(X), T))
    found = {name: model.plan.operator(name).in_strategy for name in ("matmul1", "matmul2", "head")}
    assert found == {"matmul1": ((4, 1), (1, 2)), "matmul2": ((8, 1), (1, 1)), "head": ((2, 2), (2, 2), (2,))}
    with pytest.raises(sw.SettingError, match="too late"):
        net.matmul1.shard(((1, 1), (1, 8)))
    model(X, T)
    assert model.plan.operator("matmul1").in_strategy == ((4, 1), (1, 2))


def test_marks_may_be_taken_back() -> None:
    net = Marked()
    net.matmul1.shard(), net.relu1.shard(None)
    plan = planned(net)
    assert plan.parameters["w1"].layout.is_replicated
    assert {o.cause for o in plan.operators if o.name not in ("matmul2",)} == {"batch"}


def test_data_parallel_does_not_heed_marks() -> None:
    plan = planned(Marked(), parallel_mode="data_parallel")
    assert {o.cause for o in plan.operators} == {"batch"}
    assert all(p.layout.is_replicated for p in plan.parameters.values())


# -- in-place operators, views, several outputs ------------------------------------------------------------------------


def test_marks_on_operators_of_every_kind() -> None:
    def f(m, x):
        y = m.reshape(x @ m.w, (16, 2, 4))
        y = m.transpose(y, 0, 1)
        left, right = m.split(y, 2, -1)
        y = m.cat([left, right, left], 2)
        y = m.add_(y, 1.5)
        top, places = m.max(y, 0)
        return m.sum(F.relu(y), 2), top, places, m.where(y > 0, y, torch.zeros((), dtype=D))

    net = Apply(
        f,
        reshape=sw.shard(torch.reshape, ((2, 4),)),
        transpose=sw.shard(torch.transpose, ((2, 2, 2),)),
        split=sw.shard(torch.split, ((2, 4, 1),), ((1, 8, 1), (2, 1, 2))),
        cat=sw.shard(torch.cat, ((1, 4, 1),) * 3),
        add_=sw.shard(torch.Tensor.add_, ((2, 2, 2),)),
        max=sw.shard(torch.max, ((1, 4, 2),)),
        sum=sw.shard(torch.sum, ((2, 1, 2),), ((2, 4),)),
        where=sw.shard(torch.where, ((2, 4, 1), (2, 4, 1), ())),
    )
    plan = planned(net)
    assert plan.operator("split").out_strategy == ((1, 8, 1), (2, 1, 2))
    assert plan.operator("sum").in_strategy == ((2, 1, 2),) and plan.operator("sum").out_strategy == ((2, 4),)
    assert_as_one_device(net, (X,), (X,))
