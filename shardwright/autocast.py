"""Autocast made explicit: the casts that an operator gets under ``torch.autocast``, recorded as casts of its inputs.

torch's lists of operators are not copied. An operator is called on fake tensors under autocast, and a dispatch mode
records the calls below autocast: each operator with the dtypes that it takes and returns (its trace). The first of
these forms whose trace without autocast is the same is recorded:

    1. the operator as it is                              gelu; linear of float64
    2. its argument ``dtype`` set                         sum, cumsum on CUDA: float32
    3. the inputs cast that autocast was seen to cast     linear: bfloat16; cat of mixed dtypes: the widest
    4. all floating inputs cast to one dtype              norm on CUDA, which autocast calls by another overload
    5. the operator run under autocast                    gru, whose inner products alone are cast; custom operators

Two traces are the same where they have the same operators on the same dtypes in the same order; views, copies and
casts of the operator's own inputs do not count. Example, under bfloat16 on a CPU: the trace of `aten.linear` of three
float32 tensors is three casts and ``addmm(bfloat16, bfloat16, bfloat16)``, and so is that of form 3. Without autocast
it is ``addmm(float32, float32, float32)``.

Gradients are those of the operator under autocast: a cast's gradient is cast back. One cast of a value is shared by
all its consumers in a region (one cast of a parameter: by those in one module), as autocast shares casts of weights;
a shared cast's gradients are summed in its own dtype. ``torch.autocast(cache_enabled=False)`` around the call of a
model turns sharing off.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .torch_private import (
    NOISY_LOGGERS,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    operators,
    pytree,
    schema_of,
    without_cudnn,
)

__all__ = ["Autocast", "Casts", "Like", "UnderAutocast", "casts_of", "current", "entered", "under", "with_dtype"]

aten = torch.ops.aten

_LOG = logging.getLogger(f"torch.{NOISY_LOGGERS[1]}")

#: Operators that cast elements, and operators besides views that copy elements unchanged.
_CASTS = frozenset(operators("_to_copy"))
_COPIES = frozenset((aten.clone.default, *operators("_unsafe_view"), aten.contiguous.default, aten.lift_fresh.default))


# -- the state of autocast ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Autocast:
    """The state of autocast: the device types for which it is on.

    Args:
        dtypes: (device type, the lower precision) for each device type whose autocast is on.
        shares: True where one cast of a value serves all its consumers in a region.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    shares: bool = True

    def __bool__(self) -> bool:
        return bool(self.dtypes)

    def within(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> Autocast:
        """The state inside a region ``torch.autocast(device_type, dtype, enabled)``. Its ``cache_enabled`` is not
        known: torch.export turns the cache off while it traces."""
        dtypes = {name: other for name, other in self.dtypes if name != device_type}
        if enabled:
            dtypes[device_type] = dtype or torch.get_autocast_dtype(device_type)
        return Autocast(tuple(sorted(dtypes.items(), key=str)), self.shares)

    def __str__(self) -> str:
        on = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in self.dtypes)
        return f"autocast({on or 'off'})"


def current(*device_types: str) -> Autocast:
    """The state of autocast around the caller, for these device types."""
    if not any(map(torch.is_autocast_enabled, device_types)):
        return _OFF
    on = tuple(
        [(name, torch.get_autocast_dtype(name)) for name in sorted({*device_types}) if torch.is_autocast_enabled(name)]
    )
    return Autocast(on, torch.is_autocast_cache_enabled())


_OFF = Autocast()


@contextlib.contextmanager
def entered(state: Autocast, *device_types: str) -> Iterator[None]:
    """Set the state of autocast for its own device types and the given ones inside the ``with`` block, whatever it
    was before.

    Devices of these types need not exist; ``torch.autocast`` turns itself off without them.
    """
    on = dict(state.dtypes)
    names = sorted({*on, *device_types})
    before = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in names]
    cache = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)  # the trace would miss a cast that comes from the cache
    try:
        for name in names:
            torch.set_autocast_enabled(name, name in on)
            if name in on:
                torch.set_autocast_dtype(name, on[name])
        yield
    finally:
        for name, enabled, dtype in before:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cache)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


# -- operators that run under autocast ---------------------------------------------------------------------------------


class UnderAutocast:
    """An operator that runs under autocast: a target of the graph, with all attributes of the operator.

    Attributes:
        operator: the operator itself, or a user's `torch.autograd.Function` as a `capture.regions.Applied`.
        state: the state of autocast.
    """

    def __init__(self, operator: Any, state: Autocast) -> None:
        self.operator, self.state = operator, state
        packet = getattr(operator, "overloadpacket", operator)
        self.__name__ = getattr(packet, "__name__", type(operator).__name__)
        self.__qualname__, self.__module__ = getattr(packet, "__qualname__", self.__name__), __name__

    def __call__(self, *args: object, **kwargs: object) -> object:
        with contextlib.ExitStack() as stack:
            for name, dtype in self.state.dtypes:
                stack.enter_context(torch.autocast(name, dtype, True, self.state.shares))
            return self.operator(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        if name in ("operator", "state") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.operator, name)

    def __deepcopy__(self, memo: dict[int, object]) -> UnderAutocast:
        return self

    def __repr__(self) -> str:
        return f"{self.operator!r} under {self.state}"


@lru_cache(maxsize=1 << 12)
def under(operator: object, state: Autocast) -> UnderAutocast:
    """The target that runs `operator` under autocast: one object for equal arguments."""
    return UnderAutocast(operator, state)


# -- one operator ------------------------------------------------------------------------------------------------------


class Like(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Casts(NamedTuple):
    """The form of an operator that computes, without autocast, the operator's results under autocast.

    Args:
        inputs: for each tensor among the arguments, in call order, the dtype that it is cast to, or None.
        dtype: the operator's argument ``dtype``, or None: left as it is.
        whole: True where the operator itself has to run under autocast.
        made: the dtypes of the returned tensors; None where the operator cannot run on tensors without values.
    """

    inputs: tuple[torch.dtype | None, ...]
    dtype: torch.dtype | None = None
    whole: bool = False
    made: tuple[torch.dtype, ...] | None = None


def casts_of(target: object, args: tuple[object, ...], kwargs: dict[str, object], state: Autocast) -> Casts:
    """The casts that autocast makes for one operator call.

    Args:
        target: the operator.
        args, kwargs: its arguments, with a `Like` in place of each tensor.
        state: the state of autocast around the call.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Like))
    try:
        # The key tells 1, 1.0 and True apart by their types. A quotient of integers has the default dtype.
        return _casts(target, tuple(leaves), spec, (torch.get_default_dtype(), *map(type, leaves)), state)
    except TypeError:  # an argument without a hash
        return _casts.__wrapped__(target, tuple(leaves), spec, (), state)


@lru_cache(maxsize=1 << 12)
def _casts(
    target: object, leaves: tuple[object, ...], spec: object, kinds: tuple[object, ...], state: Autocast
) -> Casts:
    likes = [x for x in leaves if isinstance(x, Like)]
    plain = (None,) * len(likes)
    call = _Call(target, leaves, spec, state)
    seen = call.run(state, plain)
    if seen is None:
        return Casts(plain, whole=True)
    if seen.itself:
        opaque = isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "shardwright")
        # a custom operator runs under autocast, and so do the operators that it calls
        return Casts(plain, whole=opaque, made=seen.made)
    without = call.run(_OFF, plain)
    if without is not None and without.exact == seen.exact:
        return Casts(plain, made=seen.made)
    for dtype, inputs in _forms(call, seen, likes):
        tried = call.run(_OFF, inputs, dtype)
        if tried is not None and tried.work == seen.work and tried.made == seen.made:
            return Casts(inputs, dtype, made=seen.made)
    return Casts(plain, whole=True, made=seen.made)


def _forms(
    call: _Call, seen: _Trace, likes: Sequence[Like]
) -> Iterator[tuple[torch.dtype | None, tuple[torch.dtype | None, ...]]]:
    """Forms that may have the trace `seen`: (argument ``dtype``, casts of the inputs)."""
    plain = (None,) * len(likes)
    floating = [dtype for dtype in seen.made if dtype.is_floating_point]
    if floating and call.takes_dtype:
        yield floating[0], plain
    cast = tuple(next(iter(to)) if len(to := seen.casts.get(i, ())) == 1 else None for i in range(len(likes)))
    if any(cast):
        yield None, cast
    lower = dict(call.state.dtypes)
    for dtype in dict.fromkeys([torch.float32, *lower.values()]):
        yield (
            None,
            tuple(
                dtype
                if x.dtype.is_floating_point and x.dtype not in (dtype, torch.float64) and x.device.type in lower
                else None
                for x in likes
            ),
        )


def with_dtype(
    target: object, args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of an operator with its argument ``dtype`` set."""
    at = [a.name for a in schema_of(target).arguments].index("dtype")
    if at < len(args):
        return (*args[:at], dtype, *args[at + 1 :]), kwargs
    return args, kwargs | {"dtype": dtype}


class _Call:
    """One operator call that can be run on fake tensors."""

    def __init__(self, target: Any, leaves: tuple[object, ...], spec: object, state: Autocast) -> None:
        self.target, self.leaves, self.spec, self.state = target, leaves, spec, state
        schema = schema_of(target)
        self.names = [a.name for a in schema.arguments] if schema is not None else []
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        passed = dict(zip(self.names, args)) | kwargs
        self.takes_dtype = "dtype" in self.names and passed.get("dtype") is None

    def run(
        self, state: Autocast, inputs: Sequence[torch.dtype | None], dtype: torch.dtype | None = None
    ) -> _Trace | None:
        """The trace of the call; None where it cannot run.

        Args:
            state: the state of autocast during the call.
            inputs: for each tensor the dtype that it is given in, or None: its own.
            dtype: its argument of that name, or None: as in the call.
        """
        logs, _LOG.disabled = _LOG.disabled, True  # forms that cannot run are expected
        types = {name for name, _ in self.state.dtypes} | {x.device.type for x in self.leaves if isinstance(x, Like)}
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                without_cudnn(types),
                FakeTensorMode(allow_non_fake_inputs=True),
            ):
                tensors: list[Tensor] = []
                to, leaves = iter(inputs), list(self.leaves)
                for i, x in enumerate(leaves):
                    if isinstance(x, Like):
                        leaves[i] = made = torch.empty(x.shape, dtype=next(to) or x.dtype, device=x.device)
                        tensors.append(made)
                args, kwargs = pytree.tree_unflatten(leaves, self.spec)
                if dtype is not None:
                    args, kwargs = with_dtype(self.target, args, kwargs, dtype)
                call = _of_call(self.target, args, kwargs, id) if self.names else ""
                with entered(state, *types & _KNOWN), _Trace(tensors, call) as trace:
                    made = self.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError):  # errors of operators on fake tensors
            return None
        finally:
            _LOG.disabled = logs
        trace.made = tuple(x.dtype for x in pytree.tree_leaves(made) if isinstance(x, Tensor))
        return trace


def _knows(name: str) -> bool:
    try:
        torch.is_autocast_enabled(name)
    except RuntimeError:
        return False
    return True


#: Device types that have an autocast in this version of torch.
_KNOWN = frozenset(filter(_knows, ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")))


class _Trace(TorchDispatchMode):
    """Records the operators that a call runs below autocast and autograd.

    Attributes:
        exact: every operator with the dtypes of the tensors among its arguments and results.
        work: the same without views, copies and casts of the inputs; an argument ``dtype`` counts as a cast before
            the operator.
        casts: index of an input -> the dtypes that it, or a view of it, is cast to.
        itself: True where the call dispatches to the operator itself, on its own inputs.
        made: the dtypes of the returned tensors.
    """

    def __init__(self, inputs: Sequence[Tensor], call: str) -> None:
        super().__init__()
        self.inputs, self.call = inputs, call
        self.roots: dict[Tensor, int] = {x: i for i, x in enumerate(inputs)}  # input, or a view of one -> its index
        self.exact: list[str] = []
        self.work: list[str] = []
        self.casts: dict[int, set[torch.dtype]] = {}
        self.itself = False
        self.made: tuple[torch.dtype, ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result  # prim.device
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.itself = not self.exact and _of_call(func, args, kwargs, id) == self.call
        self.exact.append(repr((func, *pytree.tree_map_only(Tensor, _dtype, (args, kwargs, result)))))
        root = self.roots.get(tensors[0]) if tensors else None
        if func in _CASTS and root is not None and _floating(tensors[0], results[0]):
            self.casts.setdefault(root, set()).add(results[0].dtype)
        elif _moves(func):
            if root is not None:
                self.roots.update((x, root) for x in results)
        else:
            self.work.append(_worked(func, args, kwargs, results))
        return result


def _dtype(x: Tensor) -> torch.dtype:
    return x.dtype


def _floating(*tensors: Tensor) -> bool:
    return all(x.dtype.is_floating_point for x in tensors)


def _moves(func: object) -> bool:
    """True where an operator only moves the elements of its first input."""
    returned = schema_of(func).returns
    return func in _COPIES or (
        bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    )


def _passed_arguments(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    """The arguments of a call by name, without those that have their default."""
    arguments = schema_of(func).arguments
    passed: dict[str, object] = dict(zip([a.name for a in arguments], args)) | kwargs
    return {
        a.name: passed[a.name]
        for a in arguments
        if a.name in passed
        and (isinstance(passed[a.name], Tensor) or not a.has_default_value() or a.default_value != passed[a.name])
    }


def _of_call(func: object, args: tuple[object, ...], kwargs: dict[str, object], of: Callable[[Tensor], object]) -> str:
    """A call as text, with `of` each tensor in its place."""
    return repr((func, pytree.tree_map_only(Tensor, of, _passed_arguments(func, args, kwargs))))


def _worked(func: object, args: tuple[object, ...], kwargs: dict[str, object], results: Sequence[Tensor]) -> str:
    """An operator call as dtypes, equal for all overloads. An argument ``dtype`` stands for the dtype of the floating
    inputs."""
    passed = {a.name: a.default_value for a in schema_of(func).arguments if a.has_default_value()} | _passed_arguments(
        func, args, kwargs
    )
    passed = {name: x for name, x in sorted(passed.items()) if x is not None}
    within: torch.dtype | None = None
    if func in _CASTS:
        passed = {"self": passed["self"]}
    else:
        within = passed.pop("dtype", None) or (torch.float32 if passed.pop("half_to_float", False) else None)

    def taken(x: Tensor) -> torch.dtype:
        return within if within is not None and x.dtype.is_floating_point else x.dtype

    return repr((schema_of(func).name, pytree.tree_map_only(Tensor, taken, passed), [x.dtype for x in results]))
