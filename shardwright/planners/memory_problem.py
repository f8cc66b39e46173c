"""Memory of a plan's choices: a `CostGraph` with memory usages and a limit.

A usage is a number of bytes by state of one node or of two, over the moments [start, stop). Usages by kind:

    moments     forward of operator k of n: k;  the results are returned: n, and their gradients arrive: n + 1;
                backward of operator k: 2n + 1 - k
    always      parameters, gradients, optimizer state as stored; inputs, buffers, constants
    source      an operator's output in its own layout: up to where its consumer has its own copy; with several
                consumers, up to the last one, together with the copy that is served once
    delivered   an operator's input in the layout that it needs: while it runs; with several consumers, one consumer's
                own copy on to its backward if that needs it, or if the operator may run again
    saved       the saved part of a value (`SaveOrRecompute`), from there to the backward that needs it
    recomputed  a recomputed value: from the backward of the end of its segment
    gathered    a parameter that is stored cut: from its first use to its last backward, or only around either; where a
                consumer of it runs again, from the beginning of the recomputation
    backward    gradients of inputs while an operator's backward runs; of an output from its last consumer's backward on
    inside      values inside an operator of several instructions, and their gradients (`operator_memory`)
    sent        the other end of a redistribution, where it is larger than the tensors that its consumer produces or
                alone saves

With n = 3 operators, the forwards are at moments 0 to 2, the results at 3, their gradients at 4, and the backwards of
operators 2, 1, 0 at 5, 6, 7.

A view of an input, a buffer or a constant takes no memory, except where it is redistributed. Where nothing is
recomputed the estimate is that of `memory_timeline.timeline`, except that a view of a saved value may count once more.
The estimate is too high where a value is recomputed, for longer than necessary; and where an intermediate is sent that
is not recomputed after all, or is sent twice on its way.

`save_or_recompute` supplies the nodes of saved and recomputed values, and bytes by strategy; this file lays them over
the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..graph import Op, Value
from ..launch.progress import each
from ..layout import Layout
from ..partition.local_program import InputPlacement, output_layouts
from ..partition.parameter_sharding import OptimizerParallel
from ..partition.rematerialization import hands_on, segments_of
from ..solver.problem import MemoryUsage, Problem
from ..solver.search_memory import current
from .graph_problem import CostGraph
from .save_or_recompute import RECOMPUTED, SAVED, Node, OperatorMemory, RematStates, SaveOrRecompute

__all__ = ["MemoryProblem", "add_memory"]


@dataclass(frozen=True)
class MemoryProblem:
    """A cost graph with memory.

    Attributes:
        cost_graph: the cost graph; its problem has a limit, usages, and a node for each value that may be saved.
        remat_nodes: by value, the node that decides between saving and recomputing it.
        states: by value, that node's states.
        segments: by operator, its segment of the program.
        recompute_sets: by value that may be recomputed, the operators that then run again. An operator for which
            `rematerialization.hands_on` is true comes with the value that it views, and is not listed.
    """

    cost_graph: CostGraph
    remat_nodes: dict[str, int]
    states: dict[str, tuple[SaveOrRecompute, ...]]
    segments: dict[str, int]
    recompute_sets: dict[str, tuple[str, ...]]

    def recomputed(self, states: tuple[int, ...]) -> frozenset[str]:
        """The operators that run again under these states."""
        return frozenset(
            name
            for v, names in self.recompute_sets.items()
            for name in names
            if self.states[v][states[self.remat_nodes[v]]].how == RECOMPUTED
        )

    def storage(self, states: tuple[int, ...]) -> OptimizerParallel | None:
        """The setting that stores parameters as the states say; None where no parameter is stored cut."""
        whole, gathered, cut = set(), set(), False
        graph = self.cost_graph.described.graph
        names = {value.name: name for name, value in graph.parameters.items()}
        for value, node in self.cost_graph.parameters.items():
            state = self.cost_graph.storages[value][states[node]]
            if state.stored == state.layout:
                whole.add(names[value])
            else:
                cut = True
                if not state.reshard_after_forward:
                    gathered.add(names[value])
        if not cut:
            return None
        return OptimizerParallel(-1, 0, "level3", frozenset(whole), frozenset(gathered))

    def peak(self, states: tuple[int, ...]) -> float:
        """The most bytes at any moment under these states, as the problem counts them."""
        uses = self.cost_graph.problem.usages
        changes = np.zeros(max((u.stop for u in uses), default=0) + 1)
        for u in uses:
            amount = u.amount_in(states)
            changes[u.start] += amount
            changes[u.stop] -= amount
        return float(np.cumsum(changes).max(initial=0.0))


def add_memory(
    cost_graph: CostGraph, input_placement: InputPlacement, batch_dims: Mapping[str, int], limit: float, state: float
) -> MemoryProblem:
    """The cost graph with memory.

    Args:
        cost_graph: the cost graph without memory.
        input_placement: the layouts of the inputs, and the handling of the results.
        batch_dims: value name -> the dim that carries the batch.
        limit: bytes a device.
        state: bytes of the optimizer's state for each element of a parameter.
    """
    return _MemoryProblemBuilder(cost_graph, input_placement, batch_dims, limit, state).run()


class _MemoryProblemBuilder:
    def __init__(
        self,
        cost_graph: CostGraph,
        input_placement: InputPlacement,
        batch_dims: Mapping[str, int],
        limit: float,
        state: float,
    ) -> None:
        self.cost_graph, self.graph, self.input_placement, self.limit, self.state = (
            cost_graph,
            cost_graph.described.graph,
            input_placement,
            limit,
            state,
        )
        self.memory = OperatorMemory(cost_graph)
        self.place, self.grads, self.consumers = self.memory.place, self.memory.grads, self.memory.consumers
        self.count = len(self.graph.ops)
        self.end = 2 * self.count + 2 if self.grads else self.count + 1
        self.segments = segments_of(self.graph)
        last: dict[int, int] = {}
        for name, segment in self.segments.items():
            last[segment] = self.place[name]
        self.segment_end = {name: last[segment] for name, segment in self.segments.items()}
        outputs = [v for v in self.graph.outputs if isinstance(v, Value)]
        devices = cost_graph.described.devices
        self.ends = {v.name: Layout.replicated(devices, len(v.shape)) for v in self.graph.updates.values()}
        self.ends |= {
            v.name: to
            for v, to in zip(outputs, output_layouts(outputs, devices, input_placement, dict(batch_dims)))
            if to is not None
        }
        self.usages: list[tuple[tuple[object, ...], int, int, np.ndarray, str]] = []
        self.remat = RematStates(self.memory, self.segments)
        #: By operator that may run again, a value whose recomputation makes it run again.
        self.run_with = {op.name: value for value, ops in self.remat.recompute_sets.items() for op in ops}

        self.detached = self._detached()

    def _detached(self) -> dict[str, int]:
        """By operator whose backward a detach ends, the last moment at which autograd has what it saved."""
        out: dict[str, int] = {}
        for op in reversed(self.graph.ops):
            values = [v.name for v in op.outputs if v is not None and v.requires_grad]
            if op.name in self.memory.reached or not values:
                continue
            users = {consumer.name for name in values for consumer, _ in self.consumers.get(name, ())}
            places = (out.get(name, self.place[name]) for name in users)
            out[op.name] = self.end - 1 if self.ends.keys() & set(values) else max(places, default=self.place[op.name])
        return out

    def saves_detached(self, op: Op, index: int) -> bool:
        """True where an operator saves an input for a backward that a detach ends."""
        return op.name in self.detached and index in self.memory.detached(op)[0].inputs

    # -- usages --

    def use(self, node: object, start: int, stop: int, amount: np.ndarray, what: str) -> None:
        """Add a usage.

        Args:
            node: a node number of the cost graph, ("remat", value), or a pair of these whose states decide together.
            start, stop: the first moment, and the one after the last.
            amount: bytes by state of the node, or of both nodes.
            what: the kind of memory.
        """
        nodes = node if isinstance(node, tuple) and node[0] != "remat" else (node,)
        if stop > start and amount.any():
            self.usages.append((nodes, start, min(stop, self.end), amount, what))

    def back(self, place: int) -> int:
        """The moment of an operator's backward."""
        return 2 * self.count + 1 - place

    def run(self) -> MemoryProblem:
        self.standing()
        for _name, value in self.graph.parameters.items():
            if value.name in self.cost_graph.parameters:
                self.parameter(value)
        budget = current()
        for op in each(self.graph.ops, "memory of strategies", "operators"):
            budget.tell("memory of strategies")
            self.operator(op)
            for k, value in enumerate(v for v in op.outputs if v is not None):
                self.made(op, k, value)
        return self.finish()

    def standing(self) -> None:
        """Add the memory of every plan as a usage of the first node."""
        fixed = sum(
            self.memory.bytes_of(v, layout) for v, layout in zip(self.graph.inputs, self.input_placement.inputs)
        )
        fixed += sum(t.numel() * t.element_size() for t in self.graph.constants.values())
        fixed += sum(v.nbytes for v in self.graph.buffers.values())
        used = self.cost_graph.parameters
        for v in self.graph.parameters.values():
            if v.name not in used:
                trained = self.memory.has_gradient(v)
                fixed += v.stored.nbytes * (2 if trained else 1) + int(v.numel * self.state * trained)
        if self.cost_graph.problem.costs:
            self.use(0, 0, self.end, np.full(len(self.cost_graph.problem.costs[0]), float(fixed)), "inputs")

    def parameter(self, value: Value) -> None:
        node, states = self.cost_graph.parameters[value.name], self.cost_graph.storages[value.name]
        stored = np.array([self.memory.bytes_of(value.stored, s.stored) for s in states], dtype=np.float64)
        if self.memory.has_gradient(value):
            stored = stored * (2 + self.state / value.stored.dtype.itemsize)
        self.use(node, 0, self.end, stored, "parameters")
        cut = np.array(
            [s.stored != s.layout or value.stored is not value for s in states]
        )  # the use has a copy of its own
        if not cut.any():
            return
        consumers = self.consumers[value.name]
        whole = np.array([self.memory.bytes_of(value, s.layout) for s in states], dtype=np.float64)
        reshards = np.array([s.reshard_after_forward for s in states])
        places = [self.place[op.name] for op, _ in consumers]
        saves = [self.place[op.name] for op, i in consumers if self.memory.saves_input(op, i)]
        first, last = min(places), max(places)
        if saves:
            self.use(node, first, self.back(min(saves)) + 1, whole * (cut & ~reshards), "gathered")
            self.use(node, first, last + 1, whole * (cut & reshards), "gathered")
            self.use(node, self.back(max(saves)), self.back(min(saves)) + 1, whole * (cut & reshards), "gathered")
            self.gathered_earlier(node, consumers, self.back(max(saves)), whole * (cut & reshards))
        else:
            self.use(node, first, last + 1, whole * cut, "gathered")
        if self.memory.has_gradient(value):
            self.use(node, self.back(last), self.back(first) + 1, whole * cut, "backward")

    def gathered_earlier(self, node: int, consumers: list[tuple[Op, int]], stop: int, whole: np.ndarray) -> None:
        """Add a weight that is gathered again where a consumer of it runs again: from the beginning of the
        recomputation. With several consumers, the first to run again counts."""
        values = [self.run_with[consumer.name] for consumer, _ in consumers if consumer.name in self.run_with]
        if values:
            value = max(values, key=lambda name: -self.begun(name))
            recomputed = np.array([float(s.how == RECOMPUTED) for s in self.remat.states[value]])
            self.use((node, ("remat", value)), self.begun(value), stop, np.outer(whole, recomputed), "gathered")

    def begun(self, name: str) -> int:
        """The moment at which the recomputation of a value begins."""
        op, k = self.memory.made_by[name]
        value = [v for v in op.outputs if v is not None][k]
        savers = [self.place[consumer.name] for consumer in self.remat.savers(value)]
        consumers = [self.place[consumer.name] for consumer, _ in self.consumers.get(name, ())]
        return self.back(max([self.segment_end[op.name], *(savers or consumers)]))

    def operator(self, op: Op) -> None:
        """Add an operator's own memory, and that of its inputs while it runs."""
        node, place = self.cost_graph.operators[op.name], self.place[op.name]
        grads = op.name in self.memory.reached
        if op.name in self.detached:
            self.use(node, place, self.detached[op.name] + 1, self.memory.detached(op)[1], "activations")
        if grads:
            self.use(node, place, self.back(place) + 1, self.memory.internal(op), "activations")
        forward, backward = self.memory.inside(op)
        self.use(node, place, place + 1, forward, "activations")
        if grads:
            self.use(node, self.back(place), self.back(place) + 1, backward, "backward")
        if self.memory.is_view(op):
            for index, value in enumerate(op.inputs):
                if value.name not in self.memory.made_by and value.name not in self.cost_graph.parameters:
                    self.count_operand(op, index, value)
                if grads and value.requires_grad and value.name in self.cost_graph.shared:
                    self.use(
                        node,
                        self.back(place),
                        self.back(place) + 1,
                        self.memory.input_bytes(op, index, value),
                        "backward",
                    )
            return
        for value, index in {v.name: (v, i) for i, v in reversed(list(enumerate(op.inputs)))}.values():
            if value.name not in self.memory.made_by:
                if value.name not in self.cost_graph.parameters:
                    self.count_operand(op, index, value)
                continue
            if value.name in self.memory.of_outside_inputs:
                continue
            (producer, k), wanted = self.memory.made_by[value.name], self.memory.input_bytes(op, index, value)
            further = self.memory.needs_input(op, index) if grads else np.zeros(len(wanted), dtype=bool)
            self.use(node, place, self.back(place) + 1, wanted * further, "activations")
            if value.name not in self.cost_graph.shared and not self.memory.saves_output(producer, k):
                self.use(node, place, place + 1, wanted * ~further, "delivered")
            if grads and value.requires_grad:
                self.use(node, self.back(place), self.back(place) + 1, wanted, "backward")

    def count_operand(self, op: Op, index: int, value: Value) -> None:
        """Add the copy of an input of the program, a buffer or a constant, where it is redistributed."""
        node, place, op_costs = self.cost_graph.operators[op.name], self.place[op.name], self.memory.op_costs(op)
        at = dict(zip((v.name for v in self.graph.inputs), self.input_placement.inputs)).get(value.name)
        amount = np.array(
            [
                0
                if all(
                    use.input_layout == at or (at is None and use.input_layout.is_replicated)
                    for use in p.input_uses[index]
                )
                else w
                for p, w in zip(op_costs, self.memory.input_bytes(op, index, value))
            ],
            dtype=np.float64,
        )
        self.use(node, place, self.until(op, index) + 1, amount, "activations")

    def until(self, op: Op, index: int) -> int:
        """The last moment at which an operator, or a consumer of its views, needs its input."""
        out = self.place[op.name]
        if self.grads and (self.memory.saves_input(op, index) or self.remat.is_recomputed(op)):
            out = self.back(out)
        for k, value in enumerate(v for v in op.outputs if v is not None):
            if (k, index) in self.memory.keeps(op).views:
                out = max([out, *(self.until(*consumer) for consumer in self.consumers.get(value.name, ()))])
                out = max(out, self.end - 1) if value.name in self.ends else out
        return out

    def viewing(self, op: Op, k: int, value: Value) -> None:
        """Add the copies of a view of an input, a buffer or a constant, where it is redistributed."""
        consumers, shared = self.consumers.get(value.name, []), self.cost_graph.shared.get(value.name)
        if shared is not None:
            self.copies(value, shared, consumers)
            states = self.cost_graph.shares[value.name]
            served = np.array([float(self.remat.shared_bytes(value, s)[1]) for s in states])
            self.use(
                shared,
                min(self.place[consumer.name] for consumer, _ in consumers),
                max(self.until(*consumer) for consumer in consumers) + 1,
                served,
                "activations",
            )
        elif consumers and value.name not in self.ends:
            ((consumer, i),) = consumers
            self.use(
                (self.cost_graph.operators[op.name], self.cost_graph.operators[consumer.name]),
                self.place[consumer.name],
                self.until(consumer, i) + 1,
                self.remat.received(value),
                "activations",
            )

    def made(self, op: Op, k: int, value: Value) -> None:
        """Add an operator's output: up to its last consumer, and beyond where some backward needs it."""
        node, place = self.cost_graph.operators[op.name], self.place[op.name]
        output_bytes, consumers = self.memory.output_bytes(op, k, value), self.consumers.get(value.name, [])
        places = [self.place[consumer.name] for consumer, _ in consumers]
        ends, last = value.name in self.ends, max(places, default=place)
        shared = self.cost_graph.shared.get(value.name)
        savers = [consumer for consumer, i in consumers if self.saves_detached(consumer, i)]
        if self.detached.get(op.name) and k in self.memory.detached(op)[0].outputs:
            savers.append(op)
        until = max((self.detached[saver.name] for saver in savers), default=last)
        self.use(node, last + 1, until + 1, output_bytes, "activations")
        passed_on = np.zeros(1)
        if ends:  # a result stays to the end; with a redistribution, its source stays for a while
            to = self.ends[value.name]
            passed_on = np.array(
                [float(self.memory.bytes_of(value, to) * (p.output_layouts[k] != to)) for p in self.memory.op_costs(op)]
            )
            self.use(node, self.count, self.end, passed_on, "activations")
            if self.memory.has_gradient(value):
                self.use(node, self.count + 1, self.count + 2, passed_on, "backward")
        if value.name in self.memory.of_outside_inputs:
            return self.viewing(op, k, value)
        if self.memory.has_gradient(value) and (consumers or ends):
            first = max(
                (self.place[consumer.name] for consumer, _ in consumers if consumer.name in self.memory.reached),
                default=last,
            )
            start = self.count + 1 if ends else self.back(first) + 1
            self.use(node, start, self.back(place) + 1, output_bytes, "backward")
        if shared is None and not ends and consumers:
            consumer = consumers[0][0]
            (self.viewed if self.memory.is_view(consumer) else self.sent)(op, k, value, consumer)
        if shared is not None:
            self.copies(value, shared, consumers)
            self.shared_copies(value, shared, place, min(places), self.end if ends else last + 1)
        elif ends:
            self.use(node, place, self.count + 1, output_bytes, "activations")
            self.use(node, self.count + 1, self.end, output_bytes * (passed_on == 0), "activations")
        elif not consumers:
            self.use(node, place, place + 1, output_bytes, "activations")
        elif not self.memory.saves_output(op, k):
            self.use(node, place, last, output_bytes, "activations")
        if value.name in self.remat.states:
            self.keep(op, k, value, consumers)
        kept_collective_output = self.remat.kept_collective_output(value)
        if (
            kept_collective_output is not None
        ):  # the recomputation begins with the sent value, and ends before its consumer's backward
            ((consumer, _),) = consumers
            self.use(
                (node, self.cost_graph.operators[consumer.name]),
                last + (not self.memory.is_view(consumer)),
                self.back(last),
                kept_collective_output,
                "activations",
            )

    def sent(self, op: Op, k: int, value: Value, consumer: Op) -> None:
        """Add the second end of a redistribution to a single consumer: in the forward before the consumer produces
        anything, in the backward after the memory of the consumer alone is released."""
        nodes, at = (
            (self.cost_graph.operators[op.name], self.cost_graph.operators[consumer.name]),
            self.place[consumer.name],
        )
        # several inputs are sent one after the other: the room counts for the first
        first = next(v.name for v in consumer.inputs if self.memory.reads_alone(v.name)) == value.name

        def beyond(table: np.ndarray, backward: bool) -> np.ndarray:
            room = self.memory.room(consumer, backward)
            return (
                self.memory.once(
                    "beyond", (table, room), lambda: np.ascontiguousarray(np.maximum(0.0, table - room) * (table > 0))
                )
                if first
                else table
            )

        if not self.memory.saves_output(op, k):
            self.use(nodes, at, at + 1, beyond(self.remat.sent(value), False), "activations")
        if self.memory.has_gradient(value):
            self.use(nodes, self.back(at), self.back(at) + 1, beyond(self.remat.sent_back(value), True), "backward")

    def viewed(self, op: Op, k: int, value: Value, view: Op) -> None:
        """Add the redistribution to a view: both ends while it is sent, and the gradient of the view's input together
        with that of its output, or with that of the sent value."""
        nodes, at = (self.cost_graph.operators[op.name], self.cost_graph.operators[view.name]), self.place[view.name]
        if not self.memory.saves_output(op, k):
            self.use(nodes, at, at + 1, self.remat.sent(value), "activations")
        if self.memory.has_gradient(value):
            self.use(nodes, self.back(at), self.back(at) + 1, self.remat.viewed_back(value), "backward")

    def shared_copies(self, value: Value, node: int, place: int, first: int, stop: int) -> None:
        states = self.cost_graph.shares[value.name]
        output_bytes = np.array([self.memory.bytes_of(value, s.output_layout) for s in states], dtype=np.float64)
        self.use(node, place, first, output_bytes, "activations")
        both = np.array([float(sum(self.remat.shared_bytes(value, s))) for s in states])
        self.use(node, first, stop, both, "activations")

    # -- saved and recomputed values --

    def keep(self, op: Op, k: int, value: Value, consumers: list[tuple[Op, int]]) -> None:
        """Add the saved or recomputed memory of a value."""
        moment, name = self.place[op.name], ("remat", value.name)
        mine = self.memory.saves_output(op, k)
        savers = [self.place[consumer.name] for consumer in self.remat.savers(value)]
        places = [self.place[consumer.name] for consumer, _ in consumers]
        shared, states = self.cost_graph.shared.get(value.name), self.remat.states[value.name]
        until = self.back(min([moment] if mine else savers or places)) + 1
        after = max(places) + 1

        def by_state(how: str, one: object) -> np.ndarray:
            return self.memory.once(
                ("amounts", states, how, one is None),
                (),
                lambda: np.array(
                    [(s.size if one is None else s.layout is None) * (s.how == how) for s in states], dtype=np.float64
                ),
            )

        def together(amount: np.ndarray, how: str = SAVED) -> np.ndarray:
            """Bytes by state of another node and of the save-or-recompute node."""
            some = by_state(how, amount)
            return self.memory.once("together", (some, amount), lambda: np.outer(amount, some))

        producer = self.cost_graph.operators[op.name]
        amount = np.zeros(0)  # of a shared value
        if shared is not None:
            carrier = self.cost_graph.shares[value.name]
            amount = self.memory.once(
                ("both", value.shape, value.dtype),
                (carrier,),
                lambda: np.array([float(sum(self.remat.shared_bytes(value, s))) for s in carrier]),
            )
            self.use((shared, name), after, until, together(amount), "activations")
        else:
            ((consumer, i),) = consumers
            self.use(name, moment if mine else after, until, by_state(SAVED, None), "activations")
            if mine:
                output_bytes = self.memory.output_bytes(op, k, value)
                if value.name in self.remat.saved_unsent:  # saved for its producer alone, where that needs it
                    output_bytes = self.memory.once(
                        ("output where needed", k),
                        (output_bytes, self.memory.op_costs(op)),
                        lambda: output_bytes * self.memory.needs_output(op, k),
                    )
                self.use((producer, name), moment, until, together(output_bytes), "activations")
            if savers or not mine:
                wanted, at = self.memory.input_bytes(consumer, i, value), self.cost_graph.operators[consumer.name]
                self.use((at, name), after, self.back(places[0]) + 1, together(wanted), "activations")
        recomputed, begun = by_state(RECOMPUTED, None), self.begun(value.name)
        if shared is not None and any(s == SaveOrRecompute(RECOMPUTED) for s in states):
            self.use((shared, name), begun, until, together(amount, RECOMPUTED), "recomputed")
        elif recomputed.any():
            if shared is None and mine:  # present until consumed, even where it is recomputed
                self.use(name, moment, after, recomputed, "activations")
            self.use(name, begun, until, recomputed, "recomputed")

    def copies(self, value: Value, node: int, consumers: list[tuple[Op, int]]) -> None:
        """Add the copies of a shared value that single consumers have: in a layout that is neither the producer's
        nor the one that is served once."""
        states = self.cost_graph.shares[value.name]
        for consumer, i in consumers:
            op_costs, moment = self.memory.op_costs(consumer), self.place[consumer.name]

            def count() -> np.ndarray:
                place: dict[frozenset[Layout], int] = {}
                which = [
                    place.setdefault(frozenset(use.input_layout for use in p.input_uses[i]), len(place))
                    for p in op_costs
                ]
                layouts = {
                    input_layout: n
                    for n, input_layout in enumerate(
                        dict.fromkeys(input_layout for input_layouts in place for input_layout in input_layouts)
                    )
                }
                absent = np.ones((len(states), len(layouts)))  # by state of the value and layout
                for row, s in zip(absent, states):
                    stored = (
                        s.output_layout,
                        s.output_layout.without_partial(),
                        *((s.use.input_layout,) if s.use is not None else ()),
                    )
                    row[[layouts[one] for one in stored if one in layouts]] = 0.0
                sizes = np.zeros((len(layouts), len(place)))
                for input_layouts, column in place.items():
                    for input_layout in input_layouts:
                        sizes[layouts[input_layout], column] = self.memory.bytes_of(value, input_layout)
                return np.ascontiguousarray((absent @ sizes)[:, which])

            amount = self.memory.once(("copies", i, value.shape, value.dtype), (states, op_costs), count)
            stays = self.grads and (self.memory.saves_input(consumer, i) or self.remat.is_recomputed(consumer))
            until = self.back(moment) if stays else moment
            self.use((node, self.cost_graph.operators[consumer.name]), moment, until + 1, amount, "activations")

    # -- the whole --

    def finish(self) -> MemoryProblem:
        """The whole problem. The save-or-recompute node of a value comes right after the node of its producer, or of
        the shared value."""
        cost_graph, problem, remat_states = self.cost_graph, self.cost_graph.problem, self.remat.states
        order: list[tuple[float, Node]] = [(node, node) for node in range(len(problem.costs))]
        for value in remat_states:
            op, _ = self.memory.made_by[value]
            order.append((max(cost_graph.operators[op.name], cost_graph.shared.get(value, 0)) + 0.5, ("remat", value)))
        order.sort(key=lambda entry: entry[0])
        number: dict[object, int] = {node: k for k, (_, node) in enumerate(order)}
        costs = [
            problem.costs[node]
            if isinstance(node, int)
            else self.memory.once(
                ("zeros", len(remat_states[node[1]])), (), lambda: np.zeros(len(remat_states[node[1]]))
            )
            for _, node in order
        ]
        names = [problem.names[node] if isinstance(node, int) else f"saved %{node[1]}" for _, node in order]
        edges: dict[tuple[int, int], np.ndarray] = {}
        for (a, b), table in (*problem.edges.items(), *self.remat.edges.items()):
            i, j = number[a], number[b]
            if i > j:
                i, j, table = j, i, self.turned(table)
            edges[i, j] = table
        usages = []
        for nodes, start, stop, amount, what in self.usages:
            at = [number[node] for node in nodes]
            if len(at) == 2 and at[0] > at[1]:
                at, amount = at[::-1], self.turned(amount)
            if len(at) == 2 and (at[0], at[1]) not in edges:
                edges[at[0], at[1]] = self.memory.once(("zeros", amount.shape), (), lambda: np.zeros(amount.shape))
            usages.append(MemoryUsage(at[0], start, stop, amount, what, at[1] if len(at) == 2 else None))
        operators, parameters, shared = (
            {v: number[node] for v, node in nodes.items()}
            for nodes in (cost_graph.operators, cost_graph.parameters, cost_graph.shared)
        )
        made = Problem(tuple(costs), edges, tuple(names), tuple(usages), self.limit)
        # a dropout with p = 0 returns its input too, but no region takes it along: it has to be listed
        views = {op.name for op in self.graph.ops if self.memory.is_view(op) and hands_on(op.target)}
        recompute_sets = {
            v: tuple(op.name for op in ops if op.name not in views) for v, ops in self.remat.recompute_sets.items()
        }
        moved = replace(cost_graph, problem=made, operators=operators, parameters=parameters, shared=shared)
        return MemoryProblem(
            moved, {v: number["remat", v] for v in remat_states}, remat_states, self.segments, recompute_sets
        )

    def turned(self, table: np.ndarray) -> np.ndarray:
        return self.memory.once("turned", (table,), lambda: np.ascontiguousarray(table.T))
