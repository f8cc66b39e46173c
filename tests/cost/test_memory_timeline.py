"""Memory: what a device holds over a step, the search's estimate of it, and plans that keep a limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings, strategies as st
from one_device import assert_as_one_device
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cluster import Cluster, format_bytes, memory_of
from shardwright.cost.cost_model import CostModel
from shardwright.cost.memory_timeline import optimizer_bytes, timeline
from shardwright.partition.local_program import place_inputs
from shardwright.partition.rematerialization import segments_of, with_recompute
from shardwright.planners.memory_problem import add_memory
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import CUT, PlanningProblem
from shardwright.sharded_plan import Plan
from shardwright.solver.milp import milp
from shardwright.solver.solve import solve

CROSS_ENTROPY = nn.CrossEntropyLoss()
D = torch.float64


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int = 16, heads: int = 2, dtype=torch.float32) -> None:
        super().__init__()
        self.heads, given = heads, {"dtype": dtype}
        self.norm1, self.norm2 = nn.LayerNorm(width, **given), nn.LayerNorm(width, **given)
        self.qkv, self.out = nn.Linear(width, 3 * width, **given), nn.Linear(width, width, **given)
        self.up, self.down = nn.Linear(width, 4 * width, **given), nn.Linear(4 * width, width, **given)

    def forward(self, x):
        split = [y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        y = F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Blocks(nn.Module):
    def __init__(self, count: int = 2, width: int = 16, dtype=torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width, dtype=dtype) for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def mlp(*widths: int, act=nn.GELU, bias: bool = False, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(a, b, bias=bias, dtype=dtype), act()) for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*list(chain(*layers))[:-1])


def marks(count: int, devices: int, bias: bool = False) -> dict:
    """Marks that cut a net of linears and activations along the batch, everywhere."""
    names = [f"linear{'_' + str(k) if k else ''}" for k in range(count)]
    acts = [f"gelu{'_' + str(k) if k else ''}" for k in range(count - 1)]
    return {n: ((devices, 1), (1, 1), *([(1,)] if bias else [])) for n in names} | {n: ((devices, 1),) for n in acts}


def searched(net, args, devices: int, loss_fn=None, limit: float = 1e18):
    graph = capture(net, args, None, loss_fn=loss_fn)
    input_placement, costs = place_inputs(graph, devices, "full_batch"), CostModel(None, devices)
    search = Search.of(PlanningProblem(graph, devices, input_placement, cost_model=costs))
    return search, add_memory(
        search.cost_graph(search.options(), cut=CUT), input_placement, search.batch_dims, limit, 8.0
    )


def planned(search: Search, held, states) -> Plan:
    """The plan of a solution, made by hand."""
    graph = with_recompute(search.described.graph, held.recomputed(states), held.segments)
    ops = {op.name: op for op in graph.ops}
    decisions = {n: replace(d, op=ops[n]) for n, d in held.cost_graph.decisions(states, {}, "search").items()}
    return Plan(
        graph,
        search.described.devices,
        "",
        search.input_placement,
        decisions,
        search.batch_dims,
        None,
        held.storage(states),
    )


# -- amounts --


@pytest.mark.parametrize(
    "given, expected",
    [
        ("70GB", 70e9),
        ("64GiB", 2**36),
        (" 1.5 tb ", 1.5e12),
        ("512 MiB", 2**29),
        (12_000, 12_000),
        ("3e9", 3e9),
        ("cluster", 80e9),
        (True, 80e9),
        (None, None),
        (False, None),
    ],
)
def test_amounts(given, expected) -> None:
    assert memory_of(given, Cluster.of("h100x8", 8)) == expected


@pytest.mark.parametrize("given", ["70XB", "much", "", "GB", "-3GB", "1.2.3GB", -1, 0, float("nan"), [70]])
def test_no_amount(given) -> None:
    with pytest.raises(sw.SettingError, match="70GB"):
        memory_of(given, Cluster.of("h100x8", 8))


def test_amounts_in_words_are_never_less() -> None:
    assert (
        format_bytes(999) == "999 bytes"
        and format_bytes(1_500_000_001) == "1.51 GB"
        and format_bytes(2e12) == "2.00 TB"
    )


def test_optimizers() -> None:
    assert [optimizer_bytes(o) for o in ("adam", "AdamW", "momentum", "sgd", 12, None)] == [8, 8, 4, 0, 12, 8]
    for wrong in ("adagraft", -1, (), True):
        with pytest.raises(sw.SettingError, match="momentum"):
            optimizer_bytes(wrong)


# -- the walk --


def test_a_step_by_hand() -> None:
    """Two weights 8x8, a batch of 4 x 8 (128 bytes a tensor): what is there at each moment, in bytes."""
    plan = sw.plan(mlp(8, 8, 8, act=nn.ReLU), (torch.randn(4, 8),), devices=1)
    walked, tensor, weight = timeline(plan), 128, 256
    standing = tensor + 2 * weight * 4  # the input; weights, gradients, two numbers of the optimizer
    assert walked.moments == ("linear", "relu", "linear_1", "linear_1", "relu", "linear")
    assert [total - standing for total in walked.totals()] == [
        tensor,  # the first product
        2 * tensor,  # and what relu makes of it, which is saved twice and there once
        2 * tensor,  # the output; the first product is gone
        4 * tensor,  # the gradients of the output and of what it was made of
        4 * tensor,  # of that and of the first product; relu's result is last needed
        2 * tensor,
    ]  # the output, and the gradient of the first product
    assert walked.peak == standing + 4 * tensor == plan.peak
    whole = {"parameters": 2 * weight, "gradients": 2 * weight, "optimizer": 4 * weight}
    assert plan.memory(0) == whole | {"activations": 2 * tensor}  # relu's result, and the output
    assert timeline(plan, "sgd").peak == walked.peak - 4 * weight


def test_what_is_kept_is_what_autograd_packs() -> None:
    """Against the model itself, on one device: bytes of all memory that its forward saves."""
    net, x = Blocks(2), torch.randn(4, 8, 16)
    packed = {}

    def pack(t):
        packed[t.untyped_storage().data_ptr()] = t  # held, so that no other has its address
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        net(x)
    given = {t.untyped_storage().data_ptr() for t in (*net.parameters(), x)}
    expected = sum(t.untyped_storage().nbytes() for place, t in packed.items() if place not in given)
    plan = sw.plan(Blocks(2), (x,), devices=1)
    walked = timeline(plan)
    kept = walked.totals(["activations"])[walked.forward]
    out = 4  # the loss itself
    assert kept == plan.memory(0)["activations"] == expected + out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.arange(8.0)  # no parameter and no buffer: a constant

    def forward(self, x):
        return (x * self.scale).sin()


def test_a_forward_alone_holds_its_input_and_output_at_one_time() -> None:
    plan = sw.plan(Scaled(), (torch.randn(4, 8),), devices=1)
    assert max(plan.timeline.totals(["constants"])) == 32
    nothing = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    assert plan.memory(0) == nothing | {"activations": 2 * 128}


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_what_is_gathered_is_there_for_as_long_as_it_is_kept(level) -> None:
    net = mlp(64, 64, 64, 64)
    plan = sw.plan(
        net,
        (torch.randn(16, 64),),
        devices=4,
        parallel_mode="data_parallel",
        hsdp={"threshold": 0, "optimizer_level": level},
    )
    walked, weight = timeline(plan), 64 * 64 * 4
    gathered = walked.totals(["gathered"])
    assert max(gathered) == (2 if level == "level1" else 1) * weight  # the first one's backward needs its input alone
    assert plan.memory(0)["gathered"] == (3 if level == "level1" else 1) * weight  # micro-batches may keep them all
    assert walked.totals(["parameters"])[0] == 3 * weight / 4
    assert walked.totals(["optimizer"])[0] == 2 * 3 * weight / 4


def test_what_is_dropped_is_gone_and_comes_back() -> None:
    net, x = mlp(32, 32, 32, 32), torch.randn(64, 32)
    whole = sw.plan(net, (x,), devices=1)
    again = sw.plan(net, (x,), devices=1, recompute=lambda op: op.kind == "gelu" or None)
    tensor = 64 * 32 * 4
    assert (
        whole.timeline.totals(["activations"])[whole.timeline.forward]
        - again.timeline.totals(["activations"])[again.timeline.forward]
        == 2 * tensor
    )
    assert max(again.timeline.totals(["recomputed"])) == tensor, "one after the other"
    assert again.memory(0)["recomputed"] == tensor
    assert again.peak < whole.peak


class Detached(nn.Module):
    """A part that no gradient reaches, though its parameters require one."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = mlp(16, *(widths or (64, 64)), 16, act=nn.ReLU, bias=True)
        self.head = mlp(16, *(widths[1:] or (32,)), 8, act=nn.ReLU, bias=True)

    def forward(self, x):
        return self.head(self.body(x).detach())


def test_nothing_is_kept_for_a_backward_that_a_detach_ends() -> None:
    net = Detached()
    plan = sw.plan(net, (torch.randn(64, 16),), devices=1)
    count = lambda module: sum(p.numel() for p in module.parameters())
    assert plan.memory(0)["parameters"] == 4 * count(net)
    assert plan.memory(0)["gradients"] == 4 * count(net.head)
    assert plan.memory(0)["optimizer"] == 8 * count(net.head)
    wide = 64 * 64 * 4
    assert plan.timeline.totals(["activations"])[plan.timeline.forward] < wide


def test_a_limit_is_kept_without_what_a_detach_ends() -> None:
    """The search has counted tensors for backwards that do not come: the least that it found was 457 KB."""
    net, x = Detached(64, 64, 64), torch.randn(512, 16)
    within = sw.plan(net, (x,), devices=2, parallel_mode="dynamic_programming", memory="440KB")
    assert within.peak <= memory_of("440KB", within.cluster) and not within.regions


# -- the estimate --

#: How far the search's estimate may be below the walk: what is dropped may be made again from more than its reader's
#: slice.
BELOW = 0.1


@pytest.fixture(scope="module")
def problems():
    torch.manual_seed(0)
    nets = {
        "mlp": (mlp(16, 32, 16, 8, act=nn.ReLU, bias=True), (torch.randn(64, 16),)),
        "block": (Blocks(1), (torch.randn(4, 8, 16),)),
        "detached": (Detached(), (torch.randn(64, 16),)),
    }
    return {(name, devices): searched(net, args, devices) for name, (net, args) in nets.items() for devices in (2,)}


def random_states(held, seed: int) -> tuple[int, ...]:
    """Any choice: the best one under random further costs."""
    rng = np.random.default_rng(seed)
    problem = held.cost_graph.problem
    scale = max(float(c[np.isfinite(c)].max()) for c in problem.costs)
    costs = tuple(c + rng.uniform(0, 3 * scale, len(c)) for c in problem.costs)
    return solve(replace(problem, costs=costs, usages=(), limit=None)).states


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31), which=st.sampled_from(["mlp", "block"]))
@example(seed=390, which="block")  # messages under way take 15 % more
def test_the_estimate_is_hardly_below_the_program(problems, seed, which) -> None:
    """The estimate is of a step that waits for each message at once, as a search compares it with the limit. The
    messages under way (`plan.peak`) are scheduled later, where the limit leaves room."""
    search, held = problems[which, 2]
    states = random_states(held, seed)
    plan = planned(search, held, states)
    assert held.peak(states) >= (1 - BELOW) * plan.unscheduled.peak
    # Uses of one value that want one layout but differ in the backward share their forward in the program, and then sum
    # their gradients apart: in random plans that may cost a little more than serving each by itself, as is reckoned.
    assert plan.price.total <= held.cost_graph.problem.cost(states) * 1.03, "all that is chosen has its price"


@pytest.fixture(scope="module")
def block_of_four():
    torch.manual_seed(0)
    return searched(Blocks(1), (torch.randn(4, 4, 16),), 4)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31))
def test_what_is_sent_on_the_way_to_what_is_dropped_is_kept(block_of_four, seed) -> None:
    """Between forward and backward the estimate has all that the program then has, however values are sent."""
    search, held = block_of_four
    problem, rng, count = held.cost_graph.problem, np.random.default_rng(seed), len(search.described.graph.ops)
    costs = list(problem.costs)
    scale = max(float(c[np.isfinite(c)].max()) for c in costs)
    for node in held.cost_graph.operators.values():
        costs[node] = costs[node] + rng.uniform(0, 30 * scale, len(costs[node]))
    for name, node in held.remat_nodes.items():  # whatever may be is dropped
        costs[node] = costs[node] - 1e3 * scale * np.array([s.how == "recomputed" for s in held.states[name]])
    states = solve(replace(problem, costs=tuple(costs), usages=(), limit=None)).states
    plan = planned(search, held, states)
    assert held.recomputed(states) and plan.regions
    estimated = sum(
        use.amount_in(states)
        for use in problem.usages
        if use.what == "activations" and use.start <= count + 1 < use.stop
    )
    assert estimated >= plan.timeline.totals({"activations"})[plan.timeline.forward]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**31))
def test_weights_that_are_gathered_for_what_runs_again_are_there_from_its_beginning(block_of_four, seed) -> None:
    """All weights of a block that runs again are gathered where it begins, not each where its own backward wants it."""
    search, held = block_of_four
    problem, rng = held.cost_graph.problem, np.random.default_rng(seed)
    costs = list(problem.costs)
    scale = max(float(c[np.isfinite(c)].max()) for c in costs)
    for node in held.cost_graph.operators.values():
        costs[node] = costs[node] + rng.uniform(0, 30 * scale, len(costs[node]))
    for name, node in held.remat_nodes.items():
        costs[node] = costs[node] - 1e3 * scale * np.array([s.how == "recomputed" for s in held.states[name]])
    for name, node in held.cost_graph.parameters.items():  # whatever may be is stored cut, and gathered twice
        again = np.array([s.stored != s.layout and s.reshard_after_forward for s in held.cost_graph.storages[name]])
        costs[node] = costs[node] - 1e3 * scale * again
    states = solve(replace(problem, costs=tuple(costs), usages=(), limit=None)).states
    plan = planned(search, held, states)
    assert held.recomputed(states) and held.storage(states) is not None
    changes = np.zeros(max(use.stop for use in problem.usages) + 1)
    for use in problem.usages:
        if use.what == "gathered":
            changes[[use.start, use.stop]] += (amount := use.amount_in(states)), -amount
    assert np.cumsum(changes).max() >= max(plan.timeline.totals({"gathered"}))


@pytest.mark.parametrize("which", ["mlp", "block", "detached"])
def test_the_estimate_is_the_program_where_nothing_is_converted(which, problems) -> None:
    search, held = problems[which, 2]
    graph = search.described.graph
    fixed = {op.name: search.described.rules[op.name][1].whole(2) for op in graph.ops}
    states = list(solve(replace(held.cost_graph.problem, usages=(), limit=None)).states)
    costs = list(held.cost_graph.problem.costs)
    for name, node in held.cost_graph.operators.items():  # everything whole; and of what is kept as little as may be
        options = held.cost_graph.options[name]
        costs[node] = np.array([0.0 if o.assignment == fixed[name] and not o.partial else np.inf for o in options])
    for node in held.remat_nodes.values():
        costs[node] = np.array(
            [
                1e9 * (s.how == "recomputed") + (s.how == "saved") - 0.5 * (s.layout is not None)
                for s in held.states[_name(held, node)]
            ]
        )
    states = solve(replace(held.cost_graph.problem, costs=tuple(costs), usages=(), limit=None)).states
    plan = planned(search, held, states)
    assert not plan.collectives(0) and not plan.regions
    assert held.peak(states) == pytest.approx(plan.peak, rel=0.03) and held.peak(states) >= plan.peak


@pytest.mark.parametrize(
    "act, loss, targets",
    [
        (None, nn.CrossEntropyLoss(), torch.zeros(64, dtype=torch.int64)),
        (nn.Softmax(-1), nn.MSELoss(), torch.zeros(64, 128)),
        (nn.LayerNorm(128), nn.MSELoss(), torch.zeros(64, 128)),
    ],
    ids=["cross entropy", "softmax", "layer norm"],
)
def test_the_estimate_of_each_strategy_is_the_program(act, loss, targets) -> None:
    """Also of strategies that take several instructions: with what these make on the way, and what their backwards
    want."""
    net = nn.Sequential(nn.Linear(16, 128, bias=False), *([act] if act is not None else []))
    search, held = searched(net, (torch.zeros(64, 16), targets), 4, loss)
    problem, several = held.cost_graph.problem, 0
    for op in search.described.graph.ops:
        node = held.cost_graph.operators[op.name]
        for state, op_cost in enumerate(held.cost_graph.op_costs[op.name]):
            costs = list(problem.costs)
            costs[node] = np.where(np.arange(len(costs[node])) == state, costs[node], np.inf)
            for name, kept in held.remat_nodes.items():
                costs[kept] = costs[kept] + 1e9 * np.array([s.how == "recomputed" for s in held.states[name]])
            if not np.isfinite(costs[node][state]):
                continue
            states = solve(replace(problem, costs=tuple(costs), usages=(), limit=None)).states
            peak = planned(search, held, states).peak
            # what a view reads and the view may both be counted
            assert peak <= held.peak(states) <= peak * (1.15 if op.name in ("broadcast_tensors", "mse_loss") else 1.01)
            several += len(op_cost.program) > 2
    assert several > 3


def _name(held, node: int) -> str:
    return next(name for name, number in held.remat_nodes.items() if number == node)


# -- plans within a limit --


def plan_of(net, args, devices: int, **options) -> Plan:
    return sw.plan(net, args, devices=devices, parallel_mode="dynamic_programming", **options)


def test_what_fits_is_as_without_a_limit() -> None:
    net, args = mlp(16, 32, 8), (torch.randn(64, 16),)
    free, wide = plan_of(net, args, 2), plan_of(net, args, 2, memory="cluster")
    assert wide.cost == free.cost == pytest.approx(wide.bound) and not wide.regions and wide.hsdp is None


def test_parameters_are_cut_where_only_that_fits() -> None:
    net, args = mlp(64, 64, 64, 64), (torch.randn(8, 64),)
    given = {"marks": marks(3, 4)}
    free = plan_of(net, args, 4, **given)
    plan = plan_of(net, args, 4, memory=0.7 * free.peak, **given)
    assert plan.peak <= 0.7 * free.peak and plan.hsdp is not None and not plan.regions
    cut = [p for p in plan.parameters.values() if p.storage != p.layout]
    assert 0 < len(cut) < 3, "no more than is needed"
    assert plan.cost > free.cost and [d.assignment for d in plan.decisions.values()] == [
        d.assignment for d in free.decisions.values()
    ]
    least = plan_of(net, args, 4, memory=0.5 * free.peak, **given)
    assert len([p for p in least.parameters.values() if p.storage != p.layout]) == 3


def test_operators_run_again_where_only_that_fits() -> None:
    net, args = mlp(8, 8, 8, 8, 8), (torch.randn(1024, 8),)
    given = {"marks": marks(4, 2)}
    free = plan_of(net, args, 2, **given)
    plan = plan_of(net, args, 2, memory=0.85 * free.peak, **given)
    assert plan.regions and plan.peak <= 0.85 * free.peak and plan.cost > free.cost
    assert plan.cost <= plan.found.cost * (1 + 1e-9)


def test_the_cheapest_of_all_plans() -> None:
    """Every way to store the weights and to run operators again, made and measured one by one. Not among them, as the
    search has it: the first product again, whose backward does not want its weight, and two again, one of which reads
    the other's from another segment of the program."""
    net, args, devices = mlp(32, 32, 32, 32), (torch.randn(64, 32),), 2
    graph = sw.plan(net, args, devices=devices, marks=marks(3, devices)).graph
    input_placement, costs = place_inputs(graph, devices, "full_batch"), CostModel(None, devices)
    search = Search.of(PlanningProblem(graph, devices, input_placement, cost_model=costs))
    weights, ops = list(graph.parameters), [op.name for op in graph.ops][1:-1]
    every = []
    for ways in product(("whole", "kept", "again"), repeat=len(weights)):
        text = {way: frozenset(w for w, mine in zip(weights, ways) if mine == way) for way in ("whole", "kept")}
        hsdp = replace(CUT, whole=text["whole"], kept=text["kept"])
        for names in chain.from_iterable(combinations(ops, k) for k in range(len(ops) + 1)):
            if {"gelu", "linear_1"} <= set(names):
                continue
            again = with_recompute(graph, frozenset(names), segments_of(graph))
            decisions = {op.name: replace(search.fixed[op.name], op=op) for op in again.ops}
            plan = Plan(again, devices, "", input_placement, decisions, search.batch_dims, None, hsdp)
            every.append((plan.peak, plan.cost))
    peaks = sorted({peak for peak, _ in every})
    for limit in (peaks[0], peaks[1], peaks[len(peaks) // 2], peaks[-1]):
        found = plan_of(net, args, devices, marks=marks(3, devices), memory=limit)
        assert found.peak <= limit
        assert found.cost == pytest.approx(min(cost for peak, cost in every if peak <= limit), rel=1e-6)


def test_the_same_as_the_oracle() -> None:
    net, args = mlp(16, 32, 8), (torch.randn(64, 16),)
    _search, held = searched(net, args, 2)
    problem = held.cost_graph.problem
    free = solve(replace(problem, usages=(), limit=None))
    for part in (1.0, 0.8, 0.65):
        limited = replace(problem, limit=part * held.peak(free.states))
        ours, theirs = solve(limited), milp(limited)
        assert held.peak(ours.states) <= limited.limit
        assert ours.cost == pytest.approx(theirs.cost, rel=1e-6)


def test_a_limit_that_no_plan_keeps() -> None:
    net, args = mlp(16, 32, 8), (torch.randn(64, 16),)
    with pytest.raises(sw.PlanError, match="no plan fits in 4.00 KB") as error:
        plan_of(net, args, 2, memory="4KB")
    assert "backward of linear" in str(error.value) and "optimizer" in str(error.value)
    least = int(error.value.legal.split("memory=")[1].split()[0])
    plan = plan_of(net, args, 2, memory=least)
    assert plan.peak <= least
    with pytest.raises(sw.PlanError):
        plan_of(net, args, 2, memory=0.98 * least)


def test_losses_are_as_on_one_device() -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(64, 8, dtype=D),) for _ in range(2)]
    net = mlp(8, 32, 32, 8, bias=True, dtype=D)
    for mark, layer in (((2, 1), (1, 1), (1,)), net[0]), (((2, 1), (1, 1), (1,)), net[2]), (((2, 1),), net[1]):
        sw.shard(layer, mark)
    with pytest.raises(sw.PlanError) as error:
        plan_of(net, batches[0], 2, memory="1KB")
    least = int(error.value.legal.split("memory=")[1].split()[0])
    model = assert_as_one_device(net, *batches, devices=2, mode="dynamic_programming", memory=1.02 * least)
    assert model.plan.peak <= 1.02 * least and model.plan.regions and model.plan.hsdp is not None


def test_a_document_says_it_all(tmp_path) -> None:
    net, args = mlp(64, 64, 64, 64), (torch.randn(256, 64),)
    free = plan_of(net, args, 2, marks=marks(3, 2))
    plan = plan_of(net, args, 2, marks=marks(3, 2), memory=0.8 * free.peak)
    assert plan.regions and plan.hsdp is not None
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.fingerprint == plan.fingerprint and loaded.peak == plan.peak
