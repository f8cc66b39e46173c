"""A user's own `torch.autograd.Function`, kept whole: one operator that calls it, forward and backward, as it stands.

While a model is captured, a call of ``apply`` leaves one node. Later each rank calls ``apply`` itself, so all of the
function's context (saved tensors, attributes, ``needs_input_grad``, outputs that are not differentiable) is torch's own.
Without a `shardwright.rule` the operator takes whole tensors on every rank; the rule ``"... -> ..."`` of the class lets it
be cut.

Users hold ``apply`` bound to their classes (``f = Scaled.apply``), so a replaced ``apply`` would miss calls. But ``apply``
looks ``forward`` and ``setup_context`` up on the class at each call. While a model is captured, every class of the user's
has its own pair of these two attributes, which is taken away again afterwards. Nothing of torch's own classes is replaced
but ``mark_dirty``, while a function is tried out, and the metaclass's ``__init__``, which tells of new classes.

A function is tried out on fake tensors, for which the modes of the export under way are put aside.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .errors import CaptureError
from .torch_private import DisableTorchFunction, FakeTensorMode, disable_current_modes, pytree, version_of

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
        """The results of the user's call. An ``apply`` of the class's own has been run by then: torch's is called."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return vars(torch.autograd.Function)["apply"].__get__(None, self.described_as)(*args, **kwargs)

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


def _classes(of: type = torch.autograd.Function) -> Iterator[type]:
    """Every class below `of` that is not torch's own, bases before those that inherit from them."""
    below = of.__subclasses__()
    for cls in below:
        if not cls.__module__.startswith("torch."):
            yield cls
    for cls in below:
        yield from _classes(cls)


def _watch(cls: type, put_back: contextlib.ExitStack) -> None:
    """Give a class a ``forward`` and a ``setup_context`` that leave a node while a model is captured.

    Outside of a capture, in other threads, and where `forward` is called by hand, both do what the class's own do.
    """
    own = {"forward": cls.forward, "setup_context": cls.setup_context}
    apart = cls.setup_context is not torch.autograd.Function.setup_context  # `forward` gets no context then

    @functools.wraps(own["forward"])
    def forward(*args: Any, **kwargs: Any) -> Any:
        # `apply` alone turns gradients off before it calls `forward`: a call by hand is a part of the model.
        if _CALLS.get() is None or torch.is_grad_enabled() or not (apart or isinstance(args[0], FunctionCtx)):
            return own["forward"](*args, **kwargs)
        made = _apply(cls, args if apart else args[1:], kwargs)
        if not apart:
            _mark(args[0], made)
        return made

    @functools.wraps(own["setup_context"])
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        if _CALLS.get() is None:
            own["setup_context"](ctx, inputs, output)
        else:
            _mark(ctx, output)

    for name, ours in (("forward", forward), *([("setup_context", setup_context)] if apart else [])):
        if name in vars(cls):
            put_back.callback(setattr, cls, name, vars(cls)[name])
        else:
            put_back.callback(delattr, cls, name)
        setattr(cls, name, staticmethod(ours))


def _mark(ctx: Any, output: Any) -> None:
    """Say of the outputs of the call that was seen last which ones no gradient flows through."""
    made = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    ctx.mark_non_differentiable(*(x for x, flows in zip(made, _CALLS.get()[-1][0].differentiable) if not flows))


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """While active, all classes of the user's are watched, those too that are made meanwhile."""
    meta = type(torch.autograd.Function)
    plain = meta.__init__

    def made(cls: type, *args: Any, **kwargs: Any) -> None:
        plain(cls, *args, **kwargs)
        if not cls.__module__.startswith("torch."):
            _watch(cls, put_back)

    with contextlib.ExitStack() as put_back:
        for cls in _classes():
            _watch(cls, put_back)
        put_back.callback(setattr, meta, "__init__", plain)
        meta.__init__ = made
        yield


@contextlib.contextmanager
def collect_functions(line: Callable[[], str | None]) -> Iterator[list[tuple[Applied, list[Tensor]]]]:
    """While active, each ``apply`` of a user's function leaves one node; yields the calls by their numbers.

    Args:
        line: the user's line that is being run.
    """
    calls: list[tuple[Applied, list[Tensor]]] = []
    tokens = _CALLS.set(calls), _LINE.set(line)
    try:
        with _watched():
            yield calls
    finally:
        _CALLS.reset(tokens[0]), _LINE.reset(tokens[1])


def _apply(cls: type, args: tuple, kwargs: dict[str, Any]) -> Any:
    calls = _CALLS.get()
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
        with DisableTorchFunction(), disable_current_modes(), FakeTensorMode(), torch.enable_grad():
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
                     for x in tensors]
            versions = [version_of(x) for x in fakes]
            made = applied.results(fakes)
            if [version_of(x) for x in fakes] != versions:
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
