"""What one operator does: asked of torch, which calls it once on tensors without values and of whole shapes.

    flops(local)    = flops(whole) · Π over factors of (local size / whole size)
    bytes forward   = inputs + outputs
    bytes backward  = gradients of outputs + what autograd saved of inputs and outputs + gradients of inputs

Flops are those of torch's own registry (torch.utils.flop_counter), of whatever the operator dispatches to, forward and
backward; a product is linear in each of its factors, so what a cut leaves follows from the rule's notation. An operator
that launches nothing, such as a view, costs nothing. No operator is described here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from ..errors import RuleError
from ..graph import Op, Value, map_values
from ..rules import bound_rule, find_rule
from ..rules.grouped import FLOPS
from ..torch_private import TorchDispatchMode, pytree, schema_of, storage_id

__all__ = ["Work", "signature", "work_of"]


@dataclass(frozen=True)
class Work:
    """What an operator does, whatever the shapes of its slices.

    Attributes:
        dtype: in which it computes: that of its first floating input, or output.
        launched: whether the forward does anything; and the backward.
        flops: multiplications and additions of the whole operator, forward and backward.
        dims: (index of an input, or -1 - index of an output; dim; whole size): each factor of the operator once.
        in_bytes, out_bytes: an element's, by input and output.
        saved_inputs, saved_outputs: which of them the backward reads.
        gradients: which inputs it makes a gradient for; none where no gradient flows.
        gradient_outputs: which outputs a gradient comes from.
    """

    dtype: str
    launched: tuple[bool, bool]
    flops: tuple[float, float]
    dims: tuple[tuple[int, int, int], ...]
    in_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    gradient_outputs: tuple[int, ...]

    def local(self, in_shapes: Sequence[tuple[int, ...]], out_shapes: Sequence[tuple[int, ...]]
              ) -> tuple[tuple[float, float], tuple[float, float]]:
        """((flops, bytes) forward, (flops, bytes) backward) on slices of these shapes.

        Args:
            in_shapes, out_shapes: one a tensor; last inputs may be missing, which are not read.
        """
        part = 1.0
        if any(self.flops):
            for index, dim, whole in self.dims:
                shapes = out_shapes if index < 0 else in_shapes
                index = -1 - index if index < 0 else index
                if index < len(shapes):
                    part *= shapes[index][dim] / whole
        ins = [math.prod(shape) * size for shape, size in zip(in_shapes, self.in_bytes)]
        outs = [math.prod(shape) * size for shape, size in zip(out_shapes, self.out_bytes)]
        forward = sum(ins) + sum(outs) if self.launched[0] else 0
        backward = 0
        if self.launched[1]:
            backward = sum(ins[i] for i in (*self.saved_inputs, *self.gradients) if i < len(ins)) + \
                sum(outs[i] for i in (*self.saved_outputs, *self.gradient_outputs))
        return (self.flops[0] * part, forward), (self.flops[1] * part, backward)


def signature(op: Op) -> tuple:
    """What two operators have in common that do the same work."""
    return op.target, str(map_values((op.args, op.kwargs), _described)), tuple(map(_described, op.inputs)), \
        tuple(v and _described(v) for v in op.outputs)


def _described(value: Value) -> tuple:
    return value.shape, value.dtype, value.requires_grad


class _Watch(TorchDispatchMode):
    """Counts what is dispatched: flops, and whether anything is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.launched = 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.launched |= not getattr(func, "is_view", False) and func is not torch.ops.aten.detach.default
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        elif func.name() in FLOPS:
            self.flops += FLOPS[func.name()](*args, **kwargs)
        return out


def work_of(op: Op) -> Work:
    """The work of an operator."""
    outputs = [v for v in op.outputs if v is not None]
    dtypes = [v.dtype for v in (*op.inputs, *outputs)]
    dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), torch.float32)
    sizes = tuple(v.dtype.itemsize for v in op.inputs), tuple(v.dtype.itemsize for v in outputs)
    gradients = tuple(i for i, v in enumerate(op.inputs) if v.requires_grad)
    from_outputs = tuple(i for i, v in enumerate(outputs) if v.requires_grad) if gradients else ()
    gradients = gradients if from_outputs else ()
    name = str(dtype).removeprefix("torch.")
    tried = _tried(op, outputs, gradients, from_outputs)
    if tried is None:  # it runs on tensors with values only: what it reads and makes is known all the same
        described, every = find_rule(op), tuple(range(len(op.inputs)))
        moves = bool(outputs) and not (described is not None and described.view)
        return Work(name, (moves, moves and bool(gradients)), (0.0, 0.0), (), *sizes, every, (), gradients,
                    from_outputs)
    launched, flops, saved = tried
    return Work(name, launched, flops, _dims(op) if any(flops) else (), *sizes, *saved, gradients, from_outputs)


#: An operator dispatched forward and backward: whether anything is launched, the flops, which inputs and outputs are saved.
_Dispatched = tuple[tuple[bool, bool], tuple[float, float], tuple[tuple[int, ...], tuple[int, ...]]]

#: What was dispatched by operators that were tried lately, by signature: other plans have most of them too. None: it failed.
_LATELY: OrderedDict[tuple, _Dispatched | None] = OrderedDict()
_MOST = 4096


def _tried(op: Op, outputs: list[Value], gradients: tuple[int, ...], from_outputs: tuple[int, ...]) -> _Dispatched | None:
    """The operators that an operator dispatches; None where it does not run without values."""
    key = signature(op) if schema_of(op.target) is not None else None  # what is not of torch may hold a model
    if key in _LATELY:
        _LATELY.move_to_end(key)
        return _LATELY[key]
    try:
        found = _dispatched(op, outputs, gradients, from_outputs)
    except Exception:  # of any kind, by an operator that needs values: `work_of` counts the bytes that it reads and makes
        found = None
    if key is not None:
        _LATELY[key] = found
        if len(_LATELY) > _MOST:
            _LATELY.popitem(last=False)
    return found


def _dispatched(op: Op, outputs: list[Value], gradients: tuple[int, ...], from_outputs: tuple[int, ...]) -> _Dispatched:
    """The operators that an operator dispatches when it is called on tensors without values."""
    inputs = [torch.empty(v.shape, dtype=v.dtype, device="meta").requires_grad_(i in gradients)
              for i, v in enumerate(op.inputs)]
    feed = iter(inputs)  # `inputs` are the values among the arguments, in the order of the call
    args, kwargs = map_values((op.args, op.kwargs), lambda _: next(feed))
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.detach())  # held, for memory is known by its address
        return x

    forward, backward = _Watch(), _Watch()
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x), forward:
        made = op.target(*args, **kwargs)
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)][:len(outputs)]
    if gradients:
        ends = [results[i] for i in from_outputs if results[i].requires_grad]
        grads = [torch.empty_like(x) for x in ends]
        if ends:
            with backward:
                torch.autograd.grad(ends, [inputs[i] for i in gradients], grads, allow_unused=True)
    places = set(map(_memory, packed))
    saved_inputs = tuple(i for i, x in enumerate(inputs) if _memory(x) in places)
    read = set(map(_memory, inputs))
    saved_outputs = tuple(i for i, x in enumerate(results) if _memory(x) in places - read)
    return (forward.launched, backward.launched), (forward.flops, backward.flops), (saved_inputs, saved_outputs)


def _memory(x: Tensor) -> int:
    return storage_id(x.untyped_storage())


def _dims(op: Op) -> tuple[tuple[int, int, int], ...]:
    """Dims of inputs and outputs in which each factor of the operator that may be cut stands once, by its rule."""
    described = find_rule(op)
    if described is None:
        return ()
    try:
        bound = bound_rule(op, described)
    except RuleError:
        return ()
    sides = [(-1 - i, dims, shape) for i, (dims, shape) in enumerate(zip(bound.outputs, bound.out_shapes))]
    sides += [(i, dims, shape) for i, (dims, shape) in enumerate(zip(bound.inputs, bound.in_shapes))]
    found = [(index, d, shape[d], factors) for index, dims, shape in sides for d, factors in enumerate(dims)]
    out, covered = [], set()
    for index, d, size, factors in sorted(found, key=lambda f: len(f[3])):
        if size > 1 and any(bound.factors[f].splittable for f in factors) and not covered.intersection(factors):
            covered.update(factors)
            out.append((index, d, size))
    return tuple(out)
