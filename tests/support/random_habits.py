"""Random small programs with one habit each: a number that is kept somewhere, read in some way, used in some way and
changed between calls; or an effect that a forward leaves behind.

    random_habit(7)      a number in a dict of an object with slots, read by a method, decides how often a layer runs
    trained(habit, 4)    five steps in parallel and in plain PyTorch: equal, or an error with the line
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import operator
import os
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import watched_module
from one_device import close, parallel
from torch import Tensor, nn

import shardwright as sw

D, STEPS = torch.float64, 5
VARIABLE = "SHARDWRIGHT_RANDOM_HABIT"
VALUE, OBJECTS = 1.0, {}  # globals that habits read
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("value")
LOCAL = threading.local()


class Plain:
    of_class = 1.0

    def __init__(self, value: float = 1.0) -> None:
        self.value, self.inside = value, types.SimpleNamespace(value=value)

    @property
    def shown(self) -> float:
        return self.value

    def get(self) -> float:
        return self.value

    def __call__(self) -> float:
        return self.value


@dataclasses.dataclass(slots=True)
class Slots:
    value: float = 1.0
    table: dict[str, float] = dataclasses.field(default_factory=dict)


class Descriptor:
    def __init__(self) -> None:
        self.store: dict[int, float] = {}

    def __get__(self, owner: Any, kind: type) -> float:
        return self.store.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.store[id(owner)] = value


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.value = nn.Linear(8, 8, dtype=D), 1.0
        self.register_buffer("mean", torch.zeros(8, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Program(nn.Module):
    """Two layers around the habit."""

    described = Descriptor()
    of_class = 1.0

    def __init__(self, habit: Habit) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head, self.habit = Layer(), nn.Linear(8, 4, dtype=D), habit
        self.calls, self.last = 0, None
        habit.prepare(self, habit.values[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.habit.use(self, self.layer(x), self.habit.way(self.habit.read)(self))))


# -- where the number is -----------------------------------------------------------------------------------------------


def by_default(value: float = 1.0) -> float:
    return value


def by_keyword(*, value: float = 1.0) -> float:
    return value


def by_attribute() -> float:
    return by_attribute.value


def over_list(held: list[float]) -> Callable[[], float]:
    def read() -> float:
        return held[0]

    return read


def over_variable(value: float) -> tuple[Callable[[], float], Callable[[float], None]]:
    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


def put(name: str, make: Callable[[float], Any]) -> Callable[[Any, float], None]:
    return lambda m, value: setattr(m, name, make(value))


def set_closure(m: Program, value: float) -> None:
    m.closed, m.close_over = over_variable(value)


def set_global(m: Program, value: float) -> None:
    globals()["VALUE"] = value


def set_weak(m: Program, value: float) -> None:
    m.kept = Plain(value)
    m.weak = weakref.ref(m.kept)


class Place(NamedTuple):
    prepare: Callable[[Any, float], Any]
    read: Callable[[Any], float]
    write: Callable[[Any, float], Any]


PLACES = {
    "attribute": Place(put("value", float), lambda m: m.value, lambda m, v: setattr(m, "value", v)),
    "layer": Place(
        lambda m, v: setattr(m.layer, "value", v), lambda m: m.layer.value, lambda m, v: setattr(m.layer, "value", v)
    ),
    "object": Place(put("held", Plain), lambda m: m.held.value, lambda m, v: setattr(m.held, "value", v)),
    "namespace in object": Place(
        put("held", Plain), lambda m: m.held.inside.value, lambda m, v: setattr(m.held.inside, "value", v)
    ),
    "property": Place(put("held", Plain), lambda m: m.held.shown, lambda m, v: setattr(m.held, "value", v)),
    "called object": Place(put("held", Plain), lambda m: m.held(), lambda m, v: setattr(m.held, "value", v)),
    "bound method": Place(
        lambda m, v: (setattr(m, "held", Plain(v)), setattr(m, "get", m.held.get)),
        lambda m: m.get(),
        lambda m, v: setattr(m.held, "value", v),
    ),
    "slots": Place(put("held", Slots), lambda m: m.held.value, lambda m, v: setattr(m.held, "value", v)),
    "dict in slots": Place(
        put("held", lambda v: Slots(0, {"v": v})), lambda m: m.held.table["v"], lambda m, v: m.held.table.update(v=v)
    ),
    "list": Place(put("held", lambda v: [v]), lambda m: m.held[0], lambda m, v: m.held.__setitem__(0, v)),
    "list in tuple": Place(
        put("held", lambda v: ([v],)), lambda m: m.held[0][0], lambda m, v: m.held[0].__setitem__(0, v)
    ),
    "dict": Place(put("held", lambda v: {"v": v}), lambda m: m.held["v"], lambda m, v: m.held.update(v=v)),
    "dict of objects": Place(
        put("held", lambda v: {"v": Plain(v)}),
        lambda m: m.held["v"].value,
        lambda m, v: setattr(m.held["v"], "value", v),
    ),
    "UserDict": Place(
        put("held", lambda v: collections.UserDict(v=v)), lambda m: m.held["v"], lambda m, v: m.held.update(v=v)
    ),
    "deque": Place(
        put("held", lambda v: collections.deque([v])), lambda m: m.held[0], lambda m, v: m.held.__setitem__(0, v)
    ),
    "numpy": Place(put("held", lambda v: numpy.full(2, v)), lambda m: float(m.held[0]), lambda m, v: m.held.fill(v)),
    "numpy scalar": Place(
        put("held", numpy.float64), lambda m: float(m.held), lambda m, v: setattr(m, "held", numpy.float64(v))
    ),
    "bytearray": Place(
        put("held", lambda v: bytearray([int(v)])),
        lambda m: float(m.held[0]),
        lambda m, v: m.held.__setitem__(0, int(v)),
    ),
    "closure": Place(set_closure, lambda m: m.closed(), lambda m, v: m.close_over(v)),
    "list in closure": Place(
        lambda m, v: (setattr(m, "held", [v]), setattr(m, "closed", over_list(m.held))),
        lambda m: m.closed(),
        lambda m, v: m.held.__setitem__(0, v),
    ),
    "partial": Place(
        put("held", lambda v: functools.partial(by_keyword, value=v)),
        lambda m: m.held(),
        lambda m, v: m.held.keywords.update(value=v),
    ),
    "weak reference": Place(set_weak, lambda m: m.weak().value, lambda m, v: setattr(m.kept, "value", v)),
    "descriptor": Place(put("described", float), lambda m: m.described, lambda m, v: setattr(m, "described", v)),
    "global": Place(set_global, lambda m: VALUE, set_global),
    "globals()": Place(set_global, lambda m: globals()["VALUE"], set_global),
    "object in a global": Place(
        lambda m, v: OBJECTS.update(o=Plain(v)),
        lambda m: OBJECTS["o"].value,
        lambda m, v: setattr(OBJECTS["o"], "value", v),
    ),
    "class": Place(
        lambda m, v: setattr(Program, "of_class", v), lambda m: m.of_class, lambda m, v: setattr(Program, "of_class", v)
    ),
    "another class": Place(
        lambda m, v: setattr(Plain, "of_class", v), lambda m: Plain.of_class, lambda m, v: setattr(Plain, "of_class", v)
    ),
    "type()": Place(
        lambda m, v: setattr(Program, "of_class", v),
        lambda m: type(m).of_class,
        lambda m, v: setattr(Program, "of_class", v),
    ),
    "file": Place(
        lambda m, v: setattr(watched_module, "K", v),
        lambda m: watched_module.factor(),
        lambda m, v: setattr(watched_module, "K", v),
    ),
    "default": Place(
        lambda m, v: setattr(by_default, "__defaults__", (v,)),
        lambda m: by_default(),
        lambda m, v: setattr(by_default, "__defaults__", (v,)),
    ),
    "function attribute": Place(
        lambda m, v: setattr(by_attribute, "value", v),
        lambda m: by_attribute(),
        lambda m, v: setattr(by_attribute, "value", v),
    ),
    "environment": Place(
        lambda m, v: os.environ.update({VARIABLE: str(v)}),
        lambda m: float(os.environ[VARIABLE]),
        lambda m, v: os.environ.update({VARIABLE: str(v)}),
    ),
    "context": Place(lambda m, v: CONTEXT.set(v), lambda m: CONTEXT.get(), lambda m, v: CONTEXT.set(v)),
    "thread": Place(
        lambda m, v: setattr(LOCAL, "value", v), lambda m: LOCAL.value, lambda m, v: setattr(LOCAL, "value", v)
    ),
    "optimizer": Place(
        lambda m, v: setattr(m, "opt", torch.optim.SGD([torch.zeros(1)], v)),
        lambda m: m.opt.param_groups[0]["lr"],
        lambda m, v: m.opt.param_groups[0].update(lr=v),
    ),
    "replaced object": Place(put("held", Plain), lambda m: m.held.value, lambda m, v: setattr(m, "held", Plain(v))),
    "replaced class": Place(
        put("held", Plain),
        lambda m: m.held.get(),
        lambda m, v: setattr(m.held, "__class__", type("Other", (Plain,), {"get": lambda self: v})),
    ),
    "replaced function": Place(
        put("held", lambda v: lambda: v), lambda m: m.held(), lambda m, v: setattr(m, "held", lambda: v)
    ),
    "replaced method": Place(
        put("held", Plain), lambda m: m.held.get(), lambda m, v: setattr(m.held, "get", lambda: v)
    ),
}

# -- how it is read ----------------------------------------------------------------------------------------------------


def nested(read: Callable[[Any], float]) -> Callable[[Any], float]:
    def outer(m: Any) -> float:
        def inner() -> float:
            return read(m)

        return inner()

    return outer


def many(read: Callable[[Any], float], levels: int = 8) -> Callable[[Any], float]:
    return (lambda m: many(read, levels - 1)(m)) if levels else read


def tried(read: Callable[[Any], float]) -> Callable[[Any], float]:
    def call(m: Any) -> float:
        try:
            return read(m)
        except AttributeError:
            return 1.0

    return call


class Reader:
    def __init__(self, read: Callable[[Any], float]) -> None:
        self.read = read

    def __getitem__(self, m: Any) -> float:
        return self.read(m)

    @classmethod
    def made(cls, read: Callable[[Any], float], m: Any) -> float:
        return cls(read)[m]


def in_turn(read: Callable[[Any], float], m: Any) -> Any:
    yield read(m)


WAYS: dict[str, Callable[[Callable[[Any], float]], Callable[[Any], float]]] = {
    "plainly": lambda read: read,
    "in an inner function": nested,
    "through many functions": many,
    "in a comprehension": lambda read: lambda m: sum([read(m) for _ in range(1)]),
    "by a generator": lambda read: lambda m: next(in_turn(read, m)),
    "by map": lambda read: lambda m: next(map(read, [m])),
    "by a partial": lambda read: lambda m: functools.partial(read, m)(),
    "by an object that is made": lambda read: lambda m: Reader(read)[m],
    "by a class method": lambda read: lambda m: Reader.made(read, m),
    "where it may fail": tried,
    "by methodcaller": lambda read: lambda m: operator.methodcaller("read", m)(Reader(read)),
    "of a copy": lambda read: lambda m: read(copy.copy(m)),
}

# -- what it decides ---------------------------------------------------------------------------------------------------


def sliced(m: Any, h: Tensor, v: float) -> Tensor:
    return torch.cat([h[:, int(v) :], h[:, : int(v)]], 1)


def buffered(m: Any, h: Tensor, v: float) -> Tensor:
    m.layer.mean = v * m.layer.mean + h.detach().mean(0)
    return h + m.layer.mean


USES: dict[str, Callable[[Any, Tensor, float], Tensor]] = {
    "a factor": lambda m, h, v: h * v,
    "a branch": lambda m, h, v: torch.relu(h) if v > 2 else torch.sigmoid(h),
    "how often": lambda m, h, v: functools.reduce(lambda h, _: torch.tanh(h) + 1, range(int(v)), h),
    "a keyword": lambda m, h, v: torch.add(h, m.layer.mean + 1, alpha=v),
    "a constant": lambda m, h, v: h + torch.full((8,), v, dtype=D),
    "a table": lambda m, h, v: h * torch.tensor([v] * 8, dtype=D),
    "a slice": sliced,
    "a power": lambda m, h, v: (h.abs() + 1) ** (v / 4),
    "a buffer": buffered,
    "a dtype": lambda m, h, v: h.to(torch.float64 if v > 2 else torch.float32).double(),
}

# -- what is left behind -----------------------------------------------------------------------------------------------


def counts(m: Any) -> None:
    m.calls += 1


def counts_in_the_object(m: Any) -> None:
    m.counted["calls"] += 1


def notes(m: Any) -> None:
    m.last = ("seen", m.training)


def notes_once(m: Any) -> None:
    if m.last is None:
        m.last = "first"


def prints(m: Any) -> None:
    print("forward", m.training)


def counts_in_numpy(m: Any) -> None:
    m.array[0] += 1


def draws(m: Any) -> None:
    m.last = random.random()


def appends(m: Any) -> None:
    m.seen.append(m.training)


def steps_an_iterator(m: Any) -> None:
    m.last = next(m.iterator)


EFFECTS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda m: None,
    **{f.__name__: f for f in (counts, counts_in_the_object, notes, notes_once, prints)},
    **{f.__name__: f for f in (counts_in_numpy, draws, appends, steps_an_iterator)},
}


class Habit(NamedTuple):
    """One habit; `values` are the numbers of the steps."""

    name: str
    prepare: Callable[[Any, float], Any]
    read: Callable[[Any], float]
    write: Callable[[Any, float], Any]
    way: Callable[[Callable[[Any], float]], Callable[[Any], float]]
    use: Callable[[Any, Tensor, float], Tensor]
    values: tuple[float, ...]
    further: tuple[str, ...]


FURTHER = ("", "", "", "train", "freeze", "head", "hook", "rows")


def random_habit(seed: int) -> Habit:
    """The habit of a seed."""
    draw = random.Random(seed)
    place, way, use, effect = (draw.choice(sorted(x)) for x in (PLACES, WAYS, USES, EFFECTS))
    if draw.random() < 0.6:
        effect = "nothing"
    values, further = [float(draw.randint(1, 4))], []
    for _ in range(STEPS - 1):
        values.append(values[-1] if draw.random() < 0.5 else float(draw.randint(1, 4)))
        further.append(draw.choice(FURTHER))
    done, used = EFFECTS[effect], USES[use]

    def with_effect(m: Any, h: Tensor, v: float) -> Tensor:
        done(m)
        return used(m, h, v)

    name = f"{place}, {way}, {use}, {effect}, {values}, {further}"
    return Habit(name, *PLACES[place], WAYS[way], with_effect, tuple(values), ("", *further))


def changed(net: Program, further: str, step: int) -> None:
    """A further change between two steps."""
    if further == "train":
        net.train(not net.training)
    elif further == "freeze":
        net.head.requires_grad_(not net.head.weight.requires_grad)
    elif further == "head":
        torch.manual_seed(step)
        net.head = nn.Linear(8, 4, dtype=D)
    elif further == "hook":
        net.layer.register_forward_hook(lambda module, args, out: out * (1 + step / 8))


def steps(net: Program, call: Callable[[Tensor], Tensor]) -> list[Any]:
    """Five steps of SGD: outputs, gradients, buffers and what is left behind."""
    habit, found, text = net.habit, [], io.StringIO()
    for step, value in enumerate(habit.values):
        changed(net, habit.further[step], step)
        if step:
            habit.write(net, value)
        rows = 16 if habit.further[step] == "rows" else 8
        x = torch.randn(rows, 8, dtype=D, generator=torch.Generator().manual_seed(step))
        with contextlib.redirect_stdout(text):
            out = call(x)
        out.square().mean().backward()
        found.append(out.detach().clone())
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    found.append(parameter.grad.clone())
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        found += [b.clone() for b in net.buffers()]
        found.append((net.calls, net.last, net.counted["calls"], len(net.seen), text.getvalue()))
    return found


def made(habit: Habit) -> Program:
    net = Program(habit)
    net.counted, net.array, net.seen, net.iterator = {"calls": 0}, numpy.zeros(1), [], iter(range(99))
    return net


def trained(habit: Habit, devices: int, mode: str = "semi_auto") -> str:
    """Train in parallel and in plain PyTorch, and compare.

    Returns:
        "equal", or the error of a habit that is refused.
    """
    random.seed(0)
    one = made(habit)
    expected = steps(one, one)
    random.seed(0)
    net = made(habit)
    try:
        found = steps(net, parallel(net, devices=devices, mode=mode))
    except sw.ShardwrightError as error:
        assert error.source and ".py:" in error.source and error.legal, f"{habit.name}: {error}"
        return str(error)
    close(found, expected, habit.name)
    return "equal"
