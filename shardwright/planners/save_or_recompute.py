"""For each activation the search decides: save it for the backward, or recompute it.

A value that may be saved gets a node whose states (`SaveOrRecompute`) are:

    saved       in the layout of its consumer, or in that of its producer, or in both where these differ; with several
                consumers, in that of its producer and as the copy that is served once
    recomputed  at the cost of its operators' forward once more
    absent      not saved, where no backward needs it

Two more terms:

    intermediate   a value that no backward needs and one operator consumes: it is recomputed with that one's output
    recompute set  the operators that recompute a value: its own, the producers of that one's intermediates, and so on

A recomputation sends nothing, so a value can be recomputed only where producer and consumer have the same layout; with
several consumers, the copies that were sent are saved. An intermediate needs as many bytes at its producer as at
its consumer; where two such layouts differ, the sent copy is saved too (`RematStates.kept_collective_output`). Inputs
of a recomputed operator have to be saved, or recomputed in the same segment of the program.

The file has two parts:

1. `OperatorMemory`: bytes that a graph's operators consume, produce and save, by strategy. `output_bytes` are those of
   an output, its sum completed; `input_bytes` those of an input as its consumer has it; `internal` those of the saved
   tensors that are neither; `inside` as in `operator_memory`. The backward's inputs and outputs are those of an
   operator's first strategy; `needs_input` and `needs_output` say where another strategy differs. Operators of equal
   costs (`op_cost`) share one result.
2. `RematStates`: the nodes and the edges between them.

`memory_problem` lays these bytes over the moments of a step.

Example: h = x @ w, f32[32, 8], and y = gelu(h), whose backward needs h. Saved, h takes 1,024 bytes; recomputed, it
costs the forward of the product once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from ..graph import Op, Value
from ..identity_tables import IdentityCache
from ..layout import Layout
from .graph_problem import CostGraph, reached
from .operator_memory import KeptTensors, inside, keeps, without_gradients
from .search_space import OpCost
from .shared_values import SharedState, Uses

__all__ = ["ABSENT", "RECOMPUTED", "SAVED", "Node", "OperatorMemory", "RematStates", "SaveOrRecompute"]

Made = TypeVar("Made")
Thing = TypeVar("Thing", bound=Hashable)


# -- memory of operators by strategy --


class OperatorMemory:
    """The memory of the operators of a cost graph.

    Attributes:
        place: by operator, its number in the program.
        grads: True where there is a backward.
        reached: names of the operators that have a backward.
        consumers: by value, the operators that consume it, each once, with the first input place.
        made_by: by value, its producer and the number of the output.
        ends: names of results and of values that update a buffer.
        of_outside_inputs: names of values that are views of inputs, buffers or constants, or views of such views.
    """

    def __init__(self, cost_graph: CostGraph) -> None:
        self.cost_graph, self.graph = cost_graph, cost_graph.described.graph
        self.place = {op.name: k for k, op in enumerate(self.graph.ops)}
        self.grads = any(isinstance(v, Value) and v.requires_grad for v in self.graph.outputs)
        self.reached, self._gradients = reached(self.graph)
        self.consumers = {
            name: list({op.name: (op, i) for op, i in reversed(consumers)}.values())[::-1]
            for name, consumers in self.graph.consumers().items()
        }
        self.made_by = {
            v.name: (op, k) for op in self.graph.ops for k, v in enumerate(v for v in op.outputs if v is not None)
        }
        self.ends = {v.name for v in self.graph.outputs if isinstance(v, Value)}
        self.ends |= {v.name for v in self.graph.updates.values()}
        self.once = IdentityCache().once
        self.of_outside_inputs: set[str] = set()
        for op in self.graph.ops:
            outputs = [v.name for v in op.outputs if v is not None]
            if len(op.inputs) and not any(v.name in self.cost_graph.parameters for v in op.inputs):
                self.of_outside_inputs.update(
                    outputs[k] for k, i in self.keeps(op).views if self.is_outside_input(op.inputs[i].name)
                )

    def has_gradient(self, value: Value) -> bool:
        """True where a gradient comes to a value; none comes to one that is detached alone."""
        return value.requires_grad and value.name in self._gradients

    def is_outside_input(self, name: str) -> bool:
        """True where a value lies in the memory of an input, a buffer or a constant."""
        return name in self.of_outside_inputs or (name not in self.made_by and name not in self.cost_graph.parameters)

    def op_costs(self, op: Op) -> tuple[OpCost, ...]:
        """The costs of an operator; without gradients where none comes to it."""
        costs = self.cost_graph.op_costs[op.name]
        if op.name in self.reached:
            return costs
        return self.once("without gradients", (costs,), lambda: tuple(map(without_gradients, costs)))

    def detached(self, op: Op) -> tuple[KeptTensors, np.ndarray]:
        """The tensors that an operator saves for a backward that a detach ends, and the bytes of those that are
        neither inputs nor outputs, by strategy."""
        costs = self.cost_graph.op_costs[op.name]
        internal = self.once(
            "detached", (costs,), lambda: np.array([keeps(p).internal for p in costs], dtype=np.float64)
        )
        return self.once("keeps", (costs,), lambda: keeps(costs[0])), internal

    def keeps(self, op: Op) -> KeptTensors:
        """The tensors that an operator's backward needs under its first strategy."""
        costs = self.op_costs(op)
        return self.once("keeps", (costs,), lambda: keeps(costs[0]))

    def internal(self, op: Op) -> np.ndarray:
        """Bytes of saved tensors that are neither inputs nor outputs, by strategy."""
        costs, first = self.op_costs(op), self.keeps(op)

        def count() -> np.ndarray:
            plain = [len(p.program) == 1 for p in costs]
            none = not first.internal and plain[0]
            return np.array(
                [0 if none and one else keeps(p).internal for p, one in zip(costs, plain)], dtype=np.float64
            )

        return self.once("own", (costs,), count)

    def inside(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """Bytes inside an operator of several instructions, beyond its inputs, outputs and saved tensors: forward and
        backward, each by strategy."""
        costs = self.op_costs(op)
        from_outside = frozenset(i for i, v in enumerate(op.inputs) if v.name not in self.made_by)

        def count() -> tuple[np.ndarray, np.ndarray]:
            found = np.array([inside(p, from_outside) for p in costs], dtype=np.float64)
            return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])

        return self.once(("inside", from_outside), (costs,), count)

    def saves_input(self, op: Op, index: int) -> bool:
        same = {i for i, v in enumerate(op.inputs) if v.name == op.inputs[index].name}
        return self.grads and bool(same & self.keeps(op).inputs)

    def saves_output(self, op: Op, index: int) -> bool:
        return self.grads and index in self.keeps(op).outputs

    def needs_input(self, op: Op, index: int) -> np.ndarray:
        """True, by strategy, where the backward needs an input that the backward of the first strategy does not."""
        costs, first = self.op_costs(op), self.keeps(op)
        same = frozenset(i for i, v in enumerate(op.inputs) if v.name == op.inputs[index].name)
        return self.once(
            ("needed input", same),
            (costs,),
            lambda: np.array(
                [len(p.program) > 1 and not same & first.inputs and bool(same & keeps(p).inputs) for p in costs]
            ),
        )

    def needs_output(self, op: Op, index: int) -> np.ndarray:
        """True, by strategy, where the backward needs an output."""
        costs = self.op_costs(op)
        return self.once(
            ("needed output", index), (costs,), lambda: np.array([index in keeps(p).outputs for p in costs])
        )

    def is_view(self, op: Op) -> bool:
        outputs = sum(v is not None for v in op.outputs)
        return outputs > 0 and len(self.keeps(op).views) == outputs

    def bytes_of(self, value: Value, layout: Layout) -> int:
        """Bytes of a rank's slice of a value, its sum completed."""

        def count() -> int:
            layout_ = layout.without_partial()
            return math.prod(layout_.local_shape(layout_.padded(value.shape))) * value.dtype.itemsize

        return self.once(("bytes", value.shape, value.dtype, layout), (), count)

    def output_bytes(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an output in the producer's layout, by strategy."""
        costs = self.op_costs(op)
        return self.once(
            ("output bytes", index),
            (costs,),
            lambda: np.array([self.bytes_of(value, p.output_layouts[index]) for p in costs], dtype=np.float64),
        )

    def input_bytes(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an input in the consumer's layouts, by strategy."""
        costs = self.op_costs(op)
        each = partial(self.bytes_of, value)

        def count() -> np.ndarray:
            return np.array([float(sum(map(each, {u.input_layout for u in p.input_uses[index]}))) for p in costs])

        return self.once(("input bytes", index), (costs,), count)

    def room(self, op: Op, backward: bool) -> np.ndarray:
        """Bytes of an operator while it runs that are not in memory while its inputs are sent before it; or, in the
        backward, while the gradients of its inputs are sent after it. By strategy."""
        costs, outputs = self.op_costs(op), [v for v in op.outputs if v is not None]
        counted = tuple(k for k, v in enumerate(outputs) if self.has_gradient(v) or not backward)
        places = {v.name: i for i, v in reversed(list(enumerate(op.inputs)))}
        alone = tuple(
            i
            for name, i in places.items()
            if backward
            and self.reads_alone(name)
            and self.saves_input(op, i)
            and not self.saves_output(*self.made_by[name])
        )
        return self.once(
            ("room", counted, alone),
            (costs,),
            lambda: sum(
                [
                    *(self.output_bytes(op, k, outputs[k]) for k in counted),
                    *(self.input_bytes(op, i, op.inputs[i]) for i in alone),
                ],
                self.internal(op) if self.grads else np.zeros(len(costs)),
            ),
        )

    def reads_alone(self, name: str) -> bool:
        """True where a value is produced by an operator, has one consumer, and is no view of an input, a buffer or a
        constant."""
        return name in self.made_by and name not in self.cost_graph.shared and name not in self.of_outside_inputs


#: A node number of the cost graph, or ("remat", value).
Node = int | tuple[str, str]

ABSENT, SAVED, RECOMPUTED = "absent", "saved", "recomputed"


class SaveOrRecompute(NamedTuple):
    """A state of a value's save-or-recompute node.

    Attributes:
        how: "absent", "saved" or "recomputed".
        layout: the one layout in which the value is both produced and consumed; None: the state does not fix it.
        size: bytes of the one tensor of that layout, or of the recomputed value; 0: the states of producer and consumer
            determine the bytes.
    """

    how: str
    layout: Layout | None = None
    size: int = 0


class _Ends(NamedTuple):
    """The layouts in which a value is produced (rows) and consumed (columns), each layout once.

    Attributes:
        produced, consumed: bytes in each; `consumed` is 0 where its consumer needs several layouts.
        same: True where producer and consumer have the same layout.
        closed: the same with the producer's sum completed.
        several: True where its consumer needs several layouts.
        partial: True where it is produced as a partial sum.
    """

    produced: np.ndarray
    consumed: np.ndarray
    same: np.ndarray
    closed: np.ndarray
    several: np.ndarray
    partial: np.ndarray


class RematStates:
    """The save-or-recompute nodes.

    Args:
        memory: the operators.
        segments: by operator, its segment of the program.

    Attributes:
        states: by value that has a node, its states.
        recompute_sets: by value that may be recomputed, the operators that run again.
        edges: by (node, node), tables; a node is a node number of the cost graph, or ("remat", value).
        saved_unsent: values that are saved for their producer alone; a sent copy of them is not saved.
    """

    def __init__(self, memory: OperatorMemory, segments: dict[str, int]) -> None:
        self.memory, self.cost_graph, self.segments = memory, memory.cost_graph, segments
        self.states: dict[str, tuple[SaveOrRecompute, ...]] = {}
        self.recompute_sets: dict[str, tuple[Op, ...]] = {}
        self.edges: dict[tuple[Node, Node], np.ndarray] = {}
        self._intermediates = {name for name in memory.made_by if self._is_intermediate(name)}
        self.saved_unsent: set[str] = set()
        for op in memory.graph.ops:
            for k, value in enumerate(v for v in op.outputs if v is not None):
                if (
                    memory.grads
                    and value.name not in memory.ends
                    and memory.consumers.get(value.name)
                    and value.name not in self._intermediates
                    and value.name not in memory.of_outside_inputs
                ):
                    self._node(op, k, value)
        self._recomputed = {op.name for ops in self.recompute_sets.values() for op in ops}
        for name in self.recompute_sets:
            self._chain(name)

    def is_recomputed(self, op: Op) -> bool:
        """True where an operator may run again."""
        return op.name in self._recomputed

    # -- operators that run again together --

    def savers(self, value: Value) -> list[Op]:
        """The consumers of a value whose backward needs it."""
        return [
            consumer
            for consumer, i in self.memory.consumers.get(value.name, ())
            if self.memory.saves_input(consumer, i)
        ]

    def _is_intermediate(self, name: str) -> bool:
        memory = self.memory
        op, k = memory.made_by[name]
        value = [v for v in op.outputs if v is not None][k]
        consumers = memory.consumers.get(name, ())
        return (
            memory.grads
            and len(consumers) == 1
            and name not in memory.ends
            and name not in self.cost_graph.shared
            and name not in memory.of_outside_inputs
            and not memory.saves_output(op, k)
            and not self.savers(value)
            and self.droppable(op)
            and self.segments[op.name] == self.segments[consumers[0][0].name]
        )

    def droppable(self, op: Op) -> bool:
        """True where an operator can be recomputed by itself: it has one output, and its backward needs the weights
        that it consumes (biases excepted), so they are gathered then. With a backward, a view always can."""
        memory = self.memory
        if not memory.grads or memory.is_view(op):
            return memory.grads
        weights = all(
            len(v.shape) < 2 or v.name not in self.cost_graph.parameters or memory.saves_input(op, i)
            for i, v in enumerate(op.inputs)
        )
        return weights and sum(v is not None for v in op.outputs) == 1

    def _recompute_sets(self, op: Op) -> tuple[Op, ...]:
        out = {op.name: op}
        todo = [op]
        while todo:
            for value in todo.pop().inputs:
                if value.name in self._intermediates:
                    producer = self.memory.made_by[value.name][0]
                    if producer.name not in out:
                        out[producer.name] = producer
                        todo.append(producer)
        return tuple(out.values())

    # -- a node --

    def _node(self, op: Op, k: int, value: Value) -> None:
        """Add the save-or-recompute node of a value, with its edges to the operators, or to the node of the shared
        value."""
        memory, name = self.memory, ("remat", value.name)
        mine, savers = memory.saves_output(op, k), self.savers(value)
        droppable = self.droppable(op)
        costs, node = memory.op_costs(op), self.cost_graph.operators[op.name]
        shared = self.cost_graph.shared.get(value.name)
        if shared is not None:
            intermediates = any(
                v.name in self._intermediates for other in self._recompute_sets(op) for v in other.inputs
            )
            states = self._states_of_shared(value, bool(mine or savers), droppable, intermediates)
            carrier = self.cost_graph.shares[value.name]
            self._edge(
                shared,
                name,
                memory.once(
                    ("remat-shared", states, value.shape, value.dtype),
                    (carrier,),
                    lambda: np.array([[self._fits_shared(value, s, c) for s in states] for c in carrier]),
                ),
            )
        else:
            ((consumer, i),) = memory.consumers[value.name]
            theirs = memory.op_costs(consumer)
            states = self._states_of_one(op, k, consumer, i, value, mine, bool(savers), droppable)
            if mine and not savers:
                self.saved_unsent.add(value.name)
            self._edge(
                node,
                name,
                memory.once(
                    ("remat-made", states, k, value.shape),
                    (costs,),
                    lambda: np.array([[self._fits_made(value, s, p.output_layouts[k]) for s in states] for p in costs]),
                ),
            )
            self._edge(
                name,
                self.cost_graph.operators[consumer.name],
                memory.once(
                    ("remat-read", states, i, value.shape),
                    (theirs,),
                    lambda: np.array([[self._fits_read(value, s, p.input_uses[i]) for p in theirs] for s in states]),
                ),
            )
        self.states[value.name] = states
        if any(s.how == RECOMPUTED for s in states):
            self.recompute_sets[value.name] = self._recompute_sets(op)
            for other in self.recompute_sets[value.name]:
                self._recompute_edge(value, other)

    def _recompute_edge(self, value: Value, op: Op) -> None:
        """Add the cost of recomputing an operator with a value; infinite where it would send an intermediate."""
        memory, states = self.memory, self.states[value.name]
        costs = memory.op_costs(op)
        intermediates = tuple((i, v) for i, v in enumerate(op.inputs) if v.name in self._intermediates)
        outs = tuple(
            (k, v) for k, v in enumerate(v for v in op.outputs if v is not None) if v.name in self._intermediates
        )
        key = (
            "again",
            states,
            value.nbytes,
            tuple((i, v.nbytes) for i, v in intermediates),
            tuple((k, v.nbytes) for k, v in outs),
        )

        def make() -> np.ndarray:
            recomputed = [n for n, s in enumerate(states) if s.how == RECOMPUTED]
            sizes = np.array([states[n].size for n in recomputed])
            fits = np.ones((len(costs), len(recomputed)), bool)

            def as_large(v: Value, same_size: list[int]) -> np.ndarray:
                """True where an intermediate has as many bytes as the recomputed value, in proportion."""
                unit = math.gcd(value.nbytes, v.nbytes) or 1
                return np.array(same_size)[:, None] * (value.nbytes // unit) == sizes * (v.nbytes // unit)

            for k, v in outs:
                fits &= np.array([not p.output_layouts[k].partial for p in costs])[:, None]
                fits &= as_large(v, [memory.bytes_of(v, p.output_layouts[k]) for p in costs])
            for i, v in intermediates:
                read = [_input_layout(p.input_uses[i]) for p in costs]
                same_size = as_large(v, [-1 if layout is None else memory.bytes_of(v, layout) for layout in read])
                fits &= same_size | np.array([not p.input_uses[i] for p in costs])[:, None]
            table = np.zeros((len(costs), len(states)))
            table[:, recomputed] = np.where(fits, np.array([p.forward for p in costs])[:, None], math.inf)
            return table

        self._edge(self.cost_graph.operators[op.name], ("remat", value.name), memory.once(key, (costs,), make))

    def kept_collective_output(self, value: Value) -> np.ndarray | None:
        """Bytes of an intermediate that are saved because they were sent, by state of producer and consumer; None
        where the value is no intermediate of a value that may be recomputed."""
        memory = self.memory
        if value.name not in self._intermediates or not self.is_recomputed(memory.made_by[value.name][0]):
            return None

        return self._of_both(
            value,
            "kept collective output",
            lambda e: np.where((e.consumed == e.produced) & ~(e.several | e.partial | e.same), e.consumed, 0.0),
        )

    def sent_back(self, value: Value) -> np.ndarray:
        """Bytes of the gradient of a value with one consumer, as its producer takes it, where the consumer's gradient
        has another layout: by state of producer and consumer."""
        return self._of_both(value, "sent back", lambda ends: np.where(ends.closed, 0.0, ends.produced))

    def received(self, value: Value) -> np.ndarray:
        """Bytes of a value with one consumer, in the consumer's layout, where it is sent: by state of producer
        and consumer."""
        return self._of_both(
            value,
            "received",
            lambda ends: np.where(ends.same, 0.0, np.where(ends.several, ends.produced, ends.consumed)),
        )

    def sent(self, value: Value) -> np.ndarray:
        """Bytes of a value with one consumer, as its producer leaves it, where it is sent: by state of producer and
        consumer."""
        return self._of_both(value, "sent", lambda ends: np.where(ends.same, 0.0, ends.produced))

    def viewed_back(self, value: Value) -> np.ndarray:
        """Bytes of the gradient of a value that a view consumes, at the larger of its two ends: by state of producer
        and view."""
        return self._of_both(value, "viewed back", lambda ends: np.maximum(ends.produced, ends.consumed))

    def _of_both(self, value: Value, what: str, count: Callable[[_Ends], np.ndarray]) -> np.ndarray:
        """A number, by state of a value's producer and consumer, computed from the value's layouts at both."""
        memory = self.memory
        (op, k), ((consumer, i),) = memory.made_by[value.name], memory.consumers[value.name]
        costs, of_consumer = memory.op_costs(op), memory.op_costs(consumer)

        def ends() -> tuple[_Ends, np.ndarray, np.ndarray]:
            output_layouts, rows = _numbered(p.output_layouts[k] for p in costs)
            input_layouts, columns = _numbered(_input_layout(p.input_uses[i]) for p in of_consumer)
            same, closed = (
                np.array([[one == input_layout for input_layout in input_layouts] for one in some])
                for some in (output_layouts, [one.without_partial() for one in output_layouts])
            )
            produced = np.array([float(memory.bytes_of(value, one)) for one in output_layouts])
            consumed = np.array([0.0 if one is None else memory.bytes_of(value, one) for one in input_layouts])
            return (
                _Ends(
                    produced[:, None],
                    consumed[None],
                    same,
                    closed,
                    np.array([[one is None for one in input_layouts]]),
                    np.array([[bool(one.partial)] for one in output_layouts]),
                ),
                rows,
                columns,
            )

        def make() -> np.ndarray:
            found, rows, columns = memory.once(("ends", *key), (costs, of_consumer), ends)
            table = np.broadcast_to(count(found), found.same.shape)
            return np.ascontiguousarray(table[rows][:, columns])

        key = k, i, value.shape, value.dtype
        return memory.once((what, *key), (costs, of_consumer), make)

    def _chain(self, name: str) -> None:
        """Add edges that forbid recomputing a value where an input of a recomputed operator is not in memory."""
        for op in self.recompute_sets[name]:
            for value in {v.name: v for v in op.inputs}.values():
                if value.name not in self.states:
                    continue
                producer, _ = self.memory.made_by[value.name]
                near = self.segments[producer.name] == self.segments[op.name]
                before, after, sent = self.states[value.name], self.states[name], value.name in self.saved_unsent

                def available(b: SaveOrRecompute) -> bool:
                    if b.how == RECOMPUTED:
                        return near
                    return b.how == SAVED and not (sent and b.layout is None)

                table = self.memory.once(
                    ("chain", before, after, near, sent),
                    (),
                    lambda: np.array(
                        [[0.0 if a.how != RECOMPUTED or available(b) else math.inf for a in after] for b in before]
                    ),
                )
                if table.any():
                    self._edge(("remat", value.name), ("remat", name), table)

    def _edge(self, i: Node, j: Node, table: np.ndarray) -> None:
        known = self.edges.get((i, j))
        self.edges[i, j] = table if known is None else self.memory.once("sum", (known, table), lambda: known + table)

    # -- a value with several consumers --

    def shared_bytes(self, value: Value, state: SharedState) -> tuple[int, int]:
        """Bytes of a shared value in its producer's layout, its sum completed, and of the copy that is served once."""
        size = self.memory.bytes_of(value, state.output_layout) if state.completed else 0
        return size, 0 if state.use is None else self.memory.bytes_of(value, state.use.input_layout)

    def _states_of_shared(
        self, value: Value, wanted: bool, droppable: bool, intermediates: bool
    ) -> tuple[SaveOrRecompute, ...]:
        """The states of a value with several consumers.

        Args:
            wanted: True where some backward needs the value.
            droppable: True where its operator can be recomputed.
            intermediates: True where intermediates, which need as many bytes, are recomputed with it.
        """
        out = [SaveOrRecompute(SAVED)] if wanted else [SaveOrRecompute(ABSENT), SaveOrRecompute(SAVED)]
        if droppable and not intermediates:
            out.append(SaveOrRecompute(RECOMPUTED))
        elif droppable:
            sizes = dict.fromkeys(
                self.memory.bytes_of(value, s.output_layout)
                for s in self.cost_graph.shares[value.name]
                if s.use is None
            )
            out += [SaveOrRecompute(RECOMPUTED, None, size) for size in sizes]
        return tuple(out)

    def _fits_shared(self, value: Value, state: SaveOrRecompute, carrier: SharedState) -> float:
        if state.how != RECOMPUTED:
            return 0.0
        fits = carrier.use is None and not carrier.output_layout.partial
        return 0.0 if fits and state.size in (0, self.memory.bytes_of(value, carrier.output_layout)) else math.inf

    # -- a value with one consumer --

    def _states_of_one(
        self, op: Op, k: int, consumer: Op, i: int, value: Value, mine: bool, theirs: bool, droppable: bool
    ) -> tuple[SaveOrRecompute, ...]:
        memory = self.memory
        costs, of_consumer = memory.op_costs(op), memory.op_costs(consumer)

        def make() -> tuple[SaveOrRecompute, ...]:
            produced = dict.fromkeys(p.output_layouts[k] for p in costs)
            input_layouts = dict.fromkeys(_input_layout(p.input_uses[i]) for p in of_consumer)
            both = [layout for layout in produced if layout in input_layouts and not layout.partial]
            out = [SaveOrRecompute(SAVED)] if mine or theirs else [SaveOrRecompute(ABSENT), SaveOrRecompute(SAVED)]
            if mine:  # one tensor serves producer and consumer, or the recomputation
                out += [SaveOrRecompute(SAVED, layout, memory.bytes_of(value, layout)) for layout in both]
            if droppable:
                out += [SaveOrRecompute(RECOMPUTED, layout, memory.bytes_of(value, layout)) for layout in both]
            return tuple(out)

        return memory.once(("states", k, i, mine, theirs, droppable), (costs, of_consumer), make)

    def _fits_made(self, value: Value, state: SaveOrRecompute, output_layout: Layout) -> float:
        if state.layout is not None and output_layout != state.layout:
            return math.inf
        if state.how == RECOMPUTED and (
            output_layout.partial or state.size != self.memory.bytes_of(value, output_layout)
        ):
            return math.inf
        return 0.0

    def _fits_read(self, value: Value, state: SaveOrRecompute, asked: Uses) -> float:
        input_layout = _input_layout(asked)
        if state.layout is not None and input_layout != state.layout:
            return math.inf
        if state.how == RECOMPUTED and (
            input_layout is None or state.size != self.memory.bytes_of(value, input_layout)
        ):
            return math.inf
        return 0.0


def _input_layout(asked: Uses) -> Layout | None:
    """The one layout of the uses; None where there are several."""
    layouts = {use.input_layout for use in asked}
    return layouts.pop() if len(layouts) == 1 else None


def _numbered(things: Iterable[Thing]) -> tuple[list[Thing], np.ndarray]:
    """The distinct things in order, and by thing its number among them."""
    place: dict[Thing, int] = {}
    which = np.array([place.setdefault(one, len(place)) for one in things])
    return list(place), which
