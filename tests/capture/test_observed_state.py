"""Objects, functions, classes and files that a forward reads, changed between calls: planned anew, equal to one device.

Every case has a forward of `Net`, what is made with it, and a change of what the forward reads.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import watched_module
from one_device import close, parallel
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.capture.export import Recording, capture
from shardwright.capture.observed_state import Observation
from shardwright.capture.recapture import ModelPrograms

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

SCALE, TABLE = 1.0, {"k": 1.0}
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
SETTING: contextvars.ContextVar[dict[str, float]] = contextvars.ContextVar("setting")
LOCAL, SPACE = threading.local(), types.SimpleNamespace()


@dataclasses.dataclass(slots=True)
class Inside:
    k: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    inside: Inside = dataclasses.field(default_factory=Inside)


class Weight:
    k = 1.0

    def __init__(self) -> None:
        self.k = 1.0

    def times(self, h: Tensor) -> Tensor:
        return h * self.k

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target) * self.k

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target) * self.k


class Made:
    """An object that the forward makes."""

    FACTOR = 1.0

    def run(self, h: Tensor) -> Tensor:
        return h * self.FACTOR * SCALE


class Keyed:
    def __init__(self) -> None:
        self.held = {"k": 1.0}

    def __getitem__(self, key: str) -> float:
        return self.held[key] * SCALE


class Stored:
    """A descriptor that keeps the values of its owners itself."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, owner: Any, kind: type) -> float:
        return self.values.get(id(owner), 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        self.values[id(owner)] = value


class Attributed(dict):
    """A dict with attributes, as configurations of libraries are."""


class Base(nn.Module):
    K = 1.0

    def doubled(self, h: Tensor) -> Tensor:
        return h * 2


class Net(Base):
    stored = Stored()

    def __init__(self, f: Callable[[Any, Tensor], Tensor], prepare: Callable[[Any], Any] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.f = nn.Linear(8, 8, dtype=D), f
        if prepare is not None:
            prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.fc(x))

    def doubled(self, h: Tensor) -> Tensor:
        return super().doubled(h)

    @classmethod
    def of_class(cls, h: Tensor) -> Tensor:
        return h * cls.K


def by_default(h: Tensor, k: float = 1.0) -> Tensor:
    return h * k


def by_keyword(h: Tensor, *, k: float = 1.0) -> Tensor:
    return h * k


def by_attribute(h: Tensor) -> Tensor:
    return h * by_attribute.k


by_attribute.k = 1.0


def by_further_attribute(h: Tensor) -> Tensor:
    return h * getattr(by_further_attribute, "k", 1.0)


def of_the_class(cls: type, h: Tensor) -> Tensor:
    return h * cls.K


def of_the_file(file: types.ModuleType, h: Tensor) -> Tensor:
    return h * file.K


@functools.singledispatch
def by_type(value: object) -> float:
    return 0.0


@by_type.register
def _(value: int) -> float:
    return SCALE


def deep(n: int, h: Tensor) -> Tensor:
    return LEVELS[n - 1](h) if n else h * SCALE


def level(n: int) -> Callable[[Tensor], Tensor]:
    def called(h: Tensor) -> Tensor:
        return deep(n, h)

    return called


LEVELS = [level(n) for n in range(9)]


def imports(m: Net, h: Tensor) -> Tensor:
    from watched_module import K

    return h * K


def imports_a_file(m: Net, h: Tensor) -> Tensor:
    import watched_module as held

    return h * held.factor()


def in_order(m: Net, h: Tensor) -> Tensor:
    for key in m.table:
        h = torch.tanh(h) * 2 if key == "a" else h + 1
    return h


def whole(m: Net, h: Tensor) -> Tensor:
    copied = copy.copy(m.weight)
    return h * copied.k


def evaluated(m: Net, h: Tensor) -> Tensor:
    return h * eval("SCALE")


def default_that_is_a_list(module: nn.Module, args: object, out: Tensor, held: list[float] = [1.0]) -> Tensor:
    return out * held[0]


def set_global(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda net: globals().__setitem__(name, value)


def attribute(net: Net, name: str, value: Any) -> None:
    setattr(net, name, value)


class Case(NamedTuple):
    """A forward, what is prepared for it, and the change of what it reads."""

    f: Callable[[Any, Tensor], Tensor]
    prepare: Callable[[Any], Any] | None
    change: Callable[[Any], Any]


def weighted(net: Net) -> None:
    net.weight = Weight()


CASES = {
    "bound method": Case(
        lambda m, h: m.times(h),
        lambda n: (weighted(n), attribute(n, "times", n.weight.times)),
        lambda n: setattr(n.weight, "k", 5.0),
    ),
    "bound method of a list": Case(
        lambda m, h: h * m.entry(0),
        lambda n: (attribute(n, "held", [1.0]), attribute(n, "entry", n.held.__getitem__)),
        lambda n: n.held.__setitem__(0, 5.0),
    ),
    "partial of a bound method": Case(
        lambda m, h: m.times(h),
        lambda n: (weighted(n), attribute(n, "times", functools.partial(n.weight.times))),
        lambda n: setattr(n.weight, "k", 5.0),
    ),
    "keywords of a partial": Case(
        lambda m, h: m.times(h),
        lambda n: attribute(n, "times", functools.partial(torch.mul, other=1.0)),
        lambda n: n.times.keywords.update(other=5.0),
    ),
    "slots in slots": Case(
        lambda m, h: h * m.config.inside.k,
        lambda n: attribute(n, "config", Slots()),
        lambda n: setattr(n.config.inside, "k", 5.0),
    ),
    "slots object replaced": Case(
        lambda m, h: h * m.config.inside.k,
        lambda n: attribute(n, "config", Slots()),
        lambda n: setattr(n.config, "inside", Inside(5.0)),
    ),
    "defaults": Case(lambda m, h: by_default(h), None, lambda n: setattr(by_default, "__defaults__", (5.0,))),
    "keyword defaults": Case(
        lambda m, h: by_keyword(h), None, lambda n: setattr(by_keyword, "__kwdefaults__", {"k": 5.0})
    ),
    "code": Case(
        lambda m, h: by_default(h), None, lambda n: setattr(by_default, "__code__", (lambda h, k=0: h * 5).__code__)
    ),
    "function attribute": Case(lambda m, h: by_attribute(h), None, lambda n: setattr(by_attribute, "k", 5.0)),
    "further function attribute": Case(
        lambda m, h: by_further_attribute(h), None, lambda n: setattr(by_further_attribute, "k", 5.0)
    ),
    "default of a hook": Case(
        lambda m, h: h,
        lambda n: n.fc.register_forward_hook(default_that_is_a_list),
        lambda n: default_that_is_a_list.__defaults__[0].__setitem__(0, 5.0),
    ),
    "getattr of a file": Case(
        lambda m, h: h * getattr(watched_module, "K"),  # noqa: B009  the habit
        None,
        lambda n: setattr(watched_module, "K", 5.0),
    ),
    "getattr by a name": Case(
        lambda m, h: h * getattr(watched_module, m.name, 1.0),
        lambda n: attribute(n, "name", "FURTHER"),
        lambda n: setattr(watched_module, "FURTHER", 5.0),
    ),
    "vars of a file": Case(
        lambda m, h: h * vars(watched_module)["K"], None, lambda n: setattr(watched_module, "K", 5.0)
    ),
    "dict of a file": Case(
        lambda m, h: h * watched_module.__dict__["K"], None, lambda n: setattr(watched_module, "K", 5.0)
    ),
    "file as an argument": Case(
        lambda m, h: of_the_file(watched_module, h), None, lambda n: setattr(watched_module, "K", 5.0)
    ),
    "file in an attribute": Case(
        lambda m, h: h * m.file.K,
        lambda n: attribute(n, "file", watched_module),
        lambda n: setattr(watched_module, "K", 5.0),
    ),
    "import inside": Case(imports, None, lambda n: setattr(watched_module, "K", 5.0)),
    "import of a file inside": Case(imports_a_file, None, lambda n: setattr(watched_module, "K", 5.0)),
    "globals()": Case(lambda m, h: h * globals()["SCALE"], None, set_global("SCALE", 5.0)),
    "globals().get": Case(lambda m, h: h * globals().get("LATER", 1.0), None, set_global("LATER", 5.0)),
    "eval": Case(evaluated, None, set_global("SCALE", 5.0)),
    "function of torch": Case(lambda m, h: F.relu(h), None, lambda n: setattr(F, "relu", F.silu)),
    "method of torch's layer": Case(
        lambda m, h: h, None, lambda n: setattr(nn.Linear, "forward", lambda self, x: x @ self.weight * 2)
    ),
    "attribute of the subclass": Case(lambda m, h: m.of_class(h), None, lambda n: setattr(Net, "K", 5.0)),
    "attribute by type()": Case(lambda m, h: h * type(m).K, None, lambda n: setattr(Net, "K", 5.0)),
    "getattr of a class": Case(lambda m, h: h * getattr(type(m), "L", 1.0), None, lambda n: setattr(Net, "L", 5.0)),
    "class as an argument": Case(lambda m, h: of_the_class(Base, h), None, lambda n: setattr(Base, "K", 5.0)),
    "super().method": Case(lambda m, h: m.doubled(h), None, lambda n: setattr(Base, "doubled", lambda self, h: h * 5)),
    "class of an object that is made": Case(lambda m, h: Made().run(h), None, lambda n: setattr(Made, "FACTOR", 5.0)),
    "global of an object that is made": Case(lambda m, h: Made().run(h), None, set_global("SCALE", 5.0)),
    "class of a module": Case(
        lambda m, h: m.act(h), lambda n: attribute(n, "act", nn.ReLU()), lambda n: setattr(n.act, "__class__", nn.Tanh)
    ),
    "class of an object": Case(
        lambda m, h: m.weight.times(h),
        weighted,
        lambda n: setattr(n.weight, "__class__", type("Other", (Weight,), {"times": lambda self, h: h * 5})),
    ),
    "special method": Case(
        lambda m, h: h * m.keyed["k"],
        lambda n: attribute(n, "keyed", Keyed()),
        lambda n: setattr(Keyed, "__getitem__", lambda self, key: 5.0),
    ),
    "global of a special method": Case(
        lambda m, h: h * m.keyed["k"], lambda n: attribute(n, "keyed", Keyed()), set_global("SCALE", 5.0)
    ),
    "order of an OrderedDict": Case(
        in_order, lambda n: attribute(n, "table", collections.OrderedDict(a=1, b=2)), lambda n: n.table.move_to_end("a")
    ),
    "descriptor with its own store": Case(lambda m, h: h * m.stored, None, lambda n: attribute(n, "stored", 5.0)),
    "attribute of a dict": Case(
        lambda m, h: h * m.config.k,
        lambda n: (attribute(n, "config", Attributed()), setattr(n.config, "k", 1.0)),
        lambda n: setattr(n.config, "k", 5.0),
    ),
    "UserDict": Case(
        lambda m, h: h * m.config["k"],
        lambda n: attribute(n, "config", collections.UserDict(k=1.0)),
        lambda n: n.config.__setitem__("k", 5.0),
    ),
    "ChainMap": Case(
        lambda m, h: h * m.config["k"],
        lambda n: attribute(n, "config", collections.ChainMap({}, {"k": 1.0})),
        lambda n: n.config.maps[1].__setitem__("k", 5.0),
    ),
    "WeakKeyDictionary": Case(
        lambda m, h: h * m.weak[m.fc],
        lambda n: attribute(n, "weak", weakref.WeakKeyDictionary({n.fc: 1.0})),
        lambda n: n.weak.__setitem__(n.fc, 5.0),
    ),
    "weak reference": Case(
        lambda m, h: h * m.weak().k,
        lambda n: (weighted(n), attribute(n, "weak", weakref.ref(n.weight))),
        lambda n: setattr(n.weight, "k", 5.0),
    ),
    "weak proxy": Case(
        lambda m, h: h * m.weak.k,
        lambda n: (weighted(n), attribute(n, "weak", weakref.proxy(n.weight))),
        lambda n: setattr(n.weight, "k", 5.0),
    ),
    "copy of an object": Case(whole, weighted, lambda n: setattr(n.weight, "k", 5.0)),
    "attrgetter": Case(
        lambda m, h: h * operator.attrgetter("weight.k")(m), weighted, lambda n: setattr(n.weight, "k", 5.0)
    ),
    "fields of a dataclass": Case(
        lambda m, h: h * dataclasses.asdict(m.config)["inside"]["k"],
        lambda n: attribute(n, "config", Slots()),
        lambda n: setattr(n.config.inside, "k", 5.0),
    ),
    "singledispatch": Case(lambda m, h: h * by_type(3), None, set_global("SCALE", 5.0)),
    "function of nine functions": Case(lambda m, h: deep(8, h), None, set_global("SCALE", 5.0)),
    "optimizer": Case(
        lambda m, h: h * m.opt.param_groups[0]["lr"],
        lambda n: attribute(n, "opt", torch.optim.SGD(n.fc.parameters(), 1.0)),
        lambda n: n.opt.param_groups[0].update(lr=5.0),
    ),
    "schedule": Case(
        lambda m, h: h * m.schedule.get_last_lr()[0],
        lambda n: attribute(
            n, "schedule", torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(n.fc.parameters(), 1.0), 0.5)
        ),
        lambda n: (n.schedule.optimizer.step(), n.schedule.step()),
    ),
    "numpy array, an element": Case(
        lambda m, h: h * float(m.table[0]),
        lambda n: attribute(n, "table", numpy.ones(8)),
        lambda n: n.table.__setitem__(0, 5.0),
    ),
    "numpy array, arithmetic": Case(
        lambda m, h: h * torch.from_numpy(m.table * 2),
        lambda n: attribute(n, "table", numpy.ones(8)),
        lambda n: n.table.__setitem__(0, 5.0),
    ),
    "numpy array in a list": Case(
        lambda m, h: h * sum(float(v) for v in m.tables[0]),
        lambda n: attribute(n, "tables", [numpy.ones(8)]),
        lambda n: n.tables[0].__setitem__(0, 5.0),
    ),
    "numpy scalar": Case(
        lambda m, h: h * m.scale,
        lambda n: attribute(n, "scale", numpy.float32(1.0)),
        lambda n: attribute(n, "scale", numpy.float32(5.0)),
    ),
    "bytes of a bytearray": Case(
        lambda m, h: h * m.held[0], lambda n: attribute(n, "held", bytearray([1])), lambda n: n.held.__setitem__(0, 5)
    ),
    "environment": Case(
        lambda m, h: h * float(os.environ["SHARDWRIGHT_TEST"]),
        lambda n: os.environ.update(SHARDWRIGHT_TEST="1"),
        lambda n: os.environ.update(SHARDWRIGHT_TEST="5"),
    ),
    "environment, a variable that is not there": Case(
        lambda m, h: h * float(os.getenv("SHARDWRIGHT_TEST", "1")),
        None,
        lambda n: os.environ.update(SHARDWRIGHT_TEST="5"),
    ),
    "context variable": Case(lambda m, h: h * CONTEXT.get(), None, lambda n: CONTEXT.set(5.0)),
    "dict in a context variable": Case(
        lambda m, h: h * SETTING.get()["k"], lambda n: SETTING.set({"k": 1.0}), lambda n: SETTING.get().update(k=5.0)
    ),
    "local of a thread": Case(
        lambda m, h: h * LOCAL.k, lambda n: setattr(LOCAL, "k", 1.0), lambda n: setattr(LOCAL, "k", 5.0)
    ),
    "further local of a thread": Case(
        lambda m, h: h * getattr(LOCAL, "further", 1.0), None, lambda n: setattr(LOCAL, "further", 5.0)
    ),
    "further attribute of a namespace": Case(
        lambda m, h: h * getattr(SPACE, "further", 1.0), None, lambda n: setattr(SPACE, "further", 5.0)
    ),
    "deterministic algorithms": Case(
        lambda m, h: h * (2 if torch.are_deterministic_algorithms_enabled() else 1),
        None,
        lambda n: torch.use_deterministic_algorithms(True),
    ),
    "default dtype": Case(
        lambda m, h: h + torch.ones(8) / 3 * torch.get_default_dtype().itemsize,
        None,
        lambda n: torch.set_default_dtype(torch.float64),
    ),
    "threads": Case(
        lambda m, h: h * torch.get_num_threads(), None, lambda n: torch.set_num_threads(torch.get_num_threads() + 1)
    ),
}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Leave files, classes, functions and settings as they were."""
    names, threads = dict(globals()), torch.get_num_threads()
    held = [(x, dict(vars(x))) for x in (watched_module, Base, Net, Made, Keyed, by_attribute, by_further_attribute, F)]
    linear = nn.Linear.forward
    functions = (by_default, by_keyword, default_that_is_a_list)
    kept = [(f, f.__defaults__, dict(f.__kwdefaults__ or {}), f.__code__) for f in functions]
    tokens = CONTEXT.set(1.0), SETTING.set({"k": 1.0})
    yield
    CONTEXT.reset(tokens[0]), SETTING.reset(tokens[1])
    for owner, before in held:
        for name in [n for n in vars(owner) if n not in before and not n.startswith("__")]:
            delattr(owner, name)
        for name, value in before.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)
    nn.Linear.forward = linear
    for f, defaults, keywords, code in kept:
        f.__defaults__, f.__kwdefaults__, f.__code__ = defaults, keywords or None, code
    default_that_is_a_list.__defaults__[0][0] = 1.0
    globals().update(names)
    globals().pop("LATER", None)
    os.environ.pop("SHARDWRIGHT_TEST", None)
    for space in (LOCAL, SPACE):
        vars(space).clear()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    assert "getattr" not in globals(), "stand-ins of builtin functions are taken out of the user's files"


def reads_of(net: nn.Module, programs: ModelPrograms, rows: int) -> set[str]:
    """The paths of the places that a capture has read."""
    recording = Recording()
    capture(net, (draw(rows, 8),), programs=programs, recording=recording)
    return {place.path for place in recording.reads.values()}


@pytest.mark.parametrize("changed", [False, True], ids=["unchanged", "changed"])
@pytest.mark.parametrize("name", CASES)
def test_a_further_run_reads_what_a_first_one_reads(name: str, changed: bool) -> None:
    """A run at a further size takes over the look that an earlier run has taken at the model, where it holds still."""
    case = CASES[name]
    net, programs = Net(case.f, case.prepare), ModelPrograms()
    reads_of(net, programs, 8)
    if changed:
        case.change(net)
    apart = ModelPrograms([copy.copy(programs[0])])
    apart[0].template = None
    further, first = reads_of(net, programs, 6), reads_of(net, apart, 6)
    # The first run meets the class of a dataclass's fields as it reads them; the further run knows it before.
    assert first <= further and all(path.endswith("._field_type") for path in further - first)


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "a hook of all modules"])
def test_a_further_run_takes_over(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, hooked: bool
) -> None:
    """Models whose state is as it was, but for numbers and tensors, are not looked at again."""
    if hooked:
        request.addfinalizer(nn.modules.module.register_module_forward_hook(lambda *_: None).remove)
    looks: list[str] = []
    for name in ("_look_at_all", "_take_over"):
        plain = getattr(Observation, name)
        monkeypatch.setattr(Observation, name, lambda *a, name=name, plain=plain: looks.append(name) or plain(*a))
    net, programs = Net(lambda m, h: h * m.k * SCALE, lambda n: setattr(n, "k", 2.0)), ModelPrograms()
    reads_of(net, programs, 8)
    net.k, net.fc.weight = 3.0, nn.Parameter(torch.ones(8, 8, dtype=D))
    assert "net.k" in reads_of(net, programs, 6)
    assert looks == ["_look_at_all", "_take_over", "_take_over"]
    net.k = torch.tensor(3.0, dtype=D)
    reads_of(net, programs, 5)
    assert "_look_at_all" in looks[3:]


def by_many_names(m: Any, h: Tensor) -> Tensor:
    """A file, a name that is not there yet, a file that is imported inside."""
    from watched_module import K

    return h * watched_module.K * K if "SHARDWRIGHT_TEST" not in os.environ else h * LATER  # noqa: F821


@pytest.mark.parametrize(
    ("names", "name", "value"),
    [
        (globals(), "watched_module", types.ModuleType("another")),
        (globals(), "LATER", 1.0),
        (sys.modules, "watched_module", types.ModuleType("watched_module")),
        (sys.modules, "watched_module", None),
    ],
    ids=["another file", "a name that appears", "another import", "no import"],
)
def test_names_decide_which_objects_are_found(
    names: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, programs = Net(by_many_names, None), ModelPrograms()
    reads_of(net, programs, 8)
    observation = programs.latest
    assert isinstance(observation, Observation) and observation.found_alike()
    monkeypatch.setitem(names, name, value)
    assert not observation.found_alike()


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    case = CASES[name]
    net = Net(case.f, case.prepare)
    model, x = parallel(net, devices=4), draw(8, 8)
    close(model(x), net(x))
    model(x)
    assert len(model._programs) == 1
    before = model(x).detach()
    case.change(net)
    expected = net(x)
    assert not torch.equal(expected, before), "the change is one"
    close(model(x), expected)
    assert len(model._programs) == 2
    close(model(x), expected)
    assert len(model._programs) == 2


LOSSES = {
    "an object": lambda weight: weight,
    "a bound method": lambda weight: weight.loss,
    "a partial of a bound method": lambda weight: functools.partial(weight.loss),
    "a function around a method": lambda weight: lambda out, target: weight.loss(out, target),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_change_of_the_loss_is_seen(name: str) -> None:
    weight, net = Weight(), Net(lambda m, h: h, None)
    model, x, target = parallel(net, LOSSES[name](weight), devices=4), draw(8, 8), draw(8, 8, seed=1)
    model(x, target)
    weight.k = 5.0
    close(model(x, target), weight.loss(net(x), target))
    assert len(model._programs) == 2


def scaled(scales: list[float], out: Tensor, target: Tensor, power: float = 2.0) -> Tensor:
    return (out - target).abs().pow(power).mean() * scales[0]


PARTIAL_CHANGES = {
    "an entry of an argument": lambda loss: loss.args[0].__setitem__(0, 5.0),
    "a keyword": lambda loss: loss.keywords.update(power=3.0),
}


@pytest.mark.parametrize("name", PARTIAL_CHANGES)
def test_a_change_of_the_arguments_of_a_partial_loss_is_seen(name: str) -> None:
    net, loss = Net(lambda m, h: h, None), functools.partial(scaled, [2.0], power=1.5)
    model, x, target = parallel(net, loss, devices=4), draw(8, 8), draw(8, 8, seed=1)
    model(x, target)
    PARTIAL_CHANGES[name](loss)
    for _ in range(2):
        close(model(x, target), loss(net(x), target))
    assert len(model._programs) == 2


def test_locals_of_another_thread() -> None:
    """Each thread has its own values, and its own program."""
    net = Net(lambda m, h: h * LOCAL.k, None)
    model, x, found = parallel(net, devices=4), draw(8, 8), []
    LOCAL.k = 1.0
    close(model(x), net(x))

    def elsewhere() -> None:
        LOCAL.k = 5.0
        found.append((model(x).detach(), net(x).detach()))

    thread = threading.Thread(target=elsewhere)
    thread.start(), thread.join()
    close(*found[0])
    close(model(x), net(x))
    assert len(model._programs) == 2


def test_a_large_numpy_array_is_refused() -> None:
    table = numpy.ones(3 << 20)  # 24 MiB

    def f(m: Net, h: Tensor) -> Tensor:
        return h * float(m.large[0])  # here

    with pytest.raises(sw.CaptureError, match="reads net.large, a numpy array of 24 MiB") as raised:
        parallel(Net(f, lambda n: attribute(n, "large", table)), devices=4)(draw(8, 8))
    assert raised.value.source == f"test_observed_state.py:{f.__code__.co_firstlineno + 1}" and raised.value.legal
    parallel(Net(lambda m, h: h, lambda n: attribute(n, "large", table)), devices=4)(draw(8, 8))  # it is not read


def test_functions_that_do_not_run_are_not_watched() -> None:
    """A change of what another branch would read needs no program."""
    net = Net(lambda m, h: by_attribute(h) if m.training else Made().run(h), None)
    model, x = parallel(net, devices=4), draw(8, 8)
    model(x)
    globals()["SCALE"], Made.FACTOR = 7.0, 8.0
    model(x)
    assert len(model._programs) == 1
    net.eval()
    close(model(x), net(x))


@torch.fx.wrap
def wrapped(h: Tensor) -> Tensor:
    return h * 2


def test_a_function_wrapped_by_fx() -> None:
    """torch.fx puts another function in its place while a model is traced."""
    plain, net = wrapped, Net(lambda m, h: wrapped(h), None)
    model = parallel(net, devices=4)
    for rows in (8, 8, 4, 4):
        x = draw(rows, 8)
        close(model(x), net(x))
        assert wrapped is plain
    assert len(model._programs) == 2
    globals()["wrapped"] = lambda h: h * 5
    close(model(x), net(x))


def test_a_debugger_goes_on() -> None:
    """Functions are not noted where Python is traced already: all that may be read is watched."""
    lines: list[str] = []

    def trace(frame: types.FrameType, event: str, arg: object) -> None:
        lines.append(frame.f_code.co_name)

    net = Net(lambda m, h: by_attribute(h), None)
    model, x = parallel(net, devices=4), draw(8, 8)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        model(x)
        assert sys.gettrace() is trace and "by_attribute" in lines
    finally:
        sys.settrace(before)
    by_attribute.k = 5.0
    close(model(x), net(x))
