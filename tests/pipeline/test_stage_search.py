"""stages="auto": the cut against brute force, units and their prices, what is chosen, and how it trains."""

import copy
import functools
import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpt import GPT
from hypothesis import given, strategies as st
from ranks import run_ranks
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cluster import Cluster, Level
from shardwright.errors import PlanError, RuntimeMismatchError, SettingError
from shardwright.graph import Graph
from shardwright.partition.local_program import InputPlacement, graph_digest
from shardwright.pipeline.build import PlanCache
from shardwright.pipeline.stage_costs import StageOption, balance, least_memory, recomputed
from shardwright.pipeline.stage_search import StageSearch, _chains, counts_of, first_count, stands, with_rows
from shardwright.pipeline.stages import PipelineSearchResult, StageChoice, units_of
from shardwright.planning import capture_micro

#: Two nodes of four slow devices, whose links are quick within a node: a GPT of a few layers is worth being cut.
CLUSTER = Cluster(
    "two nodes", (Level("node", 4, 1e10, 1e-7), Level("net", 2, 1e8, 1e-6)), 1e9, {"float64": 2e9}, 1e11, 1e-8
)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(layers=4):
    torch.manual_seed(0)
    return GPT(64, 16, layers, 32, 4)


def tokens(rows=16):
    return torch.randint(0, 64, (rows, 16))


@functools.cache
def planned(layers=3, micro_batches=8, memory=None, level=None):
    x = tokens()
    return sw.plan(
        gpt(layers),
        (x,),
        loss_of,
        x,
        devices=8,
        parallel_mode="recursive_programming",
        cluster=CLUSTER,
        memory=memory,
        hsdp=level and {"threshold": 0, "optimizer_level": level},
        pipeline=dict(stages="auto", micro_batches=micro_batches),
    )


# -- the cut -----------------------------------------------------------------------------------------------------------


def aligned(first, devices):
    return first % devices == 0


@st.composite
def cases(draw):
    units, devices, micro = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 4, 6))), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    some = lambda most: np.round(random.random((units + 1, units + 1)) * most, 1)
    ways = [
        StageOption(d, again, np.where(some(1) < 0.9, some(10), np.inf), some(3), some(10), some(3))
        for d in (1, 2, 4)
        for again in draw(st.sampled_from(((False,), (False, True))))
        if d <= devices
    ]
    return dict(
        ways=ways,
        units=units,
        devices=devices,
        micro_batches=micro,
        stages=draw(st.sampled_from((None, None, 1, 2, 3))),
        stands=draw(st.sampled_from((None, aligned))),
    )


def every(ways, units, devices, micro_batches, stages, stands):
    """All that there is: (seconds, the most that a stage holds)."""
    for count in range(1, min(units, micro_batches) + 1) if stages is None else (stages,):
        if count > min(units, micro_batches):
            continue
        for cuts in itertools.combinations(range(1, units), count - 1):
            borders = (0, *cuts, units)
            for chosen in itertools.product(ways, repeat=count):
                firsts = [sum(way.devices for way in chosen[:s]) for s in range(count)]
                if sum(way.devices for way in chosen) != devices or (
                    stands is not None and not all(stands(first, way.devices) for first, way in zip(firsts, chosen))
                ):
                    continue
                at = [(way, (borders[s], borders[s + 1])) for s, way in enumerate(chosen)]
                times = [float(way.seconds[ij]) for way, ij in at]
                longest = max(
                    (micro_batches - 1) * t + float(way.once[ij]) if t < math.inf else t
                    for t, (way, ij) in zip(times, at)
                )
                held = max(
                    float(way.fixed[ij] + min(micro_batches, count - s) * way.saved[ij])
                    for s, (way, ij) in enumerate(at)
                )
                if longest < math.inf:
                    yield sum(times) + longest, held


@given(cases(), st.sampled_from((math.inf, 8.0, 12.0, 16.0)))
def test_the_cut_is_the_best_of_all(case, memory):
    best = min((cost for cost, held in every(**case) if held <= memory), default=None)
    found = balance(**case, memory=memory)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.seconds == pytest.approx(best) and found.peak <= memory
        assert found.stages[0].first == 0 and found.stages[-1].last == case["units"]
        assert sum(case["ways"][c.way].devices for c in found.stages) == case["devices"]
        assert balance(**case, memory=memory, most=best * (1 - 1e-9)) is None, "nothing is below the best"
        near = balance(**case, memory=memory, near=0.2)
        assert near.seconds <= best / 0.8 + 1e-9


@given(cases())
def test_the_least_memory_is_the_least_of_all(case):
    everything = list(every(**case))
    found = least_memory(**case)
    assert (found is None) == (not everything)
    if found is not None:
        least = min(held for _, held in everything)
        assert found.peak == pytest.approx(least)
        assert found.seconds == pytest.approx(min(cost for cost, held in everything if held <= least * (1 + 1e-12)))


def test_stages_of_one_device_count_send_to_one_another():
    assert _chains([1, 2, 3, 4, 6, 12]) == [(1, 2, 4, 12), (1, 2, 6, 12), (1, 3, 6, 12)]
    assert _chains([4]) == [(4,)]
    assert all(b % a == 0 for chain in _chains([2, 3, 6, 12, 18]) for a, b in zip(chain, chain[1:]))


def test_unequal_stages_are_found_where_they_are_better():
    """Light units and a heavy one, on eight devices: the heavy one has half of them."""
    work, none = np.r_[0.0, np.cumsum((4.0, 4.0, 4.0, 4.0, 9.0))], np.zeros((6, 6))
    ways = [StageOption(d, False, (work[None, :] - work[:, None]) / d**0.5, none, none, none) for d in (1, 2, 4)]
    equal = [
        found.seconds for way in ways if (found := balance([way], 5, 8, 8, 1.0, stages=8 // way.devices)) is not None
    ]
    best = balance(ways, 5, 8, 8, 1.0, stands=aligned)
    assert best.seconds < 0.9 * min(equal) and [ways[c.way].devices for c in best.stages] == [1, 1, 1, 1, 4]


def test_devices_of_a_stage_lie_together():
    cluster = Cluster.of("h100x8x4")
    assert all(stands(cluster, first, size) for first, size in ((0, 8), (8, 16), (4, 4), (0, 32)))
    assert not any(stands(cluster, first, size) for first, size in ((4, 8), (6, 4), (12, 16)))


def test_micro_batches_divide_the_batch():
    assert counts_of(48) == (1, 2, 4, 8, 16) and counts_of(7) == (1,)
    assert 48 // first_count(48) >= 2 and first_count(1) == 1


# -- units -------------------------------------------------------------------------------------------------------------


def graph_of(net, *args, loss=None):
    return capture(net, args, None, loss_fn=loss)


def test_blocks_are_units_and_alike():
    x = tokens()
    units = units_of(graph_of(gpt(5), x, x, loss=loss_of))
    assert units.paths == (("tokens",), ("positions",), *((f"blocks.{i}",) for i in range(5)), ("norm", "head"))
    assert units.representative == (0, 1, 2, 3, 3, 3, 3, 7)
    assert len(units.reduced.ops) == len(units_of(graph_of(gpt(2), x, x, loss=loss_of)).graph.ops)
    names = {v.name for op in units.reduced.ops for v in op.outputs if v is not None}
    sources = {v.name for v in units.reduced.sources()} | set(units.reduced.constants)
    assert all(v.name in names | sources for op in units.reduced.ops for v in op.inputs)
    assert all(len(crossing) == 1 for crossing in units.crossing[1:])
    assert units.last == {7}


def test_modules_that_call_each_other_in_turns_are_one_unit():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.c(self.relu(self.a(self.relu(self.b(self.relu(self.a(x)))))))

    assert units_of(graph_of(Turns(), torch.randn(4, 8))).paths == (("a", "b"), ("c",))


class Bare(nn.Module):
    """No modules of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return (x @ self.w).relu() @ self.w


def test_a_model_without_modules_is_one_unit():
    units = units_of(graph_of(Bare(), torch.randn(4, 8)))
    assert len(units) == 1 and set(units.of.values()) == {0}


@pytest.mark.parametrize("rows", (2, 16))
def test_a_program_for_other_rows_is_that_which_is_captured(rows):
    net, batch = gpt(2), tokens(32)
    graph, wide = capture_micro(net, (batch, batch), {}, 8, loss_fn=loss_of)
    exact = capture_micro(net, (batch, batch), {}, 32 // rows, loss_fn=loss_of)[0]
    made = with_rows(graph, wide, 4, rows)
    assert graph_digest(made) == graph_digest(exact) != graph_digest(graph)
    assert [op.args for op in made.ops] == [op.args for op in exact.ops]


def test_a_program_that_changes_with_its_rows_is_named():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(x.shape[0]):
                x = self.linear(x)
            return x

    graph, wide = capture_micro(Steps(), (torch.randn(16, 4),), {}, 4)
    with pytest.raises(SettingError, match="another one for more rows"):
        with_rows(graph, wide, 4, 8)


def test_blocks_are_recomputed_each_by_itself():
    x = tokens()
    units = units_of(graph_of(gpt(3), x, x, loss=loss_of))
    graph = recomputed(units.graph, units, range(len(units)))
    calls = {
        unit: {op.recompute and op.recompute.call for op in graph.ops if units.of[op.name] == unit}
        for unit in range(len(units))
    }
    assert calls.pop(len(units) - 1) == {None}, "the last one's backward comes next"
    assert all(len(each) == 1 for each in calls.values()) and len(set.union(*calls.values())) == len(calls)


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_what_was_reckoned_is_what_the_pipeline_takes():
    plan = planned(micro_batches="auto")
    assert len(plan.stages) > 1 and plan.schedule.name == "1f1b"
    assert plan.cost == pytest.approx(plan.chosen.seconds, rel=0.03)
    assert 0.9 < plan.peak / plan.chosen.peak <= 1.02
    first = plan.alternatives[0]
    assert first.devices == tuple(stage.devices for stage in plan.stages) and first.seconds == plan.chosen.seconds
    costs = [a.seconds for a in plan.alternatives if a.seconds is not None]
    assert costs == sorted(costs) and len(costs) >= 3
    assert any(a.stages == 1 for a in plan.alternatives), "no pipeline at all is one of them"


@pytest.mark.parametrize("level", ["level1", "level2"])
def test_the_memory_that_was_reckoned_holds_the_gradients_of_the_level(level):
    """Level 1 accumulates whole gradients of gathered weights, level 2 parts."""
    plan = planned(level=level)
    whole = max(sum(stage.plan.accumulated.values()) for stage in plan.stages)
    assert (whole > 0) == (level == "level1") and 0.9 < plan.peak / plan.chosen.peak <= 1.02


def test_the_best_alternative_is_cheaper_than_given_stages():
    """The given stages are two equal ones, cut by hand at the middle, with as many micro-batches."""
    plan = planned()
    x, m = tokens(), plan.micro_batches
    by_hand = {"tokens": 0, "positions": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "norm": 1, "head": 1}
    other = sw.plan(
        gpt(3),
        (x,),
        loss_of,
        x,
        devices=8,
        cluster=CLUSTER,
        parallel_mode="recursive_programming",
        pipeline=dict(stages=2, micro_batches=m, stage_config=by_hand),
    )
    assert plan.cost <= other.cost * 1.01


def test_memory_makes_it_recompute_and_is_kept():
    free = planned()
    assert not free.chosen.recomputed
    with pytest.raises(
        PlanError, match="no pipeline fits in 1.00 KB a device: the least that was found is .* stage"
    ) as error:
        planned(memory=1000)
    least = 1e3 * float(re.search(r"found is ([0-9.]+) KB", str(error.value)).group(1))
    plan = planned(memory=least * 1.02)
    assert plan.peak <= least * 1.02 < free.peak and plan.cost > free.cost
    assert plan.chosen.recomputed and any(stage.plan.regions for stage in plan.stages)


def test_alike_stages_are_searched_once():
    calls, x = [], tokens()
    config = {"tokens": 0, "positions": 0, **{f"blocks.{i}": i for i in range(4)}, "norm": 3, "head": 3}
    plan = sw.plan(
        gpt(4),
        (x,),
        loss_of,
        x,
        devices=8,
        parallel_mode="semi_auto",
        pipeline=dict(stages=4, micro_batches=4, stage_config=config),
    )

    def planner(graph, devices, feeding, number):
        calls.append(number)
        return plan.stages[number].plan

    alike = PlanCache(planner)
    for stage in plan.stages:
        made = alike(stage.plan.graph, stage.devices, stage.plan.input_placement, stage.number)
        assert made.fingerprint == stage.plan.fingerprint and made.cost == pytest.approx(stage.plan.cost)
    assert calls == [0, 1, 3]


def test_a_constant_with_the_id_of_one_that_is_gone_is_another():
    """Large constants are compared by identity: a stage is not that of a graph whose constant is gone."""
    feeding, numbers = InputPlacement((), False), []

    def planner(graph, devices, feeding, number):
        numbers.append(number)
        return "a plan that does not hold the graph"

    once = PlanCache(planner)
    for number in range(100):
        once(Graph((), {}, {}, {"c": torch.full((100,), float(number))}, (), ()), 2, feeding, number)
    assert numbers == list(range(100))


@pytest.mark.parametrize(
    "given, words",
    (
        (dict(pipeline=dict(stages="auto", micro_batches=4, stage_config={"head": 0})), "'head' is put into stage 0"),
        (dict(pipeline=dict(stages="auto", micro_batches=4, scheduler="gpipe")), "scheduler='gpipe'"),
        (dict(pipeline=dict(stages="auto", micro_batches=4, chunks=2)), "chunks=2"),
        (dict(pipeline=dict(stages=2, micro_batches="auto")), "with a number of stages"),
        (dict(pipeline=dict(stages="auto", micro_batches=5)), "which 5 micro-batches do not divide"),
        (dict(pipeline=dict(stages="auto", micro_batches=2), parallel_mode="hybrid_parallel"), "hybrid_parallel"),
    ),
)
def test_bad_settings_are_named(given, words):
    x = tokens()
    with pytest.raises(SettingError, match=words):
        sw.plan(gpt(2), (x,), loss_of, x, devices=8, **{"parallel_mode": "recursive_programming"} | given)


def test_a_model_that_cannot_be_cut_stays_whole():
    x = torch.randn(16, 8)
    plan = sw.plan(
        Bare(),
        (x,),
        nn.MSELoss(),
        x,
        devices=8,
        cluster=CLUSTER,
        parallel_mode="recursive_programming",
        pipeline=dict(stages="auto", micro_batches="auto"),
    )
    assert len(plan.stages) == 1


def test_alternatives_are_printed(capsys):
    from shardwright.report.tables import summary

    plan = planned()
    summary(plan)
    out = capsys.readouterr().out
    assert "micro-batches" in out and "1 stage " in out and f"{len(plan.stages)} stages" in out
    assert "stage 0 on" in out and "tokens to blocks." in out


# -- running -----------------------------------------------------------------------------------------------------------


def trained(net, model, batches, loss, lr=1e-2):
    """The worst difference from one device, of losses and then of parameters."""
    ref = copy.deepcopy(net)
    own, other = (torch.optim.Adam(n.parameters(), lr=lr) for n in (net, ref))
    worst = 0.0
    for x, y in batches:
        a = model(x, y)
        a.backward()
        own.step()
        own.zero_grad()
        b = loss(ref(x), y)
        b.backward()
        other.step()
        other.zero_grad()
        worst = max(worst, abs(a.item() - b.item()))
    return worst, ref


@pytest.mark.parametrize("mode, memory", (("recursive_programming", None), ("dynamic_programming", 300e3)))
def test_it_trains_as_one_device_does(mode, memory):
    sw.init(devices=8)
    net = gpt(2)
    model = sw.AutoParallel(net, loss_of, parallel_mode=mode, cluster=CLUSTER, memory=memory)
    model.pipeline(stages="auto", micro_batches=None if memory is None else 4).dataset_strategy("full_batch")
    worst, ref = trained(net, model, [(tokens(8), tokens(8)) for _ in range(2)], loss_of)
    assert len(model.plan.stages) > 1 and (memory is None or model.plan.peak <= memory)
    assert worst < 1e-12
    assert max((a - b).abs().max().item() for a, b in zip(net.parameters(), ref.parameters())) < 1e-10
    with torch.no_grad():
        x, y = tokens(4), tokens(4)
        stages = model.plan.chosen.stages
        assert model(x, y).item() == pytest.approx(loss_of(ref(x), y).item(), abs=1e-10)
        assert model.plan.chosen.stages == stages, "other shapes keep the stages"


class Uneven(nn.Module):
    """Three stages, the most work in the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


@pytest.mark.parametrize("again", (False, True))
def test_stages_of_unequal_sizes_train_as_one_device_does(monkeypatch, again):
    stages = StageChoice(0, 1, 1, again), StageChoice(1, 2, 2, again), StageChoice(2, 3, 1, False)
    monkeypatch.setattr(
        StageSearch,
        "run",
        lambda self, memory, unequal: PipelineSearchResult(self.units.paths, stages, 8, 1.0, 1.0, ()),
    )
    sw.init(devices=4)
    net, loss = Uneven(), nn.MSELoss()
    model = sw.AutoParallel(net, loss, parallel_mode="recursive_programming")
    model.pipeline(stages="auto", micro_batches=8).dataset_strategy("full_batch")
    worst, ref = trained(net, model, [(torch.randn(64, 16), torch.randn(64, 8)) for _ in range(3)], loss)
    assert [(stage.first, stage.devices) for stage in model.plan.stages] == [(0, 1), (1, 2), (3, 1)]
    assert [bool(stage.plan.regions) for stage in model.plan.stages] == [again, again, False]
    assert worst < 1e-12
    assert max((a - b).abs().max().item() for a, b in zip(net.parameters(), ref.parameters())) < 1e-10


def rank_of(rank, world):
    torch.set_default_dtype(torch.float64)
    sw.init()
    net = gpt(2)
    cluster = replace(CLUSTER, levels=(Level("node", 2, 1e10, 1e-7), Level("net", 2, 1e8, 1e-6)))
    model = sw.AutoParallel(net, loss_of, parallel_mode="recursive_programming", cluster=cluster)
    model.pipeline(stages="auto", micro_batches=8).dataset_strategy("full_batch")
    torch.manual_seed(1)
    worst, _ = trained(net, model, [(tokens(), tokens()) for _ in range(2)], loss_of)
    return worst, model.plan.chosen.stages, model.plan.fingerprint


def test_ranks_choose_alike_and_train_as_one_device_does():
    found = run_ranks(rank_of, 4)
    assert len({(stages, fingerprint) for _, stages, fingerprint in found}) == 1
    assert len(found[0][1]) > 1
    assert max(worst for worst, _, _ in found) < 1e-10


def parts_of(rank, world):
    sw.init()
    model = sw.AutoParallel(gpt(2), loss_of, parallel_mode="recursive_programming").pipeline("auto", micro_batches=4)
    try:
        model(tokens(4), tokens(4))
    except (SettingError, RuntimeMismatchError) as error:
        return str(error)


def test_ranks_that_feed_their_own_parts_are_told_to_feed_the_whole():
    found = run_ranks(parts_of, 2)
    assert all('dataset_strategy("full_batch")' in words for words in found)
