"""stages="auto": the search for a model's cut, devices of each stage, recomputation, and number of micro-batches.

1. Search (`StageSearch`):

    price        the units of the model, for each pair of d devices and m micro-batches, by one plan (`unit_prices`)
    cut          for each (d, m) the best stages of d devices, and for the best m of unequal numbers (`balance`)
    choose       the cheapest cut that fits in memory; where the prices of its (d, m) come from the plan of another m,
                 they are replaced by prices of its own plan, until the cheapest cut has its own prices

Numbers of micro-batches are powers of two that divide the batch. For each d the largest number is tried first, then
half of it, until a step takes longer or does not fit; S stages begin with 16·S, where the bubble is less than one
sixteenth. Recomputation is priced only where a cut does not fit. No decision depends on a clock, so all processes
would choose alike.

2. Other numbers of rows (`with_rows`): a captured program for another number of rows, from two captures of it.

    number(rows) = number(b) + (number(2b) - number(b)) · (rows - b) / b

for every size and every number among the arguments of operators. Example: a size of 32 for b = 4 rows and of 64 for 8
rows is 128 for 16 rows. The result is right for a program with the same operators for more rows, and is used for
prices; the program that runs is captured for its own rows.

3. From the choice to a plan (`AutomaticStages`): choose stages, make the pipeline of the choice, and check that it
   fits. The prices come from a plan in which stages have other neighbours than in the pipeline. Where the pipeline's
   own peak is above the limit, stages are chosen again with proportionally less memory. Borders between stages of
   unequal numbers of devices have redistributions of their own; where such a pipeline costs more than the price of
   equal stages, equal stages are made too, and the cheaper pipeline is taken.

4. Ctrl-C (`AutomaticStages.so_far`): a pipeline that fits and is made already is the best so far. Before one is, it is
   the pipeline of the cheapest cut by the prices until then, its stages planned as those of the prices are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from ..capture.annotations import PipelineSettings
from ..cluster import Cluster, format_bytes
from ..errors import PlanError, SettingError, ShardwrightError
from ..graph import Graph, Op, Value
from ..launch.progress import each, keep
from ..partition.local_program import Decisions, InputPlacement, PortableDecisions, place_inputs
from ..sharded_plan import Plan
from ..torch_private import pytree
from .build import rows_of
from .pipeline_plan import PipelinePlan
from .stage_costs import StageCut, StageOption, UnitPrices, all_recomputed, balance, least_memory, unit_prices
from .stages import PipelineSearchResult, PricedPipeline, StageChoice, units_of

__all__ = ["UNITS_BY", "AutomaticStages", "StageSearch", "check_automatic", "first_count", "with_rows"]


# -- other numbers of rows


def with_rows(graph: Graph, wide: Graph, rows: int, wanted: int) -> Graph:
    """The graph for `wanted` rows.

    Args:
        graph, wide: captured for `rows`, and for twice as many.

    Raises:
        SettingError: the captures are not the same program, or a number would not be whole.
    """
    return graph if rows == wanted else _Resizing(graph, wide, rows, wanted).run()


class _Resizing:
    def __init__(self, graph: Graph, wide: Graph, rows: int, wanted: int) -> None:
        self.graph, self.wide, self.rows, self.wanted = graph, wide, rows, wanted
        self.values: dict[str, Value] = {}

    def run(self) -> Graph:
        graph, wide = self.graph, self.wide
        if len(graph.ops) != len(wide.ops) or len(graph.inputs) != len(wide.inputs):
            raise self.other(None)
        for name, tensor in graph.constants.items():
            if name not in wide.constants or wide.constants[name].shape != tensor.shape:
                raise self.other(None)
        inputs = tuple(self.value(v, w, None) for v, w in zip(graph.inputs, wide.inputs))
        ops = tuple(map(self.operator, graph.ops, wide.ops))
        changed = lambda v: self.values.get(v.name, v) if isinstance(v, Value) else v
        return replace(
            graph,
            inputs=inputs,
            ops=ops,
            outputs=tuple(map(changed, graph.outputs)),
            updates={n: changed(v) for n, v in graph.updates.items()},
        )

    def operator(self, op: Op, other: Op) -> Op:
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        other_leaves, its = pytree.tree_flatten((other.args, other.kwargs))
        if op.target is not other.target or spec != its or len(op.outputs) != len(other.outputs):
            raise self.other(op)
        args, kwargs = pytree.tree_unflatten([self.leaf(a, b, op) for a, b in zip(leaves, other_leaves)], spec)
        return replace(
            op,
            args=args,
            kwargs=kwargs,
            inputs=tuple(self.values.get(v.name, v) for v in op.inputs),
            outputs=tuple(
                None if v is None or w is None else self.value(v, w, op) for v, w in zip(op.outputs, other.outputs)
            ),
        )

    def leaf(self, one: object, two: object, op: Op) -> object:
        if isinstance(one, Value):
            return self.values.get(one.name, one)
        if isinstance(one, int) and not isinstance(one, bool) and isinstance(two, int):
            return self.number(one, two, op)
        if not isinstance(one, (int, float)) and one != two:
            raise self.other(op)
        return one

    def value(self, one: Value, two: Value, op: Op | None) -> Value:
        if len(one.shape) != len(two.shape):
            raise self.other(op)
        shape = tuple(self.number(a, b, op) for a, b in zip(one.shape, two.shape))
        made = self.values[one.name] = replace(one, shape=shape)
        return made

    def number(self, one: int, two: int, op: Op | None) -> int:
        more, rest = divmod((two - one) * (self.wanted - self.rows), self.rows)
        if rest or one + more < 0 <= one:
            raise self.other(op)
        return one + more

    def other(self, op: Op | None) -> SettingError:
        return SettingError(
            "the program is another one for more rows: what it costs for other numbers of micro-batches cannot be told",
            **(op.where if op is not None else {}),
            legal="a number for micro_batches",
        )


#: S stages are tried with at most this many times S micro-batches.
MOST_ROUNDS = 16

#: NEAR: allowed distance of unequal stages from the best, relative to it. PROMISING: unequal stages are searched for
#: the numbers m whose equal stages cost at most this many times the best.
NEAR, PROMISING = 2e-3, 1.1

#: (devices of a stage, number of micro-batches).
Pair = tuple[int, int]

#: The planner of the plan that units are priced by: (graph, devices, fed) -> Plan.
Planner = Callable[[Graph, int, InputPlacement], Plan]


def counts_of(rows: int) -> tuple[int, ...]:
    """The numbers of micro-batches for a batch of `rows` rows: powers of two that divide it."""
    return tuple(1 << k for k in range((rows & -rows).bit_length())) if rows else (1,)


def first_count(rows: int) -> int:
    """The number of micro-batches for which a model is captured first, where the number is to be chosen.

    A micro-batch has at least two rows where possible, as a program of a single row may differ.
    """
    counts = [c for c in counts_of(rows) if rows // c >= 2] or [1]
    return counts[len(counts) // 2]


def stands(cluster: Cluster, first: int, devices: int) -> bool:
    """True where `devices` devices from `first` on are contiguous like the innermost ones.

    Inside each level whose units have more devices, they lie in one unit; at each other level, they begin at a unit.
    """
    below = 1
    for level in cluster.levels:
        below *= level.size
        if first // below != (first + devices - 1) // below if devices < below else first % below:
            return False
    return True


class _Priced(NamedTuple):
    """Prices of all units, without and, where requested, with recomputation.

    `at_these_rows` is True where the plan was searched for this number of rows.
    """

    plan: Plan
    at_these_rows: bool
    prices: list[UnitPrices]


class StageSearch:
    """The search for the stages of one model.

    Args:
        graph, wide: captured for `count` micro-batches, and for twice the rows.
        rows: of a micro-batch of the graph.
        count: the number of micro-batches for which the graph was captured.
        devices: of all stages together.
        dataset: the dataset strategy.
        planner: the planner of the plans that units are priced by.
        micro_batches: the number of micro-batches, or "auto".
    """

    def __init__(
        self,
        graph: Graph,
        wide: Graph | None,
        rows: int,
        count: int,
        devices: int,
        dataset: object,
        cluster: Cluster,
        planner: Planner,
        *,
        micro_batches: int | str = "auto",
    ) -> None:
        self.rows, self.batch, self.devices = rows, rows * count, devices
        self.dataset, self.cluster, self.memory, self.planner = dataset, cluster, math.inf, planner
        self.units, self.wide = units_of(graph), wide
        self.counts = counts_of(self.batch) if micro_batches == "auto" else (int(micro_batches),)
        self.graphs = {rows: self.units.reduced}
        self.priced: dict[Pair, _Priced] = {}
        self.refused: dict[Pair, ShardwrightError] = {}
        self.equal: dict[Pair, StageCut | None] = {}
        self.unequal: dict[int, tuple[list[StageOption], StageCut]] = {}

    def run(self, memory: float, unequal: bool = True) -> PipelineSearchResult:
        """The chosen stages and the alternatives.

        Args:
            memory: bytes per device.
            unequal: True where stages may have unequal numbers of devices.

        Raises:
            PlanError: no pipeline fits; with the least memory that was found, and the pipeline that needs it.
            ShardwrightError: no plan is possible; the planner's error.
        """
        self.memory = memory
        self.equal.clear()
        self.unequal.clear()
        for size in each(self.sizes(), "search of stages", "sizes of a stage"):
            before = math.inf
            for count in self.counts_for(size):
                self.price((size, count))
                found = self.equal.get((size, count))
                if (found is None and before < math.inf) or (found is not None and found.seconds > before):
                    break
                before = found.seconds if found is not None else before
        self.settle()
        if unequal and self.dataset == "full_batch":  # else a rank's part of the batch would differ between stages
            near = PROMISING * self.least()
            equally_cut = ((m, found) for (_, m), found in self.equal.items() if found is not None)
            for count in sorted({m for m, found in equally_cut if found.seconds <= near}):
                self.cut_unequally(count)
        return self.result()

    def so_far(self, memory: float) -> PipelineSearchResult | None:
        """The result by the prices until now, where Ctrl-C has stopped the search; None: no cut fits.

        Args:
            memory: bytes per device.
        """
        self.memory = memory
        self.equal.clear()
        self.unequal.clear()
        for pair in list(self.priced):
            self.price(pair)
        try:
            return self.result()
        except ShardwrightError:
            return None

    # -- candidates ----------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Numbers of devices of a stage where all stages have equally many."""
        most = min(len(self.units), max(self.counts))
        return [
            d
            for d in range(1, self.devices + 1)
            if self.devices % d == 0
            and self.devices // d <= most
            and all(stands(self.cluster, first, d) for first in range(0, self.devices, d))
        ]

    def counts_for(self, devices: int) -> list[int]:
        """Numbers of micro-batches for stages of `devices` devices, the largest first."""
        stages = self.devices // devices
        fits = [m for m in self.counts if m >= stages]
        return [m for m in reversed(fits) if m <= max(MOST_ROUNDS * stages, fits[0])]

    def on_rows(self, rows: int) -> Graph:
        """The graph of the units' representatives for a micro-batch of `rows` rows."""
        if rows not in self.graphs:
            wide = self.wide or self.units.graph
            if len(wide.ops) != len(self.units.graph.ops):
                with_rows(self.units.graph, wide, self.rows, rows)  # raises the error
            self.graphs[rows] = with_rows(self.graphs[self.rows], self.units.on(wide).reduced, self.rows, rows)
        return self.graphs[rows]

    # -- prices --------------------------------------------------------------------------------------------------------

    def price(self, pair: Pair, at_these_rows: bool = False) -> None:
        """Price the units for a pair, and cut.

        Args:
            at_these_rows: True: by a plan searched for this number of rows; False: by the plan of another number of
                micro-batches, where one is valid here too.
        """
        devices, count = pair
        try:
            if at_these_rows or pair not in self.priced:
                graph = self.on_rows(self.batch // count)
                input_placement = place_inputs(graph, devices, self.dataset)
                plan = None if at_these_rows else self.taken_over(graph, devices, input_placement)
                searched = self.planner(graph, devices, input_placement) if plan is None else plan
                self.priced[pair] = _Priced(searched, plan is None, [unit_prices(searched, self.units, self.cluster)])
            self.equal[pair] = self.cut_equally(pair, math.inf)
            cut = self.equal[pair]
            if (cut is None or cut.peak > self.memory) and len(self.priced[pair].prices) == 1:
                recomputing = all_recomputed(self.priced[pair].plan, self.units)
                self.priced[pair].prices.append(unit_prices(recomputing, self.units, self.cluster, recompute=True))
            if cut is None or cut.peak > self.memory:
                self.equal[pair] = self.cut_equally(pair, self.memory)
        except ShardwrightError as error:
            self.refused[pair] = error
            for table in (self.priced, self.equal):
                table.pop(pair, None)

    def cut_equally(self, pair: Pair, memory: float) -> StageCut | None:
        """The best cut into stages of one size."""
        return balance(self.ways(pair), len(self.units), self.devices, pair[1], memory, stages=self.devices // pair[0])

    def taken_over(self, graph: Graph, devices: int, input_placement: InputPlacement) -> Plan | None:
        """A plan of the graph with the decisions of a plan for another number of rows; None where none is valid."""
        for pair in sorted(self.priced):
            known = self.priced[pair]
            if pair[0] == devices and known.at_these_rows:
                portable = PortableDecisions.of(Decisions(known.plan.decisions, known.plan.batch_dims))
                decisions = portable.onto(graph, devices, on_missing_rule="replicate").decisions
                if all(
                    len(d.assignment.digits) == len(d.bound.factors)
                    and d.bound.divides(d.assignment)
                    and d.bound.is_consistent(d.assignment)
                    for d in decisions.values()
                ):
                    try:
                        made = replace(known.plan, graph=graph, input_placement=input_placement, decisions=decisions)
                        _ = made.program
                        return made
                    except ShardwrightError:
                        continue  # these rows do not divide for a redistribution
        return None

    def ways(self, *pairs: Pair) -> list[StageOption]:
        """The options to run a stage."""
        return [each.way for pair in pairs for each in self.priced[pair].prices]

    def least(self) -> float:
        """Seconds of the best known cut."""
        return min((found.seconds for found in self.equal.values() if found is not None), default=math.inf)

    def settle(self) -> None:
        """Price the best pair by its own plan, until the best pair is so priced."""
        while True:
            found = [(balanced.seconds, pair) for pair, balanced in self.equal.items() if balanced is not None]
            if not found or self.priced[best := min(found)[1]].at_these_rows:
                return
            self.price(best, at_these_rows=True)

    def cut_unequally(self, count: int) -> None:
        """Cut into stages of unequal numbers of devices, and keep the cut where it is better than all known ones."""
        most = self.least() * (1 - NEAR)
        for chain in _chains(sorted({d for d, m in self.priced if m == count})):
            ways = self.ways(*((d, count) for d in chain))
            found = balance(
                ways,
                len(self.units),
                self.devices,
                count,
                self.memory,
                most=most,
                near=NEAR,
                stands=lambda first, d: stands(self.cluster, first, d),
            )
            if found is not None:
                self.unequal[count], most = (ways, found), found.seconds

    # -- result --------------------------------------------------------------------------------------------------------

    def result(self) -> PipelineSearchResult:
        alternatives, best = [], None
        for pair, found in self.equal.items():
            alternatives.append(
                self.alternative(self.ways(pair), found, pair[1]) if found is not None else self.too_large(pair)
            )
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best = self.ways(pair), found, pair[1]
        for count, (ways, found) in self.unequal.items():
            alternatives.append(self.alternative(ways, found, count))
            if best is None or found.seconds < best[1].seconds:
                best = ways, found, count
        alternatives += [
            PricedPipeline((d,) * (self.devices // d), m, why=f"{type(error).__name__}: {error}")
            for (d, m), error in self.refused.items()
            if (d, m) not in self.equal
        ]
        alternatives.sort(
            key=lambda a: (a.seconds is None, a.seconds or 0.0, a.peak or math.inf, a.devices, a.micro_batches)
        )
        if best is None:
            raise self.nothing(alternatives)
        ways, found, count = best
        stages = tuple(StageChoice(c.first, c.last, ways[c.way].devices, ways[c.way].recompute) for c in found.stages)
        return PipelineSearchResult(self.units.paths, stages, count, found.seconds, found.peak, tuple(alternatives))

    def alternative(self, ways: Sequence[StageOption], found: StageCut, count: int) -> PricedPipeline:
        used = [ways[c.way] for c in found.stages]
        return PricedPipeline(
            tuple(way.devices for way in used), count, sum(way.recompute for way in used), found.seconds, found.peak
        )

    def too_large(self, pair: Pair) -> PricedPipeline:
        """The alternative for a pair that does not fit: the memory that it needs."""
        devices, count = pair
        ways, stages = self.ways(pair), self.devices // devices
        found = least_memory(ways, len(self.units), self.devices, count, stages=stages)
        if found is None:
            return PricedPipeline((devices,) * stages, count, why="there are no such stages")
        return replace(
            self.alternative(ways, found, count),
            seconds=None,
            why=f"needs {format_bytes(found.peak)} a device, of {format_bytes(self.memory)}",
        )

    def nothing(self, alternatives: Sequence[PricedPipeline]) -> Exception:
        """The error that no pipeline is possible."""
        needs = [a for a in alternatives if a.peak is not None]
        if not needs:
            errors = list(self.refused.values())
            return (
                errors[0]
                if errors
                else SettingError(
                    f'stages="auto": no number of stages for {self.devices} devices, {len(self.units)} units and '
                    f"micro_batches={self.counts[0]}",
                    legal="more micro-batches, or another number of devices",
                )
            )
        least = min(needs, key=lambda a: a.peak or 0.0)
        return PlanError(
            f'stages="auto": no pipeline fits in {format_bytes(self.memory)} a device: the least that was found is '
            f"{format_bytes(least.peak or 0.0)}, with {least.stages} stage{'s' * (least.stages > 1)} of "
            f"{least.devices[0]} devices, "
            f"{least.micro_batches} micro-batch{'es' * (least.micro_batches > 1)} and {least.recomputed} of "
            "the stages computed again in the backward",
            legal="more devices, smaller batches, optimizer parallel (hsdp), or more memory",
        )


def _chains(sizes: list[int]) -> list[tuple[int, ...]]:
    """The longest chains of sizes in which each divides the next: stages of such sizes can send to one another."""
    out: list[tuple[int, ...]] = []

    def grow(chain: tuple[int, ...], rest: list[int]) -> None:
        nexts = [d for d in rest if not chain or d % chain[-1] == 0]
        for d in nexts:
            if not any(d % other == 0 and d != other for other in nexts):
                grow((*chain, d), [r for r in nexts if r > d])
        if not nexts:
            out.append(chain)

    grow((), sizes)
    return out


# -- from the choice to a plan

#: Mode -> the mode in which units are priced instead: the recursion finds plans near the best.
UNITS_BY = {"dynamic_programming": "recursive_programming"}

#: Attempts to choose stages, each with less memory than the one before.
MOST_TRIES = 4


def check_automatic(setting: PipelineSettings, modules: Mapping[str, int], strategies: Path | None = None) -> None:
    """Check that no setting fixes something that stages="auto" chooses.

    Args:
        strategies: the file of a plan whose strategies are to apply; None: none.

    Raises:
        SettingError: a module in a stage, another schedule, chunks, a plan's strategies.
    """
    if modules:
        path, stage = next(iter(modules.items()))
        raise SettingError(
            f'the module {path!r} is put into stage {stage}, and stages="auto" chooses stages itself',
            legal="no set_stage and no stage_config, or a number of stages",
        )
    if setting.scheduler != "1f1b" or setting.chunks not in (None, 1):
        what = f"scheduler={setting.scheduler!r}" if setting.scheduler != "1f1b" else f"chunks={setting.chunks}"
        raise SettingError(
            f'{what} with stages="auto", which are cut for 1f1b', legal='scheduler="1f1b", or a number of stages'
        )
    if strategies is not None:
        raise SettingError(
            f'{strategies} has strategies, and stages="auto" chooses them with the stages',
            legal="no strategies, or a number of stages",
        )


#: Runs a choice on one of several processes: (graph, settings that decide the choice, choose) -> the choice.
OnFirstRank = Callable[[Graph, object, Callable[[], PipelineSearchResult]], PipelineSearchResult]


class PlanStages(Protocol):
    """The planning of chosen stages; with `quick`, stages are planned as those of the prices."""

    def __call__(self, chosen: PipelineSearchResult, quick: bool = False, /) -> PipelinePlan: ...


@dataclass(frozen=True)
class AutomaticStages:
    """The settings by which the stages of one model are chosen.

    Attributes:
        count: the number of micro-batches for which it is captured first.
        captured: number of micro-batches -> the captured graph, and that for twice the rows.
        before: the choice for an earlier call with other shapes: its stages are kept.
        first: where several processes plan together, the function that runs the choice on one: (graph, settings,
            choose) -> the choice; None: each process chooses.
    """

    count: int
    captured: Callable[[int], tuple[Graph, Graph | None]]
    before: PipelineSearchResult | None = None
    first: OnFirstRank | None = None

    @classmethod
    def of(
        cls,
        setting: PipelineSettings,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        captured: Callable[[int], tuple[Graph, Graph | None]],
        before: object = None,
        first: OnFirstRank | None = None,
        per_rank_batch: bool = False,
    ) -> AutomaticStages:
        """The settings for a call of a model; without stages="auto", for the requested number of micro-batches.

        Args:
            args, kwargs: the whole batch.
            before: the plan of an earlier call.
            per_rank_batch: True where each process feeds a part of the batch.

        Raises:
            SettingError: micro-batches to be chosen for given stages, or stages to be chosen where the batch depends
                on their number.
        """
        if setting.stages != "auto":
            if setting.micro_batches == "auto":
                raise SettingError('micro_batches="auto" with a number of stages', legal='a number, or stages="auto"')
            return cls(int(setting.micro_batches), captured)
        if per_rank_batch:
            raise SettingError(
                'stages="auto" where each process feeds its own part of the batch: of how many parts '
                "the batch is depends on the stages",
                legal='dataset_strategy("full_batch")',
            )
        chosen, rows = getattr(before, "chosen", None), rows_of(args, dict(kwargs)) or 1
        if setting.micro_batches != "auto":
            count = int(setting.micro_batches)
        elif chosen is None:
            count = first_count(rows)
        else:
            count = max(
                (c for c in counts_of(rows) if len(chosen.stages) <= c <= chosen.micro_batches),
                default=chosen.micro_batches,
            )
        return cls(count, captured, None if chosen is None else replace(chosen, micro_batches=count), first)

    def run(
        self,
        graph: Graph,
        wide: Graph | None,
        splits: tuple[bool, ...],
        devices: int,
        dataset: object,
        cluster: Cluster,
        memory: float | None,
        planner: Planner,
        piped: PlanStages,
        micro_batches: int | str,
    ) -> PipelinePlan:
        """The pipeline of the chosen stages.

        Args:
            memory: bytes per device; None: those of the cluster.
            piped: (chosen stages, quick) -> the pipeline; with quick, its stages are planned as those of the prices.

        Raises:
            PlanError: no pipeline fits.
            KeyboardInterrupt: at Ctrl-C; the command around keeps the best pipeline so far.
        """
        if self.before is not None:
            return piped(self.before)
        limit = cluster.memory if memory is None else memory
        rows = next((v.shape[0] for v, part in zip(graph.inputs, splits) if part), 1)
        choosing: list[StageSearch] = []
        fitting: list[PipelinePlan] = []

        def choose(target: float, unequal: bool) -> PipelineSearchResult:
            if not choosing:
                choosing.append(
                    StageSearch(
                        graph, wide, rows, self.count, devices, dataset, cluster, planner, micro_batches=micro_batches
                    )
                )
            return choosing[0].run(target, unequal)

        def made(target: float, unequal: bool = True) -> PipelinePlan:
            settings = (devices, target, unequal, micro_batches, cluster)
            found = piped(
                choose(target, unequal)
                if self.first is None
                else self.first(graph, settings, lambda: choose(target, unequal))
            )
            if found.peak <= limit:
                fitting.append(found)
            return found

        target, least = limit, float("inf")
        try:
            for _ in range(MOST_TRIES):
                found = made(target)
                if (
                    found.chosen is not None
                    and found.chosen.unequal
                    and found.cost
                    > min(
                        (a.seconds for a in found.alternatives if a.seconds is not None and len(set(a.devices)) == 1),
                        default=float("inf"),
                    )
                ):
                    other = made(target, unequal=False)
                    found = other if other.cost <= found.cost and other.peak <= limit else found
                if found.peak <= limit:
                    return found
                least, target = min(least, found.peak), target * limit / found.peak * (1 - 1e-6)
        except KeyboardInterrupt:
            keep(lambda: self.so_far(choosing, fitting, piped, limit))
            raise
        raise PlanError(
            f'stages="auto": no pipeline that fits in {format_bytes(limit)} a device was found; the least that '
            f"one needs is {format_bytes(least)}",
            legal="more devices, smaller batches, optimizer parallel (hsdp), or more memory",
        )

    @staticmethod
    def so_far(
        choosing: Sequence[StageSearch], fitting: Sequence[PipelinePlan], piped: PlanStages, limit: float
    ) -> PipelinePlan | None:
        """The best pipeline of a search that Ctrl-C has stopped; None: none that fits.

        Args:
            choosing: the search, where it had begun.
            fitting: the pipelines that were made and fit.
            piped: see `run`.
            limit: bytes per device.
        """
        found, target = min(fitting, key=lambda made: made.cost, default=None), limit
        for _ in range(MOST_TRIES if found is None and choosing else 0):
            chosen = choosing[0].so_far(target)
            if chosen is None:
                return None
            made = piped(chosen, True)
            if made.peak <= limit:
                found = made
                break
            target *= limit / made.peak * (1 - 1e-6)
        note = "stopped by Ctrl-C: the best pipeline until then"
        return None if found is None else replace(found, notes_of_its_own=(*found.notes_of_its_own, note))
