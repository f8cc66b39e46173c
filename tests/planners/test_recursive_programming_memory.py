"""recursive_programming within a memory limit: each level of the recursion has its own, and keeps it where it can."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from small_networks import D, draw
from test_recursive_programming import MODE, as_one_device, slow_devices
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cost.cost_model import CostModel
from shardwright.errors import PlanError
from shardwright.partition.local_program import place_inputs
from shardwright.planners import recursive_programming
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import CUT, PlanningProblem
from shardwright.solver.milp import milp
from shardwright.solver.problem import Problem, Solution
from shardwright.solver.solve import solve


def layers(count: int) -> tuple[nn.Module, tuple, nn.Module]:
    """So many of 24 by 24."""
    net = nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(24, 24, dtype=D), nn.GELU())))
    return net, (draw(48, 24), draw(48, 24, seed=1)), nn.MSELoss()


def most_held(problem: Problem, solution: Solution) -> float:
    """Bytes at the fullest moment, row by row."""
    return max(
        sum(use.amount_in(solution.states) for use in problem.usages if use.start <= moment < use.stop)
        for moment in {use.start for use in problem.usages}
    )


@dataclass
class Asked:
    """A level's limit, what was chosen there, whether that was said to keep it; of the last, what it answered."""

    limit: float
    problem: Problem | None = None
    solution: Solution | None = None
    kept: bool = False
    last: bool = False
    answer: Any = None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The levels with a limit, in the order in which the recursion comes to them."""
    out: list[Asked] = []
    add_memory, nearest, fit = (
        recursive_programming.add_memory,
        recursive_programming._nearest,
        recursive_programming.fit,
    )

    def hold(made: Any, input_placement: Any, batch_dims: Any, limit: float, state: float) -> Any:
        out.append(Asked(limit))
        return add_memory(made, input_placement, batch_dims, limit, state)

    def choose(problem: Problem) -> tuple[Solution, bool]:
        solution, kept = nearest(problem)
        if problem.limit is not None:
            out[-1].problem, out[-1].solution, out[-1].kept = problem, solution, kept
        return solution, kept

    def end(search: Search, made: Any, limit: float, *others: Any, **named: Any) -> Any:
        out.append(Asked(limit, last=True))
        try:
            out[-1].answer = fit(search, made, limit, *others, **named)
        except PlanError as error:
            out[-1].answer = error
            raise
        return out[-1].answer

    for name, spy in (("add_memory", hold), ("_nearest", choose), ("fit", end)):
        monkeypatch.setattr(recursive_programming, name, spy)
    return out


def limits(sizes: tuple[int, ...], memory: float, hope: float) -> list[float]:
    """The limits of all levels, the outermost first: r^hope times the memory, where r devices are told apart below."""
    rest, out = math.prod(sizes), []
    for size in reversed(sizes):
        rest //= size
        out.append(memory * rest**hope)
    return out


def check(asked: list[Asked], sizes: tuple[int, ...], memory: float, hopes: tuple[float, ...]) -> None:
    """Check the limit of every level in a run for each hope, and that each choice keeps the limit where it can."""
    expected = [limit for hope in hopes for limit in limits(sizes, memory, hope)]
    assert [level.limit for level in asked] == pytest.approx(expected)
    assert [level.last for level in asked] == [*(False,) * (len(sizes) - 1), True] * len(hopes)
    for level in asked:
        if level.last:
            assert level.limit == memory
            continue
        assert level.problem.limit == level.limit
        held = most_held(level.problem, level.solution)
        if level.kept:
            assert held <= level.limit * (1 + 1e-9)
        else:
            assert held > level.limit
            with pytest.raises(PlanError):
                milp(level.problem)
    ends = [level for level in asked if level.last]
    assert all(isinstance(level.answer, PlanError) for level in ends[:-1])
    assert not isinstance(ends[-1].answer, PlanError)


def binds(level: Asked) -> bool:
    """True where the best of a level's strategies would hold more than it may."""
    free = solve(replace(level.problem, limit=None, usages=()))
    return most_held(level.problem, free) > level.limit


@pytest.mark.parametrize("count, memory, hopes", [(3, 38_600, (1.0, 0.5)), (2, 34_000, (1.0, 0.5, 0.0))])
def test_levels_are_given_less_where_the_last_cannot_fit(
    count: int, memory: int, hopes: tuple, asked: list[Asked]
) -> None:
    """The levels below do not cut what they were counted on for: with less above them there is a plan, and it fits."""
    net, batch, loss_fn = layers(count)
    plan = sw.plan(
        net, batch[:-1], loss_fn, batch[-1], parallel_mode=MODE, devices=8, cluster=slow_devices(2, 2, 2), memory=memory
    )
    check(asked, (2, 2, 2), memory, hopes)
    assert any(map(binds, asked[-3:-1])), "or less for the upper levels would change nothing"
    assert plan.timeline.peak <= memory == plan.found.limit and plan.peak == plan.timeline.peak
    as_one_device(net, batch, loss_fn, plan)


def test_a_large_network_has_two_turns(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that refuses its limit takes long there: the second turn lowers the limits of the levels by little."""
    monkeypatch.setattr(recursive_programming, "LARGE", 0)
    (net, batch, loss_fn), memory = layers(3), 38_600
    with suppress(PlanError):
        sw.plan(
            net,
            batch[:-1],
            loss_fn,
            batch[-1],
            parallel_mode=MODE,
            devices=8,
            cluster=slow_devices(2, 2, 2),
            memory=memory,
        )
    expected = [limit for hope in (1.0, 0.75) for limit in limits((2, 2, 2), memory, hope)]
    assert [level.limit for level in asked] == pytest.approx(expected)


def test_a_level_that_cannot_keep_its_limit_holds_as_little_as_it_can(asked: list[Asked]) -> None:
    """Without any hope the first level has too few cuts; the next ones have more, and keep theirs."""
    (net, batch, loss_fn), sizes, memory = layers(3), (2, 2, 2), 43_800
    graph = capture(net, batch, None, loss_fn=loss_fn)
    search = Search.of(
        PlanningProblem(graph, 8, place_inputs(graph, 8, "full_batch"), cost_model=CostModel(slow_devices(*sizes), 8))
    ).check()
    decided = recursive_programming._Recursion(search, "adam", CUT).run(memory, 0.0)
    check(asked, sizes, memory, (0.0,))
    assert [level.kept for level in asked[:-1]] == [False, True] and decided.found.limit == memory
    first = asked[0]
    least = most_held(first.problem, first.solution)
    with pytest.raises(PlanError):
        milp(replace(first.problem, limit=0.98 * least))
