"""The dumps of a plan: what was asked for, and what one rank runs, as plain text with one operator a line.

    %3 = matmul(%1, %w1)  {in_strategy: ((2, 4), (4, 1))}  f32[32, 784], f32[784, 512] -> f32[32, 512]   # matmul1  net.py:41
    %5 = matmul(%4, %w1)  f32[16, 196], f32[196, 512] -> f32[16, 512]   # matmul1  net.py:41
    %6 = all_reduce(%5)  {ranks: (4, 5, 6, 7), bytes: 32768}  f32[16, 512] -> f32[16, 512]   # completes %5

The first is of ``step_parallel_begin.ir``: the user's operators, global shapes. The others are of ``execute.ir``: the
local program, forward then backward. What operators make has a number, what is fed or stored has its name. A dump is a
function of the plan and the rank alone, and asks for no other rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..conversion import Conversion, Step, conversion
from ..errors import PlanError
from ..graph import Value
from ..layout import Layout, group_of
from ..plan.again import Again
from ..plan.graph_document import dtype_word
from ..plan.recompute import Recomputed
from ..plan.padding import true_slice
from ..plan.plan import Plan, backward_collectives, forward_collectives, made_by, read_by
from ..plan.route import Compute, Extreme, Instance, Move, Ref

__all__ = ["begin_text", "execute_text", "write_dumps"]


def write_dumps(plan: Plan, directory: str | Path, ranks: Iterable[int]) -> None:
    """Write ``rank_R/step_parallel_begin.ir`` and ``rank_R/execute.ir`` below a directory, which is made if need be.

    Files of an earlier plan are replaced. The same plan gives the same bytes.

    Args:
        ranks: the ranks to write; the others cost nothing.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    for rank in ranks:
        folder = Path(directory) / f"rank_{rank}"
        texts = {"step_parallel_begin.ir": begin_text(plan, rank), "execute.ir": execute_text(plan, rank)}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_bytes(text.encode())


def begin_text(plan: Plan, rank: int) -> str:
    """The user's operators, each with its strategy, its global shapes and where it is called.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    graph = plan.graph
    names = _Numbers(v.name for v in _sources(plan))
    lines = list(_header(plan, rank, "the user's operators, global shapes"))
    lines.append("# a word in parentheses at the end says who chose the strategy where no mark did")
    for planned, op in zip(plan.operators, graph.ops, strict=True):
        asked = [f"in_strategy: {planned.in_strategy}"]
        mark = op.mark
        if mark is not None and any(isinstance(entry, Layout) for entry in mark.in_strategy or ()):
            asked.append(f"in_layout: ({', '.join(map(_layout, planned.in_layouts))})")
        if mark is not None and mark.out_strategy is not None:
            asked.append(f"out_strategy: {planned.out_strategy}")
            asked.append(f"out_layout: ({', '.join(map(_layout, planned.out_layouts))})")
        outs = [v for v in op.outputs if v is not None]
        made = [names.new(v.name) for v in outs] or ["_"]
        comment = _where(planned.name, planned.module, planned.source)
        if planned.cause != "mark":
            comment += f"  ({planned.cause})"
        lines.append(_line(made, planned.op, _arguments(op.args, op.kwargs, names), ", ".join(asked),
                           _types([(v, v.shape) for v in op.inputs], [(v, v.shape) for v in outs]), comment))
    lines += _results([o.name if isinstance(o, Value) else o for o in graph.outputs], graph.outputs,
                      {n: v.name for n, v in graph.updates.items()}, names)
    return "\n".join(lines) + "\n"


def execute_text(plan: Plan, rank: int) -> str:
    """The program of one rank: local operators, slices and collectives, forward and backward.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    lines = list(_header(plan, rank, "the program of this rank, local shapes"))
    return "\n".join(lines + _Execute(plan, rank).run()) + "\n"


# -- pieces of text ----------------------------------------------------------------------------------------------------


def _header(plan: Plan, rank: int, title: str) -> Iterator[str]:
    if not 0 <= rank < plan.devices:
        raise PlanError(f"rank {rank} is outside the {plan.devices} devices")
    routed = plan.routed
    yield f"# {title}"
    yield f"# devices: {plan.devices}, mode: {plan.mode}, rank: {rank}, plan: {plan.fingerprint}"
    yield "# a layout names, for each dim, the digits of the rank that cut it: size@stride, major first; - is whole"
    tables = [("input", {i.name: i for i in routed.inputs}), ("parameter", routed.parameters),
              ("buffer", routed.buffers), ("constant", routed.constants)]
    for kind, table in tables:
        for instance in table.values():
            value, shape = plan.graph.parameters.get(instance.value.name, instance.value), instance.local_shape
            index = true_slice(instance.layout, value.shape, rank)
            own = tuple(s.stop - s.start for s in index)
            part = ", ".join(f"{s.start}:{s.stop}" for s in index)
            yield (f"# {kind} %{value.name}  {_type(value, value.shape)}  layout {_layout(instance.layout)}  "
                   f"{'fed' if kind == 'input' else 'stored'} [{part}] = {_type(value, own)}"
                   + (f", padded to {_type(value, shape)}" if own != shape else "")
                   + _used(value, routed.used.get(value.name), instance.layout))
    if routed.seed is not None:
        yield f"# seed %{routed.seed.value.name}  of the random numbers, drawn at each call, the same on every rank"
    for alias, name in plan.graph.aliases.items():
        yield f"# {alias} is {name}"
    for note in plan.notes:
        yield f"# note: {note}"


def _used(value: Value, used: Layout | None, stored: Layout) -> str:
    if used is None or used == stored:
        return ""
    return f"  used in layout {_layout(used)} = {_type(value, used.local_shape(used.padded(value.shape)))}"


def _sources(plan: Plan) -> Iterator[Value]:
    yield from plan.graph.sources()
    yield from (i.value for i in plan.routed.constants.values())
    if plan.routed.seed is not None:
        yield plan.routed.seed.value


def _line(made: Sequence[str], name: str, arguments: Sequence[str], attributes: str, types: str, comment: str) -> str:
    parts = [f"{', '.join(made)} = {name}({', '.join(arguments)})"]
    if attributes:
        parts.append(f"{{{attributes}}}")
    if types:
        parts.append(types)
    return "  ".join(parts) + (f"   # {comment}" if comment else "")


def _where(name: str, module: str, source: str) -> str:
    inside = module and module != name and not name.startswith(module + ".")
    return "  ".join(filter(None, (f"{name} in {module}" if inside else name, source)))


def _type(value: Value, shape: Sequence[int]) -> str:
    return f"{dtype_word(value.dtype)}{list(shape)}"


def _types(before: Sequence[tuple[Value, Sequence[int]]], after: Sequence[tuple[Value, Sequence[int]]]) -> str:
    left, right = (", ".join(_type(*entry) for entry in side) for side in (before, after))
    return f"{left} -> {right}" if left else right


def _layout(layout: Layout) -> str:
    return "[" + ", ".join("·".join(map(repr, digits)) or "-" for digits in layout.dims or ()) + "]"


class _Numbers(dict):
    """Name of a value -> how it is written: ``%4`` for what is made, ``%w1`` for what is fed or stored."""

    def __init__(self, sources: Iterable[str]) -> None:
        super().__init__((name, f"%{name}") for name in sources)
        self._taken, self._last = set(self.values()), 0

    def number(self) -> str:
        """The next number; one that is a parameter's name, as in a ParameterList, is left out."""
        self._last += 1
        return f"%{self._last}" if f"%{self._last}" not in self._taken else self.number()

    def new(self, name: str) -> str:
        self[name] = self.number()
        return self[name]


def _arguments(args: tuple, kwargs: dict[str, Any], names: dict[str, str]) -> list[str]:
    return [_argument(a, names) for a in args] + [f"{k}={_argument(a, names)}" for k, a in kwargs.items()]


def _argument(leaf: Any, names: dict[str, str]) -> str:
    if isinstance(leaf, (Ref, Value)):
        return names[leaf.name]
    if isinstance(leaf, (list, tuple)):
        return "[" + ", ".join(_argument(x, names) for x in leaf) + "]"
    if isinstance(leaf, torch.dtype):
        return dtype_word(leaf)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(leaf))  # no addresses: the same plan gives the same bytes


def _results(keys: Sequence[Any], outputs: Sequence[Any], updates: dict[str, str], names: dict[str, str]) -> list[str]:
    shown = [names[k] if isinstance(o, (Value, Instance)) else _argument(o, names) for k, o in zip(keys, outputs)]
    return [f"return {', '.join(shown)}"] + [f"update %{name} = {names[made]}" for name, made in updates.items()]


# -- the program of a rank ---------------------------------------------------------------------------------------------


class _Execute:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.names = _Numbers(v.name for v in _sources(plan))
        self.known: dict[str, Instance] = {}
        for table in (plan.routed.parameters, plan.routed.buffers, plan.routed.constants):
            self.known.update((i.name, i) for i in table.values())
        self.known.update((i.name, i) for i in plan.routed.inputs)
        if plan.routed.seed is not None:
            self.known[plan.routed.seed.name] = plan.routed.seed
        for i in plan.routed.instructions:
            self.known.update((o.name, o) for o in made_by(i))
        self.lines: list[str] = []
        self.gradients: dict[str, list[str]] = {}  # instance name -> what its uses have brought
        self.again: dict[str, str] = {}            # instance name -> how it is written once it is computed again
        self.region: Any = None                    # the region of which the latest line is

    def run(self) -> list[str]:
        routed = self.plan.routed
        self.lines.append("# forward")
        for instruction in routed.instructions:
            if isinstance(instruction, Compute):
                self.compute(instruction)
            else:
                self.convert(instruction)
        self.lines += _results([o.name if isinstance(o, Instance) else o for o in routed.outputs], routed.outputs,
                               {n: i.name for n, i in routed.updates.items()}, self.names)
        self.lines.append("# backward, in the order in which it runs")
        self.backward()
        return self.lines

    # -- forward --

    def compute(self, instruction: Compute) -> None:
        op, leaves = instruction.op, read_by(instruction)
        arguments = _arguments(instruction.args, instruction.kwargs, self.names)
        made = [self.names.new(o.name) for o in made_by(instruction)] or ["_"]
        self.lines.append(_line(made, _kind(instruction), arguments, "",
                                self.types(leaves, [o.name for o in made_by(instruction)]),
                                _where(instruction.operator, op.module, op.source)))

    def convert(self, instruction: Move | Extreme) -> None:
        source, written = instruction.source, self.names[instruction.source.name]
        given = {"output": "for the output"}.get(instruction.operator, f"for {instruction.operator}")
        if isinstance(instruction, Move) and instruction.cause == "parameter":
            given = f"{source.value.name} {given}"

        def comment(step: Step) -> str:
            if not step.reduces:
                return given
            # An all-reduce leaves what the operator itself would have left; a reduce-scatter is for the next one.
            return f"completes {written}" if step.kind == "all_reduce" else f"completes {written} {given}"
        self.names[instruction.target.name] = self.steps(
            instruction.forward, source.value, source.local_shape, written, forward_collectives(instruction), comment)

    def types(self, before: Iterable[str], after: Iterable[str]) -> str:
        sides = [[(self.known[n].value, self.known[n].local_shape) for n in names] for names in (before, after)]
        return _types(*sides)

    def steps(self, steps: Conversion, value: Value, shape: tuple[int, ...], written: str, collectives: Iterator,
              comment: Callable[[Step], str]) -> str:
        """A line for each step of a conversion; what its result is written as: itself where there are none."""
        shapes = steps.local_shapes(shape)
        for step, before, after in zip(steps.steps, shapes, shapes[1:]):
            if step.communicates:
                collective, digits = next(collectives)
                attributes = f"ranks: {group_of(self.rank, digits)}, bytes: {collective.bytes}{_details(step)}"
            else:
                attributes = _index(step, before, self.rank)
            made = self.names.number()
            self.lines.append(_line([made], step.kind, [written], attributes,
                                    _types([(value, before)], [(value, after)]), comment(step)))
            written = made
        return written

    # -- backward --

    def backward(self) -> None:
        routed = self.plan.routed
        seen: set[str] = set()
        for output in routed.outputs:
            if isinstance(output, Instance) and output.value.requires_grad and output.name not in seen:
                seen.add(output.name)
                made = self.names.number()
                types = self.types((), [output.name])
                self.lines.append(_line([made], "gradient", [self.names[output.name]], "", types,
                                        "given by the caller; 1 for a loss"))
                self.bring(output.name, made)
        for instruction in self.plan.backward:
            if isinstance(instruction, Compute):
                self.compute_backward(instruction)
            elif isinstance(instruction, Move):
                self.convert_backward(instruction)
            elif isinstance(instruction, Again):
                self.gather_again(instruction)
            elif isinstance(instruction, Recomputed):
                self.recompute(instruction)
            else:
                self.extreme_backward(instruction)
        final = [f"{name}: {self.total(i.name)}" for name, i in routed.parameters.items() if i.name in self.gradients]
        self.lines.append(f"gradients {{{', '.join(final)}}}" if final else "# no parameter has a gradient")

    def bring(self, name: str, gradient: str) -> None:
        self.gradients.setdefault(name, []).append(gradient)

    def total(self, name: str) -> str:
        """The gradient of an instance from all its uses."""
        parts = self.gradients[name]
        if len(parts) > 1:
            made = self.names.number()
            self.lines.append(_line([made], "add", parts, "", self.types([name] * len(parts), [name]),
                                    f"gradient of {self.names[name]} from {len(parts)} uses"))
            self.gradients[name] = parts = [made]
        return parts[0]

    def compute_backward(self, instruction: Compute) -> None:
        outs = [o.name for o in made_by(instruction) if o.name in self.gradients]
        ins = [n for n in read_by(instruction) if self.known[n].value.requires_grad]
        arguments = [self.total(n) for n in outs]
        made = [self.names.number() for _ in ins]
        for name, gradient in zip(ins, made):
            self.bring(name, gradient)
        self.lines.append(_line(
            made, f"{_kind(instruction)}_backward", arguments, "", self.types(outs, ins),
            f"gradient{'s' * (len(ins) > 1)} of {', '.join(self.names[n] for n in ins)}; "
            + _where(instruction.operator, instruction.op.module, instruction.op.source)))

    def convert_backward(self, instruction: Move) -> None:
        source, target = instruction.source, instruction.target
        gradient = self.total(target.name)
        if instruction.backward is not None:
            whose = source.value.name if instruction.cause == "parameter" else self.names[source.name]
            comment = f"gradient of {whose}"
            if instruction.forward.steps:
                comment += f", transpose of {', '.join(s.kind for s in instruction.forward.steps)}"
            if instruction.operator != "output":
                comment += f" for {instruction.operator}"
            gradient = self.steps(instruction.backward, target.value, target.local_shape, gradient,
                                  backward_collectives(instruction), lambda step: comment)
        self.bring(source.name, gradient)

    def recompute(self, instruction: Recomputed) -> None:
        """A line of the forward once more: what it makes has another number, and is read by that in its region."""
        if instruction.region is not self.region:
            self.region = instruction.region
            self.lines.append(f"# {self.region.path} is computed again, for the backward of {instruction.operator}")
        first = {name: self.names[name] for name in self.names}
        self.names.update(self.again)
        again = instruction.instruction
        self.compute(again) if isinstance(again, Compute) else self.convert(again)
        self.again.update((o.name, self.names[o.name]) for o in made_by(again))
        self.names.update(first)

    def gather_again(self, instruction: Again) -> None:
        source = instruction.move.source
        self.steps(instruction.move.forward, source.value, source.local_shape, self.names[source.name],
                   backward_collectives(instruction),
                   lambda step: f"{source.value.name} again, for the backward of {instruction.operator}")

    def extreme_backward(self, instruction: Extreme) -> None:
        """Each rank gets the share of the gradient that its ties are of the ties of all ranks."""
        source, reduced = instruction.source, self.names[instruction.source.name]
        gradient = self.total(instruction.target.name)
        layout = source.layout
        made = self.names.number()
        self.lines.append(_line([made], "ties", [self.names[instruction.operand.name], reduced,
                                                 self.names[instruction.target.name]], "",
                                self.types([instruction.operand.name, source.name, instruction.target.name],
                                           [source.name]), f"how many elements attain the {layout.reduction}"))
        of_all = self.steps(conversion(layout.without_partial().with_partial(layout.partial), layout.without_partial()),
                            source.value, source.local_shape, made, backward_collectives(instruction),
                            lambda step: f"gradient of {reduced}: the ties of all ranks")
        shared = self.names.number()
        self.lines.append(_line([shared], f"{layout.reduction}_backward", [gradient, made, of_all], "",
                                self.types([source.name] * 3, [source.name]), f"gradient of {reduced}"))
        self.bring(source.name, shared)


def _kind(instruction: Compute) -> str:
    packet = getattr(instruction.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(instruction.target, "__name__", str(instruction.target))


def _details(step: Step) -> str:
    """What a collective does with dims, and what it reduces by if not a sum."""
    parts = []
    for word, attribute in (("scatter_dim", "scattered"), ("gather_dim", "gathered")):
        dims = [d for d, atoms in enumerate(step.dims) if any(getattr(a, attribute) is not None for a in atoms)]
        if dims:
            parts.append(f", {word}: {dims[0] if len(dims) == 1 else tuple(dims)}")
    if step.reduces and step.reduction != "sum":
        parts.append(f", reduction: {step.reduction}")
    return "".join(parts)


def _index(step: Step, shape: tuple[int, ...], rank: int) -> str:
    """The part of its local tensor that a rank keeps: ranges a dim, or where those have gaps an index of a view."""
    geometry = step.geometry(shape)
    if geometry.cuts is None:
        chosen = {axis: str(digit.value(rank)) for axis, digit in geometry.select}
        index = ", ".join(chosen.get(axis, ":") for axis in range(len(geometry.pre_view)))
        return f"view: {list(geometry.pre_view)}, index: [{index}]"
    ranges = [f"0:{size}" for size in shape]
    for dim, length, digits in geometry.cuts:
        number = 0
        for digit in digits:
            number = number * digit.size + digit.value(rank)
        ranges[dim] = f"{number * length}:{(number + 1) * length}"
    return f"index: [{', '.join(ranges)}]"
