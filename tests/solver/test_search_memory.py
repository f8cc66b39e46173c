"""A search keeps to the host memory that it is given, ends with a plan and a true bound, and says how far it has
come."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tracemalloc
import weakref
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import EXAMPLES, ROOT
from torch import nn

import shardwright as sw
from shardwright.errors import SettingError
from shardwright.launch.progress import time_text
from shardwright.solver import cutting_planes
from shardwright.solver.elimination import Facts, Tables
from shardwright.solver.lagrangian import Cut, Pricing, SweptPricing
from shardwright.solver.memory_rows import Rows, Splicer, binding, period, shorter
from shardwright.solver.presolve import consistent
from shardwright.solver.priced_search import _PricedSearch, priced_search
from shardwright.solver.problem import MemoryUsage, Problem
from shardwright.solver.search_memory import OutOfBudgetError, SearchBudget, SearchProgress, free_memory, spending
from shardwright.solver.solve import least_memory, solve, solve_limited, swept

ENOUGH = 4e9  # bytes: as good as no limit here


@pytest.fixture(autouse=True)
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No integer programs: what they take depends on the draw."""
    monkeypatch.setattr("shardwright.solver.priced_search.MIXED", 0)


def random_problem(seed: int, nodes: int = 7, limit: float | None = None) -> Problem:
    """A small one whose states can all be listed."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 4, nodes)
    costs = tuple(draw.integers(0, 20, size).astype(float) for size in sizes)
    edges = {}
    for i, j in product(range(nodes), repeat=2):
        if i < j and (j == i + 1 or draw.random() < 0.3):
            table = draw.integers(0, 30, (sizes[i], sizes[j])).astype(float)
            table[draw.random(table.shape) < 0.1] = np.inf
            edges[i, j] = table
    usages = tuple(MemoryUsage(v, v, nodes + 2, draw.integers(1, 9, sizes[v]).astype(float)) for v in range(nodes))
    return Problem(costs, edges, (), usages if limit is not None else (), limit)


def layers(count: int, seed: int = 0, hub: bool = False) -> Problem:
    """Equal layers of four nodes that share their tables, each joined to the next, with memory that lives to the
    end."""
    draw = np.random.default_rng(seed)
    sizes = (4, 5, 3, 4)
    own = [draw.random(size) * 10 for size in sizes]
    inner = {
        pair: draw.random((sizes[pair[0]], sizes[pair[1]])) * 10 for pair in ((0, 1), (0, 2), (1, 3), (2, 3), (0, 3))
    }
    between, positions = draw.random((4, 4)) * 10, draw.random((3, 5)) * 5
    held = [draw.integers(1, 50, size).astype(float) for size in sizes]
    costs, edges, usages, first = [np.array([1.0, 1.1])], {}, [], 1
    if hub:
        costs[0] = np.array([1.0, 2.0, 0.5])
    for k in range(count):
        at = first + 4 * k
        costs += own
        edges |= {(at + a, at + b): table for (a, b), table in inner.items()}
        if k:
            edges[at - 1, at] = between
        if hub:
            edges[0, at + 1] = positions
        usages += [MemoryUsage(at + n, at + n, 8 * count - at - n, amount) for n, amount in enumerate(held)]
    return Problem(tuple(costs), edges, (), tuple(usages), None)


def widened(problem: Problem, times: int) -> Problem:
    """The problem with so many copies of each state; what was one table is one table."""
    made = {
        id(table): table for table in (*problem.costs, *problem.edges.values(), *(u.amount for u in problem.usages))
    }
    wide = {key: np.tile(table, (times,) * table.ndim) for key, table in made.items()}
    return replace(
        problem,
        costs=tuple(wide[id(own)] for own in problem.costs),
        edges={pair: wide[id(table)] for pair, table in problem.edges.items()},
        usages=tuple(replace(use, amount=wide[id(use.amount)]) for use in problem.usages),
    )


def most_held(problem: Problem) -> float:
    """The most that the best states hold where nothing limits them."""
    free = solve(replace(problem, usages=())).states
    return max(
        sum(u.amount_in(free) for u in problem.usages if u.start <= t < u.stop)
        for t in {u.start for u in problem.usages}
    )


def least(problem: Problem) -> float:
    """The least cost within the limit, of all states."""
    found = np.inf
    for states in product(*(range(len(own)) for own in problem.costs)):
        if problem.limit is not None:
            moments = {use.start for use in problem.usages}
            if any(
                sum(u.amount_in(states) for u in problem.usages if u.start <= t < u.stop) > problem.limit
                for t in moments
            ):
                continue
        found = min(found, problem.cost(states))
    return found


# -- equal layers --


@pytest.mark.parametrize("hub", [False, True])
def test_most_of_equal_layers_are_left_out(hub):
    problem = layers(40, hub=hub)
    size = period(problem.costs, problem.edges)
    assert size == 4
    short = shorter(problem.costs, problem.edges, size)
    assert short is not None and len(short.nodes) < 40
    for (i, j), (x, y) in short.pairs.items():  # what stands for an edge has its table, and ends of its kinds
        assert short.edges[x, y] is problem.edges[i, j]
        for v, s in ((i, x), (j, y)):
            assert np.array_equal(problem.costs[v], problem.costs[short.nodes[s]])


def test_layers_that_differ_are_all_left():
    problem = layers(12)
    costs = tuple(own + 0.01 * v for v, own in enumerate(problem.costs))
    assert shorter(costs, problem.edges, 4) is None


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_by_sweeps_is_one_and_near_the_best(seed, hub):
    problem = layers(30, seed, hub)
    best = solve(replace(problem, usages=())).cost
    bound, looks = SweptPricing(replace(problem, limit=0.0), Rows.of(replace(problem, usages=(), limit=0.0), 0)).least(
        np.zeros(0)
    )
    assert bound <= best * (1 + 1e-9)
    assert bound >= 0.9 * best
    assert len(looks) == len(problem.costs) and all(mark.any() for mark in looks)


@pytest.mark.parametrize("seed", range(4))
def test_with_prices_it_is_below_whatever_keeps_the_limit(seed):
    draw, problem = np.random.default_rng(seed), layers(16, seed)
    problem = replace(problem, limit=0.9 * most_held(problem))
    bound, times = binding(consistent(problem).problem)
    rows = Rows.of(bound, len(times))
    known = priced_search(bound, rows, Pricing.of(bound, rows), 1e-2).found
    pricing = SweptPricing(bound, rows)
    for _ in range(5):
        prices = np.zeros(len(times))
        prices[draw.integers(0, len(times), 2)] = draw.random(2) * 0.1
        assert pricing.least(prices)[0] <= known.cost * (1 + 1e-9)


def test_a_bound_of_many_layers_takes_the_memory_of_few() -> None:
    """At prices of a few moments, the tables and messages are those of the layers that differ."""
    most = {}
    for count in (12, 48):
        problem = widened(layers(count), 40)
        problem = replace(problem, limit=0.8 * most_held(problem))
        bound, times = binding(consistent(problem).problem)
        rows = Rows.of(bound, len(times))
        prices = np.zeros(len(times))
        prices[len(times) // 2] = 0.1
        pricing = SweptPricing(bound, rows)
        tracemalloc.start()
        found = [pricing.least(factor * prices)[0] for factor in (1.0, 1.1, 4.0)]
        most[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.isfinite(found).all()
    assert most[48] < 1.5 * most[12]


@pytest.mark.parametrize("seed", range(3))
def test_a_search_by_sweeps_is_as_good_as_one_by_elimination(seed):
    problem = layers(30, seed)
    problem = replace(problem, limit=0.85 * most_held(problem))
    bound, times = binding(consistent(problem).problem)
    rows = Rows.of(bound, len(times))
    exact = priced_search(bound, rows, Pricing.of(bound, rows), 1e-3).found
    found = priced_search(bound, rows, SweptPricing(bound, rows), 1e-3).found
    assert found is not None
    assert found.bound <= exact.cost * (1 + 1e-9)
    assert found.cost <= exact.cost * 1.02
    assert (rows.used(found.states) <= problem.limit).all()


def test_a_first_mixture_within_the_limit_is_followed_by_a_further_turn():
    """The bound of the turn that finds the mixture is 0.2 % below the states; sweeps at its prices come nearer."""
    problem = layers(30, seed=4)
    problem = replace(problem, limit=0.9 * most_held(problem))
    bound, times = binding(consistent(problem).problem)
    rows = Rows.of(bound, len(times))
    found = priced_search(bound, rows, SweptPricing(bound, rows), 1e-3).found
    assert found is not None and (rows.used(found.states) <= problem.limit).all()
    assert found.bound <= found.cost <= (1 + 1e-3) * found.bound


def test_where_no_known_states_are_within_the_limit_the_leanest_are(monkeypatch):
    """A mixture of states may be within the limit although none of the states is (a mixture of experts of 96 layers
    within 80 GB)."""
    problem = layers(30)
    problem = replace(problem, limit=0.85 * most_held(problem))
    bound, times = binding(consistent(problem).problem)
    rows, real = Rows.of(bound, len(times)), _PricedSearch.offer

    def offer(search: _PricedSearch, cut: Cut) -> None:
        if search.least is not None or (cut.used > rows.limit).any():
            real(search, cut)

    monkeypatch.setattr(_PricedSearch, "offer", offer)
    monkeypatch.setattr("shardwright.solver.priced_search.DEAR", 99)  # the search of a mixture finds one by itself
    monkeypatch.setattr(Splicer, "splice", lambda *_: None)
    monkeypatch.setattr(Splicer, "window", lambda *_: None)
    found = priced_search(bound, rows, SweptPricing(bound, rows), 1e-3).found
    assert found is not None and (rows.used(found.states) <= problem.limit).all()


def test_where_the_best_mixture_has_no_states_within_the_limit_a_lower_limit_brings_some(monkeypatch):
    """At two moments, (0, 1) has 10.3 and 9.6 of 10, (1, 0) has 9.6 and 10.3: half of each costs 20, and (1, 1), their
    splice, is forbidden."""
    monkeypatch.setattr(_PricedSearch, "lean", lambda self: pytest.fail("the leanest states are searched"))
    costs, forbidden = np.array([10.0, 10.0, 11.0]), np.zeros((3, 3))
    forbidden[1, 1] = np.inf
    uses = tuple(MemoryUsage(v, v, v + 1, np.array([10.3, 9.6, 9.0])) for v in range(2))
    problem = Problem((costs, costs), {(0, 1): forbidden}, usages=uses, limit=10.0)
    bound, times = binding(consistent(problem).problem)
    rows = Rows.of(bound, len(times))
    found = priced_search(bound, rows, SweptPricing(bound, rows), 1e-3).found
    assert found is not None and found.cost == 21.0 and found.states[:2] in ((1, 2), (2, 1))
    assert found.bound == pytest.approx(20.0)


class NeverWithin:
    """A problem whose every state is above the limit of 10, a new one at each prices."""

    calls = 0

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        self.calls += 1
        return 0.0, Cut((self.calls,), 100.0 - self.calls, np.array([11.0 + self.calls / 1000]))


def test_prices_that_no_mixture_of_states_can_meet_are_given_up():
    def evaluations(**given) -> int:
        problem = NeverWithin()
        assert (
            cutting_planes.ascend(problem, cutting_planes.Prices(1, 10.0), cap=1e3, gap=1e-6, most=40, **given)
            == np.inf
        )
        return problem.calls

    assert evaluations() > 40
    assert evaluations(most_capped=3) < 10
    assert evaluations(until=-1.0) == 1  # the bound, 0, is above it at once


@pytest.mark.parametrize(("target", "enough"), [(0.0, 2.0), (10.0, 10.0)])
def test_a_search_for_lean_states_ends_with_the_first_that_suffice(target, enough):
    """Two nodes, each of 10 or 2 at a moment of its own: (10, 2) and (2, 10) give (2, 2), unless 10 will do."""
    uses = tuple(MemoryUsage(v, v, v + 1, np.array([10.0, 2.0])) for v in range(2))
    problem = Problem((np.zeros(2), np.zeros(2)), {}, usages=uses, limit=1.0)
    rows = Rows.of(problem, 2)

    class Fat:
        """Whatever the prices, the first node's 10."""

        def __init__(self) -> None:
            self.rows = rows

        def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
            return 0.0, Cut((0, 1), 0.0, rows.used((0, 1)))

    seen = [Cut((1, 0), 0.0, rows.used((1, 0)))]
    found = cutting_planes.leanest_by_prices(problem, rows, Fat(), 1.0, seen, evaluations=0, target=target)
    assert found.enough == enough


def test_a_table_of_one_elimination_ends_with_the_elimination():
    """A table with prices in it never comes again: its facts would only keep it alive."""
    facts, known, priced = Facts(), np.ones((40, 30)), np.ones((20, 30))
    before, reference = facts.columns(known, 0), weakref.ref(priced)
    tables = Tables(facts)
    assert tables.least(((0, -1), (1, -1)), (known, priced), 2).shape == (40, 20)
    assert tables.facts.columns(known, 0)[0] is before[0]
    del tables, priced
    gc.collect()
    assert reference() is None


# -- the budget --


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_budget_the_bound_is_true_and_the_states_are_allowed(seed):
    problem = random_problem(seed)
    best = least(problem)
    if not np.isfinite(best):
        return
    for found in (solve(problem), swept(consistent(problem).problem, 1e-9)):
        assert found.bound <= best + 1e-9 <= found.cost + 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_where_elimination_is_refused_sweeps_take_its_place(seed, monkeypatch):
    problem = random_problem(seed)
    best = least(problem)
    if not np.isfinite(best):
        return
    asked, refused = SearchBudget.ask, []

    def refuse(self, size):
        if not refused:
            refused.append(size)
            raise OutOfBudgetError("no more")
        asked(self, size)

    monkeypatch.setattr(SearchBudget, "ask", refuse)
    found = solve(problem)
    assert refused and found.bound <= best + 1e-9 <= found.cost + 1e-8


def test_what_is_larger_than_the_room_is_refused():
    gc.collect()  # what earlier tests have left would go meanwhile
    budget = SearchBudget(50e6, progress=False)
    budget.ask(10e6)
    with pytest.raises(OutOfBudgetError, match="50 MB"):
        budget.ask(60e6)
    held = np.ones(16_000_000)  # 128 MB
    with pytest.raises(OutOfBudgetError):
        budget.watch()
    assert held[0] == 1 and budget.grown > 55e6


def test_a_table_that_is_too_large_is_not_made():
    with spending(SearchBudget(30e6, progress=False)):
        tables = Tables()
        with pytest.raises(OutOfBudgetError):
            tables.least(((0, -1), (1, -1)), (np.zeros((4000, 3)), np.zeros((4000, 3))), 2)
        assert tables.least(((0, -1), (1, -1)), (np.zeros((40, 3)), np.zeros((40, 3))), 2).shape == (40, 40)


def test_half_of_what_is_free_and_at_most_three_gigabytes_is_the_default():
    assert 0 < SearchBudget(progress=False).allowed <= min(free_memory() * 0.75, 3e9)


def test_a_search_has_one_budget_from_its_first_step_to_its_last(monkeypatch):
    """A budget of each step would allow each the growth that the whole search may have."""
    problem = layers(2)
    problem = replace(problem, limit=0.9 * most_held(problem))
    for searching in (solve, solve_limited, least_memory):
        budgets = []
        made = SearchBudget.__init__
        with monkeypatch.context() as patch:
            patch.setattr(SearchBudget, "__init__", lambda self, *given: (budgets.append(self), made(self, *given))[1])
            searching(problem)
        assert len(budgets) == 1, searching


def test_a_search_in_a_child_keeps_to_its_budget():
    """Measured from outside: how much memory a forked child takes beyond what it began with."""
    problem = layers(24)
    draw = np.random.default_rng(0)
    wide = {pair: draw.random(table.shape) for pair, table in problem.edges.items()}  # no two tables are equal
    sizes = [len(own) * 20 for own in problem.costs]
    costs = tuple(draw.random(size) for size in sizes)
    edges = {pair: draw.random((sizes[pair[0]], sizes[pair[1]])) for pair in wide}
    problem = Problem(costs, edges)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            budget = SearchBudget(100e6, progress=False)
            most = [0.0]
            watch = SearchBudget.watch

            def watched(self, *args, **named):
                most[0] = max(most[0], self.grown)
                watch(self, *args, **named)

            SearchBudget.watch = watched
            with spending(budget):
                found = solve(problem, gap=1e-2)
            os.write(send, repr((most[0], found.cost, found.bound)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    text = b""
    while part := os.read(receive, 1000):
        text += part
    os.close(receive)
    assert os.waitpid(child, 0)[1] == 0
    grown, cost, bound = eval(text.decode())
    assert grown <= 160e6
    assert bound <= cost * (1 + 1e-9)


LARGE = """
import json, resource, sys, torch
from torch.nn import functional as F
from llama import Llama
from shardwright.capture.export import capture
from shardwright.planning import make_plan
from shardwright.settings import Settings

allowed, growth = 1e9, int(1.6e9)
torch.set_num_threads(1)
with torch.device("meta"):
    net, tokens = Llama(32000, 4096, 96, 8192, 64, 8, 28672), torch.zeros(64, 4096, dtype=torch.long)
graph = capture(net, (tokens, tokens), None, loss_fn=lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten()))
taken = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + growth, taken + growth))
given = dict(cluster="h100x8x8", memory=42e9, search_memory=allowed, search_progress=False)
plan = make_plan(graph, 64, Settings("dynamic_programming", **given))
print(json.dumps([plan.peak, plan.found.cost, plan.found.bound]))
"""


@pytest.mark.scale
def test_a_model_of_96_layers_is_planned_within_the_budget() -> None:
    """The kernel refuses a child more memory than its budget and what a plan itself takes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, EXAMPLES))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, cost, bound = json.loads(done.stdout.splitlines()[-1])
    assert peak <= 42e9
    assert bound <= cost <= 1.05 * bound


# -- settings --


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize(
    "given, match",
    [("much", "search_memory"), (-1, "search_memory"), (True, "search_memory"), ("1MB", "256.00 MB or more")],
)
def test_an_amount_that_there_is_not_is_an_error(given, match):
    with pytest.raises(SettingError, match=match):
        sw.AutoParallel(net(), parallel_mode="dynamic_programming", search_memory=given)
    with pytest.raises(SettingError, match=match):
        sw.plan(net(), (torch.zeros(8, 16),), parallel_mode="dynamic_programming", devices=4, search_memory=given)


def test_what_cannot_be_called_is_no_progress():
    with pytest.raises(SettingError, match="search_progress"):
        sw.AutoParallel(net(), search_progress="loud")


def test_a_wrapper_plans_with_its_setting():
    model = sw.AutoParallel(net(), parallel_mode="dynamic_programming", search_memory="1GB", search_progress=False)
    assert model.settings.search_memory == "1GB" and model.settings.search_progress is False


@pytest.mark.parametrize("mode", ["dynamic_programming", "recursive_programming"])
def test_a_plan_is_the_same_whatever_the_budget(mode):
    given = dict(parallel_mode=mode, devices=4, memory="30KB", search_progress=False)
    one = sw.plan(net(), (torch.zeros(64, 16),), **given)
    other = sw.plan(net(), (torch.zeros(64, 16),), search_memory=ENOUGH, **given)
    free = sw.plan(net(), (torch.zeros(64, 16),), **given | {"memory": None})
    assert one.cost == other.cost > free.cost and one.peak <= 30e3 < free.peak


# -- progress --


def test_a_long_search_says_how_far_it_is(monkeypatch):
    from shardwright.solver import search_memory

    monkeypatch.setattr(search_memory, "SILENT", 0.0)
    monkeypatch.setattr(search_memory, "EVERY", 0.0)
    message: list[SearchProgress] = []
    problem = layers(20)
    bound, times = binding(consistent(replace(problem, limit=0.8 * most_held(problem))).problem)
    rows = Rows.of(bound, len(times))
    with spending(SearchBudget(ENOUGH, progress=message.append)):
        priced_search(bound, rows, SweptPricing(bound, rows), 1e-2)
    assert any(line.phase == "prices of memory" and line.bound is not None for line in message)
    assert [line.seconds for line in message] == sorted(line.seconds for line in message)
    reported = next(line for line in message if line.best is not None and line.bound is not None)
    best, bounded = time_text(reported.best, 4), time_text(reported.bound, 4)
    assert str(reported).startswith(f"search: {reported.phase}, best {best} a step, bound {bounded}, gap ")


def test_a_short_one_calls_nobody():
    message: list[SearchProgress] = []
    with spending(SearchBudget(ENOUGH, progress=message.append)):
        solve(random_problem(0))
    assert not message


def test_the_command_takes_it(tmp_path: Path, capsys, monkeypatch):
    from shardwright.cli.main import main

    script = tmp_path / "small.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n\ndef model():\n"
        "    return {'net': nn.Linear(8, 8), 'inputs': (torch.zeros(8, 8),), "
        "'parallel_mode': 'dynamic_programming'}\n"
    )
    out = str(tmp_path / "plan.json")
    target = [f"{script}:model", "--devices", "4", "--output", out]
    assert main(["plan", *target, "--search-memory", "1GB", "--quiet"]) == 0
    assert main(["plan", *target, "--search-memory", "1MB"]) == 1
    assert "search_memory='1MB'" in capsys.readouterr().err
