"""Mistakes: one error each, raised while planning, that says who, where, what, which sizes, and what would be legal."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from one_device import parallel
from small_networks import Apply, D, Marked, draw, labels
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.graph import Graph
from shardwright.planning import make_plan
from shardwright.settings import Settings

X, T = draw(16, 8), labels(16)
L = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
FOUR = sw.Layout((2, 2), ("a", "b"))


def line_of(function: Callable, text: str) -> str:
    """``file.py:41`` of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"test_errors_bad_input.py:{start + at}"


def literal(legal: str) -> Any:
    """The strategy that an error offers, or None where it offers none."""
    try:
        return ast.literal_eval(legal)
    except (ValueError, SyntaxError):
        return None


# -- strategies --------------------------------------------------------------------------------------------------------


def product(m, x):
    return m.op(x, m.w)  # the product


def pointwise(m, x):
    return m.op(x @ m.w)  # the pointwise operator


def along(m, x):
    return m.op(x @ m.w, dim=1)  # the sums


def biased(m, x):
    return m.op(x, m.w, m.b)  # with a bias


@dataclass
class Mistake:
    """A strategy, and what its error must say."""

    says: str
    in_strategy: Any = ((8, 1),)
    out_strategy: Any = None
    call: Callable = pointwise
    operator: Callable = torch.relu
    devices: int = 8
    rows: int = 16
    error: type = sw.StrategyError
    offers: Any = "a strategy"


def of_product(says: str, in_strategy: Any, **rest: Any) -> Mistake:
    return Mistake(says, in_strategy, call=product, operator=torch.matmul, **rest)


MISTAKES = {
    # numbers of inputs and dims
    "an input too few": of_product(r"1 entries .* 2 tensor inputs of shapes \[\(16, 8\), \(8, 8\)\]", ((2, 4),)),
    "an input too many": of_product("3 entries", ((2, 4), (4, 1), (1,))),
    "no inputs": of_product("0 entries", ()),
    "a dim too few": Mistake(r"input 0 has shape \(16, 8\), 2 dims; its entry \(8,\) has 1", ((8,),)),
    "a dim too many": of_product(r"input 1 has shape \(8, 8\), 2 dims; its entry .* has 3", ((2, 4), (4, 1, 1))),
    "cuts without the outer tuple": Mistake("2 entries .* 1 tensor input", (4, 1), offers=((4, 1),)),
    # sizes
    "does not divide": of_product(
        "input 0, dim 0 has size 16, which does not divide by 3", ((3, 1), (1, 1)), devices=12
    ),
    "does not divide, minor dim": Mistake(
        "input 0, dim 1 has size 8, which does not divide by 16", ((1, 16),), devices=16
    ),
    "a batch smaller than its split": of_product(
        "input 0, dim 0 has size 4, which does not divide by 8", ((8, 1), (1, 1)), rows=4
    ),
    "the contracted dim differs": of_product(r"factor 'k' \(size 8\) 4 ways, input 1 splits it 2", ((2, 4), (2, 1))),
    "more than the devices": of_product(r"\(4, 4, 1\) need 16 devices, there are 8", ((4, 4), (4, 1))),
    "the product does not divide": of_product(r"make 3 parts, which does not divide 8", ((3, 1), (1, 1)), rows=48),
    "six devices, four parts": of_product("make 4 parts, which does not divide 6", ((4, 1), (1, 1)), devices=6),
    "may not be split": Mistake(
        r"input 0, dim 1 \(size 8\) may not be split .* asked for 4",
        ((2, 4),),
        call=along,
        operator=torch.cumprod,
        offers=((2, 1),),
    ),
    "classes may not be split": Mistake(
        "dim 1 .* may not be split", ((2, 2), (2,)), operator=F.multi_margin_loss, call=lambda m, x: m.op(x @ m.w, T)
    ),
    "the bias differs": Mistake(
        "input 1 splits it 4|input 1 splits the shared factor 'n'",
        ((2, 1), (4, 1), (2,)),
        call=biased,
        operator=F.linear,
    ),
    # values
    "zero": Mistake("at least 1, not 0", ((0, 1),)),
    "negative": Mistake("at least 1, not -1", ((-1, 1),)),
    "a word": Mistake("at least 1, not 'dp'", (("dp", 1),)),
    "a float": Mistake("at least 1, not 2.0", ((2.0, 1),)),
    "True": Mistake("at least 1, not True", ((True, 1),)),
    "None inside": Mistake("the entry of input 0 is None", (None,), offers="text"),
    "a number": Mistake("one entry per tensor input", 4),
    "a text": Mistake("one entry per tensor input", "dp"),
    "a dict": Mistake("one entry per tensor input", {"x": (8, 1)}),
    # Layouts
    "a Layout without the tuple": Mistake("one entry per tensor input", L("dp", "mp"), offers=((2, 2),)),
    "a Layout that was not called": Mistake("names no dims", (L,), offers="text"),
    "a Layout of other devices": Mistake(
        r"device matrix of 4 devices \(2, 2\), there are 8", (FOUR("a", "b"),), error=sw.LayoutError, offers="text"
    ),
    "a Layout of other dims": Mistake(r"input 0 has shape \(16, 8\), 2 dims", (L("dp"),)),
    "a Layout that does not divide": Mistake(
        "dim 0 has size 12, which does not divide by 8", (L(("dp", "sp", "mp"), "None"),), rows=12
    ),
    "Layouts that differ on the contracted dim": of_product(
        "'k' over different devices", (L("dp", "sp"), L("mp", "None")), offers="text"
    ),
    "Layouts that order it otherwise": of_product(
        "'k' over different devices", (L("dp", ("sp", "mp")), L(("mp", "sp"), "None")), offers="text"
    ),
    "an axis on two factors": of_product(
        "'m' .* and 'n' .* over the same devices", (L("dp", "sp"), L("sp", "dp")), offers="text"
    ),
    "no axis left for a tuple": of_product(
        "no axis is left that cuts the factor 'n' 2 ways", (L(("dp", "sp", "mp"), "None"), (1, 2))
    ),
    "a tuple against a Layout": of_product("2 ways, input 1 splits it 4", (L("dp", "sp"), (4, 1))),
    # out_strategy
    "outputs too many": Mistake(r"one entry per output, here 1 of shapes \[\(16, 8\)\]", None, ((8, 1), (8, 1))),
    "out: cuts without the outer tuple": Mistake("one entry per output", None, (8, 1)),
    "out: a text": Mistake("one entry per output", None, "dp"),
    "out: a Layout without the tuple": Mistake("one entry per output", None, L("dp", "None")),
    "out: dims": Mistake(r"output 0 has shape \(16, 8\), 2 dims; its entry has 1", None, ((8,),)),
    "out: does not divide": Mistake(
        r"dim 1 of \(16, 8\) has size 8, which does not divide by 3", None, ((1, 3),), devices=24, error=sw.LayoutError
    ),
    "out: more than the devices": Mistake(
        r"\(8, 2\) need 16 devices, there are 8", None, ((8, 2),), error=sw.LayoutError
    ),
    "out: a word": Mistake("at least 1, not 'a'", None, (("a", 1),), error=sw.LayoutError),
    "out: a Layout of other devices": Mistake(
        r"matrix of 4 devices \(2, 2\), there are 8", None, (FOUR("a", "b"),), error=sw.LayoutError, offers="text"
    ),
    "out: a Layout that was not called": Mistake("names no dims", None, (L,), offers="text"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_strategies_that_do_not_fit(name) -> None:
    case = MISTAKES[name]
    x = draw(case.rows, 8)
    net = Apply(case.call, op=sw.shard(case.operator, case.in_strategy, case.out_strategy), b=nn.Parameter(draw(8)))
    messages = []
    for attempt in (lambda: sw.plan(net, (x,), devices=case.devices), lambda: parallel(net, devices=case.devices)(x)):
        with pytest.raises(sw.ShardwrightError) as raised:
            attempt()
        messages.append(str(raised.value))
    error = raised.value
    assert messages[0] == messages[1] and type(error) is case.error
    assert re.search(case.says, error.message), error.message
    assert error.operator.startswith("op (") and error.operator in str(error)
    text = {product: "the product", pointwise: "the pointwise", along: "the sums", biased: "a bias"}.get(case.call)
    if text is not None:
        assert error.source == line_of(case.call, text) and error.source in str(error)
    given = case.in_strategy if case.out_strategy is None else case.out_strategy
    assert repr(given) in str(error) or str(given) in str(error)
    assert error.legal and f"legal: {error.legal}" in str(error)
    offered = literal(error.legal)
    if case.offers == "text":
        return
    assert offered is not None and (case.offers == "a strategy" or offered == case.offers), error.legal
    net.op.shard(*((offered,) if case.out_strategy is None else (None, offered)))
    sw.plan(net, (x,), devices=case.devices)


def test_nothing_has_happened_when_a_strategy_is_refused() -> None:
    net = Marked(first=((2, 4), (2, 1)))
    torch.manual_seed(0)
    with sw.no_init_parameters():
        deferred = nn.Sequential(sw.shard(nn.Linear(8, 8), ((3, 1), (1, 1), (1,))))
    before, state = {n: p.clone() for n, p in net.named_parameters()}, torch.get_rng_state()
    for model, x in ((parallel(net), X), (parallel(deferred), X.float())):
        for _ in range(2):
            with pytest.raises(sw.StrategyError):
                model(x)
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in net.named_parameters())
    assert all(p.is_meta for p in deferred.parameters()) and torch.equal(torch.get_rng_state(), state)
    model = parallel(net)
    with pytest.raises(sw.StrategyError):
        model(X)
    net.matmul1.shard(((2, 4), (4, 1)))  # put right, it goes on
    model.dataset_strategy("full_batch")
    torch.testing.assert_close(model(X), net(X))


# -- the legal choice is legal -----------------------------------------------------------------------------------------

SHAPES = {
    "matmul": (torch.matmul, [(12, 8), (8, 6)]),
    "batched": (torch.matmul, [(4, 6, 8), (8, 12)]),
    "linear": (F.linear, [(12, 8), (6, 8), (6,)]),
    "relu": (torch.relu, [(12, 8)]),
    "add": (torch.add, [(12, 8), (12, 8)]),
    "broadcast": (torch.add, [(6, 12, 8), (1, 8)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(12, 8)]),
    "cumsum": (lambda x: torch.cumsum(x, 0), [(12, 8)]),
    "reshape": (lambda x: torch.reshape(x, (4, 24)), [(12, 8)]),
    "cross_entropy": (F.cross_entropy, [(12, 8), (12, 8)]),
}
CUTS = st.integers(1, 6) | st.sampled_from([8, 12, 16])


@lru_cache
def captured(name: str) -> Graph:
    function, shapes = SHAPES[name]
    net = Apply(lambda m, *inputs: m.op(*inputs), op=sw.shard(function, ()))
    return capture(net, tuple(torch.empty(s, device="meta") for s in shapes))


def plan_of(name: str, strategy: Any, devices: int) -> sw.Plan:
    graph = captured(name)
    op = graph.ops[0]
    marked = graph.with_ops((replace(op, mark=replace(op.mark, in_strategy=strategy)),))
    return make_plan(marked, devices, Settings("semi_auto"))


@settings(max_examples=200)
@given(st.data())
def test_the_legal_choice_is_legal(data) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    shapes = SHAPES[name][1]
    devices = data.draw(st.sampled_from([2, 4, 6, 8, 12]))
    strategy = tuple(
        data.draw(
            st.lists(CUTS, min_size=max(0, len(s) - data.draw(st.sampled_from([0, 0, 0, 1]))), max_size=len(s)).map(
                tuple
            )
        )
        for s in shapes
    )
    strategy = strategy[: data.draw(st.sampled_from([len(shapes)] * 4 + [1]))]
    try:
        plan = plan_of(name, strategy, devices)
    except sw.StrategyError as error:
        offered = literal(error.legal)
        assert offered is not None, error.legal
        plan = plan_of(name, offered, devices)
        assert plan.operator("op").in_strategy == offered
    else:
        assert plan.operator("op").in_strategy[: len(strategy)] == strategy


# -- parameters --------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(8, 8))
        self.first, self.second = sw.shard(torch.matmul, first), sw.shard(torch.matmul, second)

    def forward(self, x):
        y = self.first(x, self.w)  # the first use
        return self.second(y, self.w)  # the second use


@pytest.mark.parametrize("second", [((8, 1), (1, 1)), ((2, 2), (2, 2)), ((1, 4), (4, 1)), None], ids=str)
def test_one_parameter_in_two_layouts(second) -> None:
    # ((1, 4), (4, 1)) cuts it as many ways, over other devices.
    with pytest.raises(sw.PlanError, match=r"parameter 'w' \(8, 8\)") as raised:
        sw.plan(Shared(((2, 4), (4, 1)), second), (X,), devices=8)
    message = str(raised.value)
    for text in ("the first use", "the second use"):
        assert line_of(Shared.forward, text) in message
    assert "first" in message and ("second" in message or second is None)
    assert "(4, 1)" in message and str((second or ((8, 1), (1, 1)))[1]) in message and raised.value.legal
    error = raised.value
    assert error.operator and error.source == line_of(Shared.forward, "the second use")
    assert all(text in error.strategy for text in ("first ((2, 4), (4, 1))", f"second {second}" if second else "first"))
    sw.plan(Shared(((2, 4), (4, 1)), ((2, 4), (4, 1))), (X,), devices=8)


def test_a_tied_parameter_in_two_layouts() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = sw.shard(nn.Linear(8, 8, dtype=D), ((2, 1), (4, 1), (4,)))
            self.b = sw.shard(nn.Linear(8, 8, dtype=D), ((2, 4), (1, 4), (1,)))
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    with pytest.raises(sw.PlanError, match=r"'a.weight' .* a \(test_errors_bad_input.*, b \(test_errors_bad_input"):
        sw.plan(Tied(), (X,), devices=8)


# -- operators without a rule ------------------------------------------------------------------------------------------


def inverse(m, x):
    return torch.linalg.tensorinv(m.w, 1) @ x.mT  # has no rule


def test_operators_without_a_rule() -> None:
    with pytest.raises(sw.MissingRuleError) as raised:
        sw.plan(Apply(inverse), (X,), devices=8)
    error = raised.value
    assert "linalg_tensorinv" in error.operator and error.source == line_of(inverse, "has no rule")
    assert "(8, 8)" in error.message and "sw.rule(" in error.legal and 'on_missing_rule="replicate"' in error.legal
    sw.plan(Apply(inverse), (X,), devices=8, on_missing_rule="replicate")


def poisson(m, x):
    return x @ m.w + torch.poisson(x.abs())  # draws


def gamma(m, x):
    return x @ m.w + torch._standard_gamma(x.abs())  # draws


@pytest.mark.parametrize("f", [poisson, gamma])
def test_operators_that_draw_without_a_rule_cannot_be_repeated(f) -> None:
    with pytest.raises(sw.MissingRuleError, match="on 8 devices it would draw other random numbers") as raised:
        sw.plan(Apply(f), (X,), devices=8, on_missing_rule="replicate")
    assert raised.value.source == line_of(f, "draws") and "stand_alone" in raised.value.legal
    sw.plan(Apply(f), (X,), devices=8, parallel_mode="stand_alone")


# -- Layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sw.Layout((2, 2), ("dp", "dp")), "repeats"),
        (lambda: sw.Layout((2, 2), ("dp",)), "2 axes.* has 1"),
        (lambda: sw.Layout((2, 0), ("dp", "mp")), "at least 1, not 0"),
        (lambda: sw.Layout((2.0,), ("dp",)), "at least 1, not 2.0"),
        (lambda: sw.Layout(8, ("dp",)), "tuple of sizes, not 8"),
        (lambda: sw.Layout((8,), "dp"), "tuple of names, not 'dp'"),
        (lambda: sw.Layout((8,), None), "tuple of names, not None"),
        (lambda: sw.Layout((8,), (1,)), "tuple of names"),
        (lambda: sw.Layout((8,), ("interleaved_parallel",)), "reserved"),
        (lambda: sw.Layout((8,), ("None",)), "reserved"),
        (lambda: L("dp", "dp"), "'dp' is used twice"),
        (lambda: L(("dp", "mp"), "mp"), "'mp' is used twice"),
        (lambda: L("dp", "tp"), "unknown axis 'tp'"),
        (lambda: L("dp", 1), "1 is no axis"),
    ],
)
def test_layouts_that_cannot_be(make, says) -> None:
    with pytest.raises(sw.LayoutError, match=says) as raised:
        make()
    assert raised.value.legal and raised.value.source == f"test_errors_bad_input.py:{make.__code__.co_firstlineno}"


# -- settings ----------------------------------------------------------------------------------------------------------


def planned(**settings) -> sw.Plan:
    return sw.plan(Marked(), (settings.pop("x", X),), **{"devices": 8, **settings})


@pytest.mark.parametrize(
    ("attempt", "says", "legal"),
    [
        (lambda: planned(parallel_mode="auto"), "unknown parallel_mode 'auto'", "semi_auto"),
        (lambda: sw.AutoParallel(Marked(), parallel_mode="auto"), "unknown parallel_mode 'auto'", "semi_auto"),
        (lambda: planned(on_missing_rule="skip"), "unknown on_missing_rule 'skip'", "replicate"),
        (lambda: sw.AutoParallel(Marked(), on_missing_rule=True), "unknown on_missing_rule True", "replicate"),
        (lambda: planned(devices=0), "not 0", "devices=8"),
        (lambda: planned(devices="8"), "not '8'", "devices=8"),
        (lambda: sw.init(devices=0), "devices=0", "at least 1"),
        (lambda: sw.init(devices=True), "devices=True", "at least 1"),
        (lambda: sw.AutoParallel(torch.relu), "is not an nn.Module", "model"),
        (lambda: sw.plan(torch.relu, (X,)), "is not an nn.Module", "model"),
        (lambda: sw.AutoParallel(Marked(), loss_fn=5), "loss_fn 5", "CrossEntropyLoss"),
        (lambda: sw.AutoParallel(Marked()).plan, "before the first call", "shardwright.plan"),
        (lambda: sw.shard("matmul", ((1, 1),)), "'matmul' is not an operator", "torch.matmul"),
        (lambda: sw.AutoParallel(Marked()).dataset_strategy("full"), "unknown dataset_strategy 'full'", "full_batch"),
        (lambda: planned(dataset_strategy="full"), "unknown dataset_strategy 'full'", "full_batch"),
        (lambda: planned(dataset_strategy=8), "unknown dataset_strategy 8", "full_batch"),
        (lambda: planned(dataset_strategy=True), "unknown dataset_strategy True", "full_batch"),
        (lambda: planned(dataset_strategy=L("dp", "None")), "unknown dataset_strategy Layout", "one entry per tensor"),
        (
            lambda: planned(dataset_strategy=((8, 1), (8,))),
            r"2 entries, .* 1 tensors of shapes \[\(16, 8\)\]",
            "((8, 1),)",
        ),
        (lambda: planned(dataset_strategy=(8,)), "entry 8 is neither", "((8, 1),)"),
        (lambda: planned(dataset_strategy=((8,),)), r"1 dims, the tensor \(16, 8\) has 2", "((8, 1),)"),
        (lambda: planned(dataset_strategy=((3, 1),)), "3 parts, which does not divide 8", "((8, 1),)"),
        (lambda: planned(dataset_strategy=((0, 1),)), "not 0", "((8, 1),)"),
        (lambda: planned(dataset_strategy=(("dp", 1),)), "not 'dp'", "((8, 1),)"),
        (
            lambda: planned(dataset_strategy=((8, 1),), x=draw(12, 8)),
            "size 12, which does not divide by 8",
            "((4, 1),)",
        ),
        (lambda: planned(dataset_strategy=(L,)), "2 dims of", "((8, 1),)"),
        (lambda: planned(dataset_strategy=(FOUR("a", "b"),)), "on 8 devices, it has 4", "((8, 1),)"),
        (
            lambda: planned(dataset_strategy="data_parallel", x=draw(12, 8)),
            "size 12, which 8 devices do not",
            "full_batch",
        ),
        (lambda: planned(parallel_mode="data_parallel", x=draw(12, 8)), "size 12.* 8 equal parts", "8 divides"),
        (lambda: planned(marks={"nothing": ((1, 1),)}), "no operator is called 'nothing'", "matmul1"),
        (lambda: planned().operator("nothing"), "no operator is called 'nothing'", "matmul1"),
        (lambda: planned().operator(""), "calls 4 operators|calls 5 operators", "matmul1"),
        (lambda: planned().collectives(8), "rank 8 is outside the 8 devices", None),
    ],
)
def test_settings(attempt, says, legal) -> None:
    with pytest.raises(sw.ShardwrightError, match=says) as raised:
        attempt()
    assert legal is None or legal in raised.value.legal
    assert not isinstance(raised.value, (sw.StrategyError, sw.CaptureError)) or "data_parallel" in raised.value.message


def test_data_parallel_is_not_offered_where_it_is_not_legal() -> None:
    with pytest.raises(sw.LayoutError) as raised:
        planned(dataset_strategy=((8, 1),), x=draw(12, 8))
    assert "data_parallel" not in raised.value.legal
    planned(dataset_strategy=((4, 1),), x=draw(12, 8))


def test_settings_that_come_too_late() -> None:
    model = parallel(Marked(), nn.CrossEntropyLoss())
    model(X, T)
    for late in (lambda: model.dataset_strategy("full_batch"), lambda: model.enable_gradients_mean()):
        with pytest.raises(sw.SettingError, match="too late") as raised:
            late()
        assert "before the first call" in raised.value.legal


def test_a_number_of_devices_that_nobody_says(monkeypatch) -> None:
    sw.init()
    with pytest.raises(sw.SettingError, match="how many devices") as raised:
        sw.AutoParallel(nn.Linear(8, 8, dtype=D)).dataset_strategy("full_batch")(X)
    assert "shardwright.init(devices=8)" in raised.value.legal
    for text in ("eight", "0", "-1"):
        monkeypatch.setenv("SHARDWRIGHT_DEVICES", text)
        with pytest.raises(sw.SettingError, match=f"SHARDWRIGHT_DEVICES={text}"):
            sw.init()
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "4")
    assert sw.init(devices=8).devices == 4  # who starts the script decides


def test_marks_that_are_no_strategies_do_not_confuse_the_count() -> None:
    sw.init()
    for strategy in (8, L("dp", "None"), "dp", {"x": 1}, (8, 1), (None,)):
        net = Apply(pointwise, op=sw.shard(torch.relu, strategy))
        with pytest.raises(sw.StrategyError):
            sw.AutoParallel(net).dataset_strategy("full_batch")(X)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_calls_that_do_not_fit_the_model() -> None:
    net = Marked()
    for attempt, says in (
        (lambda: parallel(net)(), "TypeError"),
        (lambda: parallel(net)(X, X), "TypeError"),
        (lambda: parallel(net)(draw(16, 9)), "RuntimeError"),
        (lambda: parallel(net)(5), "Error"),
        (lambda: parallel(net, nn.CrossEntropyLoss())(X), "TypeError"),
    ):
        with pytest.raises(sw.CaptureError, match=says) as raised:
            attempt()
        assert raised.value.source
