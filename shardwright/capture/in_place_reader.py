"""The reader of the in-place operators of an exported program: each variable gets the value that it holds afterwards.

`mutation` turns a write into a view into a program without writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CaptureError
from ..graph import Value, leaves, map_values, values_in
from ..rules.indexing import overwritten
from ..rules.normalization import batch_norm
from ..torch_private import schema_of
from .mutation import Cell, Memory, View, ViewStep, Writer, gives_back, plain_form
from .recapture import AsExported, memory_of
from .source_lines import module_path, source_of

__all__ = ["InPlaceReader", "metas_made", "tensors_of"]

aten = torch.ops.aten

#: Owner of a memory that the model must not change in place -> what the user writes instead.
_UNCHANGEABLE = {
    "parameter": "a change outside of the model's forward",
    "constant": "a buffer, which register_buffer makes of it",
}


def tensors_of(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def metas_made(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The outputs of an operator as meta tensors; None where the operator needs elements."""
    args, kwargs = map_values((args, kwargs), lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    try:
        return tensors_of(target(*args, **kwargs))
    except RuntimeError:
        return None


class InPlaceReader:
    """The part of `GraphReader` that reads in-place operators; `GraphReader` sets the attributes."""

    cells: dict[torch.fx.Node, Any]
    updates: dict[str, Value]
    memories: dict[str, Memory]
    writer: Writer
    node: torch.fx.Node | None
    frontier: int | None
    aliases: dict[str, str]
    prefix: str
    nodes: AsExported
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor_nodes: list[torch.fx.Node]
    program: Any
    path_of: Callable[[Any], str | None]

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        raise NotImplementedError

    def read(self, cell: Cell) -> Value:
        raise NotImplementedError

    def record(
        self,
        node: torch.fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        further: Sequence[Value] = (),
        metas: list[Any] | None = None,
        entered: bool = True,
    ) -> list[Cell]:
        raise NotImplementedError

    def find_views(
        self,
        node: torch.fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cells: Sequence[Cell | None],
    ) -> None:
        """Make each output that shares memory with an input a view of that input."""
        sources = [(n, made) for n in self.tensor_nodes if isinstance(made := self.nodes.made(n), torch.Tensor)]
        metas, back = tensors_of(self.nodes.made(node)), gives_back(target, args, kwargs)
        memories = None if back else [(n, memory_of(made)) for n, made in sources]
        for i, (cell, meta) in enumerate(zip(cells, metas)):
            if cell is None:
                continue
            if memories is None:
                shared = [n for n, _ in sources]
            else:
                memory = memory_of(meta)
                shared = [n for n, other in memories if other == memory]
            source = None if not shared else shared[i] if len(shared) == len(cells) else shared[0]
            parent = None if source is None else self.cells[source].view
            if parent is not None and any(v is parent.value for v in values_in((args, kwargs))):
                assert source is not None
                sizes = tuple(tuple(m.shape) if m is not None else () for m in metas)
                step = ViewStep(
                    target, args, kwargs, parent.value, i, sizes, True if back else (self.nodes.made(source), meta)
                )
                cell.view = View(parent.memory, cell.view.value, parent, step)

    def in_place(
        self, node: torch.fx.Node, target: Any, written: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
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
        if target is aten.fill_diagonal_.default and len(args[0].shape) == 2:
            value = self.filled_diagonal(*args, **kwargs)
            made = None if value is None else [value]
        elif target is aten.copy_.default:
            made = self.emit(overwritten, args[:2], {}) if args[0].requires_grad else [args[1]]
        elif target is aten.detach_.default and not args[0].requires_grad:
            made = [args[0]]
        elif plain is None or (torch.Tag.inplace_view in target.tags and target is not aten.detach_.default):
            made = None
        else:
            kwargs = {name: value for name, value in kwargs.items() if name not in written}
            made = [c.view.value for c in self.record(node, plain, args, kwargs, metas=metas_made(plain, args, kwargs))]
        if made is None or len(made) != len(changed) or not all(isinstance(c, Cell) for c in changed):
            raise CaptureError(
                f"{target} writes into its arguments and has no plain form",
                source=source_of(node) or None,
                legal="an operator that returns its result",
            )
        for cell, value in zip(changed, made):
            assert cell is not None
            if value is not cell.view.value:
                self.store(node, cell, value)
        self.cells[node] = changed[0] if isinstance(self.nodes.made(node), torch.Tensor) else changed

    def turn(self, node: torch.fx.Node, plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read ``x.t_()``: the variable views its memory with other dims from here on."""
        source = self.tensor_nodes[0]
        cell = self.cells[source]
        before = cell.view
        value = self.record(node, plain, args, kwargs)[0].view.value
        step = ViewStep(plain, args, kwargs, before.value, 0, (value.shape,), before.value.shape == value.shape == ())
        cell.view = View(before.memory, value, before, step)
        self.cells[node] = cell

    def filled_diagonal(self, x: Value, fill: Any, wrap: bool = False) -> Value | None:
        rows, columns = x.shape
        if wrap and rows > columns:
            return None
        assert self.node is not None
        diagonal = self.emit(
            aten.full.default,
            ([min(rows, columns)], fill),
            {"dtype": x.dtype, "device": self.nodes.made(self.node).device},
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
        self, node: torch.fx.Node, target: Any, named: dict[str, Any], nodes: dict[str, Any]
    ) -> None:
        """Read a normalisation that updates its running statistics: `target` returns the new statistics as outputs."""
        if target is batch_norm:
            path = module_path(node, self.prefix)
            count = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
            count = self.aliases.get(count, count)
            counts = self.memories.get(count)
            named["tracked"] = self.writer.read(counts.whole) if counts and math.isnan(named["momentum"]) else None
        args = tuple(named[a.name] for a in schema_of(target).arguments)
        held = [self.cells[nodes[name]] for name in ("running_mean", "running_var")]
        out, *new = self.record(node, target, args, {}, [self.read(c) for c in held])
        for cell, made in zip(held, new):
            self.store(node, cell, made.view.value)
        self.cells[node] = out
