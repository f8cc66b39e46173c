"""The one-string notation of an operator, and the layouts and partial sums that follow from it.

    notation = [order ":"] input {"," input} "->" output {"," output}
    input    = {token}                       one token a tensor dim; nothing for a scalar
    token    = factor | "..." | "1" | "(" factor {factor} ")"
    factor   = name ["!" | "~"] ["?"]

A *factor* is a loop of the operator. Dims that share a factor are cut alike. A factor that no output names is
contracted: when it is cut, each rank holds a term of the result (a partial sum). ``!``: the factor may not be split.
``~``: the factor is one of windows, whose cuts read elements of the neighbours' slices of an input (`Bound.halos`);
the rule gives the windows. ``?``: the input may be left out of a strategy, its cuts follow from the others. ``...``
stands for any number of leading dims, aligned on the right, that broadcast. ``(a b)`` is one dim made of two factors,
the first major. ``1`` is a dim that carries no factor. The order of the factors in the device matrix is that in which
the string names them first. An optional prefix ``m k n:`` names them earlier. A ``*`` in the prefix stands for the
devices that a strategy leaves unused, where the factor behind it is cut. Otherwise they come last.

The string, bound to shapes, and an assignment of digits to factors give the layouts of all inputs and outputs, the
partial sums of the outputs, and the digits over which the gradient of an input is partial:

    partial(output) = digits of the factors that the output does not name
    partial(gradient of input i) = digits of the factors that input i does not carry

Worked example: ``m k, k n -> m n`` for shapes (8, 4), (4, 6) -> (8, 6) on 4 devices, with m cut twice and k cut twice:
the inputs have the cuts (2, 2) and (2, 1), the output (2, 1), a partial sum over the digit of k.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..errors import LayoutError, RuleError
from ..layout import Digits, Layout, complement, digits_size, merge
from ..redistribution import Halo, Window

__all__ = ["Assignment", "Bound", "Factor", "Notation", "bind", "parse"]

#: Number of layouts that a `Bound` caches.
LAYOUTS = 512

_TOKEN = re.compile(
    r"\s*(?:(?P<open>\()|(?P<close>\))|(?P<dots>\.\.\.)(?P<dotmark>!?)"
    r"|(?P<one>1)(?![A-Za-z0-9_])|(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<mark>[!~]?)(?P<opt>\??))"
)
_ELLIPSIS = "..."


@dataclass(frozen=True)
class Notation:
    """A parsed string. A dim is a tuple of factor names: one, several (compound), or none (``1``)."""

    text: str
    inputs: tuple[tuple[tuple[str, ...], ...], ...]
    outputs: tuple[tuple[tuple[str, ...], ...], ...]
    whole: frozenset[str]
    optional: frozenset[int]
    order: tuple[str, ...]
    rest: int | None = None  # index of the factor behind the unused devices, where it is cut; else they come last
    windowed: frozenset[str] = frozenset()


@cache
def parse(text: str) -> Notation:
    """Parse a notation string.

    Raises:
        RuleError: a syntax error, with its place in the string.
    """

    def wrong(message: str, at: int) -> RuleError:
        return RuleError(f"{message}\n  {text}\n  {' ' * at}^", legal='a string such as "... m k, ... k n -> ... m n"')

    if text.count("->") != 1:
        raise wrong("the notation needs exactly one '->'", max(text.find("->"), 0))
    arrow, body_at = text.index("->"), text.find(":") + 1
    if body_at > arrow:
        raise wrong("the order of factors stands before the inputs", body_at - 1)
    order = {match.group(): match.start() for match in re.finditer(r"\S+", text[: max(body_at - 1, 0)])}
    for name, at in order.items():
        if not name.isidentifier() and name != "*":
            raise wrong(f"{name!r} is not a factor name", at)
    whole: set[str] = set()
    windowed: set[str] = set()
    optional: set[int] = set()

    def operand(begin: int, end: int, index: int | None) -> tuple[tuple[str, ...], ...]:
        dims: list[tuple[str, ...]] = []
        group: list[str] | None = None
        group_at = begin
        seen: set[str] = set()
        at = begin
        while text[at:end].strip():
            match = _TOKEN.match(text, at, end)
            if match is None:
                at += len(text[at:end]) - len(text[at:end].lstrip())
                raise wrong(f"cannot read {text[at:end].strip()!r}", at)
            start = match.end() - len(match.group().lstrip())
            names: tuple[str, ...] = ()
            if match["open"]:
                if group is not None:
                    raise wrong("a compound dim inside a compound dim", start)
                group, group_at = [], start
            elif match["close"]:
                if not group:
                    raise wrong("an empty or unopened compound dim", start)
                dims.append(tuple(group))
                group = None
            elif match["dots"]:
                names = (_ELLIPSIS,)
                if match["dotmark"]:
                    whole.add(_ELLIPSIS)
                if group is not None:
                    raise wrong("'...' inside a compound dim", start)
            elif match["one"]:
                dims.append(())
            else:
                names = (match["name"],)
                if match["mark"]:
                    (whole if match["mark"] == "!" else windowed).add(match["name"])
                if match["opt"]:
                    if index is None:
                        raise wrong("an output is never optional", start)
                    optional.add(index)
            for name in names:
                if name in seen:
                    raise wrong(f"{name!r} stands twice in one operand", start)
                seen.add(name)
                if group is not None:
                    group.append(name)
                else:
                    dims.append((name,))
            at = match.end()
        if group is not None:
            raise wrong("a compound dim that is not closed", group_at)
        return tuple(dims)

    def operands(begin: int, end: int, are_inputs: bool) -> tuple[tuple[tuple[str, ...], ...], ...]:
        out, at = [], begin
        if not text[begin:end].strip():
            return () if are_inputs else ((),)
        for i, piece in enumerate(text[begin:end].split(",")):
            out.append(operand(at, at + len(piece), i if are_inputs else None))
            at += len(piece) + 1
        return tuple(out)

    inputs = operands(body_at, arrow, True)
    outputs = operands(arrow + 2, len(text), False)
    named = {f for operand_ in inputs + outputs for dim in operand_ for f in dim}
    rest = next((i for i, name in enumerate(order) if name == "*"), None)
    order.pop("*", None)
    for name, at in order.items():
        if name not in named:
            raise wrong(f"the order names {name!r}, which no operand has", at)
    return Notation(
        text, inputs, outputs, frozenset(whole), frozenset(optional), tuple(order), rest, frozenset(windowed)
    )


@dataclass(frozen=True)
class Factor:
    """A loop of the operator.

    Attributes:
        name: its name in the notation.
        size: the size of the loop.
        splittable: the factor may be cut.
        pads: the factor may be cut into parts that do not divide it.
        window: the windows of the operator over the dim of an input that the factor is part of; None: the slice of an
            input is all that a part of the factor reads.
    """

    name: str
    size: int
    splittable: bool
    pads: bool = False
    window: Window | None = None


@dataclass(frozen=True, eq=False)
class Assignment:
    """The digits of the rank that cut each factor: a strategy in its one normal form."""

    devices: int
    digits: tuple[Digits, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.devices, self.digits))

    def __hash__(self) -> int:  # searches look assignments up often
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assignment):
            return NotImplemented
        return self is other or (self.digits == other.digits and self.devices == other.devices)

    @property
    def used(self) -> Digits:
        """All digits that cut some factor."""
        return tuple(d for digits in self.digits for d in digits)


@dataclass(frozen=True)
class Bound:
    """A notation bound to the shapes of one call. Factors are named by their index, dims by tuples of indices."""

    notation: Notation
    factors: tuple[Factor, ...]
    inputs: tuple[tuple[tuple[int, ...], ...], ...]
    outputs: tuple[tuple[tuple[int, ...], ...], ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    reduction: str = "sum"
    uneven: bool = False  # dims may be padded where a cut does not divide them

    def with_padding(self, contracted: bool) -> Bound:
        """The same call, with padding allowed for every factor that is no part of a compound dim.

        Args:
            contracted: allow padding of contracted factors too; their padding then adds nothing to the output.
        """
        sides = self.inputs + self.outputs
        beside = {i for dims in sides for dim in dims if len(dim) > 1 for i in dim}
        lacked = {i for i in range(len(self.factors)) for dims in self.outputs if all(i not in dim for dim in dims)}
        refused = beside if contracted else beside | lacked
        return replace(
            self,
            uneven=True,
            factors=tuple(
                replace(f, pads=f.splittable and f.size > 1 and i not in refused) for i, f in enumerate(self.factors)
            ),
        )

    def whole(self, devices: int) -> Assignment:
        """The assignment that cuts nothing: every rank does all the work."""
        return Assignment(devices, ((),) * len(self.factors))

    def cut_by(self, devices: int, digits: Mapping[int, Digits]) -> Assignment:
        """The assignment that cuts the given factors."""
        return Assignment(devices, tuple([merge(digits[i]) if i in digits else () for i in range(len(self.factors))]))

    def dim_digits(self, dim: tuple[int, ...], assignment: Assignment) -> Digits | None:
        """The digits of a dim; None where a compound dim would be cut in its minor factor only."""
        if len(dim) == 1:
            return assignment.digits[dim[0]]
        out: Digits = ()
        for position, index in enumerate(dim):
            digits = assignment.digits[index]
            out += digits
            if digits_size(digits) < self.factors[index].size and any(
                assignment.digits[later] for later in dim[position + 1 :]
            ):
                return None
        return out

    def _layout(self, dims: tuple[tuple[int, ...], ...], assignment: Assignment, partial: bool) -> Layout | None:
        digits: list[Digits] = []
        for dim in dims:
            found = self.dim_digits(dim, assignment)
            if found is None:
                return None
            digits.append(found)
        named = {i for dim in dims for i in dim}
        open_ = (
            [d for i, ds in enumerate(assignment.digits) if i not in named for d in ds]
            if partial and self.reduction != "none"
            else ()
        )
        return Layout.of(assignment.devices, digits, open_, self.reduction)

    @cached_property
    def _layouts(self) -> dict[tuple[int, Assignment, bool], Layout | None]:
        return {}

    def _remembered(self, index: int, assignment: Assignment, output: bool) -> Layout | None:
        """The cached layout of an input or output.

        Equal calls share one `Bound` (`registry.bound_rule`) and need the same layouts many times.
        """
        known, key = self._layouts, (index, assignment, output)
        if key not in known:
            if len(known) >= LAYOUTS:
                known.clear()
            known[key] = self._layout((self.outputs if output else self.inputs)[index], assignment, output)
        return known[key]

    def input_layout(self, index: int, assignment: Assignment) -> Layout | None:
        """The layout in which the operator needs input `index`; None where the cuts form no layout."""
        return self._remembered(index, assignment, False)

    def output_layout(self, index: int, assignment: Assignment) -> Layout | None:
        """The layout of output `index`, including partial sums; None where the cuts form no layout."""
        return self._remembered(index, assignment, True)

    def halos(self, index: int, assignment: Assignment) -> tuple[Halo, ...]:
        """The halos that the operator reads beside the slices of input `index`, one for each dim that needs one."""
        if not self.windowed:
            return ()
        return tuple(
            window.cut(d, digits)
            for d, dim in enumerate(self.inputs[index])
            for f in dim
            if (window := self.factors[f].window) is not None and (digits := assignment.digits[f])
        )

    def in_local_shape(self, index: int, assignment: Assignment, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The local shape of input `index` as the operator reads it, halos included.

        Args:
            shape: of the whole input, perhaps padded.

        Raises:
            LayoutError: a dim that its cut does not divide.
        """
        layout = self.input_layout(index, assignment)
        assert layout is not None
        local = list(layout.local_shape(shape))
        for halo in self.halos(index, assignment):
            local[halo.dim] = halo.length
        return tuple(local)

    def has_halos(self, assignment: Assignment) -> bool:
        """True where the operator reads more of some input than a slice."""
        return any(assignment.digits[f] for f in self.windowed)

    def halos_may_pay(self, assignment: Assignment, sizes: Iterable[tuple[int, int]]) -> bool:
        """True where a search should consider an assignment, as far as halos are concerned.

        A cut of windows never beats the same cut of the batch, the factor ``n``: both leave the same partial sums, and
        the batch needs no halos. Nor does it pay where a rank reads more elements of its neighbours than its own.

        Args:
            assignment: a consistent one.
            sizes: (factor, ways) of the cuts that it is made of.
        """
        if not self.has_halos(assignment):
            return True
        batch = next((i for i, f in enumerate(self.factors) if f.name == "n" and f.splittable), None)
        room = 1 if batch is None else self.factors[batch].size // digits_size(assignment.digits[batch])
        if any(f in self.windowed and room % ways == 0 for f, ways in sizes):
            return False
        return all(
            halo.length <= 2 * halo.part_size for i in range(len(self.inputs)) for halo in self.halos(i, assignment)
        )

    @cached_property
    def windowed(self) -> frozenset[int]:
        """The factors of windows."""
        return frozenset(i for i, factor in enumerate(self.factors) if factor.window is not None)

    def is_consistent(self, assignment: Assignment) -> bool:
        """True where all inputs and outputs have layouts, and each cut factor is splittable and divides or pads."""
        known = self._consistent
        if assignment not in known:
            if len(known) >= LAYOUTS:
                known.clear()
            known[assignment] = self._checked(assignment)
        return known[assignment]

    @cached_property
    def _consistent(self) -> dict[Assignment, bool]:
        return {}

    def _checked(self, assignment: Assignment) -> bool:
        for factor, digits in zip(self.factors, assignment.digits):
            if digits and (not factor.splittable or (factor.size % digits_size(digits) and not factor.pads)):
                return False
        return all(self._layout(d, assignment, False) is not None for d in self.inputs + self.outputs)

    def divides(self, assignment: Assignment) -> bool:
        """True where every cut divides its dim, so that nothing is padded."""
        return all(f.size % digits_size(digits) == 0 for f, digits in zip(self.factors, assignment.digits))

    def dividing(self, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
        """The nearest cuts below those of an assignment that divide the dims of each input."""
        return tuple(
            tuple(math.gcd(size, cut) for size, cut in zip(shape, cuts))
            for shape, cuts in zip(self.in_shapes, self.in_strategy(assignment))
        )

    def gradient_partial(self, index: int, assignment: Assignment) -> Digits:
        """The digits over which the gradient of input `index` is a partial sum."""
        carried = {i for dim in self.inputs[index] for i in dim}
        return tuple(d for i, digits in enumerate(assignment.digits) if i not in carried for d in digits)

    def in_strategy(self, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
        """The assignment as a tuple strategy: the cuts of each input."""
        return tuple(tuple(digits_size(self.dim_digits(dim, assignment) or ()) for dim in dims) for dims in self.inputs)

    def out_cuts(self, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
        """The cuts of each output."""
        return tuple(
            tuple(digits_size(self.dim_digits(dim, assignment) or ()) for dim in dims) for dims in self.outputs
        )

    def spread(self, dim: tuple[int, ...], digits: Digits) -> dict[int, Digits] | None:
        """The digits of a dim, distributed over its factors, major first; None where they do not fit."""
        if len(dim) == 1 and self.factors[dim[0]].pads:
            return {dim[0]: merge(digits)} if digits else {}
        out: dict[int, Digits] = {}
        todo = list(digits)
        for index in dim:
            room, mine = self.factors[index].size, []
            while todo and room > 1:
                digit = todo[0]
                if room % digit.size == 0:
                    mine.append(todo.pop(0))
                    room //= digit.size
                elif digit.size % room == 0:
                    rest = digit.size // room
                    mine.append(type(digit)(room, digit.stride * rest))
                    todo[0] = type(digit)(rest, digit.stride)
                    room = 1
                else:
                    return None
            if mine:
                out[index] = merge(mine)
            if room > 1:
                break
        return None if todo else out

    def follow(
        self, layouts: Mapping[int, Layout], of_outputs: bool = False, devices: int | None = None
    ) -> Assignment | None:
        """The assignment under which inputs (or outputs) have exactly the given layouts, apart from partial sums.

        Args:
            layouts: index of an input (or output) -> its layout.
            of_outputs: the layouts are those of outputs.
            devices: the number of devices, for empty `layouts`.

        Returns:
            None where no assignment exists: the layouts contradict one another, cut an unsplittable factor, or do not
                fit.
        """
        found: dict[int, Digits] = {}
        for index, layout in layouts.items():
            devices = layout.devices
            dims = (self.outputs if of_outputs else self.inputs)[index]
            assert layout.dims is not None
            for dim, digits in zip(dims, layout.dims):
                spread = self.spread(dim, digits) if digits else {}
                if spread is None:
                    return None
                for factor in dim:
                    mine = spread.get(factor, ())
                    if found.setdefault(factor, mine) != mine:
                        return None
        assert devices is not None
        assignment = self.cut_by(devices, found)
        try:
            complement(assignment.devices, assignment.used)
            if not self.is_consistent(assignment):
                return None
        except LayoutError:  # two dims are cut by the same part of the rank
            return None
        return assignment


def _many(operands: Sequence[object], noun: str) -> str:
    """A number of operands in words: "1 input", "2 outputs"."""
    return f"{len(operands)} {noun}{'s' * (len(operands) != 1)}"


def bind(
    notation: Notation,
    in_shapes: Sequence[tuple[int, ...]],
    out_shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
    reduction: str = "sum",
    windows: Mapping[str, Window] | None = None,
) -> Bound:
    """Bind a notation to the shapes of one call.

    Args:
        notation: the parsed string.
        in_shapes, out_shapes: the shapes of the inputs and outputs.
        sizes: sizes of factors that occur only in compound dims.
        reduction: the reduction of partial results.
        windows: of the factors that the string marks with ``~``.

    Raises:
        RuleError: the notation has another number of operands or dims, a factor two sizes, or a ``~`` without windows.
    """
    windows = windows or {}

    def wrong(message: str) -> RuleError:
        return RuleError(
            f"the rule {notation.text!r} does not fit: {message}",
            legal=f"a name for each dim of the shapes {tuple(in_shapes)} -> {tuple(out_shapes)}",
        )

    if notation.windowed - windows.keys():
        raise wrong(f"it has no windows for {', '.join(sorted(notation.windowed - windows.keys()))}")
    if len(notation.inputs) != len(in_shapes):
        raise wrong(f"it describes {_many(notation.inputs, 'input')}, the operator has {len(in_shapes)}")
    if len(notation.outputs) != len(out_shapes):
        raise wrong(f"it describes {_many(notation.outputs, 'output')}, the operator has {len(out_shapes)}")
    operands = list(zip(notation.inputs, in_shapes)) + list(zip(notation.outputs, out_shapes))
    ellipsis_rank = max((len(shape) - (len(dims) - 1) for dims, shape in operands if (_ELLIPSIS,) in dims), default=0)

    def open_up(dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> list[tuple[str, ...]]:
        if (_ELLIPSIS,) not in dims:
            names = list(dims)
        else:
            at, count = dims.index((_ELLIPSIS,)), len(shape) - (len(dims) - 1)
            if count < 0:
                raise wrong(f"it needs at least {len(dims) - 1} dims, not {shape}")
            names = [*dims[:at], *((f"...{ellipsis_rank - count + i}",) for i in range(count)), *dims[at + 1 :]]
        if len(names) != len(shape):
            raise wrong(f"it has {len(names)} dims where the operator has {shape}")
        return names

    opened = [open_up(dims, tuple(shape)) for dims, shape in operands]
    size_of: dict[str, int] = dict(sizes or {})
    seen: dict[str, None] = dict.fromkeys(notation.order)
    for dims, _ in operands:  # broadcast dims are adjacent, at the place where the string first names them
        if (_ELLIPSIS,) in dims:
            seen.update(dict.fromkeys(f for d in dims[: dims.index((_ELLIPSIS,))] for f in d))
            seen.update(dict.fromkeys(f"...{i}" for i in range(ellipsis_rank)))
            break
        seen.update(dict.fromkeys(f for d in dims for f in d))
    for names, (_, shape) in zip(opened, operands):
        for dim, size in zip(names, shape):
            for factor in dim:
                seen.setdefault(factor)
            if len(dim) == 1 and size != 1 and size_of.setdefault(dim[0], size) != size:
                raise wrong(f"the factor {dim[0]!r} has sizes {size_of[dim[0]]} and {size}")
    names_in_order = list(seen)
    position = {name: i for i, name in enumerate(names_in_order)}

    def resolve(names: list[tuple[str, ...]], shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        out: list[tuple[int, ...]] = []
        for dim, size in zip(names, shape):
            if len(dim) == 1 and size == 1 and size_of.get(dim[0], 1) != 1:
                out.append(())  # broadcast
            elif len(dim) > 1:
                total = 1
                for factor in dim:
                    total *= size_of.setdefault(factor, 1)
                if not 0 <= total - size < size_of[dim[0]]:  # parts of one length; the last parts may be shorter
                    raise wrong(f"the compound dim {dim} makes {total}, the tensor has {size}")
                out.append(tuple(position[f] for f in dim if size_of[f] != 1))
            else:
                out.append(tuple(position[f] for f in dim))
        return tuple(out)

    resolved = [resolve(names, shape) for names, (_, shape) in zip(opened, operands)]

    def splittable(name: str) -> bool:
        return name not in notation.whole and not (name.startswith(_ELLIPSIS) and _ELLIPSIS in notation.whole)

    factors = tuple(
        Factor(n, size_of.get(n, 1), splittable(n), window=windows[n] if n in notation.windowed else None)
        for n in names_in_order
    )
    k = len(in_shapes)
    return Bound(
        notation,
        factors,
        tuple(resolved[:k]),
        tuple(resolved[k:]),
        tuple(map(tuple, in_shapes)),
        tuple(map(tuple, out_shapes)),
        reduction,
    )
