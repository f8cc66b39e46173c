"""Parts of parameters that a rank draws alone, or by blocks: the calls of a tape on the part that it keeps.

A tape has the operators that give a parameter its values (`deferred_init`). Of a large tensor a rank computes its part:

    rows            the elements from a first to a last row; memory of the other rows is never touched
    columns         of these rows some columns, where the tensor is cut along another dim than the first. The part lies
                    in memory of its own size. A fill draws blocks of rows, of which the columns are kept
    trunc_normal_   where no number can lie outside of the bounds, a ``normal_``. Otherwise torch draws the whole tensor
                    anew until all elements are inside: each block is drawn as often as it needs, and the rounds of all
                    are counted

Example: ``Linear(8192, 8192)`` in float32 on rank 1 of 8. Cut in rows, 32 of 256 MiB are drawn; cut in columns, 256 MiB
are drawn, in blocks of 16, and 32 MiB are kept.

The tensor that is handed on has the whole shape. With columns its rows overlap in memory (`DrawnPart.whole`), and
elements outside of the part have any values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_private import operators, pytree, storage_id
from .generator_jumps import Numbers, draws_by_place, row_blocks, truncates_by_place

__all__ = ["DrawnPart", "Meta", "compute", "draws", "metas", "noted", "parts_of"]

#: Elements of the smallest tensor of which a rank draws its part alone.
LARGE = 1 << 16

#: Standard deviations beyond which ``normal_`` makes no number: it takes the logarithm of a number of 53 bits.
FAR = 9.0

_ATEN = torch.ops.aten
#: Operators that make a tensor of a shape, their first argument, and draw nothing; those that draw, and the fill that
#: draws the same.
_MADE = (_ATEN.empty.memory_format, _ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default)
_DRAWN = {_ATEN.rand.default: _ATEN.uniform_.default, _ATEN.randn.default: _ATEN.normal_.default}
_FILLS = (_ATEN.uniform_.default, _ATEN.normal_.default)
#: Operators beside those that torch calls pointwise which compute each element of the result from the same one.
_EACH = (_ATEN.zero_.default, _ATEN.fill_.Scalar, _ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default)
_EACH = (*_EACH, *operators("_to_copy"))

#: A call of a tape: function, arguments, keyword arguments, result.
Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


@dataclass(frozen=True)
class Meta:
    """A meta tensor at the time that an operator took or returned it: ``module.double()`` gives the same object another
    memory later. The storage is held so that no other storage gets its address."""

    storage: torch.UntypedStorage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @property
    def key(self) -> int:
        return storage_id(self.storage)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of contiguous memory."""
    return torch.empty(shape, device="meta").stride()


def noted(x: Any) -> Any:
    """A `Meta` of a meta tensor; anything else as it is."""
    if isinstance(x, Tensor) and x.is_meta:
        return Meta(x.untyped_storage(), x.shape, x.stride(), x.storage_offset(), x.dtype)
    return x


def metas(x: Any) -> list[Meta]:
    """The `Meta` among the leaves of nested lists."""
    return [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Meta)]


def draws(function: Any) -> bool:
    """True where a call on a tape draws random numbers, or may."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
    return seeded or getattr(function, "__module__", "") == nn.init.__name__


class DrawnPart(NamedTuple):
    """The part of a storage that is computed, as rows and columns of a matrix.

    Attributes:
        shape: of the matrix.
        rows: the first row, and the one after the last; none where they are equal.
        columns: likewise; None: all.
    """

    shape: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> DrawnPart:
        """The smallest part that holds a slice of a tensor and is cut along the first dim and one more.

        Args:
            index: of each dim.
            shape: of the whole.
        """
        begins, ends = zip(*(each.indices(size)[:2] for each, size in zip(index, shape, strict=True)))
        cut = next((d for d in range(1, len(shape)) if ends[d] - begins[d] < shape[d]), None)
        at = 1 if cut is None else cut
        matrix = math.prod(shape[:at]), math.prod(shape[at:])
        many = matrix[0] // max(1, shape[0])
        rows = begins[0] * many, ends[0] * many
        if cut is None:
            return cls(matrix, rows)
        inner = math.prod(shape[cut + 1 :])
        return cls(matrix, rows, (begins[cut] * inner, ends[cut] * inner))

    @property
    def empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or (self.columns is not None and self.columns[0] >= self.columns[1])

    @property
    def _width(self) -> int:
        """Elements from a row to the next."""
        return self.shape[1] if self.columns is None else self.columns[1] - self.columns[0]

    def memory(self, dtype: torch.dtype) -> Tensor:
        """Flat memory for the part. The operating system gives memory that is written, and no other."""
        more = 0 if self.columns is None else self.shape[1]
        return torch.empty(self.shape[0] * self._width + more, dtype=dtype, device="cpu")

    def within(self, flat: Tensor) -> Tensor:
        """The part in its memory."""
        matrix = flat.as_strided(self.shape, (self._width, 1))
        matrix = matrix[slice(*self.rows)]
        return matrix if self.columns is None else matrix[:, slice(*self.columns)]

    def whole(self, flat: Tensor, tensor: Tensor) -> Tensor:
        """A view of the memory with the shape of the whole tensor, right in the part."""
        strides = (s if s < self.shape[1] else s // self.shape[1] * self._width for s in tensor.stride())
        return flat.as_strided(tensor.shape, tuple(strides))


def parts_of(
    calls: Iterable[Call],
    waiting: Mapping[int, Sequence[tuple[str, Tensor]]],
    asked_of: Callable[[str, Tensor], Sequence[slice] | None],
) -> dict[int, DrawnPart]:
    """Storage -> its part that is computed; the other storages are computed as a whole.

    Storages that are computed from one another have the same part.

    Args:
        calls: of a tape, in order.
        waiting: storage -> the tensors on it that get values, by name.
        asked_of: (name, tensor) -> its slice that is read; None: all of it.
    """
    if type(torch.empty(0)) is not Tensor:  # a mode whose tensors have no values
        return {}
    asked: dict[int, list[DrawnPart]] = {}
    for key, entries in waiting.items():
        slices = [asked_of(name, x) for name, x in entries] if all(_is_large(noted(x)) for _, x in entries) else [None]
        if None not in slices:
            asked[key] = [DrawnPart.of(index, x.shape) for index, (_, x) in zip(slices, entries) if index is not None]
    whole = waiting.keys() - asked.keys()
    together: dict[int, set[int]] = {}  # storage -> those that are computed from it, or that it is computed from
    shapes: dict[int, torch.Size] = {}
    for call in calls if asked else ():
        each = metas(call)
        keys = {x.key for x in each}
        joined = keys.union(*(together.get(key, ()) for key in keys))
        together.update(dict.fromkeys(joined, joined))
        shapes.update((x.key, x.shape) for x in each)
        if not keys.isdisjoint(whole) or not _by_elements(*call):
            whole |= keys
    parts: dict[int, DrawnPart] = {}
    for key, group in together.items():
        if group.isdisjoint(whole):
            some = {each for k in group for each in asked.get(k, ()) if not each.empty}
            rows = shapes[key][0], shapes[key].numel() // shapes[key][0]
            if len(some) == 1:
                (parts[key],) = some
            elif any(each.shape != rows for each in some):  # weights that are tied, and cut in several ways
                parts[key] = DrawnPart(rows, (0, rows[0]))
            else:  # of what nobody asks for, such as a weight that was tied to another, no row
                begin, end = min((p.rows[0] for p in some), default=0), max((p.rows[1] for p in some), default=0)
                parts[key] = DrawnPart(rows, (begin, end))
    return parts


def _is_large(x: Meta) -> bool:
    """True for all of a storage, row by row, of at least `LARGE` elements."""
    numel = x.shape.numel()
    whole = x.storage.nbytes() == numel * x.dtype.itemsize and x.stride == _strides(x.shape)
    return numel >= LARGE and whole


def _by_elements(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """True for a call of which some elements can be computed alone."""
    if not isinstance(result, Meta) or any(
        x.shape != result.shape or not _is_large(x) for x in metas((args, kwargs, result))
    ):
        return False
    if function in _MADE:
        return True
    if fill := _DRAWN.get(function, function if function in _FILLS else None):
        return not (kwargs and function in _FILLS) and draws_by_place(fill, result.dtype)
    if _truncates(function):
        return kwargs["generator"] is None and _accepted(kwargs) > 0.3 and truncates_by_place(result.dtype)
    others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    each = function in _EACH or torch.Tag.pointwise in getattr(function, "tags", ())
    return each and not draws(function) and not any(x.dim() for x in others)


def _truncates(function: Any) -> bool:
    return getattr(function, "__name__", "").endswith("trunc_normal_") and draws(function)


def _accepted(normal: Mapping[str, Any]) -> float:
    """The probability of a number inside of the bounds of a ``trunc_normal_``; torch draws in another way where it is
    small."""
    below = lambda x: 0.5 * (1 + math.erf((x - normal["mean"]) / normal["std"] / math.sqrt(2)))
    return below(normal["b"]) - below(normal["a"])


def compute(
    call: Call, of: Callable[[Any], Any], part: DrawnPart, real: Mapping[int, Tensor], numbers: Numbers
) -> Tensor:
    """The memory of the result of a call, of which a part alone is computed.

    Args:
        call: one that `parts_of` has given a part.
        of: a value of the tape -> the value now.
        part: of its tensors.
        real: storage -> its memory.
        numbers: of the generator.
    """
    function, args, kwargs, result = call
    inside = lambda x: part.within(real[x.key]) if isinstance(x, Meta) else of(x)
    flat = real[result.key] if result.key in real else part.memory(result.dtype)
    if function in _FILLS or function in _DRAWN:
        _fill(numbers, _DRAWN.get(function, function), flat, part, args[1:] if function in _FILLS else ())
    elif _truncates(function):
        _truncated(numbers, flat, part, **{name: kwargs[name] for name in ("mean", "std", "a", "b")})
    elif function in _MADE:
        target = part.within(flat)
        if function is not _MADE[0]:
            target.copy_(function([*target.shape], *map(of, args[1:]), **pytree.tree_map(of, kwargs)))
    elif any(x.key == result.key for x in metas((args, kwargs))):  # in place, or the same memory
        function(*pytree.tree_map(inside, args), **pytree.tree_map(inside, kwargs))
    else:
        part.within(flat).copy_(function(*pytree.tree_map(inside, args), **pytree.tree_map(inside, kwargs)))
    return flat


def _fill(numbers: Numbers, fill: Any, flat: Tensor, part: DrawnPart, args: Sequence[Any]) -> None:
    """Draw a part of a fill of the whole."""
    (rows, width), target = part.shape, part.within(flat)
    if part.empty or part.columns is None:
        begin, end = (0, 0) if part.empty else (part.rows[0] * width, part.rows[1] * width)
        pieces, into = [(begin, end)] if begin < end else [], flat
    else:
        pieces, into = [(a * width, b * width) for a, b in row_blocks(*part.rows, width, rows * width)], None
    row = 0
    for drawn in numbers.pieces(fill, flat.dtype, rows * width, pieces, *args, into=into):
        if part.columns is not None:
            block = drawn.view(-1, width)[:, slice(*part.columns)]
            target[row : row + len(block)] = block
            row += len(block)


def _truncated(numbers: Numbers, flat: Tensor, part: DrawnPart, mean: float, std: float, a: float, b: float) -> None:
    """Draw a part of a ``trunc_normal_`` of the whole."""
    low, high = (torch.tensor(x, dtype=flat.dtype, device="cpu").item() for x in (a, b))
    if low < mean - FAR * std and high > mean + FAR * std:
        return _fill(numbers, _FILLS[1], flat, part, (mean, std))
    (rows, width), target = part.shape, part.within(flat)
    pieces = [(first * width, last * width) for first, last in row_blocks(0, rows, width, rows * width)]
    for (first, last), values in zip(
        pieces, numbers.truncated(flat.dtype, rows * width, pieces, mean, std, low, high), strict=True
    ):
        begin, end = max(first // width, part.rows[0]), min(last // width, part.rows[1])
        if begin < end and not part.empty:
            block = values.view(-1, width)[begin - first // width : end - first // width]
            target[begin - part.rows[0] : end - part.rows[0]] = (
                block if part.columns is None else block[:, slice(*part.columns)]
            )
    return None
