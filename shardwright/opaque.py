"""A user's own `torch.autograd.Function`, kept whole: one operator that calls it, forward and backward, as it stands.

While a model is captured its ``apply`` leaves one node. What runs later on each rank is ``apply`` itself, so that all of
its context (saved tensors, attributes, ``needs_input_grad``, outputs that are not differentiable) is torch's own. Without
a `shardwright.rule` it takes whole tensors on every rank; the rule ``"... -> ..."`` of the class lets it be cut.

Private here: a function is tried out on fake tensors, for which the modes of the export under way are put aside. And
``apply`` is one function, which users hold bound to their classes (``f = Scaled.apply``): it is that function's code which
is another one while a model is captured.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .errors import CaptureError

__all__ = ["OPAQUE", "Applied", "collect_functions"]

_LEGAL = "torch.library.custom_op with register_fake and register_autograd, described by sw.rule"


class Applied:
    """``Function.apply`` with all that is no tensor in its place: called on the tensors alone, returns tensors alone.

    Attributes:
        described_as: the class, by which a rule is found.
        differentiable: for each output whether a gradient flows through it.
    """

    def __init__(self, function: type, leaves: Sequence[Any], spec: Any) -> None:
        self.described_as, self.spec = function, spec
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.differentiable: tuple[bool, ...] = ()
        self.__name__, self.__qualname__, self.__module__ = function.__name__, function.__qualname__, __name__

    def results(self, tensors: Sequence[Tensor]) -> Any:
        """What the user's call returns."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.described_as.apply(*args, **kwargs)

    def __call__(self, *tensors: Tensor) -> Any:
        made = [x for x in pytree.tree_leaves(self.results(tensors)) if isinstance(x, Tensor)]
        return made[0] if len(made) == 1 else tuple(made)

    def __repr__(self) -> str:
        others = [x for i, x in enumerate(self.leaves) if i not in self.places]
        return f"{self.__qualname__}{re.sub(r' at 0x[0-9a-fA-F]+', '', repr(others)) if others else ''}"


#: The calls seen by the capture that is under way, and the fake tensors that they return; None outside of one.
_CALLS: contextvars.ContextVar[list[tuple[Applied, list[Tensor]]] | None] = \
    contextvars.ContextVar("shardwright_functions", default=None)
_LINE: contextvars.ContextVar[Callable[[], str | None]] = contextvars.ContextVar("shardwright_line")


@torch.library.custom_op("shardwright::opaque", mutates_args=())
def opaque(inputs: list[Tensor], call: int) -> list[Tensor]:
    """Call number `call` of a user's function; it stands in captured graphs only."""
    raise AssertionError("a captured graph is read, not run")


@opaque.register_fake
def _(inputs: list[Tensor], call: int) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _CALLS.get()[call][1]]


def _no_backward(ctx: Any, *gradients: Any) -> Any:
    raise AssertionError("a captured graph is read, not run")


opaque.register_autograd(_no_backward)
OPAQUE = torch.ops.shardwright.opaque.default


class _Watched:
    """Where the code that stands for `torch.autograd.Function.apply` comes from."""

    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        __class__  # noqa: B018  torch's has this cell, and so must what takes its place
        from shardwright.opaque import _apply  # this runs among the globals of torch's
        return _apply(cls, args, kwargs)


_FUNCTION = torch.autograd.Function.__dict__["apply"].__func__
_PLAIN = types.FunctionType(_FUNCTION.__code__, _FUNCTION.__globals__, "apply", None, _FUNCTION.__closure__)


@contextlib.contextmanager
def collect_functions(line: Callable[[], str | None]) -> Iterator[list[tuple[Applied, list[Tensor]]]]:
    """While active, each ``apply`` of a user's function leaves one node; yields the calls by their numbers.

    Args:
        line: the user's line that is being run.
    """
    calls: list[tuple[Applied, list[Tensor]]] = []
    tokens = _CALLS.set(calls), _LINE.set(line)
    _FUNCTION.__code__ = _Watched.apply.__code__
    try:
        yield calls
    finally:
        _FUNCTION.__code__ = _PLAIN.__code__
        _CALLS.reset(tokens[0]), _LINE.reset(tokens[1])


def _apply(cls: type, args: tuple, kwargs: dict[str, Any]) -> Any:
    calls = _CALLS.get()
    if calls is None or cls.__module__.startswith("torch."):
        return _PLAIN(cls, *args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    applied = Applied(cls, leaves, spec)
    tensors = [leaves[i] for i in applied.places]
    token = _CALLS.set(None)  # what it calls itself is a part of it
    try:
        made, out_spec = pytree.tree_flatten(_tried(applied, tensors, _LINE.get()))
    finally:
        _CALLS.reset(token)
    given = [x for x in made if isinstance(x, Tensor)]
    applied.differentiable = tuple(x.requires_grad for x in given)
    calls.append((applied, given))
    outputs = iter(opaque(tensors, len(calls) - 1))
    return pytree.tree_unflatten([next(outputs) if isinstance(x, Tensor) else x for x in made], out_spec)


def _tried(applied: Applied, tensors: Sequence[Tensor], line: Callable[[], str | None]) -> Any:
    """What a call returns, on fake tensors of its own.

    Raises:
        CaptureError: it writes into its inputs, or cannot run on tensors that have no values.
    """
    name, where = applied.__qualname__, line()

    def refused(*_: Any) -> None:
        raise CaptureError(f"{name}, a torch.autograd.Function, marks an input as changed in place", source=where,
                           legal="a forward that returns a new tensor")

    dirty = FunctionCtx.mark_dirty
    FunctionCtx.mark_dirty = refused
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), FakeTensorMode(), torch.enable_grad():
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
                     for x in tensors]
            versions = [x._version for x in fakes]
            made = applied.results(fakes)
            if [x._version for x in fakes] != versions:
                refused()
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"the forward of {name}, a torch.autograd.Function, cannot run on tensors without values: "
                           f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
                           source=where, legal=_LEGAL) from error
    finally:
        FunctionCtx.mark_dirty = dirty
    return made
