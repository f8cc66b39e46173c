"""Guards: the Python state for which a captured program is valid, checked before each call.

A captured program is valid while its model reads the state that it read during the capture. Guards record, of one
capture:

    structure   submodules, parameters and buffers of every module (identity), hooks, `training`, `requires_grad`
    reads       attributes of modules and of plain objects, class attributes, globals, closure cells (`observed_state`)
    contents    of lists, dicts and sets that were read
    types       dtype and shape of parameters, buffers and of tensors that were read
    conditions  questions that the forward has asked of torch: whether gradients are enabled, values of tensors
                (`conditions`)

A check compares all of it by identity, in loops that run in C: 56 to 95 us for a GPT of 12 layers. Values are compared
only where an object is another one: ``5.0`` in place of an equal ``5.0`` is no change.

Worked example: a forward reads ``self.beta``, which is ``2.0``. The guard is (``vars(net)``, ``"beta"``, the object
2.0). After ``net.beta = 5.0`` both the object and the value are others; `Guards.change` says "net.beta was 2.0 and is
5.0".
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import nn

from ..identity_tables import IdentitySet
from ..torch_private import DisableTorchFunctionSubclass, buffer_table, hook_tables, parameter_table, part_tables
from .observed.opaque_state import equal_states, guarded_state, state_of
from .observed.places import (
    CALLED,
    CONTAINERS,
    MISSING,
    Entry,
    GuardedPlace,
    PlaceReader,
    contents,
    entries,
    is_simple,
    same,
    spelled,
)

__all__ = ["CONTAINERS", "HOOKS", "MISSING", "Condition", "GuardedPlace", "Guards", "contents", "is_simple", "spelled"]


#: Kinds of hooks on which a captured program depends.
HOOKS = ("forward-pre hooks", "forward hooks", "backward hooks", "backward-pre hooks")


def _identical(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


class Condition(NamedTuple):
    """A question that a forward has asked besides reading attributes.

    Args:
        name: the user's words for the question: ``torch.is_grad_enabled()``, ``net.scale``.
        ask: asks it now.
        answer: the answer to the captured forward.
        quiet: True where another answer needs no message, as between training and evaluation.
    """

    name: str
    ask: Callable[[], object]
    answer: object
    quiet: bool = False


class Guards:
    """The Python state for which one captured program is valid.

    `settle` records the values of the places; the constructor calls it, or shares what other guards have recorded.

    Args:
        modules: the modules of the model and of its loss, by path.
        places: the places that the capture has read.
        around: one of `modules` -> its kinds of hooks that run around the program, and are not part of it.
        counters: identities of places whose number changes at each call; the effects of the program hold the places.
        conditions: the questions that the forward has asked.
        earlier: those of another program of the model. They share their records where they guard the same places and
            none of these has changed, as between two sizes of the inputs.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        places: Iterable[GuardedPlace],
        around: Mapping[nn.Module, tuple[str, ...]] | None = None,
        counters: Collection[tuple[int, object]] = (),
        conditions: Iterable[Condition] = (),
        earlier: Guards | None = None,
    ) -> None:
        self._modules, self._conditions = list(modules), list(conditions)
        self._counters = counters
        self._places = [place for place in places if place.identity not in counters]
        self._identities = [place.identity for place in self._places]
        self._around, self._copied = around or {}, False
        if earlier is not None and self._guards_those_of(earlier):
            self.__dict__ = vars(earlier) | vars(self)
        else:
            self.settle()

    def _guards_those_of(self, earlier: Guards) -> bool:
        """True where `earlier` guard the same places, and none of these has changed."""
        return (
            not earlier._copied
            and self._identities == earlier._identities
            and self._counters == earlier._counters
            and self._around == earlier._around
            and len(self._modules) == len(earlier._modules)
            and all(a is b and path == name for (path, a), (name, b) in zip(self._modules, earlier._modules))
            and earlier._unchanged()
        )

    def settle(self) -> None:
        """Record the present values of all places."""
        attributes = [vars(module) for _, module in self._modules]
        tables: list[dict[object, object]] = []
        paths = []
        for path, module in self._modules:
            around = self._around.get(module, ())
            for kind, table in (part_tables(module) | hook_tables(module)).items():
                if kind not in around:
                    tables.append(table)
                    paths.append((path, kind))
        for kind, table in hook_tables(None).items():
            tables.append(table)
            paths.append(("the whole of torch.nn", kind))
        self._tables, self._paths = tables, paths
        self._lengths = list(map(len, tables))
        self._empty = [t for t in tables if not t]
        self._full = [t for t in tables if t]
        self._full_paths = [at for at, t in zip(paths, tables) if t]
        self._counts = list(map(len, self._full))
        self._members = list(chain.from_iterable(map(dict.values, self._full)))
        self._keys = [tuple(t) for t in self._full]
        self._parameters = [p for _, m in self._modules for p in parameter_table(m).values() if p is not None]
        self._trained = list(map(_requires_grad, self._parameters))
        named = [
            (f"{path}.{key}", tensor)
            for path, module in self._modules
            for table in (parameter_table(module), buffer_table(module))
            for key, tensor in table.items()
            if tensor is not None
        ]
        found = {
            place.identity: place
            for place in (
                *(
                    GuardedPlace(a, key, f"{path}.{key}")
                    for (path, _), a in zip(self._modules, attributes)
                    for key in ("training", "forward")
                ),
                *(GuardedPlace(module, "__class__", f"{path}.__class__") for path, module in self._modules),
                *self._places,
            )
        }
        self._containers: list[tuple[Collection[object], tuple[object, ...], str]] = []
        self._states: list[tuple[object, tuple[object, ...], str]] = []
        seen: IdentitySet[object] = IdentitySet()
        for place in list(found.values()):
            self._contain(place.get(), place.path, seen, found, named)
        self._tensor_paths = [path for path, _ in named]
        self._tensors = [tensor for _, tensor in named]
        self._dtypes, self._shapes = list(map(_dtype, self._tensors)), list(map(_shape, self._tensors))
        places = list(found.values())
        # Settings and entries of the environment may be other, equal objects at each read.
        self._asked = [(p, p.get()) for p in places if p.key is CALLED or isinstance(p.key, Entry)]
        self._reader = PlaceReader([p for p in places if p.key is not CALLED and not isinstance(p.key, Entry)])
        self._values = self._reader.values()

    def _contain(
        self,
        value: object,
        path: str,
        seen: IdentitySet[object],
        found: dict[tuple[int, object], GuardedPlace],
        named: list[tuple[str, torch.Tensor]],
    ) -> None:
        """Guard the contents of a container: its entries, or the keys of a dict, with a place for each value; and the
        state of an object without attributes.

        Args:
            seen: the containers that were looked into.
            found: receives the places.
            named: receives the tensors, with their paths.
        """
        if isinstance(value, torch.Tensor):
            named.append((path, value))
            return
        parts: tuple[object, ...]
        if isinstance(value, tuple):
            parts = value
        elif isinstance(value, functools.partial):
            parts = value.args, value.keywords
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            parts = (value.__self__,)
        elif is_simple(value) or value in seen:
            return
        elif isinstance(value, contextvars.ContextVar):
            seen.add(value)
            parts = (value.get(None),)
            self._states.append((value, state_of(value) or (), path))
        elif not isinstance(value, CONTAINERS):
            seen.add(value)
            state = guarded_state(value, path)
            if state is not None:
                self._states.append((value, state, path))
            return
        else:
            seen.add(value)
            parts = entries(value)
            self._containers.append((value, parts, path))
            if isinstance(value, dict):
                places = [GuardedPlace(value, key, f"{path}[{key!r}]") for key in parts]
                found.update((p.identity, p) for p in places if p.identity not in self._counters)
                parts = tuple(dict.values(value))
        for entry in parts:
            self._contain(entry, path, seen, found, named)

    def hold(self) -> bool:
        """True where no guarded value has changed."""
        return not self._copied and (self._unchanged() or self.change() is None)

    def _unchanged(self) -> bool:
        """True where every guarded object is identical to the recorded one."""
        return (
            all(map(is_, self._reader.values(), self._values))
            and not any(self._empty)
            and list(map(len, self._full)) == self._counts
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._members))
            and self._tensors_unchanged()
            and all(_identical(entries(container), was) for container, was, _ in self._containers)
            and all(same(was, place.get()) for place, was in self._asked)
            and all(equal_states(state_of(value), was) for value, was, _ in self._states)
            and all(condition.ask() == condition.answer for condition in self._conditions)
        )

    def _tensors_unchanged(self) -> bool:
        with DisableTorchFunctionSubclass():  # in processes parameters are of a class with functions of its own
            return (
                list(map(_requires_grad, self._parameters)) == self._trained
                and list(map(_dtype, self._tensors)) == self._dtypes
                and list(map(_shape, self._tensors)) == self._shapes
            )

    def change(self) -> str | None:
        """The first change, in words; None where no value has changed.

        Where None is returned, objects that replaced equal ones are recorded.
        """
        for (path, kind), table, length in zip(self._paths, self._tables, self._lengths):
            if len(table) != length:
                return f"{path} has {len(table)} {kind} and had {length}"
        was = iter(self._members)
        for (path, kind), table, keys in zip(self._full_paths, self._full, self._keys):
            for (key, now), before in zip(table.items(), was):
                if now is not before:
                    return f"{path}.{key} is another one" if kind not in HOOKS else f"{path} has other {kind}"
            if tuple(table) != keys:
                return f"{path} names its {kind} differently"
        for parameter, before in zip(self._parameters, self._trained):
            if parameter.requires_grad is not before:
                return f"{self._name(parameter)}.requires_grad was {before} and is {parameter.requires_grad}"
        retyped = self.retyped()
        if retyped is not None:
            return retyped
        recorded = [*zip(self._reader.places, self._values), *self._asked]
        for place, before in recorded:
            now = place.get()
            if not same(before, now):
                if (is_simple(before) and is_simple(now)) or before is MISSING or now is MISSING:
                    return f"{place.path} was {spelled(before)} and is {spelled(now)}"
                return f"{place.path} is another object: {spelled(now)}"
        for container, before, path in self._containers:
            now = entries(container)
            if len(before) != len(now) or not all(map(same, before, now)):
                return f"{path} holds something else than it did"
        for value, before, path in self._states:
            if not equal_states(state_of(value), before):
                return f"{path}, a {type(value).__name__}, holds something else than it did"
        for condition in self._conditions:
            answer = condition.ask()
            if answer != condition.answer:
                return f"{condition.name} was {condition.answer} and is {answer}"
        self._values = self._reader.values()
        self._asked = [(p, p.get()) for p, _ in self._asked]
        self._containers = [(container, entries(container), path) for container, _, path in self._containers]
        return None

    def retyped(self) -> str | None:
        """The first parameter, buffer or tensor that has another dtype or shape than it had, in words; None: none has.

        ``net.bfloat16()`` and assignments to ``.data`` change the tensor and leave the object.
        """
        if self._tensors_unchanged():
            return None
        for path, tensor, dtype, shape in zip(self._tensor_paths, self._tensors, self._dtypes, self._shapes):
            if tensor.dtype is not dtype or tensor.shape != shape:
                before, now = (
                    f"{str(d).removeprefix('torch.')}{list(s)}"
                    for d, s in ((dtype, shape), (tensor.dtype, tensor.shape))
                )
                return f"{path} was {before} and is {now}"
        return None

    def parts_changed(self) -> bool:
        """True where parameters, buffers or submodules of the model have been added, removed, replaced or retyped."""
        return (
            self._copied
            or self.retyped() is not None
            or list(map(len, self._tables)) != self._lengths
            or not all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._members))
        )

    def only_mode_changed(self) -> bool:
        """True where nothing but `training`, `requires_grad` and quiet conditions have changed: needs no message."""
        values, trained, conditions = self._values, self._trained, self._conditions
        self._values = [
            place.get() if isinstance(place.owner, dict) and place.key == "training" else value
            for place, value in zip(self._reader.places, values)
        ]
        self._trained = list(map(_requires_grad, self._parameters))
        self._conditions = [condition for condition in conditions if not condition.quiet]
        try:
            return not self._copied and self.hold()
        finally:
            self._values, self._trained, self._conditions = values, trained, conditions

    def __deepcopy__(self, memo: dict[int, object]) -> Guards:
        """Guards of no model: a copied model gets its guards when it is captured."""
        made = Guards((), ())
        made._copied = True
        return made

    def _name(self, parameter: torch.Tensor) -> str:
        return next(
            f"{path}.{key}"
            for (path, _), table in zip(self._paths, self._tables)
            for key, tensor in table.items()
            if tensor is parameter
        )


_requires_grad, _dtype, _shape = attrgetter("requires_grad"), attrgetter("dtype"), attrgetter("shape")
