"""Values from outside of the model, and effects on it: clocks, iterators, random numbers of the system, files, the
environment, arrays, hooks for one call. Each is done at each call, or refused with the line."""

from __future__ import annotations

import collections
import contextlib
import datetime
import io
import itertools
import os
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy
import pytest
import torch
from habit_models import Habit, batches, run_both
from one_device import close, parallel
from test_export import line_of
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

CYCLE, ORDERED = itertools.cycle([1.0, 2.0]), collections.OrderedDict(a=1, b=2)
VARIABLE = "SHARDWRIGHT_TEST"
FILE: list[Path] = []


class Single:
    """An object of which there is one."""

    made: ClassVar[Single | None] = None

    def __init__(self) -> None:
        self.calls = 0

    @classmethod
    def get(cls) -> Single:
        if cls.made is None:
            cls.made = cls()  # here
        return cls.made


@pytest.fixture(autouse=True)
def _put_back(tmp_path: Path) -> Iterator[None]:
    FILE[:], Single.made = [tmp_path / "log.txt"], None
    yield
    os.environ.pop(VARIABLE, None)
    for name in [n for n in os.environ if n.startswith(VARIABLE)]:
        del os.environ[name]


# -- refused -----------------------------------------------------------------------------------------------------------


def counts_in_an_array(m, x):
    m.array[0] += 1  # here
    return m.out(m.inner(x))


def counts_in_bytes(m, x):
    m.bytes[0] += 1  # here
    return m.out(m.inner(x))


def changes_the_order_of_a_dict(m, x):
    ORDERED.move_to_end("a")  # here
    return m.out(m.inner(x))


def keeps_what_was_used_last(m, x):
    m.recent["a"] = m.recent.pop("a")  # here
    return m.out(m.inner(x))


def takes_the_next_of_an_attribute(m, x):
    m.last = next(m.iterator)  # here
    return m.out(m.inner(x))


def takes_the_next_of_a_global(m, x):
    return m.out(m.inner(x) * next(CYCLE))  # here


def takes_the_next_of_a_generator(m, x):
    for value in m.generator:  # here
        return m.out(m.inner(x) * value)


def takes_the_next_by_a_method(m, x):
    return m.out(m.inner(x) * m.step())  # here


def takes_the_next_of_a_dict(m, x):
    return m.out(m.inner(x) * next(m.iterators["a"]))  # here


def makes_a_generator_of_numbers(m, x):
    return m.out(m.inner(x) * (2 if random.Random().random() < 0.5 else 1))  # here


def makes_a_generator_of_numpy(m, x):
    return m.out(m.inner(x) * (2 if numpy.random.default_rng().random() < 0.5 else 1))  # here


def draws_of_the_system(m, x):
    return m.out(m.inner(x) * secrets.choice([1, 2]))  # here


def draws_bytes(m, x):
    return m.out(m.inner(x) * (os.urandom(1)[0] % 2))  # here


def names_itself(m, x):
    m.label = str(uuid.uuid4())  # here
    return m.out(m.inner(x))


def multiplies_by_the_time(m, x):
    h = m.inner(x)
    return m.out(h * (time.time() % 7))  # here


def makes_a_tensor_of_the_time(m, x):
    h = m.inner(x)
    return m.out(h * torch.tensor(perf_counter()))  # here


def decides_by_the_time(m, x):
    h = m.inner(x)
    if time.time() > m.deadline:
        h = torch.tanh(h)  # here
    return m.out(h)


def notes_the_time(m, x):
    m.last = time.monotonic()  # here
    return m.out(m.inner(x))


def prints_the_time(m, x):
    print("at", time.time())  # here
    return m.out(m.inner(x))


def notes_the_date(m, x):
    m.last = str(datetime.datetime.now())  # here
    return m.out(m.inner(x))


def writes_a_file(m, x):
    with open(FILE[0], "a") as file:  # here
        file.write("x")
    return m.out(m.inner(x))


def reads_a_file(m, x):
    return m.out(m.inner(x) * float(FILE[0].read_text()))  # here


def reads_an_open_file(m, x):
    return m.out(m.inner(x) * len(m.file.read()))  # here


def counts_in_the_environment(m, x):
    os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, 0)) + 1)  # here
    return m.out(m.inner(x))


def makes_a_single_object(m, x):
    Single.get().calls += 1
    return m.out(m.inner(x))


REFUSED: dict[Callable, str] = {
    counts_in_an_array: "changes net.array, a numpy array",
    counts_in_bytes: "changes net.bytes, a bytearray",
    changes_the_order_of_a_dict: "changes test_side_effects_outside_values.ORDERED, a OrderedDict",
    keeps_what_was_used_last: "changes net.recent, a dict",
    takes_the_next_of_an_attribute: "takes the next value of net.iterator, a range_iterator",
    takes_the_next_of_a_global: "takes the next value of test_side_effects_outside_values.CYCLE, a cycle",
    takes_the_next_of_a_generator: "takes the next value of net.generator, a generator",
    takes_the_next_by_a_method: "takes the next value of net.step, a count",
    takes_the_next_of_a_dict: r"takes the next value of net.iterators\['a'\]",
    makes_a_generator_of_numbers: "seeds random.Random from the system",
    makes_a_generator_of_numpy: "numpy.random.default_rng without a seed",
    draws_of_the_system: "secrets.choice",
    draws_bytes: "urandom",
    names_itself: "uuid.uuid4",
    multiplies_by_the_time: "mul is called with .* in one run, and .* in a second run right after it",
    makes_a_tensor_of_the_time: "in a second run right after it",
    decides_by_the_time: "the forward calls tanh .* in one run, and tanh .* in a second run right after it",
    notes_the_time: "net.last",
    prints_the_time: "the forward prints 'at .* in one run, and prints 'at ",
    notes_the_date: "net.last",
    writes_a_file: "opens the file .*nothing would be written again",
    reads_a_file: "opens the file .*would be used at each call",
    reads_an_open_file: "uses net.file, an open file, for more than writing",
    counts_in_the_environment: "os.environ.'SHARDWRIGHT_TEST'. changes at each call",
    makes_a_single_object: "assigns a Single to Single.made",
}


def numbers() -> Iterator[float]:
    while True:
        yield 1.0


def with_outside(f: Callable) -> Habit:
    net = Habit(f)
    net.array, net.bytes, net.recent, net.deadline = numpy.zeros(1), bytearray(1), {"a": 1, "b": 2}, time.time() + 60
    net.iterator, net.generator, net.iterators = iter(range(9)), numbers(), {"a": iter([1.0])}
    net.step, net.label, net.file = itertools.count(1).__next__, "", io.StringIO("text")
    return net


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_refused_with_the_line(f: Callable, devices: int) -> None:
    FILE[0].write_text("2.0")
    net = with_outside(f)
    held = dict(vars(net))
    before = (
        net.array.copy(),
        bytes(net.bytes),
        list(ORDERED),
        list(net.recent),
        os.environ.get(VARIABLE),
        net.file.tell(),
    )
    names = dict(globals())
    with pytest.raises(sw.CaptureError, match=REFUSED[f]) as raised:
        parallel(net, devices=devices)(batches()[0])
    where = Single.get if f is makes_a_single_object else f
    line = line_of(getattr(where, "__func__", where), "# here")
    if f is decides_by_the_time:  # the lines of both branches
        assert "calls tanh (habit_models.py" in str(raised.value) and f"tanh ({line})" in str(raised.value)
    else:
        assert raised.value.source == line
    assert raised.value.legal
    after = (net.array, bytes(net.bytes), list(ORDERED), list(net.recent), os.environ.get(VARIABLE), net.file.tell())
    assert before == after and FILE[0].read_text() == "2.0" and Single.made is None
    assert list(vars(net)) == list(held) and all(vars(net)[k] is v for k, v in held.items())
    assert globals().keys() == names.keys() and all(globals()[k] is v for k, v in names.items())
    assert next(net.iterator) == 0 and next(net.iterators["a"]) == 1.0 and net.step() == 1


def test_nothing_of_python_stays_changed() -> None:
    def kept() -> list[Any]:
        held = [(time, "time"), (os, "urandom"), (secrets, "choice"), (uuid, "uuid4"), (numpy.random, "default_rng")]
        held += [
            (random.Random, "seed"),
            (random.SystemRandom, "random"),
            (io, "open"),
            (type(os.environ), "__getitem__"),
        ]
        return [vars(owner)[name] for owner, name in held] + [open, getattr, time.time, perf_counter]

    before = kept()
    for f in (lambda m, x: m.out(m.inner(x) * 2), multiplies_by_the_time, writes_a_file):
        net = with_outside(f)
        with contextlib.suppress(sw.CaptureError):
            parallel(net, devices=4)(batches()[0])
        assert all(a is b for a, b in zip(before, kept()))


def test_another_thread_goes_on() -> None:
    """Other threads may open files and draw numbers while the forward runs."""

    def elsewhere() -> None:
        with open(FILE[0], "a") as file:
            found = secrets.randbelow(9), random.Random().random(), os.environ.get(VARIABLE), next(CYCLE)
            file.write(f"{time.time()} {found}\n")

    def f(m, x):
        thread = threading.Thread(target=elsewhere)
        thread.start(), thread.join()
        return m.out(m.inner(x))

    net = Habit(f)
    close(parallel(net, devices=4)(batches()[0]), net(batches()[0]))
    lines = FILE[0].read_text().splitlines()
    assert len(lines) >= 3 and all(abs(float(line.split()[0]) - time.time()) < 60 for line in lines)


# -- done at each call -------------------------------------------------------------------------------------------------


def test_text_written_to_an_open_file_at_each_call() -> None:
    file = io.StringIO()

    def f(m, x):
        m.file.write("rows ")
        m.file.writelines([str(x.shape[0]), "\n"])
        m.file.flush()
        return m.out(m.inner(x))

    net = Habit(f)
    net.file = file
    model = parallel(net, devices=4)
    for _ in range(3):
        model(batches()[0])
    assert file.getvalue() == "rows 8\n" * 3 and net.file is file


def test_a_variable_of_the_environment_set_at_each_call() -> None:
    def f(m, x):
        os.environ[VARIABLE] = str(x.shape[0])
        return m.out(m.inner(x))

    model = parallel(Habit(f), devices=4)
    for _ in range(3):
        os.environ.pop(VARIABLE, None)
        model(batches()[0])
        assert os.environ[VARIABLE] == "8"
    assert len(model._programs) == 1


def test_a_single_object_counts_at_each_call() -> None:
    Single.get()
    model = parallel(Habit(makes_a_single_object), devices=4)
    for _ in range(3):
        model(batches()[0])
    assert Single.get().calls == 3 and len(model._programs) == 1


def test_counters_in_slots_and_classes() -> None:
    class Slots:
        __slots__ = ("calls", "rows")

        def __init__(self) -> None:
            self.calls = 0

    class Counts:
        calls = 0

    def f(m, x):
        m.slots.calls += 1
        m.slots.rows = x.shape[0]
        Counts.calls += 2
        type(m.slots)
        return m.out(m.inner(x))

    net = Habit(f)
    net.slots = Slots()
    model = parallel(net, devices=4)
    for _ in range(3):
        model(batches()[0])
    assert (net.slots.calls, net.slots.rows, Counts.calls) == (3, 8, 6)


def test_iterators_and_clocks_beside_the_program() -> None:
    """A forward that only holds an iterator, or measures a time that it does not use."""

    def f(m, x):
        start = time.perf_counter()
        h = m.inner(x) if m.iterator is not None else x
        assert time.perf_counter() - start < 3600
        return m.out(h)

    net = with_outside(f)
    close(parallel(net, devices=4)(batches()[0]), net(batches()[0]))
    assert next(net.iterator) == 0


# -- hooks for one call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("kind", ["forward", "forward with keywords", "forward pre", "of all modules"])
def test_a_hook_for_one_call(kind: str, devices: int) -> None:
    """A hook that removes itself takes effect once, and again when it is put back."""

    def put(net: nn.Module) -> None:
        def hook(module: nn.Module, *args: Any) -> Any:
            if module is not layer:
                return None
            handle.remove()
            return (args[0][0] * 2,) if kind == "forward pre" else args[-1] * 2

        layer = net.inner.fc
        handle = {
            "forward": layer.register_forward_hook,
            "forward with keywords": lambda hook: layer.register_forward_hook(hook, with_kwargs=True, always_call=True),
            "forward pre": layer.register_forward_pre_hook,
            "of all modules": nn.modules.module.register_module_forward_hook,
        }[kind](hook)

    def change(net: nn.Module, step: int) -> None:
        if step in (1, 3):
            put(net)

    model = run_both(lambda m, x: m.out(m.inner(x)), devices, change, marked=False)
    assert not model.net.inner.fc._forward_hooks and not nn.modules.module._global_forward_hooks
    assert not model.net.inner.fc._forward_hooks_with_kwargs
    assert len(model._programs) == 3


def test_a_hook_that_the_first_forward_registers_stays() -> None:
    def f(m, x):
        if not m.inner._forward_hooks:
            m.inner.register_forward_hook(lambda module, args, out: out * 2)
        return m.out(m.inner(x))

    net = Habit(f)
    model, x = parallel(net, devices=4), batches()[0]
    expected: Tensor = net.out(net.inner(x) * 2)
    close(model(x), expected)
    close(model(x), expected)
    assert len(net.inner._forward_hooks) == 1
