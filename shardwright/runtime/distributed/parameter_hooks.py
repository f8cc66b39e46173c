"""Hooks that users put on parameters, where autograd does not see the parameters.

A program in processes computes on leaves of its own (`parameters`), and autograd knows these alone. The hooks of the
parameters run where gradients are handed over, and mean what they mean on one device:

    register_hook                         gets the whole gradient of this backward, a plain tensor; its result is cut
    register_post_accumulate_grad_hook    gets the parameter, after its gradient was added to ``grad``

A sharded gradient is gathered for its hook: one all-gather for each parameter with a hook. The ranks of a parameter's
stage call the hooks of `register_hook`; all ranks call the others, also where the parameter is empty.

At the first call the parameters are replaced by other objects. Their hooks move to these, and references to the old
objects in the hooks' functions are exchanged.

Example: of a weight [32, 16], in slices [8, 16] on 4 ranks, a hook of ``register_hook`` gets the gradient [32, 16] on
each rank; rank 1 adds rows 8 to 16 of its result. Old objects in functions are those of a loop that steps in the
backward:

    optimizers = {p: torch.optim.Adam([p]) for p in net.parameters()}
    def step(p): optimizers[p].step(); optimizers[p].zero_grad()     # afterwards `optimizers` has the new objects as
                                                                     keys
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...accelerators import random_state
from ...capture.annotations import CUT
from ...capture.hybrid_models import is_own, stacked
from ...errors import SettingError, place_text
from ...identity_tables import IdentitySet
from ...torch_private import gradient_hooks, move_gradient_hooks
from .requested_gradients import note_leaf

__all__ = [
    "call_after",
    "called_before",
    "carry_over",
    "in_step_or_hook",
    "leaf_of_slice",
    "put_within",
    "seen_by_hooks",
    "with_rank_dim",
]

#: The depth to which a hook's function is followed into functions and objects that it refers to.
_DEPTH = 3


def called_before(parameter: Tensor, whole: Tensor) -> Tensor:
    """The whole gradient `whole` after the hooks of ``register_hook``.

    Raises:
        SettingError: a hook returns something other than a gradient of this shape, or draws from torch's own random
            numbers, which differ between ranks.
    """
    for hook in list(gradient_hooks(parameter).before.values()):
        state = random_state(whole.device)
        with torch.no_grad():
            made = hook(whole)
        if not torch.equal(state, random_state(whole.device)):
            raise SettingError(
                f"{_called(hook, parameter)} draws random numbers, which are others on each rank",
                legal="a torch.Generator of its own, seeded alike on every rank",
            )
        if made is not None:
            if not isinstance(made, Tensor) or made.shape != whole.shape:
                what = (
                    f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
                )
                raise SettingError(
                    f"{_called(hook, parameter)} returns {what}",
                    legal=f"a tensor of shape {list(whole.shape)}, or None",
                )
            whole = made.to(whole.dtype)
    return whole


def call_after(parameter: Tensor) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook``."""
    for hook in list(gradient_hooks(parameter).after.values()):
        with torch.no_grad():
            hook(parameter)


def seen_by_hooks(parameter: nn.Parameter, gradient: Tensor, rank: int) -> Tensor:
    """This rank's part of the gradient of a DTensor after its hooks. All ranks of its mesh call this together.

    Args:
        parameter: the DTensor parameter.
        gradient: this rank's part.
        rank: this rank's number among those that the parameter's layout refers to.
    """
    from ...partition.padded_dims import true_slice  # noqa: PLC0415  needed beside the next import alone
    from .dtensors import as_dtensor, gathered_as, layout_of, padded_slice  # noqa: PLC0415  DTensor takes a second to import

    cut = as_dtensor(parameter)
    layout = layout_of(cut)
    if layout is None or layout.is_replicated:
        return called_before(parameter, gradient)
    whole = called_before(parameter, gathered_as(cut, padded_slice(cut, gradient)))
    return whole[true_slice(layout, tuple(parameter.shape), rank)].clone(memory_format=torch.contiguous_format)


def put_within(parameter: nn.Parameter) -> SettingError:
    """The error for a hook put on a parameter between backwards whose gradients are summed together."""
    return SettingError(
        f"the parameter {getattr(parameter, CUT, '')!r} was given a hook after a backward under no_sync(): it would "
        "see the sum of several backwards",
        legal="hooks put on parameters before no_sync() is entered",
    )


def _called(hook: object, parameter: Tensor) -> str:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    where = "" if code is None else f" ({place_text(code.co_filename, code.co_firstlineno)})"
    return f"the hook{where} of the parameter {getattr(parameter, CUT, '')!r}"


# -- parameters that are replaced by other objects


def carry_over(olds: Sequence[Tensor], successors: Mapping[Tensor, nn.Parameter]) -> None:
    """Move the hooks of parameters to the objects that replace them, and exchange the objects in the hooks' functions.

    Args:
        olds: the old parameters.
        successors: old parameter -> the new one.
    """
    hooks = []
    for old in olds:
        of_old = gradient_hooks(old)
        hooks += [*of_old.before.values(), *of_old.after.values()]
        move_gradient_hooks(old, successors[old])
    if hooks:
        exchange = _Exchange(successors)
        for hook in hooks:
            exchange.within(hook, 0)


class _Exchange:
    """Replaces old objects by new ones in the cells, globals, defaults, attributes and containers of a function."""

    def __init__(self, successors: Mapping[Tensor, nn.Parameter]) -> None:
        self._successors, self._seen = successors, IdentitySet[object]()

    def _is_old(self, value: object) -> bool:
        return isinstance(value, Tensor) and value in self._successors

    def _new(self, value: Any) -> Any:
        """The value's replacement; a tuple that holds old objects becomes another tuple."""
        if isinstance(value, tuple) and type(value) is tuple and any(map(self._is_old, value)):
            return tuple(map(self._new, value))
        return self._successors[value] if self._is_old(value) else value

    def within(self, value: object, depth: int) -> None:
        """Exchange old objects in `value` and in all that it refers to."""
        if value in self._seen or depth > _DEPTH or isinstance(value, (Tensor, nn.Module, type, types.ModuleType)):
            return
        self._seen.add(value)
        if isinstance(value, dict):
            if any(self._is_old(key) or self._new(entry) is not entry for key, entry in value.items()):
                entries = [(self._new(key), self._new(entry)) for key, entry in value.items()]
                value.clear()
                value.update(entries)
        elif isinstance(value, list):
            if any(self._new(entry) is not entry for entry in value):
                value[:] = map(self._new, value)
        elif isinstance(value, set) and any(map(self._is_old, value)):
            entries = list(map(self._new, value))
            value.clear()
            value.update(entries)
        for each in self._references(value):
            self.within(each, depth + 1)

    def _references(self, value: object) -> Iterator[object]:
        """The objects that an object refers to; old ones among the references are exchanged on the way."""
        if isinstance(value, functools.partial):
            func, args, kwargs = value.func, value.args, value.keywords
            value.__setstate__(  # type: ignore[attr-defined]  # typeshed leaves it out
                (func, tuple(map(self._new, args)), {k: self._new(v) for k, v in kwargs.items()}, vars(value))
            )
            yield from (func, *args, *kwargs.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                try:
                    content = cell.cell_contents
                except ValueError:
                    continue
                if self._new(content) is not content:
                    cell.cell_contents = self._new(content)
                yield content
            if value.__defaults__:
                value.__defaults__ = tuple(map(self._new, value.__defaults__))
            space = value.__globals__
            for name in value.__code__.co_names:
                if name in space:
                    if self._new(space[name]) is not space[name]:
                        space[name] = self._new(space[name])
                    yield space[name]
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__kwdefaults__ or {})
        elif isinstance(value, dict):
            yield from [each for each in value.values() if isinstance(each, (dict, list, set, types.FunctionType))]
        elif (
            not isinstance(value, (list, set, tuple, str, bytes, int, float))
            and isinstance(getattr(value, "__dict__", None), dict)
            and not isinstance(value, torch.optim.Optimizer)
        ):
            yield vars(value)


def leaf_of_slice(parameter: Tensor) -> Tensor:
    """A leaf on the storage of a rank's own slice, with the dim of the ranks. Its gradient is handed over to the
    parameter."""
    leaf = parameter.detach().unsqueeze(0)
    if not parameter.requires_grad:
        return leaf

    def hand_over(filled: Tensor) -> None:
        assert filled.grad is not None
        gradient, filled.grad = called_before(parameter, filled.grad.squeeze(0)), None
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        call_after(parameter)

    note_leaf(leaf.requires_grad_(True), parameter, None)
    leaf.register_post_accumulate_grad_hook(hand_over)
    return leaf


def with_rank_dim(tensor: Tensor) -> Tensor:
    """The tensor that a program in one process computes on: `tensor` itself, or for the only rank's own slice
    its leaf."""
    return leaf_of_slice(tensor) if is_own(tensor) and stacked(tensor) is None else tensor


# -- code that ranks of other stages do not run at the same time


def in_step_or_hook() -> bool:
    """True inside of an optimizer's step, or of a hook of a parameter: in a pipeline the ranks of another stage are not
    in it at the same time. A closure that a step calls is run by all ranks together."""
    frame: types.FrameType | None = sys._getframe(1)
    called_codes: set[types.CodeType] = set()
    while frame is not None:
        code = frame.f_code
        if code is call_after.__code__ or code is called_before.__code__:
            return True
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return _code_of(frame.f_locals.get("closure")) not in called_codes
        called_codes.add(code)
        frame = frame.f_back
    return False


def _code_of(function: object) -> types.CodeType | None:
    """The code of a function that may be bound, decorated, partial or an object."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            return function.__code__
        elif function is not None and isinstance(type(function).__call__, types.FunctionType):
            function = type(function).__call__
        else:
            return None
