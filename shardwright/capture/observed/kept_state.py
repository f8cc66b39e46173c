"""State in reach of a forward, copied when it is first seen, compared after the forward, and restored at the end.

    spaces        dicts of attributes, and the tables of modules
    containers    lists, dicts, sets
    places        globals, variables of closures, attributes of classes and of objects with slots
    opaque        objects without attributes (`opaque_state`)
    hooks         tables of forward hooks: a hook that removes itself

A further run of the same forward keeps the same objects (`KeptState.keep_those_of`), where each is as it was: the same
functions, classes and objects. Numbers, strings and tensors may be others, since no object is reached through them.

Example: a forward with ``self.count += 1``, where ``count`` is 3, has one `Change`: the place "net.count", old 3, new
4. At the end of the capture ``count`` is 3 again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import is_, is_not, itemgetter

import torch
from torch import nn

from ...identity_tables import IdentityMap
from ...torch_private import forward_hook_tables, part_tables
from ..regions import IN_PLACE_OF
from .memoised_functions import MemoisedStandIn
from .opaque_state import draws, equal_states, set_state, state_of, watch_state
from .places import (
    CONTAINERS,
    MISSING,
    GuardedPlace,
    PlaceReader,
    contents,
    entries,
    filled,
    place_key,
    refill,
    same_content,
)

__all__ = ["PLAIN", "Change", "KeptState", "untraced_function"]


@dataclass(frozen=True)
class Change:
    """A place that a forward has changed.

    Args:
        place: its owner is the object itself where the content of a list, a set or an array was changed, or the order
            of a dict, and its key None.
        old, new: the values; the contents of a list or a set.
    """

    place: GuardedPlace
    old: object
    new: object

    def watch(self) -> Callable[[], bool]:
        """A function that returns True once the place has changed, from this call on."""
        owner, place = self.place.owner, self.place
        if place.key is None and isinstance(owner, CONTAINERS):
            before = filled(owner)
            return lambda: not same_content(owner, before)
        if place.key is None:
            return watch_state(owner)()
        old = place.get()
        return lambda: (now := place.get()) is not old and not _equal(old, now)


def _equal(old: object, now: object) -> bool:
    """True for equal texts: the environment makes a new object at each read."""
    return type(old) is type(now) is str and old == now


def untraced_function(value: object) -> object:
    """The function behind a wrapper that a capture, or ``torch.fx.wrap``, puts in its place while a model is traced;
    any other value itself."""
    if type(value) is types.FunctionType:
        if value.__module__ != __name__ and hasattr(value, "__wrapped__"):
            file = value.__code__.co_filename
            if file.endswith("_symbolic_trace.py"):
                return value.__wrapped__
    elif type(value) is MemoisedStandIn:
        return value.function
    elif type(value) is staticmethod or type(value) is classmethod:
        function = value.__func__
        if type(function) is MemoisedStandIn:
            return function.function
        if type(function) is types.FunctionType:
            return vars(function).get(IN_PLACE_OF, value)
    return value


#: Types of values through which no other object is reached.
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def _reaches_alike(old: object, new: object) -> bool:
    """True where the same objects are reached through two values; a tensor of before is noted as `torch.Tensor`."""
    return (
        old is new
        or (type(old) in PLAIN and type(new) in PLAIN)
        or (old is torch.Tensor and isinstance(new, torch.Tensor))
    )


def _without_tensor(value: object) -> object:
    return torch.Tensor if isinstance(value, torch.Tensor) else value


@dataclass
class _Snapshot:
    """A dict or container, with its contents before the export, and at the beginning of the forward.

    Args:
        of_tensors: True for a table of parameters or buffers, in which a capture puts tensors of its own.
        unchanged: True where `reaches_alike` has found the contents from before.
    """

    owner: Collection[object]
    before: Collection[object]
    begun: Collection[object]
    path: str
    of_tensors: bool = False
    unchanged: bool = False

    def forget_tensors(self) -> None:
        """Keep alive no tensor."""
        before, self.begun = self.before, ()
        if self.of_tensors:
            self.before = ()
        elif self.unchanged:  # the contents are those of an earlier run, which has forgotten them
            return
        elif before and any(issubclass(kind, torch.Tensor) for kind in set(map(type, contents(before)))):
            if isinstance(before, dict):
                self.before = {key: _without_tensor(value) for key, value in before.items()}
            else:
                make = set if isinstance(before, set) else list
                self.before = make(map(_without_tensor, before))

    def reaches_alike(self) -> bool:
        """True where the same objects are reached through the present content."""
        owner, before = self.owner, self.before
        self.unchanged = not self.of_tensors and same_content(owner, before)
        if self.of_tensors or self.unchanged:
            return True
        if isinstance(owner, set) or len(entries(owner)) != len(before):
            return False
        if not isinstance(owner, dict):
            return all(map(_reaches_alike, before, owner))
        before, now = _as_dict(before), filled(owner)
        return [*now] == [*before] and all(map(_reaches_alike, before.values(), now.values()))


def _same_contents(pairs: Sequence[tuple[Collection[object], Collection[object]]]) -> bool:
    """True where each container holds the same objects as an earlier copy, in the same order.

    Args:
        pairs: the containers with their copies. No line of Python runs for one that is a plain dict.
    """
    plain = [(owner, copy) for owner, copy in pairs if type(owner) is dict and type(copy) is dict]
    owners, copies = [owner for owner, _ in plain], [copy for _, copy in plain]
    return (
        list(map(tuple, owners)) == list(map(tuple, copies))
        and all(map(is_, _values_of(owners), _values_of(copies)))
        and all(same_content(owner, copy) for owner, copy in pairs if type(owner) is not dict or type(copy) is not dict)
    )


def _values_of(dicts: Iterable[dict[object, object]]) -> Iterator[object]:
    return chain.from_iterable(map(dict.values, dicts))


def _as_dict(content: Collection[object]) -> dict[object, object]:
    """The content of a dict, as such."""
    assert isinstance(content, dict)
    return content


class KeptState:
    """Copies of the state in reach of a forward."""

    def __init__(self) -> None:
        #: A dict of attributes, one of `_spaces`, or an object -> the path of the object.
        self._paths: IdentityMap[object, str] = IdentityMap()
        self._spaces: IdentityMap[object, _Snapshot] = IdentityMap()
        self._containers: IdentityMap[object, _Snapshot] = IdentityMap()
        self._hooks: list[_Snapshot] = []
        self._places: dict[tuple[int, object], tuple[GuardedPlace, object]] = {}
        self._entries: list[tuple[type, frozenset[str]]] = []  # classes, and the names of their attributes
        #: Object without attributes -> its state, its path.
        self._opaque: IdentityMap[object, tuple[tuple[object, ...], str]] = IdentityMap()
        self._replaced: dict[GuardedPlace, object] = {}  # a place -> its number, while a counter replaces it
        self._stood_for: list[tuple[GuardedPlace, object]] = []  # places of stand-ins -> the objects behind them
        self._reader = PlaceReader(())  # of the first of `_places`, in their order
        #: Those of `_places` that have other values now, while a further run keeps these.
        self._present: dict[tuple[int, object], tuple[GuardedPlace, object]] = {}
        self._assigned_by_layers: set[tuple[int, object]] = set()  # attributes that torch's layers assign to themselves
        self._as_begun = False  # True where `changes` has found all but generators and hooks as the forward began

    def keep_space(self, attributes: dict[str, object], path: str, module: nn.Module | None = None) -> bool:
        """Keep a dict of attributes, and the tables of its module; False where it is kept already."""
        if attributes in self._paths:
            return False
        self._paths[attributes] = path
        self._spaces[attributes] = self._snapshot(attributes, path)
        tables = {} if module is None else part_tables(module)
        for kind, table in tables.items():
            self._spaces[table] = self._snapshot(table, path, of_tensors=kind != "submodules")
        if module is not None:
            self.keep_hooks_of(module, path)
        return True

    def keep_hooks(self) -> None:
        """Keep the tables of the hooks of all modules."""
        for hooks in forward_hook_tables(None):
            self._hooks.append(self._snapshot(hooks, "all modules"))

    def keep_content(self, container: Collection[object], path: str) -> bool:
        """Keep a list, dict or set; False where it is kept already."""
        if container in self._containers:
            return False
        self._containers[container] = self._snapshot(container, path)
        return True

    def keep_place(self, place: GuardedPlace) -> None:
        """Keep the value of a place outside of the kept dicts."""
        if not isinstance(place.owner, dict) or place.owner not in self._paths:
            self._places.setdefault(place.identity, (place, untraced_function(place.get())))

    def keep_class(self, cls: type) -> None:
        """Keep the attributes of a class."""
        names = frozenset(vars(cls))
        self._entries.append((cls, names))
        for name in names:
            if not name.startswith("__"):
                self.keep_place(GuardedPlace(cls, name, f"{cls.__name__}.{name}"))

    def keep_opaque(self, value: object, path: str) -> bool:
        """Keep the state of an object without attributes; False for an object of another kind."""
        state = state_of(value)
        if state is not None:
            self._opaque.setdefault(value, (state, path))
        return state is not None

    def put_stand_in(self, place: GuardedPlace, value: object, stand_in: object) -> None:
        """Put a stand-in in the place of a value until the end of the capture."""
        owner = place.owner
        if isinstance(owner, type) and isinstance(stand_in, types.FunctionType):
            stand_in = staticmethod(stand_in)
        place.set(stand_in)
        self._stood_for.append((place, value))
        if not self.begin_with(owner, place.key, stand_in):
            self._places[place.identity] = place, stand_in

    def begin_with(self, owner: object, key: object, value: object) -> bool:
        """Let the forward begin with another entry of a dict or container; False where it is not kept."""
        snapshot = self._spaces.get(owner) or self._containers.get(owner)
        if snapshot is None:
            return False
        begun = snapshot.begun = filled(snapshot.begun)
        if isinstance(begun, dict):
            begun[key] = value
        else:
            assert isinstance(begun, list) and isinstance(key, int)
            begun[key] = value
        return True

    def begin(self, numbers: Mapping[GuardedPlace, object], exported: bool = True) -> None:
        """Take the present state for that at the beginning of the forward.

        Args:
            numbers: place -> its value during this forward.
            exported: True in an export, which has put its own tensors into the model; False: but for `numbers` the
                present state is the kept one.
        """
        self._as_begun = False
        for place, value in numbers.items():
            self._replaced[place] = place.get()
            self._places.setdefault(place.identity, (place, place.get()))
            place.set(value)
        if exported or numbers:
            for snapshot in (*self._spaces.values(), *self._containers.values()):
                snapshot.begun = self._before(snapshot.owner)
        for snapshot in self._hooks:
            snapshot.begun = self._before(snapshot.owner)

    def _before(self, owner: Collection[object]) -> Collection[object]:
        """A copy of a dict or container as it was before the forward."""
        if not isinstance(owner, dict):
            return filled(owner)
        copied = filled(owner)
        for place, number in self._replaced.items():
            if place.owner is owner and place.key in copied:
                copied[place.key] = number
        return copied

    def _snapshot(self, owner: Collection[object], path: str, of_tensors: bool = False) -> _Snapshot:
        before = self._before(owner)
        return _Snapshot(owner, before, before, path, of_tensors)

    # -- further runs --

    def forget_tensors(self) -> None:
        """Keep alive no tensor, and no state of an array: the capture has ended."""
        for snapshot in (*self._spaces.values(), *self._containers.values()):
            snapshot.forget_tensors()
        for place, value in reversed(self._stood_for):
            if place.identity in self._places:
                self._places[place.identity] = place, value
        if len(self._reader.places) != len(self._places):
            self._reader = PlaceReader([place for place, _ in self._places.values()])
            self._places = {place.identity: self._places[place.identity] for place in self._reader.places}
        if any(issubclass(kind, torch.Tensor) for kind in {type(old) for _, old in self._places.values()}):
            self._places = {identity: (place, _without_tensor(old)) for identity, (place, old) in self._places.items()}
        self._opaque = IdentityMap((value, ((), path)) for value, (_, path) in self._opaque.items())
        self._hooks.clear()
        self._replaced.clear()
        self._stood_for.clear()

    def reaches_alike(self) -> bool:
        """True where the kept state leads to the same objects as before the capture."""
        return (
            self._spaces_reach_alike()
            and all(snapshot.reaches_alike() for snapshot in self._containers.values())
            and self._places_reach_alike()
            and all(_own_names(cls) == _own_names(names) for cls, names in self._entries)
        )

    def _spaces_reach_alike(self) -> bool:
        spaces = list(self._spaces.values())
        plain = [snapshot for snapshot in spaces if not snapshot.of_tensors]
        if not _same_contents([(snapshot.owner, snapshot.before) for snapshot in plain]):
            return all(snapshot.reaches_alike() for snapshot in spaces)
        for snapshot in spaces:
            snapshot.unchanged = not snapshot.of_tensors
        return True

    def _places_reach_alike(self) -> bool:
        self._present = {}
        for place, old, new in self._differing():
            if not _reaches_alike(old, new):
                return False
            self._present[place.identity] = place, new
        return True

    def _differing(self) -> Iterator[tuple[GuardedPlace, object, object]]:
        """The kept places whose values are other objects than the kept ones: place, kept value, present value."""
        copies, present = list(self._places.values()), self._reader.values()
        present += [place.get() for place, _ in copies[len(present) :]]
        differ = map(is_not, present, map(itemgetter(1), copies))
        for (place, old), new in compress(zip(copies, present), differ):
            new = untraced_function(new)
            if new is not old:
                yield place, old, new

    def keep_those_of(self, earlier: KeptState) -> None:
        """Keep the present state of all that an earlier run of the same forward has kept."""
        self._paths = IdentityMap(earlier._paths.items())
        self._spaces, self._containers = map(self._present_of, (earlier._spaces, earlier._containers))
        self._reader, self._places = earlier._reader, earlier._places | earlier._present
        self._entries = list(earlier._entries)
        for value, (_, path) in earlier._opaque.items():
            self.keep_opaque(value, path)

    def _present_of(self, snapshots: IdentityMap[object, _Snapshot]) -> IdentityMap[object, _Snapshot]:
        """The present content of what `reaches_alike` has compared. The earlier run has ended, so that both runs share
        the snapshots of what is unchanged."""
        present = IdentityMap(snapshots.items())
        for owner, snapshot in snapshots.items():
            if snapshot.unchanged:
                snapshot.begun = snapshot.before
            else:
                present[owner] = self._snapshot(snapshot.owner, snapshot.path, snapshot.of_tensors)
        return present

    def keep_hooks_of(self, module: nn.Module, path: str) -> None:
        """Keep the tables of the hooks of a module. A forward takes no hook out of an empty one."""
        self._hooks += [self._snapshot(hooks, path) for hooks in forward_hook_tables(module) if hooks]

    def changes(self) -> Iterator[Change]:
        """The changes by the forward, compared with the present state. Where there was none,
        `put_back` does not look at the state again."""
        as_begun = True
        spaces = list(self._spaces.values())
        for snapshot in () if _same_contents([(s.owner, s.begun) for s in spaces]) else spaces:
            if not same_content(snapshot.owner, snapshot.begun):
                as_begun = False
                for change in _of_dict(snapshot, "{0}.{1}"):
                    if change.place.identity not in self._assigned_by_layers:
                        yield change
        for place, old, new in self._differing():
            if _equal(old, new):
                continue
            as_begun = False
            if not isinstance(place.owner, dict) or (
                place.owner not in self._paths and place.owner not in self._containers
            ):
                yield Change(place, old, new)
        for cls, names in self._entries:
            for name in vars(cls).keys() - names:
                if place_key(cls, name) not in self._places and not name.startswith("__"):
                    as_begun = False
                    yield Change(GuardedPlace(cls, name, f"{cls.__name__}.{name}"), MISSING, vars(cls)[name])
        for snapshot in self._containers.values():
            container, before = snapshot.owner, snapshot.begun
            if same_content(container, before):
                continue
            as_begun = False
            found = list(_of_dict(snapshot, "{0}[{1!r}]")) if isinstance(container, dict) else []
            yield from found
            if not found:
                yield Change(GuardedPlace(container, None, snapshot.path), tuple(before), tuple(container))
        for value, (state, path) in self._opaque.items():
            if not draws(value) and not equal_states(state_of(value), state):
                as_begun = False
                yield Change(GuardedPlace(value, None, path), (), ())
        for snapshot in self._hooks:
            for number, hook in _as_dict(snapshot.begun).items():
                if number not in snapshot.owner:
                    yield Change(GuardedPlace(snapshot.owner, number, f"a hook of {snapshot.path}"), hook, MISSING)
        self._as_begun = as_begun

    def is_hook(self, place: GuardedPlace) -> bool:
        """True for an entry of a table of hooks."""
        return any(place.owner is snapshot.owner for snapshot in self._hooks)

    def drawn(self) -> tuple[str, Callable[[], Callable[[], bool]]] | None:
        """A random number generator from which the forward has drawn, and a function that starts to watch it.

        Generators of torch are not looked at. None where the forward has drawn from none.
        """
        for generator, (state, path) in self._opaque.items():
            if draws(generator) and not equal_states(state_of(generator), state):
                return path, watch_state(generator)
        return None

    def restore(self) -> None:
        """Restore the state from before the forward. Hooks that the forward has registered stay."""
        for snapshot in self._hooks:
            _restore_hooks(_as_dict(snapshot.owner), _as_dict(snapshot.begun))
        self._restore()

    def _restore(self) -> None:
        for snapshot in (*self._spaces.values(), *self._containers.values()):
            refill(snapshot.owner, snapshot.begun)
        self._restore_places()

    def _restore_places(self) -> None:
        if not self._as_begun:
            for place, old, now in self._differing():
                if not _equal(old, now):
                    place.set(old)
            for cls, names in self._entries:
                for name in [name for name in vars(cls).keys() - names if not name.startswith("__")]:
                    delattr(cls, name)
        for value, (state, _) in self._opaque.items():
            set_state(value, state)

    def put_back(self) -> None:
        """Restore the state from before the capture."""
        self._restore_places()
        for place, value in reversed(self._stood_for):
            place.set(value)
        for snapshot in (*self._spaces.values(), *self._containers.values()):
            if snapshot.begun is not snapshot.before or not self._as_begun:
                refill(snapshot.owner, snapshot.before)
        for snapshot in self._hooks:
            _restore_hooks(_as_dict(snapshot.owner), _as_dict(snapshot.before))


def _own_names(names: type | frozenset[str]) -> frozenset[str]:
    """The names of a class besides those of the methods that a capture replaces."""
    return frozenset(vars(names) if isinstance(names, type) else names) - _REPLACED_METHODS


#: Methods of a class that a capture replaces.
_REPLACED_METHODS = {"__getattribute__", "__setattr__"}


def _restore_hooks(table: dict[object, object], before: dict[object, object]) -> None:
    if not before.keys() <= table.keys():
        refill(table, before | filled(table))


def _of_dict(snapshot: _Snapshot, path: str) -> Iterator[Change]:
    """The entries of a dict that have changed."""
    owner, begun = _as_dict(snapshot.owner), _as_dict(snapshot.begun)
    for key in {**begun, **filled(owner)}:
        old, new = begun.get(key, MISSING), dict.get(owner, key, MISSING)
        if old is not new:
            yield Change(GuardedPlace(owner, key, path.format(snapshot.path, key)), old, new)
