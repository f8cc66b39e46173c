"""The pieces of a dump's text, and numbers with their units.

1. Dumps: the header, the lines of stored and fed values, operators, types, layouts, results (`header` to
   `results_lines`).
2. Units, in dumps and tables alike: bytes (`size_text`, ``392 KiB``) and seconds (`time_text`, ``1.23 ms``, which is
   that of `launch.progress`, since searches show theirs).

Example: 401,408 bytes are ``392 KiB``, and 8,030,261,248 elements are ``8.03 billion``. The layout of a matrix whose
dim 0 is cut 8 ways is ``[8@1, -]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..cluster import Level
from ..cost.communication_schedule import ScheduledMessage, block_of
from ..errors import PlanError
from ..graph import Value, short_dtype
from ..launch.progress import ROUNDING, time_text
from ..layout import Layout
from ..partition.local_program import LocalOp, PlacedValue, Ref
from ..partition.padded_dims import true_slice
from ..pipeline.pipeline_plan import PipelinePlan
from ..redistribution import Halo, RedistributionStep, digits_value
from ..sharded_plan import Plan

__all__ = [
    "ROUNDING",
    "ValueNumbers",
    "arguments",
    "cost_text",
    "count_text",
    "details_of",
    "halo_text",
    "header",
    "index_text",
    "kind_of",
    "layout_text",
    "link_text",
    "message_line",
    "results_lines",
    "size_text",
    "sources",
    "tensor_lines",
    "time_text",
    "types_text",
    "where",
    "written_line",
]


def header(plan: Plan | PipelinePlan, rank: int, title: str) -> Iterator[str]:
    """The first lines of a dump: its title, the plan, the rank, and the notation of layouts.

    Raises:
        PlanError: a rank outside the plan's devices.
    """
    if not 0 <= rank < plan.devices:
        raise PlanError(f"rank {rank} is outside the {plan.devices} devices")
    yield f"# {title}"
    yield f"# devices: {plan.devices}, mode: {plan.mode}, rank: {rank}, plan: {plan.fingerprint}"
    yield "# a layout names, for each dim, the digits of the rank that cut it: size@stride, major first; - is whole"


def tensor_lines(plan: Plan, rank: int) -> Iterator[str]:
    """A line for each value that is fed to a rank or stored on it, and the plan's notes."""
    program = plan.program
    tables = [
        ("input", {i.name: i for i in program.inputs}),
        ("parameter", program.parameters),
        ("buffer", program.buffers),
        ("constant", program.constants),
    ]
    for kind, table in tables:
        for placed in table.values():
            value, shape = (plan.graph.parameters.get(placed.value.name, placed.value), placed.local_shape)
            index = true_slice(placed.layout, value.shape, rank)
            extents = tuple(s.stop - s.start for s in index)
            part = ", ".join(f"{s.start}:{s.stop}" for s in index)
            stored = value.stored
            yield (
                f"# {kind} %{value.name}  {_type(stored, value.shape)}  layout {layout_text(placed.layout)}  "
                f"{'fed' if kind == 'input' else 'stored'} [{part}] = {_type(stored, extents)}"
                + (f", padded to {_type(stored, shape)}" if extents != shape else "")
                + _used(value, program.used.get(value.name), placed.layout)
            )
    if program.seed is not None:
        yield f"# seed %{program.seed.value.name}  of the random numbers, drawn at each call, the same on every rank"
    for alias, name in plan.graph.aliases.items():
        yield f"# {alias} is {name}"
    for note in plan.notes:
        yield f"# note: {note}"


def _used(value: Value, used: Layout | None, stored: Layout) -> str:
    if used is None or (used == stored and value.stored.dtype == value.dtype):
        return ""
    return f"  used in layout {layout_text(used)} = {_type(value, used.local_shape(used.padded(value.shape)))}"


def sources(plan: Plan) -> Iterator[Value]:
    """The values that no operator produces: inputs, parameters, buffers, constants and the seed."""
    yield from plan.graph.sources()
    yield from (i.value for i in plan.program.constants.values())
    if plan.program.seed is not None:
        yield plan.program.seed.value


def written_line(
    made: Sequence[str], name: str, arguments: Sequence[str], attributes: str, types: str, comment: str
) -> str:
    """``%3 = relu(%2)  {attributes}  types   # comment``."""
    parts = [f"{', '.join(made)} = {name}({', '.join(arguments)})"]
    if attributes:
        parts.append(f"{{{attributes}}}")
    if types:
        parts.append(types)
    return "  ".join(parts) + (f"   # {comment}" if comment else "")


def message_line(
    action: str, number: int, message: ScheduledMessage, ranks: tuple[int, ...], carried: bool = False
) -> str:
    """``issue 3: all_gather  {ranks: (0, 1), bytes: 64}   # weights of blocks.1: up.weight``, or ``wait 3   # …``.

    Args:
        action: "issue" or "wait".
        number: of the message.
        message: the message.
        ranks: its ranks.
        carried: True where the stage's next backward waits for it.
    """
    when = f"; once a step, in the {'first' if message.role == 'gather' else 'last'} micro-batch" * message.once
    if action == "wait":
        return f"wait {number}   # {message}{when}{'; in the next backward of the stage' * carried}"
    names = list(dict.fromkeys(m.name for m in message.members))
    blocks = {block_of(name) for name in names}
    if len(blocks) == 1 and (block := blocks.pop()) and message.role in ("gather", "scatter"):
        names = [name[len(block) + 1 :] for name in names]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    moved = "" if [message.whose] == names else f": {', '.join(names[:3])}{more}"
    sent = f"{{ranks: {ranks}, bytes: {message.bytes}}}"
    return f"issue {number}: {message.kind}  {sent}   # {message.whose}{moved}{when}"


def where(name: str, module: str, source: str) -> str:
    """The operator of a line, its module, and its call site."""
    inside = module and module != name and not name.startswith(module + ".")
    return "  ".join(filter(None, (f"{name} in {module}" if inside else name, source)))


def _type(value: Value, shape: Sequence[int]) -> str:
    return f"{short_dtype(value.dtype)}{list(shape)}"


def types_text(before: Sequence[tuple[Value, Sequence[int]]], after: Sequence[tuple[Value, Sequence[int]]]) -> str:
    """``f32[2, 3] -> f32[2]``: values with shapes of their own."""
    inputs, outputs = (", ".join(_type(*entry) for entry in side) for side in (before, after))
    return f"{inputs} -> {outputs}" if inputs else outputs


def layout_text(layout: Layout) -> str:
    """``[4@1, -]``: the digits that cut each dim."""
    return "[" + ", ".join("·".join(map(repr, digits)) or "-" for digits in layout.dims or ()) + "]"


class ValueNumbers(dict[str, str]):
    """Name of a value -> its text in a dump: ``%4`` for a produced value, ``%w1`` for a fed or stored one.

    Args:
        sources: the names of the values that are fed or stored.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        super().__init__((name, f"%{name}") for name in sources)
        self._taken, self._last = set(self.values()), 0

    def number(self) -> str:
        """The next number that is not also the name of a source, such as that of a parameter in a ParameterList."""
        self._last += 1
        return f"%{self._last}" if f"%{self._last}" not in self._taken else self.number()

    def new(self, name: str) -> str:
        self[name] = self.number()
        return self[name]


def arguments(args: tuple[object, ...], kwargs: dict[str, object], names: dict[str, str]) -> list[str]:
    """An operator's arguments as text, values by their text in `names`."""
    return [_argument(a, names) for a in args] + [f"{k}={_argument(a, names)}" for k, a in kwargs.items()]


def _argument(leaf: object, names: dict[str, str]) -> str:
    if isinstance(leaf, (Ref, Value)):
        return names[leaf.name]
    if isinstance(leaf, (list, tuple)):
        return "[" + ", ".join(_argument(x, names) for x in leaf) + "]"
    if isinstance(leaf, torch.dtype):
        return short_dtype(leaf)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(leaf))  # no addresses: the same plan gives the same bytes


def results_lines(
    keys: Sequence[Any], outputs: Sequence[object], updates: dict[str, str], names: dict[str, str]
) -> list[str]:
    """The line of the results, and a line for the new value of each buffer."""
    shown = [names[k] if isinstance(o, (Value, PlacedValue)) else _argument(o, names) for k, o in zip(keys, outputs)]
    return [f"return {', '.join(shown)}"] + [f"update %{name} = {names[made]}" for name, made in updates.items()]


# -- numbers with their units -------------------------------------------------------------------------


def size_text(count: float) -> str:
    """Bytes: ``392 KiB``; below 10 of a unit with one decimal."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 10 else f"{size:.1f} {units[0]}"


def count_text(count: int) -> str:
    """A number of elements: ``8.03 billion``; below a million exactly."""
    for word, factor in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if count >= factor:
            return f"{count / factor:.3g} {word}"
    return f"{count:,}"


#: Relative difference up to which a plan's cost and its price by the search are the same, but for rounding.
PRICED_ALIKE = 1e-6


def cost_text(cost: float, bound: float | None = None, gap: float | None = None) -> str:
    """The cost of a plan and what was proved of it: ``cost 1.23 ms, lower bound 1.22 ms, gap 0.821%``, with six
    digits, by which the two differ. Where the search priced the plan above its cost, the bound and the gap are those of
    the price, which is named."""
    text = f"cost {time_text(cost, 6)}"
    if bound is None or gap is None:
        return text
    price = bound / (1 - gap) if gap < 1 else cost
    named = f", priced {time_text(price, 6)} by the search" if price > cost * (1 + PRICED_ALIKE) else ""
    return f"{text}{named}, lower bound {time_text(bound, 6)}, gap {gap:.3%}"


def link_text(level: Level) -> str:
    """A level of links, with the abbreviation of its network: ``IB NDR`` for InfiniBand NDR."""
    return level.name.replace("InfiniBand", "IB")


def kind_of(instruction: LocalOp) -> str:
    """The name of an operator, without its overload."""
    packet = getattr(instruction.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(instruction.target, "__name__", str(instruction.target))


def details_of(step: RedistributionStep) -> str:
    """The dims of a collective, and its reduction if it is no sum."""
    parts = []
    for word, attribute in (("scatter_dim", "scattered"), ("gather_dim", "gathered")):
        dims = [d for d, atoms in enumerate(step.dims) if any(getattr(a, attribute) is not None for a in atoms)]
        if dims:
            parts.append(f", {word}: {dims[0] if len(dims) == 1 else tuple(dims)}")
    if step.reduces and step.reduction != "sum":
        parts.append(f", reduction: {step.reduction}")
    return "".join(parts)


def halo_text(halo: Halo, rank: int) -> str:
    """The dim of a halo, and the elements of the dim that a rank has and reads; those outside of it are filled."""
    part = digits_value(halo.digits, rank)
    has, begin = halo.has(part), halo.begins(part)
    return f"dim: {halo.dim}, has: {has.start}:{has.stop}, reads: {begin}:{begin + halo.length}"


def index_text(step: RedistributionStep, shape: tuple[int, ...], rank: int) -> str:
    """The part of its local tensor that a rank keeps: a range for each dim, or an index of a view where the part has
    gaps."""
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
