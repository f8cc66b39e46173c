"""A graph's planning problem as a pairwise cost graph, and a solution of it as a plan.

    node of an operator     states: its strategies             cost: `op_cost` (forward and backward, seconds)
    node of a parameter     states: `StorageState`             cost: the use that is served once, if any
    node of a shared value  states: `SharedState`              cost: none
    edge                    the redistributions of a value to a consumer, and of its gradient back (`EdgeCosts`)

1. A value with one consumer needs no node: its edge joins producer and consumer.
2. A value with several consumers has a node (`shared_values`). The partitioner serves equal uses together: the state
   says the layout in which the value is produced, and the one use that is served once for all consumers with that use.
3. A result of the program, or a buffer update, is one more use of its value.
4. An operator that no gradient reaches from the results, as one before a `detach`, has no backward, and no gradient of
   its inputs is redistributed.

The cost of a plan is then the cost of its partitioned program. The program is cheaper than the cost graph says where
consumers share more than one use of a value, as with uses a, a, b, b; and where they share a use of an input, a buffer
or a constant.

`CostGraph` is the problem with the meaning of its nodes, and `cost_graph` builds it. `plan_search` has the way from a
solution to a plan; `memory_problem` adds memory to a `CostGraph`.

Example: h = x @ w and y = relu(h) are 2 nodes with 1 edge between them, since h has one consumer. Where 2 operators
consume h, h has a node too, and an edge to each of the 3 operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from ..cost.cost_model import CostModel
from ..errors import PlanError, ShardwrightError
from ..graph import SEED, Graph, Master, Op, Value
from ..identity_tables import IdentityCache
from ..launch.progress import each
from ..layout import Layout
from ..partition.local_program import Decision, InputPlacement, output_layouts
from ..partition.parameter_sharding import OptimizerParallel, stored_layouts
from ..partition.partitioner import Use
from ..solver.problem import Problem
from ..solver.search_memory import current
from .operator_memory import saved_inputs
from .search_space import EdgeCosts, OpCost, OperatorTable, Strategy, op_cost
from .shared_values import SharedState, SharedValue, Uses

__all__ = ["CostGraph", "StorageState", "cost_graph"]

Table = TypeVar("Table")
Part = TypeVar("Part", bound=Hashable)

#: Most entries of the tables of all states in which some consumers of a value share a use: 128 MB, and 16 MB within a
#: limit of memory, where each state takes longer. With more, few of the uses are tried.
MOST_ENTRIES, MOST_WITHIN = 2**24, 2**21


class StorageState(NamedTuple):
    """A state of a parameter.

    Attributes:
        layout: the layout of its use.
        stored: the layout of its storage.
        reshards: True where the gathered copy is gathered again in the backward.
        use: with several consumers, the use that is served once; None: each consumer is served by itself.
    """

    layout: Layout
    stored: Layout
    reshard_after_forward: bool = False
    use: Use | None = None


@dataclass(frozen=True)
class CostGraph:
    """A problem and the meaning of its nodes.

    Attributes:
        problem: nodes in program order.
        described: the operators.
        options: by operator, the strategies that are its node's states.
        operators, parameters, shared: name -> node.
        storages: by parameter, its node's states.
        shares: by shared value, its node's states.
        op_costs: by operator, one per strategy.
        limited: True where some consumers of a value may share a use that was not tried.
    """

    problem: Problem
    described: OperatorTable
    options: dict[str, tuple[Strategy, ...]]
    operators: dict[str, int]
    parameters: dict[str, int]
    shared: dict[str, int]
    storages: dict[str, tuple[StorageState, ...]]
    shares: dict[str, tuple[SharedState, ...]]
    op_costs: dict[str, tuple[OpCost, ...]]
    limited: bool = False

    def decisions(self, states: Sequence[int], causes: Mapping[str, Decision], cause: str) -> dict[str, Decision]:
        """The decisions that states of the nodes stand for.

        Args:
            states: by node.
            causes: operators that were decided before; they keep the cause of their decision.
            cause: the cause of the other decisions.
        """
        out = {}
        for op in self.described.graph.ops:
            before = causes.get(op.name)
            made = self.described.decided(op, self.options[op.name][states[self.operators[op.name]]], cause)
            out[op.name] = made if before is None else replace(before, partial=made.partial)
        return out

    def states(self, chosen: Mapping[str, Strategy]) -> tuple[int, ...]:
        """The states of the nodes under given strategies of all operators; parameters and shared values have their
        best states.

        Raises:
            PlanError: a strategy is not among the options.
        """
        states = [-1] * len(self.problem.costs)
        for name, node in self.operators.items():
            if chosen[name] not in self.options[name]:
                raise PlanError(f"{name}: its strategy is not among the {len(self.options[name])} of the search")
            states[node] = self.options[name].index(chosen[name])
        totals = {node: self.problem.costs[node].copy() for node in (*self.parameters.values(), *self.shared.values())}
        for (i, j), table in self.problem.edges.items():
            if i in totals:
                totals[i] += table[:, states[j]]
            elif j in totals:
                totals[j] += table[states[i]]
        for node, total in totals.items():
            states[node] = int(total.argmin())
        return tuple(states)

    def cost(self, chosen: Mapping[str, Strategy]) -> float:
        """Seconds of a step under these strategies; infinite where they exclude one another."""
        return self.problem.cost(self.states(chosen))


def cost_graph(
    described: OperatorTable,
    options: Mapping[str, tuple[Strategy, ...]],
    input_placement: InputPlacement,
    batch_dims: Mapping[str, int],
    costs: CostModel,
    *,
    stored: Mapping[str, Layout] | None = None,
    hsdp: OptimizerParallel | None = None,
    cut: OptimizerParallel | None = None,
    known: Sequence[Mapping[str, Strategy]] = (),
    deliveries: EdgeCosts | None = None,
) -> CostGraph:
    """The problem of choosing one of the options of every operator.

    Args:
        described: the operators.
        options: by operator; operators that are alike should have the same tuple: it is priced once.
        input_placement: the layouts of the inputs, and the handling of the results.
        batch_dims: value name -> the dim that carries the batch.
        costs: a `Costs`.
        stored: layouts of parameters and buffers that are settled already.
        hsdp: ZeRO/FSDP sharding (optimizer parallel) of the other parameters; None: stored as their operators use them.
        cut: where `hsdp` is None, a storage that each of the other parameters may have too, its gathered copy kept or
            gathered again in the backward.
        known: plans out of these options, near which shared uses are tried (`SharedValue`).
        deliveries: prices of the same operators and costs that are known already; new prices are added to it.

    Raises:
        PlanError: an operator none of whose strategies can be worked out.
    """
    return _Builder(
        described, options, input_placement, batch_dims, costs, dict(stored or {}), hsdp, cut, known, deliveries
    ).build()


class _Builder:
    def __init__(
        self,
        described: OperatorTable,
        options: Mapping[str, tuple[Strategy, ...]],
        input_placement: InputPlacement,
        batch_dims: Mapping[str, int],
        costs: CostModel,
        stored: dict[str, Layout],
        hsdp: OptimizerParallel | None,
        cut: OptimizerParallel | None,
        known: Sequence[Mapping[str, Strategy]],
        deliveries: EdgeCosts | None,
    ) -> None:
        self.described, self.graph, self.costs = described, described.graph, costs
        self.all_options, self.stored, self.hsdp, self.cut, self.known = options, stored, hsdp, cut, known
        self.deliveries = EdgeCosts(costs) if deliveries is None else deliveries
        self.consumers, self.producers = self.graph.consumers(), self.graph.producers()
        self.reached, self.gradients = reached(self.graph)
        self.ends = self._ends(input_placement, batch_dims)
        self.sources = self._sources(input_placement)
        self.node_costs: list[np.ndarray] = []
        self.names: list[str] = []
        self.edges: dict[tuple[int, int], np.ndarray] = {}
        self.options: dict[str, tuple[Strategy, ...]] = {}
        self.operators: dict[str, int] = {}
        self.parameters: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.storages: dict[str, tuple[StorageState, ...]] = {}
        self.shares: dict[str, tuple[SharedState, ...]] = {}
        self.op_costs: dict[str, tuple[OpCost, ...]] = {}
        self.looked_by_name: dict[str, tuple[tuple[Strategy, ...], tuple[OpCost, ...], np.ndarray]] = {}
        self.once = IdentityCache().once  # one table, or another result, for the same arguments
        self.waiting: dict[str, list[tuple[int, np.ndarray]]] = {}  # by operator, edges that wait for its node

    # -- the inputs and outputs of the program --

    def _ends(self, input_placement: InputPlacement, batch_dims: Mapping[str, int]) -> dict[str, Uses]:
        """By value, the uses at the end of the program: results of the program, buffers that are updated."""
        graph, devices = self.graph, self.described.devices
        out: dict[str, set[Use]] = {}
        values = [v for v in graph.outputs if isinstance(v, Value)]
        for value, layout in zip(values, output_layouts(values, devices, input_placement, dict(batch_dims))):
            if layout is not None:
                out.setdefault(value.name, set()).add(Use(layout, (), "output"))
        for name, value in graph.updates.items():
            out.setdefault(value.name, set()).add(Use(self._whole(graph.buffers[name]), (), "output"))
        return {name: frozenset(uses) for name, uses in out.items()}

    def _sources(self, input_placement: InputPlacement) -> dict[str, Layout]:
        graph, devices = self.graph, self.described.devices
        out = {v.name: layout for v, layout in zip(graph.inputs, input_placement.inputs)}
        out |= {v.name: self._whole(v) for v in graph.buffers.values()}
        out |= {n: Layout.replicated(devices, t.dim()) for n, t in graph.constants.items()}
        return out | {SEED.name: Layout.replicated(devices, 1)}

    def _whole(self, value: Value) -> Layout:
        return self.stored.get(value.name) or Layout.replicated(self.described.devices, len(value.shape))

    def _with_gradient(self, value: Value, consumer: Op | None = None) -> Value:
        """The value; one without a gradient where none comes back to it from the consumer, or from any."""
        comes = value.name in self.gradients if consumer is None else consumer.name in self.reached
        return value if comes or not value.requires_grad else replace(value, requires_grad=False)

    # -- nodes --

    def build(self) -> CostGraph:
        values = {v.name for v in self.graph.parameters.values()}
        limited = self._limit()
        budget = current()
        budget.tell("costs of strategies")
        for op in each(self.graph.ops, "costs of redistributions", "operators"):
            budget.tell("costs of redistributions")
            options, op_costs, costs = self._look_at(op)
            for i in self._read(op):
                if op.inputs[i].name in values and op.inputs[i].name not in self.parameters:
                    self._parameter(op.inputs[i])
            node = self.operators[op.name] = self._node(op.name, costs)
            self.options[op.name], self.op_costs[op.name] = options, op_costs
            for before, table in self.waiting.pop(op.name, ()):
                self._edge(before, node, table)
            for i in self._read(op):
                self._reads(op, node, i, values)
            for k, value in enumerate(v for v in op.outputs if v is not None):
                self._makes(op, node, k, value)
        problem = Problem(tuple(self.node_costs), self.edges, tuple(self.names))
        return CostGraph(
            problem,
            self.described,
            self.options,
            self.operators,
            self.parameters,
            self.shared,
            self.storages,
            self.shares,
            self.op_costs,
            limited,
        )

    def _node(self, name: str, costs: np.ndarray) -> int:
        self.node_costs.append(costs)
        self.names.append(name)
        return len(self.names) - 1

    def _read(self, op: Op) -> list[int]:
        """The first input place of each value that an operator consumes."""
        return list({v.name: i for i, v in reversed(list(enumerate(op.inputs)))}.values())[::-1]

    def _look_at(self, op: Op) -> tuple[tuple[Strategy, ...], tuple[OpCost, ...], np.ndarray]:
        if op.name not in self.looked_by_name:
            options = self.all_options[op.name]
            self.looked_by_name[op.name] = self.once(
                ("looked at", self.described.kinds[op.name], op.name in self.reached),
                (options,),
                lambda: self._look(op, options),
            )
        return self.looked_by_name[op.name]

    def _look(self, op: Op, options: Sequence[Strategy]) -> tuple[tuple[Strategy, ...], tuple[OpCost, ...], np.ndarray]:
        usable, op_costs, reason = [], [], None
        priced = self.deliveries.op_costs.setdefault(self.described.kinds[op.name], {})
        for strategy in options:
            cost = priced.get(strategy)
            if cost is None:
                try:
                    cost = priced[strategy] = op_cost(self.described.decided(op, strategy, ""), self.costs)
                except ShardwrightError as error:
                    reason = error
                    continue
            op_costs.append(cost if op.name in self.reached else replace(cost, backward=0.0))
            usable.append(strategy)
        if not usable:
            if reason is not None:
                raise reason
            raise PlanError("it has no strategy that this search may use", **op.where)
        return tuple(usable), tuple(op_costs), np.array([p.seconds for p in op_costs])

    def _parameter(self, value: Value) -> None:
        """Add a parameter's node: its states are the layouts that its consumers can need."""
        layouts: dict[Layout, None] = {}
        consumers: dict[Use, set[str]] = {}
        for op, i in self.consumers[value.name]:
            for uses in self._input_uses(op, i)[0]:
                layouts.update((use.input_layout, None) for use in sorted(uses, key=str))
                if len(uses) == 1:
                    consumers.setdefault(next(iter(uses)), set()).add(op.name)
        states = [storage for layout in layouts for storage in self._storages(value, layout)]
        if not states:
            states = [StorageState(layout, layout) for layout in layouts] or [
                StorageState(self._whole(value), self._whole(value))
            ]
        several = sorted((use for use, names in consumers.items() if len(names) > 1), key=str)
        states += [state._replace(use=use) for state in states for use in several if use.input_layout == state.layout]
        self.storages[value.name] = tuple(states)
        price, name = self.deliveries.price, value.name
        value = self._with_gradient(value)
        self.parameters[name] = self._node(
            name, np.array([0.0 if s.use is None else price(s.stored, (s.use,), value, parameter=True) for s in states])
        )

    def _storages(self, value: Value, layout: Layout) -> list[StorageState]:
        """The states of a parameter that is used in `layout`."""
        if value.name in self.stored:
            return [
                StorageState(
                    layout,
                    self.stored[value.name],
                    self.hsdp is not None and self.hsdp.reshards_after_forward(value.name),
                )
            ]
        whole = [] if self.hsdp is not None else [StorageState(layout, layout)]
        setting = self.hsdp or self.cut
        if setting is None:
            return whole
        try:
            stored = stored_layouts({value.name: (value, layout)}, setting)[value.name].layout
        except ShardwrightError:
            return whole
        if stored == layout:
            return [StorageState(layout, layout)]
        reshards = (False, True) if self.hsdp is None else (self.hsdp.reshards_after_forward(value.name),)
        return whole + [StorageState(layout, stored, each) for each in reshards]

    # -- edges --

    def _input_uses(self, op: Op, index: int) -> tuple[tuple[Uses, ...], np.ndarray]:
        """The distinct uses that the strategies make of an input, and by strategy the number of its uses among them."""
        op_costs = self._look_at(op)[1]
        return self._distinct("asked", op_costs, index, lambda p: p.input_uses[index])

    def _leaves(self, op: Op, index: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        op_costs = self._look_at(op)[1]
        return self._distinct("left", op_costs, index, lambda p: p.output_layouts[index])

    def _distinct(
        self, name: str, op_costs: tuple[OpCost, ...], index: int, part: Callable[[OpCost], Part]
    ) -> tuple[tuple[Part, ...], np.ndarray]:
        def count() -> tuple[tuple[Part, ...], np.ndarray]:
            place: dict[Part, int] = {}
            which = [place.setdefault(part(p), len(place)) for p in op_costs]
            return tuple(place), np.array(which)

        return self.once((name, index), (op_costs,), count)

    def _reads(self, op: Op, node: int, index: int, parameters: set[str]) -> None:
        """Add the edge from a parameter, or the cost of an input, a buffer or a constant."""
        value = self._with_gradient(op.inputs[index], op)
        uses, which = self._input_uses(op, index)
        if value.name in parameters:
            states, settled = self.storages[value.name], value.name in self.stored
            saved = any(state.reshard_after_forward for state in states) and index in saved_inputs(self._look_at(op)[1])
            table = self.once(
                ("parameter", states, uses, *_kind(value), saved, settled),
                (),
                lambda: np.array([[self._used(value, state, use, saved) for use in uses] for state in states]),
            )
            self._edge(self.parameters[value.name], node, self._spread(table, None, which))
        elif value.name in self.sources:
            source = self.sources[value.name]
            self.node_costs[node] = self.node_costs[node] + self.deliveries.table((source,), uses, value)[0, which]

    def _used(self, value: Value, storage: StorageState, uses: Uses, saved: bool) -> float:
        """The price of an operator's uses of a parameter. All its users agree on one layout; where the storage is
        settled, each may differ.

        Args:
            saved: True where the operator's backward needs the parameter.
        """
        if any(use.input_layout != storage.layout for use in uses) and value.name not in self.stored:
            return float("inf")
        served = storage.use is not None and uses == {storage.use}
        total = 0.0 if served else self.deliveries.price(storage.stored, uses, value, parameter=True)
        if storage.reshard_after_forward and saved:
            total += self.deliveries.price(storage.stored, uses, replace(value, requires_grad=False), parameter=True)
        return total

    def _makes(self, op: Op, node: int, index: int, value: Value) -> None:
        """Add the edges from a value to its consumers."""
        output_layouts, which = self._leaves(op, index)
        value, consumers = self._with_gradient(value), self._consumers(value)
        ends = self.ends.get(value.name, frozenset())
        if not consumers:
            self.node_costs[node] = (
                self.node_costs[node] + self.deliveries.table(output_layouts, (ends,), value)[which, 0]
            )
        elif len(consumers) == 1 and not ends:
            ((consumer, i),) = consumers
            uses, asked = self._input_uses(consumer, i)
            table = self.deliveries.table(output_layouts, uses, self._with_gradient(value, consumer))
            self._later(consumer, node, self._spread(table, which, asked))
        else:
            self._share(node, value, output_layouts, which, consumers, ends)

    def _share(
        self,
        node: int,
        value: Value,
        output_layouts: tuple[Layout, ...],
        which: np.ndarray,
        consumers: list[tuple[Op, int]],
        ends: Uses,
    ) -> None:
        """Add the node of a value with several consumers."""
        asked = [self._input_uses(consumer, i) for consumer, i in consumers]
        shared = self._shared_value(value, output_layouts, [uses for uses, _ in asked], ends)
        states = self.shares[value.name] = shared.states
        shared_node = self.shared[value.name] = self._node(f"%{value.name}", np.zeros(len(states)))
        firsts = self.once("producer", (shared,), shared.producer_costs)
        self._edge(node, shared_node, self._spread(firsts, which, None))
        for (consumer, _i), (uses, taken) in zip(consumers, asked):
            read = self._with_gradient(value, consumer)
            table = self.once(
                ("consumer", read.requires_grad), (shared, uses), lambda: shared.consumer_costs(read, uses)
            )
            self._later(consumer, shared_node, self._spread(table, None, taken))

    def _shared_value(
        self, value: Value, output_layouts: tuple[Layout, ...], asked: Sequence[tuple[Uses, ...]], ends: Uses
    ) -> SharedValue:
        return self.once(
            ("shared", ends, value.shape, *_kind(value)),
            (output_layouts, *asked),
            lambda: SharedValue(value, output_layouts, asked, ends, self.deliveries),
        )

    def _limit(self) -> bool:
        """Try few of the uses that some consumers of a value may share, where all together are too many. Equal values
        have equal states, also where a known plan decides them differently.

        Returns:
            True where some are not tried.
        """
        found: list[tuple[SharedValue, Op, int, list[tuple[Op, int]]]] = []
        entries = 0
        for op in each(self.graph.ops, "costs of strategies", "operators"):
            current().tell("costs of strategies")
            for index, value in enumerate(self._with_gradient(v) for v in op.outputs if v is not None):
                consumers, ends = self._consumers(value), self.ends.get(value.name, frozenset())
                if len(consumers) + bool(ends) > 2:
                    asked = [self._input_uses(consumer, i)[0] for consumer, i in consumers]
                    shared = self._shared_value(value, self._leaves(op, index)[0], asked, ends)
                    entries += shared.pairs * sum(len(self._look_at(consumer)[0]) for consumer, _ in consumers)
                    found.append((shared, op, index, consumers))
        if entries <= (MOST_ENTRIES if self.cut is None else MOST_WITHIN):
            return False
        for shared, producer, index, consumers in found:
            shared.limit()
            for plan in self.known:
                made, *read = (self._op_cost(op, plan) for op in (producer, *(consumer for consumer, _ in consumers)))
                if made is not None:
                    uses = [cost.input_uses[i] for cost, (_, i) in zip(read, consumers) if cost is not None]
                    shared.near(made.output_layouts[index], (use for some in uses if len(some) == 1 for use in some))
        return True

    def _op_cost(self, op: Op, plan: Mapping[str, Strategy]) -> OpCost | None:
        """The cost of an operator in a known plan; None where its strategy there cannot be worked out."""
        options, op_costs, _ = self._look_at(op)
        return op_costs[options.index(plan[op.name])] if plan.get(op.name) in options else None

    def _consumers(self, value: Value) -> list[tuple[Op, int]]:
        """The consumers of a value, each once, with the first input place."""
        consumers = {consumer.name: (consumer, i) for consumer, i in reversed(self.consumers.get(value.name, ()))}
        return list(consumers.values())[::-1]

    def _spread(self, table: np.ndarray, rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray:
        """A table of distinct layouts and uses as one of strategies; the same object for the same arguments."""
        numbers = rows is not None and rows.tobytes(), columns is not None and columns.tobytes()

        def spread() -> np.ndarray:
            taken = table if rows is None else table[rows]
            return np.ascontiguousarray(taken if columns is None else taken[:, columns])

        return self.once(("spread", *numbers), (table,), spread)

    def _later(self, consumer: Op, node: int, table: np.ndarray) -> None:
        self.waiting.setdefault(consumer.name, []).append((node, table))

    def _edge(self, i: int, j: int, table: np.ndarray) -> None:
        self.edges[i, j] = self.edges[i, j] + table if (i, j) in self.edges else table


def reached(graph: Graph) -> tuple[set[str], set[str]]:
    """The operators and the values that a gradient reaches from the results, as in `Plan.backward`.

    A value before a detach requires a gradient, and none comes.
    """
    values = {v.name for v in graph.outputs if isinstance(v, Value) and v.requires_grad}
    operators = set()
    for op in reversed(graph.ops):
        if any(v is not None and v.name in values for v in op.outputs):
            operators.add(op.name)
            values.update(v.name for v in op.inputs if v.requires_grad)
    return operators, values


def _kind(value: Value) -> tuple[int, bool, Master | None]:
    """The properties of a value that its prices depend on."""
    return value.nbytes, value.requires_grad, value.master


# -- the search --
