"""One rank searches in processes, and all have its plan, or its error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_device import close
from ranks import run_ranks, run_scenarios
from small_networks import Apply, D, Marked, draw, labels
from test_memory_timeline import mlp
from test_rank_executor import alike_on_all, gradients, raised, whole, wrapped
from torch import nn

import shardwright as sw
from shardwright import planning
from shardwright.capture.export import capture
from shardwright.json_files.json_values import dumps, loads
from shardwright.partition.local_program import PortableDecisions, graph_digest
from shardwright.planfile.document_writer import written
from shardwright.planners.planning_problem import PLANNERS
from shardwright.settings import Settings

X, T = draw(16, 8), labels(16)
CROSS_ENTROPY = nn.CrossEntropyLoss()
SEARCH = "dynamic_programming"

SCENARIOS: dict[str, Callable[[int, int], None]] = {}


def scenario(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextlib.contextmanager
def replaced(mode: str, by: Callable[..., Any]) -> Iterator[None]:
    """Another planner in the place of a mode's."""
    planner = PLANNERS[mode]
    PLANNERS[mode] = replace(planner, decide=by)
    try:
        yield
    finally:
        PLANNERS[mode] = planner


@contextlib.contextmanager
def counted(mode: str = SEARCH) -> Iterator[list[None]]:
    """An entry for each search on this rank."""
    planner, calls = PLANNERS[mode], []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return planner(*args, **kwargs)

    with replaced(mode, counting):
        yield calls


def gathered(mine: Any, world: int) -> list[Any]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    return everyone


def squeezed() -> nn.Sequential:
    """Marked along the batch of 256 on four devices, so that little but what is kept and stored is left to choose."""
    net = mlp(16, 16, 16, 16, dtype=D)
    for module in net:
        sw.shard(module, ((4, 1), (1, 1)) if isinstance(module, nn.Linear) else ((4, 1),))
    return net


#: Bytes a device with which `squeezed` can be trained only if some results are computed again, and weights stored cut.
TIGHT = 125_000


# -- one search --------------------------------------------------------------------------------------------------------


@scenario
def rank_0_searches_and_all_have_its_plan(rank: int, world: int) -> None:
    for mode, marks in (
        (SEARCH, (None, None, None)),
        (SEARCH, (((2, 2), (2, 1)), None, None)),
        ("recursive_programming", (None, None, None)),
        ("sharding_propagation", (((2, 2), (2, 1)), None, None)),
    ):
        net, one = Marked(*marks), Marked()
        model = wrapped(net, CROSS_ENTROPY, mode)
        ours, theirs = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(one.parameters(), 0.1)
        with counted(mode) as calls:
            for size in (16, 16, 18, 16, 32):  # two searches: 4 divides 16 and not 18; 32 is cut as 16 is
                x, t = draw(size, 8, seed=size), labels(size)
                loss, expected = model(x, t), CROSS_ENTROPY(one(x), t)
                close(loss, expected, mode)
                loss.backward(), expected.backward()
                close(gradients(net), gradients(one), mode)
                ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
                assert len(set(gathered(written(model.plan), world))) == 1, "one plan, with its price and its proof"
        close(whole(net.state_dict()), one.state_dict(), mode)
        assert gathered(len(calls), world) == [2, 0, 0, 0]
        assert model.plan.bound is None  # which nobody proved for 32
        assert "nothing was searched" in model.plan.found.notes[-1]


@scenario
def what_is_stored_and_recomputed_comes_along(rank: int, world: int) -> None:
    net = squeezed()
    one, x = copy.deepcopy(net), draw(256, 16)
    model = wrapped(net, nn.MSELoss(), SEARCH, memory=TIGHT)
    with counted() as calls:
        for seed in range(2):
            loss, expected = model(x, draw(256, 16, seed=seed)), nn.MSELoss()(one(x), draw(256, 16, seed=seed))
            close(loss, expected)
            loss.backward(), expected.backward()
    assert gathered(len(calls), world) == [1, 0, 0, 0]
    close(gradients(net), gradients(one))
    plan = model.plan
    assert plan.regions and plan.hsdp is not None and plan.peak <= TIGHT and plan.found.limit == TIGHT
    assert len(set(gathered(written(plan), world))) == 1


@scenario
def machines_that_reckon_differently(rank: int, world: int) -> None:
    """Each by itself would find another plan; together they run that of rank 0."""
    x, y = draw(256, 16), draw(256, 16, seed=1)
    mine = sw.plan(
        mlp(16, 256, 256, 16, dtype=D),
        (x,),
        nn.MSELoss(),
        y,
        parallel_mode=SEARCH,
        devices=world,
        cluster=("a100x8", "cpu")[rank % 2],
    )
    alone = gathered(mine.fingerprint, world)
    assert alone[0] != alone[1], "or this tests nothing"
    net = mlp(16, 256, 256, 16, dtype=D)
    one = copy.deepcopy(net)
    model = wrapped(net, nn.MSELoss(), SEARCH, cluster=("a100x8", "cpu")[rank % 2])
    loss, expected = model(x, y), nn.MSELoss()(one(x), y)
    close(loss, expected)
    loss.backward(), expected.backward()
    close(gradients(net), gradients(one))
    assert gathered(model.plan.fingerprint, world) == alone[:1] * world


# -- one error ---------------------------------------------------------------------------------------------------------


@scenario
def memory_in_which_nothing_fits(rank: int, world: int) -> None:
    model = wrapped(squeezed(), nn.MSELoss(), SEARCH, memory=1000)
    with counted() as calls:
        for times in (1, 2):
            error = raised(lambda: model(draw(256, 16), draw(256, 16)))
            assert type(error) is sw.PlanError and "no plan fits in 1.00 KB" in str(error) and "memory=" in error.legal
            alike_on_all(error, world)
            assert gathered(len(calls), world) == [times, 0, 0, 0]
    assert wrapped(Marked(None, None, None), CROSS_ENTROPY, SEARCH)(X, T).isfinite()  # and the ranks can go on


class Held(Exception):
    """An error that cannot be sent."""

    def __init__(self, what: Any) -> None:
        super().__init__("held")
        self.what = what


@scenario
def whatever_a_search_raises(rank: int, world: int) -> None:
    for error, other in (
        (ZeroDivisionError("by nothing"), ZeroDivisionError),
        (Held(lambda: 0), RuntimeError),
        (sw.StrategyError("not so", operator="up", strategy=lambda: 0), sw.StrategyError),
    ):

        def failing(*_: Any, **__: Any) -> Any:
            raise error

        with replaced(SEARCH, failing), pytest.raises(type(error) if rank == 0 else other) as found:
            wrapped(Marked(None, None, None), CROSS_ENTROPY, SEARCH)(X, T)
        assert str(error).split("\n")[0].split(" 0x")[0] in str(found.value)
    assert wrapped(Marked(None, None, None), CROSS_ENTROPY, SEARCH)(X, T).isfinite()


@scenario
def ranks_that_differ_search_nothing(rank: int, world: int) -> None:
    free, odd = (None, None, None), rank == 1
    cases: list[tuple[str, Callable[[], Any]]] = [
        (
            "feed other inputs",
            lambda: wrapped(Marked(*free), CROSS_ENTROPY, SEARCH)(
                draw(12 if odd else 16, 8), labels(12 if odd else 16)
            ),
        ),
        (
            "captured another model",
            lambda: wrapped(Marked(((4, 1), (1, 1)) if odd else ((2, 1), (1, 2)), None, None), CROSS_ENTROPY, SEARCH)(
                X, T
            ),
        ),
        ("other settings", lambda: wrapped(Marked(*free), CROSS_ENTROPY, SEARCH, memory="1GB" if odd else None)(X, T)),
        ("another parallel_mode", lambda: wrapped(Marked(*free), CROSS_ENTROPY, "semi_auto" if odd else SEARCH)(X, T)),
        ("another parallel_mode", lambda: wrapped(Marked(*free), CROSS_ENTROPY, SEARCH if odd else "semi_auto")(X, T)),
        (
            "another parallel_mode",
            lambda: wrapped(Marked(*free), CROSS_ENTROPY, "recursive_programming" if odd else SEARCH)(X, T),
        ),
        ("cannot plan", lambda: wrapped(Apply(lambda m, x: x @ m.w[: 5 if odd else 8]), None, SEARCH)(X)),
        ("cannot plan", lambda: wrapped(Marked(*free), CROSS_ENTROPY, SEARCH, cluster="cray1" if odd else None)(X, T)),
    ]
    for message, call in cases:
        with counted() as calls:
            error = raised(call)
        assert isinstance(error, sw.RuntimeMismatchError) and message in str(error) and "[1]" in str(error), error
        alike_on_all(error, world)
        assert not any(gathered(len(calls), world)), "nothing was searched"
    error = raised(lambda: wrapped(Marked(*free), CROSS_ENTROPY, SEARCH, cluster="cray1")(X, T))
    assert isinstance(error, sw.SettingError) and "cray1" in str(error)  # on all ranks: the error that it is
    alike_on_all(error, world)


@scenario
def a_rank_that_cannot_take_what_it_is_handed(rank: int, world: int) -> None:
    taken = PortableDecisions.onto

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise sw.PlanError("out of paper")
        return taken(*args, **kwargs)

    PortableDecisions.onto = failing
    try:
        error = raised(lambda: wrapped(Marked(None, None, None), CROSS_ENTROPY, SEARCH)(X, T))
    finally:
        PortableDecisions.onto = taken
    assert isinstance(error, sw.RuntimeMismatchError) and "[1]" in str(error) and "out of paper" in str(error)
    alike_on_all(error, world)


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    sw.init(devices=4)  # what a first search loads, before the ranks are forked
    sw.AutoParallel(Marked(None, None, None), CROSS_ENTROPY, SEARCH).dataset_strategy("full_batch")(X, T).backward()
    return run_ranks(run_scenarios, 4, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_four_ranks(name: str, results) -> None:
    for rank, result in enumerate(results):
        if result[name] is not None:
            pytest.fail(f"rank {rank}:\n{result[name]}", pytrace=False)


# -- what is handed on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_net, x, options",
    [
        (lambda: Marked(None, None, None), X, {}),
        (lambda: Marked(((2, 2), (2, 1)), None, None, ((4, 1),)), X, {"parallel_mode": "sharding_propagation"}),
        (squeezed, draw(256, 16), {"memory": 146_000}),  # without a loss its whole result is handed out
        (lambda: Marked(((4, 1), (1, 1)), None, None), draw(18, 8), {"uneven": True}),
        (
            lambda: nn.Sequential(nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D)),
            X,
            {"on_missing_rule": "replicate"},
        ),
    ],
    ids=["free", "marked", "memory", "uneven", "no rule"],
)
def test_what_comes_back_is_what_was_decided(make_net: Callable, x: torch.Tensor, options: dict[str, Any]) -> None:
    held: list[Any] = []

    def searcher(graph: Any, settings: Any, find: Callable, take: Callable) -> Any:
        found = find()
        other = capture(make_net(), (x,))
        assert other is not graph and graph_digest(other) == graph_digest(graph)
        portable = PortableDecisions.read(loads(dumps(PortableDecisions.of(found).encode())))
        held.append(
            (
                found,
                take(portable),
                portable.onto(
                    other, 4, **{key: value for key, value in options.items() if key in ("uneven", "on_missing_rule")}
                ),
            )
        )
        return held[0][1]

    given = {"parallel_mode": SEARCH} | options
    given["dataset_strategy"] = "full_batch"
    made, alone = (
        written(planning.make_plan(capture(make_net(), (x,)), 4, Settings.of(**given), searcher=each_searcher))
        for each_searcher in (searcher, None)
    )
    found, taken, elsewhere = held[0]
    assert taken == found and list(taken.decisions) == list(found.decisions)
    assert [d.assignment for d in elsewhere.decisions.values()] == [d.assignment for d in found.decisions.values()]
    assert made == alone


def test_a_graph_s_digest_is_of_operators_shapes_and_marks() -> None:
    def digest(*marks: Any, x: torch.Tensor = X) -> str:
        return graph_digest(capture(Marked(*marks), (x,)))

    free = (None, None, None)
    assert digest(*free) == digest(*free)
    others = [
        digest(*free, x=draw(32, 8)),
        digest(((2, 2), (2, 1)), None, None),
        digest(*free, ((4, 1),)),
        graph_digest(capture(nn.Sequential(nn.Linear(8, 8)), (X.float(),))),
    ]
    assert len({digest(*free), *others}) == 5
