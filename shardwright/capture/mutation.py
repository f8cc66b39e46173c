"""Writes into tensors by in-place operators, rewritten as a program without writes: each variable of the model is a
view of some memory.

    y = x.new_empty(4, 8)            memory M, y views all of it
    row = y[0]                       row views M through select(0, 0)
    row.add_(1)                      M' = select_scatter(M, row + 1, 0, 0); row is row + 1
    y * 2                            y was written through row: it is M'

A write computes the new value of the view, and carries it back through the inverse of each view operator into the
whole memory. Other views of that memory are recomputed from the memory at their next read.

`InPlaceReader` reads the in-place operators of an exported program in this way: each variable gets the value that it
holds afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from ..errors import CaptureError
from ..graph import Value, leaves, map_values, values_in
from ..rules.indexing import assigned, overwritten
from ..rules.normalization import batch_norm
from ..torch_private import OpOverload, overload_name, schema_of
from .outlines import Target, memory_of
from .recapture import AsExported
from .regions import Applied
from .source_lines import module_path, source_of

__all__ = [
    "Cell",
    "InPlaceReader",
    "Memory",
    "View",
    "ViewStep",
    "Writer",
    "all_tensors",
    "flows",
    "gives_back",
    "is_beside",
    "is_same",
    "is_view",
    "metas_made",
    "plain_form",
    "serial",
    "tensors_of",
]

# -- memory and its views


aten = torch.ops.aten

_COUNT = itertools.count()


def serial() -> int:
    """A number above those of all existing variables and memories."""
    return next(_COUNT)


#: Record an operator in place of the one that is read, and return its outputs: ``emit(target, args, kwargs)``.
Emit = Callable[[object, tuple[object, ...], dict[str, object]], Sequence[Value]]


# -- variables and their views -----------------------------------------------------------------------------------------


class Memory:
    """Elements that variables share.

    Args:
        value: the content of the memory at the current point of the program.
        owner: "parameter", "buffer", "input" or "constant"; "" for a memory that the program created.
        name: the name of the owner.
    """

    def __init__(self, value: Value, owner: str = "", name: str = "") -> None:
        self.owner, self.name = owner, name
        self.whole = View(self, value)
        self.version = 0  # number of writes
        self.number = serial()


@dataclass(frozen=True)
class ViewStep:
    """One view operator.

    Args:
        target, args, kwargs: the operator as recorded; `seen` is its argument for the viewed tensor.
        seen: the value of the viewed tensor.
        output: index of the output that is the view.
        sizes: the shapes of all outputs, where the operator has several.
        whole: True where the view has the elements of the viewed tensor, in the same dims; or the tensors that tell:
            the viewed one, and the view.
    """

    target: OpOverload[..., torch.Tensor]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    seen: Value
    output: int
    sizes: tuple[tuple[int, ...], ...]
    whole: bool | tuple[torch.Tensor, torch.Tensor]

    @property
    def same(self) -> bool:
        return self.whole if isinstance(self.whole, bool) else is_same(*self.whole)


class View:
    """Elements of a memory, seen through view operators.

    Args:
        memory: the memory.
        value: the current value of the view.
        parent: the view from which this view was taken; None: the view is the whole memory.
        step: the view operator between `parent` and this view.
    """

    def __init__(self, memory: Memory, value: Value, parent: View | None = None, step: ViewStep | None = None) -> None:
        self.memory, self.value, self.parent, self.step = memory, value, parent, step
        self.version = memory.version if parent is not None else 0


class Cell:
    """A tensor variable of the model's code."""

    def __init__(self, view: View | Value) -> None:
        self.view = view if isinstance(view, View) else Memory(view).whole
        self.number = serial()

    @property
    def memory(self) -> Memory:
        return self.view.memory


class Writer:
    """Read and write variables.

    Args:
        emit: records an operator.
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def read(self, view: View) -> Value:
        """The current value of a view; view operators are recorded where the memory was written since the last read."""
        if view.version != view.memory.version and view.parent is not None:
            assert view.step is not None
            step, seen = view.step, self.read(view.parent)
            args, kwargs = map_values((step.args, step.kwargs), lambda v: seen if v is step.seen else v)
            view.value = self.emit(step.target, args, kwargs)[step.output]
        view.version = view.memory.version
        return view.value

    def write(self, view: View, value: Value) -> None:
        """Set the value of a view, and of every view that shares its memory.

        Raises:
            CaptureError: a view operator without an inverse.
        """
        changed: list[tuple[View, Value]] = [(view, value)]
        while view.parent is not None:
            assert view.step is not None
            value = self.inverse(view.step, self.read(view.parent), value)
            view = view.parent
            changed.append((view, value))
        view.memory.version += 1
        for view, value in changed:
            view.value, view.version = value, view.memory.version

    def assign(self, old: Value, value: Value) -> Value:
        """`value` as a write under `torch.no_grad` leaves it in a tensor that held `old`."""
        if old.requires_grad:
            return self.emit(assigned, (old, value), {})[0]
        return self.emit(aten.detach.default, (value,), {})[0] if value.requires_grad else value

    def inverse(self, step: ViewStep, whole: Value, part: Value) -> Value:
        """The value of the viewed tensor after a write to a view of it.

        Args:
            step: the view operator.
            whole: the viewed tensor before the write.
            part: the view after the write.

        Raises:
            CaptureError: the view operator has no inverse.
        """
        kind = step.target.overloadpacket.__name__
        if kind == "detach":
            return self.assign(whole, part)
        if step.same:
            return part
        made = _INVERSES[kind](step, whole, part) if kind in _INVERSES else None
        if made is None:
            raise CaptureError(
                f"a tensor is written in place through {step.target}, from which there is no way back to "
                f"the tensor of shape {whole.shape} that it views",
                legal="a write into the tensor itself, or into a clone() of the view",
            )
        target, *args = made
        for name, value in (("imag", whole), ("real", whole)):  # the other half of a complex number
            args = [self.emit(getattr(aten, name).default, (value,), {})[0] if a == name else a for a in args]
        return self.emit(target, tuple(args), {})[0]


# -- the inverse of each view operator ---------------------------------------------------------------------------------


def _reshaped(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    return aten.reshape.default, part, list(whole.shape)


def _permuted(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...] | None:
    """Undo a permutation; the order of the dims is read from the strides of a probe with dims of size 2."""
    if whole.dtype.is_complex and step.target.overloadpacket.__name__ in ("mH", "matrix_H", "adjoint"):
        return None  # these conjugate as well
    probe = torch.empty((2,) * len(whole.shape), device="meta")
    args, kwargs = map_values((step.args, step.kwargs), lambda _: probe)
    order = sorted(step.target(*args, **kwargs).stride(), reverse=True)
    places = [step.target(*args, **kwargs).stride().index(stride) for stride in order]
    return aten.permute.default, part, places


def _argument(step: ViewStep, name: str, default: object = None) -> object:
    names = [a.name for a in schema_of(step.target).arguments]
    by_name = dict(zip(names, step.args)) | step.kwargs
    return by_name.get(name, default)


def _dim(step: ViewStep, whole: Value, default: int = 0) -> int:
    dim = _argument(step, "dim", default)
    assert isinstance(dim, int)
    return dim % len(whole.shape)


def _selected(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    return aten.select_scatter.default, whole, part, _dim(step, whole), _argument(step, "index")


def _unbound(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    return aten.select_scatter.default, whole, part, _dim(step, whole), step.output


def _sliced(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    return (
        aten.slice_scatter.default,
        whole,
        part,
        _dim(step, whole),
        _argument(step, "start"),
        _argument(step, "end"),
        _argument(step, "step", 1),
    )


def _narrowed(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...] | None:
    dim, start = _dim(step, whole), _argument(step, "start")
    if not isinstance(start, int):
        return None
    start = start % whole.shape[dim] if start < 0 else start
    return aten.slice_scatter.default, whole, part, dim, start, start + part.shape[dim]


def _parted(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    """Write one of the parts of a dim."""
    kind = step.target.overloadpacket.__name__
    dim = (
        {"v": 0, "h": min(1, len(whole.shape) - 1), "d": 2}[kind[0]]
        if kind in ("hsplit", "vsplit", "dsplit")
        else _dim(step, whole)
    )
    start = sum(size[dim] for size in step.sizes[: step.output])
    return aten.slice_scatter.default, whole, part, dim, start, start + part.shape[dim]


def _diagonal(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...]:
    return (
        aten.diagonal_scatter.default,
        whole,
        part,
        _argument(step, "offset", 0),
        _argument(step, "dim1", 0),
        _argument(step, "dim2", 1),
    )


def _expanded(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...] | None:
    return _reshaped(step, whole, part) if whole.numel == part.numel else None


def _retyped(step: ViewStep, whole: Value, part: Value) -> tuple[object, ...] | None:
    return (aten.view.dtype, part, whole.dtype) if whole.shape == part.shape else None


_INVERSES: dict[str, Callable[[ViewStep, Value, Value], tuple[object, ...] | None]] = {
    **dict.fromkeys(
        (
            "reshape _unsafe_view _reshape_alias flatten unflatten ravel squeeze unsqueeze atleast_1d "
            "atleast_2d atleast_3d view_as reshape_as"
        ).split(),
        _reshaped,
    ),
    "view": lambda step, whole, part: (_retyped if whole.dtype != part.dtype else _reshaped)(step, whole, part),
    **dict.fromkeys(
        "transpose permute t numpy_T mT mH matrix_H adjoint movedim moveaxis swapaxes swapdims".split(), _permuted
    ),
    "select": _selected,
    "unbind": _unbound,
    "slice": _sliced,
    "narrow": _narrowed,
    "diagonal": _diagonal,
    **dict.fromkeys("split split_with_sizes chunk tensor_split hsplit vsplit dsplit".split(), _parted),
    **dict.fromkeys("expand expand_as broadcast_to".split(), _expanded),
    "real": lambda step, whole, part: (aten.complex.default, part, "imag"),
    "imag": lambda step, whole, part: (aten.complex.default, "real", part),
    "view_as_real": lambda step, whole, part: (aten.view_as_complex.default, part),
    "view_as_complex": lambda step, whole, part: (aten.view_as_real.default, part),
    **dict.fromkeys(("conj", "_conj"), lambda step, whole, part: (aten.conj.default, part)),
    "_neg_view": lambda step, whole, part: (aten.neg.default, part),
}


# -- operators that write ----------------------------------------------------------------------------------------------

#: In-place operators whose plain form has another name.
_FUNCTIONAL: dict[object, OpOverload[..., torch.Tensor]] = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
}


def plain_form(target: OpOverload[..., torch.Tensor]) -> OpOverload[..., torch.Tensor] | None:
    """The operator that returns the result that `target` writes in place; None where there is none.

    ``aten.relu_.default`` -> ``aten.relu.default``, ``aten.add.out`` -> ``aten.add.Tensor``.
    """
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    namespace, name = schema_of(target).name.split("::")
    if name.startswith("__i") and name.endswith("__"):
        plain = f"__{name[3:]}"
    else:
        plain = name[:-1] if name.endswith("_") else name
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if packet is None:
        return None
    wanted = [_taken(a) for a in schema_of(target).arguments if not (a.kwarg_only and _is_written(a))]
    overloads = [getattr(packet, n) for n in packet.overloads()]
    overloads.sort(key=lambda o: overload_name(o) != overload_name(target))
    return next(
        (
            o
            for o in overloads
            if not any(map(_is_written, schema_of(o).arguments)) and list(map(_taken, schema_of(o).arguments)) == wanted
        ),
        None,
    )


def _taken(argument: torch.Argument) -> tuple[str, str]:
    """Name and type of an argument; the tensor itself is ``self`` to ``dropout_`` and ``input`` to ``dropout``."""
    return "self" if argument.name == "input" else argument.name, str(argument.type)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where two tensors that share memory are the same elements in the same dims."""

    def place(t: torch.Tensor) -> tuple[object, ...]:
        return t.shape, t.stride(), t.storage_offset(), t.dtype, t.is_conj(), t.is_neg()

    return place(a) == place(b)


def gives_back(target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """True where an operator returns its input although the capture does not show it: a dropout of nothing."""
    if target not in (
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    ):
        return False
    by_name = dict(zip(("input", "p", "train"), args)) | kwargs
    return by_name["p"] == 0 or not by_name["train"]


def is_view(target: object) -> bool:
    """True where the result of an operator may share memory with its input."""
    if isinstance(target, Applied):
        return False
    returns = schema_of(target).returns
    return len(returns) == 1 and returns[0].alias_info is not None


def is_beside(target: object) -> bool:
    """True for a view operator, and for a write through one."""
    return is_view(target) or target in (
        aten.slice_scatter.default,
        aten.select_scatter.default,
        assigned,
        aten.diagonal_scatter.default,
    )


def flows(target: object, args: tuple[object, ...], kwargs: dict[str, object], count: int) -> tuple[bool, ...]:
    """For each output: True where a gradient of some input reaches it, and for all where the operator does not tell."""
    if count > 1 and len({v.requires_grad for v in values_in((args, kwargs))}) > 1:
        try:
            args, kwargs = map_values(
                (args, kwargs),
                lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad),
            )
            assert callable(target)
            with torch.enable_grad():
                made = target(*args, **kwargs)
            return tuple(isinstance(m, torch.Tensor) and m.requires_grad for m in made)
        except RuntimeError:  # the operator runs on tensors with values only
            pass
    return (True,) * count


# -- the reader of in-place operators


#: Owner of a memory that the model must not change in place -> what the user writes instead.
_UNCHANGEABLE = {
    "parameter": "a change outside of the model's forward",
    "constant": "a buffer, which register_buffer makes of it",
}


def tensors_of(made: object) -> list[object]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def all_tensors(cells: Sequence[Cell | None]) -> list[Cell]:
    """The variables of an operator whose outputs are all tensors."""
    found = [cell for cell in cells if cell is not None]
    assert len(found) == len(cells)
    return found


def metas_made(target: Target, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object] | None:
    """The outputs of an operator as meta tensors; None where the operator needs elements."""
    args, kwargs = map_values((args, kwargs), lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    try:
        return tensors_of(target(*args, **kwargs))
    except RuntimeError:
        return None


class InPlaceReader:
    """The part of `GraphReader` that reads in-place operators; `GraphReader` sets the attributes."""

    cells: dict[torch.fx.Node, object]
    updates: dict[str, Value]
    memories: dict[str, Memory]
    writer: Writer
    node: torch.fx.Node | None
    frontier: int | None
    aliases: dict[str, str]
    prefix: str
    nodes: AsExported
    args: tuple[object, ...]
    kwargs: dict[str, object]
    tensor_nodes: list[torch.fx.Node]
    program: ExportedProgram
    path_of: Callable[[object], str | None]

    def emit(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Value]:
        raise NotImplementedError

    def read(self, cell: Cell) -> Value:
        raise NotImplementedError

    def record(
        self,
        node: torch.fx.Node,
        target: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        further: Sequence[Value] = (),
        metas: Sequence[object] | None = None,
        entered: bool = True,
    ) -> list[Cell | None]:
        raise NotImplementedError

    def cell(self, node: torch.fx.Node) -> Cell:
        """The variable that a node gives."""
        cell = self.cells[node]
        assert isinstance(cell, Cell)
        return cell

    def traced(self, node: torch.fx.Node) -> torch.Tensor:
        """The result of a node, a tensor without elements."""
        made = self.nodes.made(node)
        assert isinstance(made, torch.Tensor)
        return made

    def find_views(
        self,
        node: torch.fx.Node,
        target: OpOverload[..., torch.Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        cells: Sequence[Cell | None],
    ) -> None:
        """Make each output that shares memory with an input a view of that input."""
        sources = [(n, made) for n in self.tensor_nodes if isinstance(made := self.nodes.made(n), torch.Tensor)]
        metas, back = tensors_of(self.nodes.made(node)), gives_back(target, args, kwargs)
        memories = None if back else [(n, memory_of(made)) for n, made in sources]
        for i, (cell, meta) in enumerate(zip(cells, metas)):
            if cell is None:
                continue
            assert isinstance(meta, torch.Tensor)
            if memories is None:
                shared = [n for n, _ in sources]
            else:
                memory = memory_of(meta)
                shared = [n for n, other in memories if other == memory]
            source = None if not shared else shared[i] if len(shared) == len(cells) else shared[0]
            parent = None if source is None else self.cell(source).view
            if parent is not None and any(v is parent.value for v in values_in((args, kwargs))):
                assert source is not None
                sizes = tuple(tuple(m.shape) if isinstance(m, torch.Tensor) else () for m in metas)
                step = ViewStep(
                    target, args, kwargs, parent.value, i, sizes, True if back else (self.traced(source), meta)
                )
                cell.view = View(parent.memory, cell.view.value, parent, step)

    def in_place(
        self,
        node: torch.fx.Node,
        target: OpOverload[..., torch.Tensor],
        written: Sequence[str],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        """Read ``x.relu_()`` as a plain relu; the variable x holds its result from here on."""
        by_name = dict(zip((a.name for a in schema_of(target).arguments), self.args)) | self.kwargs
        changed = [
            self.cells.get(n) for n in leaves([by_name[name] for name in written]) if isinstance(n, torch.fx.Node)
        ]
        plain = plain_form(target)
        if (
            torch.Tag.inplace_view in target.tags
            and target is not aten.detach_.default
            and plain is not None
            and schema_of(plain).returns[0].alias_info is not None
        ):
            self.turn(node, plain, args, kwargs)
            return
        x = args[0] if args else None
        made: list[Value] | None
        if target is aten.fill_diagonal_.default and isinstance(x, Value) and len(x.shape) == 2:
            value = self.filled_diagonal(x, *args[1:], **kwargs)
            made = None if value is None else [value]
        elif target is aten.copy_.default and isinstance(x, Value) and isinstance(source := args[1], Value):
            made = self.emit(overwritten, args[:2], {}) if x.requires_grad else [source]
        elif target is aten.detach_.default and isinstance(x, Value) and not x.requires_grad:
            made = [x]
        elif plain is None or (torch.Tag.inplace_view in target.tags and target is not aten.detach_.default):
            made = None
        else:
            kwargs = {name: value for name, value in kwargs.items() if name not in written}
            results = self.record(node, plain, args, kwargs, metas=metas_made(plain, args, kwargs))
            made = [c.view.value for c in all_tensors(results)]
        cells = [c for c in changed if isinstance(c, Cell)]
        if made is None or not len(made) == len(changed) == len(cells):
            raise CaptureError(
                f"{target} writes into its arguments and has no plain form",
                source=source_of(node) or None,
                legal="an operator that returns its result",
            )
        for cell, value in zip(cells, made):
            if value is not cell.view.value:
                self.store(node, cell, value)
        self.cells[node] = cells[0] if isinstance(self.nodes.made(node), torch.Tensor) else cells

    def turn(
        self,
        node: torch.fx.Node,
        plain: OpOverload[..., torch.Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        """Read ``x.t_()``: the variable views its memory with other dims from here on."""
        cell = self.cell(self.tensor_nodes[0])
        before = cell.view
        value = all_tensors(self.record(node, plain, args, kwargs))[0].view.value
        step = ViewStep(plain, args, kwargs, before.value, 0, (value.shape,), before.value.shape == value.shape == ())
        cell.view = View(before.memory, value, before, step)
        self.cells[node] = cell

    def filled_diagonal(self, x: Value, fill: object, wrap: object = False) -> Value | None:
        rows, columns = x.shape
        if wrap and rows > columns:
            return None
        assert self.node is not None
        diagonal = self.emit(
            aten.full.default, ([min(rows, columns)], fill), {"dtype": x.dtype, "device": self.traced(self.node).device}
        )[0]
        return self.emit(aten.diagonal_scatter.default, (x, diagonal), {})[0]

    def store(self, node: torch.fx.Node, cell: Cell, value: Value) -> None:
        """Give a variable another value, in the memory that the variable shares.

        A write into a buffer is recorded as an update. A write into a parameter or a constant is refused.
        """
        memory, old, where = cell.memory, self.read(cell), {"source": source_of(node) or None}
        if memory.owner in _UNCHANGEABLE:
            changed = f"its parameter {memory.name!r}"
            if memory.owner == "constant":
                known = self.path_of(self.program.constants.get(memory.name))
                changed = (
                    f"{known or 'a tensor of no module'}, a plain tensor of shape {list(memory.whole.value.shape)},"
                )
            raise CaptureError(f"the model changes {changed} in place", **where, legal=_UNCHANGEABLE[memory.owner])
        if value.dtype != old.dtype:
            value = self.emit(aten.to.dtype, (value, old.dtype), {})[0]
        if value.shape != old.shape:
            value = self.emit(aten.expand.default, (value, list(old.shape)), {})[0]
        if self.frontier is not None and memory.number < self.frontier:
            value = self.writer.assign(old, value)
        try:
            self.writer.write(cell.view, value)
        except CaptureError as error:
            raise error.located(**where) from None
        if memory.owner == "buffer":
            self.updates[memory.name] = memory.whole.value

    def running_statistics(
        self, node: torch.fx.Node, target: object, named: dict[str, object], nodes: Mapping[str, object]
    ) -> None:
        """Read a normalisation that updates its running statistics: `target` returns the new statistics as outputs."""
        if target is batch_norm:
            path = module_path(node, self.prefix)
            count = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
            count = self.aliases.get(count, count)
            counts = self.memories.get(count)
            momentum = named["momentum"]
            cumulative = isinstance(momentum, float) and math.isnan(momentum)
            named["tracked"] = self.writer.read(counts.whole) if counts and cumulative else None
        args = tuple(named[a.name] for a in schema_of(target).arguments)
        sources = (nodes["running_mean"], nodes["running_var"])
        statistics = [self.cell(source) for source in sources if isinstance(source, torch.fx.Node)]
        out, *new = all_tensors(self.record(node, target, args, {}, [self.read(c) for c in statistics]))
        for cell, made in zip(statistics, new):
            self.store(node, cell, made.view.value)
        self.cells[node] = out
