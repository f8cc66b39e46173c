"""What a graph's operators hold, strategy by strategy: bytes of what they read, leave and save.

    left      of an output, as it is left, its sum completed
    wanted    of an input, as it is asked for
    own       what the backward wants that is neither
    inside    what is there beyond all these, forward and backward, while the operator's own instructions run

Which inputs and outputs a backward wants is asked of an operator's first strategy; where another one differs
(`wants_input`, `wants_output`) that is said for each. Everything is worked out once for operators that share their
footprints, and is then one object.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from ..graph import Op, Value
from ..layout import Layout
from .energy import Energy
from .footprint import Footprint
from .inside import inside
from .keeping import Keeps, keeps

__all__ = ["OperatorMemory"]


class OperatorMemory:
    """The operators of an energy.

    Attributes:
        place: by operator, its number in the program.
        grads: whether there is a backward.
        consumers: by value, the operators that read it, each once, with the first place at which it does.
        made_by: by value, its operator and the number of the output.
        ends: names of values that are handed out or update a buffer.
        of_given: names of values that an operator makes as a view of what comes in, or of such a view.
    """

    def __init__(self, energy: Energy) -> None:
        self.energy, self.graph = energy, energy.described.graph
        self.place = {op.name: k for k, op in enumerate(self.graph.ops)}
        self.grads = any(isinstance(v, Value) and v.requires_grad for v in self.graph.outputs)
        self.consumers = {name: list({op.name: (op, i) for op, i in reversed(readers)}.values())[::-1]
                          for name, readers in self.graph.consumers().items()}
        self.made_by = {v.name: (op, k) for op in self.graph.ops
                        for k, v in enumerate(v for v in op.outputs if v is not None)}
        self.ends = {v.name for v in self.graph.outputs if isinstance(v, Value)}
        self.ends |= {v.name for v in self.graph.updates.values()}
        self._known: dict[Hashable, Any] = {}
        self.of_given: set[str] = set()
        for op in self.graph.ops:
            outputs = [v.name for v in op.outputs if v is not None]
            if len(op.inputs) and not any(v.name in self.energy.parameters for v in op.inputs):
                self.of_given.update(outputs[k] for k, i in self.keeps(op).views if self.is_given(op.inputs[i].name))

    def is_given(self, name: str) -> bool:
        """Whether a value lies in the memory of what comes in: an input, a buffer or a constant."""
        return name in self.of_given or name not in self.made_by and name not in self.energy.parameters

    def once(self, key: Hashable, make: Any) -> Any:
        """Made once; equal arrays are then one object. A key may name an object by its id if that lives as long."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def prints(self, op: Op) -> tuple[Footprint, ...]:
        return self.energy.footprints[op.name]

    def keeps(self, op: Op) -> Keeps:
        """What an operator's backward needs, as its first strategy has it."""
        prints = self.prints(op)
        return self.once(("keeps", id(prints)), lambda: keeps(prints[0]))

    def own(self, op: Op) -> np.ndarray:
        """Bytes of what is kept that is neither an input nor an output, by strategy."""
        prints, first = self.prints(op), self.keeps(op)

        def count() -> np.ndarray:
            plain = [len(p.program) == 1 for p in prints]
            none = not first.own and plain[0]
            return np.array([0 if none and one else keeps(p).own for p, one in zip(prints, plain)], dtype=np.float64)
        return self.once(("own", id(prints)), count)

    def inside(self, op: Op) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that are there while it runs beyond what it reads, leaves and keeps, in the forward and in the backward: of
        operators of several instructions, by strategy."""
        prints = self.prints(op)
        given = frozenset(i for i, v in enumerate(op.inputs) if v.name not in self.made_by)

        def count() -> tuple[np.ndarray, np.ndarray]:
            found = np.array([inside(p, given) for p in prints], dtype=np.float64)
            return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])
        return self.once(("inside", id(prints), given), count)

    def saves_input(self, op: Op, index: int) -> bool:
        same = {i for i, v in enumerate(op.inputs) if v.name == op.inputs[index].name}
        return self.grads and bool(same & self.keeps(op).inputs)

    def saves_output(self, op: Op, index: int) -> bool:
        return self.grads and index in self.keeps(op).outputs

    def wants_input(self, op: Op, index: int) -> np.ndarray:
        """By strategy, whether its backward wants an input that that of the first strategy does not."""
        prints, first = self.prints(op), self.keeps(op)
        same = frozenset(i for i, v in enumerate(op.inputs) if v.name == op.inputs[index].name)
        return self.once(("wants input", id(prints), same), lambda: np.array(
            [len(p.program) > 1 and not same & first.inputs and bool(same & keeps(p).inputs) for p in prints]))

    def wants_output(self, op: Op, index: int) -> np.ndarray:
        """By strategy, whether its backward wants an output."""
        prints = self.prints(op)
        return self.once(("wants output", id(prints), index), lambda: np.array([index in keeps(p).outputs for p in prints]))

    def is_view(self, op: Op) -> bool:
        outputs = sum(v is not None for v in op.outputs)
        return outputs > 0 and len(self.keeps(op).views) == outputs

    def bytes_of(self, value: Value, layout: Layout) -> int:
        """Of a rank's part of a value, its sum completed."""
        def count() -> int:
            layout_ = layout.without_partial()
            return math.prod(layout_.local_shape(layout_.padded(value.shape))) * value.dtype.itemsize
        return self.once(("bytes", value.shape, value.dtype, layout), count)

    def left(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an output as it is left, by strategy."""
        prints = self.prints(op)
        return self.once(("left", id(prints), index), lambda: np.array(
            [self.bytes_of(value, p.leaves[index]) for p in prints], dtype=np.float64))

    def wanted(self, op: Op, index: int, value: Value) -> np.ndarray:
        """Bytes of an input as it is asked for, by strategy."""
        prints = self.prints(op)
        return self.once(("wanted", id(prints), index), lambda: np.array(
            [sum(self.bytes_of(value, want) for want in {use.want for use in p.asks[index]}) for p in prints],
            dtype=np.float64))

    def room(self, op: Op, backward: bool) -> np.ndarray:
        """Bytes that are there while an operator runs, but not while what it reads is sent before it; or not while the
        gradients of that are sent behind its backward. By strategy."""
        prints, outputs = self.prints(op), [v for v in op.outputs if v is not None]
        counted = tuple(k for k, v in enumerate(outputs) if v.requires_grad or not backward)
        places = {v.name: i for i, v in reversed(list(enumerate(op.inputs)))}
        alone = tuple(i for name, i in places.items() if backward and self.reads_alone(name) and self.saves_input(op, i)
                      and not self.saves_output(*self.made_by[name]))
        return self.once(("room", id(prints), counted, alone), lambda: sum(
            [*(self.left(op, k, outputs[k]) for k in counted), *(self.wanted(op, i, op.inputs[i]) for i in alone)],
            self.own(op) if self.grads else np.zeros(len(prints))))

    def reads_alone(self, name: str) -> bool:
        """Whether a value is made by an operator, for one reader, and no view of what comes in."""
        return name in self.made_by and name not in self.energy.shared and name not in self.of_given
