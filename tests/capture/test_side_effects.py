"""Habits of users' models that are refused, with the line; functions that keep what they made; what a capture leaves as
it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import re
import sys
from collections.abc import Callable
from typing import ClassVar

import numpy
import pytest
import torch
from habit_models import NAMES, Config, D, Habit, batches, run_both
from one_device import close, parallel
from test_export import line_of
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

log = logging.getLogger("habits")

# -- refused -----------------------------------------------------------------------------------------------------------


def tensor_in_an_attribute(m, x):
    h = m.inner(x)
    m.last = h  # here
    return m.out(h)


def tensor_in_a_list(m, x):
    h = m.inner(x)
    m.saved.append(h)  # here
    return m.out(h)


def tensor_in_a_dict(m, x):
    h = m.inner(x)
    m.cache["h"] = h  # here
    return m.out(h)


def list_that_grows(m, x):
    NAMES.append("call")  # here
    return m.out(m.inner(x))


def draws_of_python(m, x):
    h = m.inner(x)
    if random.random() < 0.5:  # here
        h = h * 2
    return m.out(h)


def draws_of_numpy(m, x):
    scale = float(numpy.random.rand())  # here
    return m.out(m.inner(x) * scale)


def draws_of_its_own(m, x):
    return m.out(m.inner(x) * m.random.uniform(0, 1))  # here


def draws_of_its_own_numpy(m, x):
    return m.out(m.inner(x) * float(m.numpy.normal()))  # here


def prints_a_tensor(m, x):
    h = m.inner(x)
    print(f"mean {h.mean()}")  # here
    return m.out(h)


def logs_a_tensor(m, x):
    h = m.inner(x)
    log.error("mean %s", h.mean())  # here
    return m.out(h)


def prints_a_number(m, x):
    h = m.inner(x)
    print("mean", h.mean().item())  # here
    return m.out(h)


def prints_numbers_in_a_list(m, x):
    h = m.inner(x)
    print([(h > 0).sum().item()])  # here
    return m.out(h)


def prints_a_formatted_number(m, x):
    h = m.inner(x)
    print(f"mean {h.mean().item():.3f} of {len(h)}")  # here
    return m.out(h)


def prints_a_sum_of_a_format(m, x):
    h = m.inner(x)
    print(f"sum {h.sum():.4f}")  # here
    return m.out(h)


def prints_a_number_of_a_format(m, x):
    h = m.inner(x)
    print("mean " + str(round(float(h.mean()), 3)))  # here
    return m.out(h)


def logs_a_number(m, x):
    h = m.inner(x)
    log.error("largest %s", h.argmax().item())  # here
    return m.out(h)


def prints_a_counter(m, x):
    m.calls += 1  # here
    print(f"call {m.calls}")
    return m.out(m.inner(x))


def hook_on_a_tensor(m, x):
    h = m.inner(x)
    h.register_hook(lambda gradient: gradient * 2)  # here
    return m.out(h)


def gradient_retained(m, x):
    h = m.inner(x)
    h.retain_grad()  # here
    return m.out(h)


def counter_that_decides(m, x):
    m.calls += 1  # here
    h = m.inner(x)
    return m.out(h * 2 if m.calls % 2 else h)


def counter_that_multiplies(m, x):
    m.calls += 1  # here
    return m.out(m.inner(x) * m.calls)


def number_that_decays(m, x):
    m.beta *= 0.9  # here
    return m.out(m.inner(x) * m.beta)


def number_that_cycles(m, x):
    m.calls = (m.calls + 1) % 3  # here
    return m.out(m.inner(x))


def counter_copied(m, x):
    m.calls += 1
    m.shape = m.calls  # here
    return m.out(m.inner(x))


def buffer_of_another_shape(m, x):
    h = m.inner(x)
    m.mean = h.detach()  # here
    return m.out(h)


def buffer_of_another_dtype(m, x):
    h = m.inner(x)
    m.mean = h.detach().mean(0).float()  # here
    return m.out(h)


def buffer_that_carries_gradients(m, x):
    h = m.inner(x)
    old = m.mean
    m.mean = 0.9 * old + 0.1 * h.mean(0)  # here
    return m.out(h + old)


def buffer_made_in_the_forward(m, x):
    h = m.inner(x)
    m.register_buffer("new", h.detach().mean(0))  # here
    return m.out(h)


def parameter_replaced(m, x):
    m.head.weight = nn.Parameter(m.head.weight * 2)  # here
    return m.out(m.inner(x))


def attribute_deleted(m, x):
    del m.shape  # here
    return m.out(m.inner(x))


def object_assigned(m, x):
    m.config = Config(3.0)  # here
    return m.out(m.inner(x) * m.config.beta)


REFUSED = {
    tensor_in_an_attribute: "assigns a tensor to net.last",
    tensor_in_a_list: "changes net.saved, a list",
    tensor_in_a_dict: r"assigns a tensor to net.cache\['h'\]",
    list_that_grows: "changes test_side_effects.NAMES",
    draws_of_python: "draws a number from random",
    draws_of_numpy: "draws a number from numpy.random",
    draws_of_its_own: "draws a number from net.random",
    draws_of_its_own_numpy: "draws a number from net.numpy",
    prints_a_tensor: "prints the values of tensors",
    logs_a_tensor: "logs the values of tensors",
    prints_a_number: "prints the values of tensors.* item.. takes out of it, is known once the program runs",
    prints_numbers_in_a_list: "prints the values of tensors",
    prints_a_formatted_number: "prints the values of tensors",
    prints_a_sum_of_a_format: "takes a number out of a tensor .*no tensor has values before the program runs",
    prints_a_number_of_a_format: "takes a number out of a tensor .*no tensor has values before the program runs",
    logs_a_number: "logs the values of tensors",
    prints_a_counter: "net.calls changes at each call",
    hook_on_a_tensor: "register_hook",
    gradient_retained: "retain_grad",
    counter_that_decides: "net.calls changes at each call",
    counter_that_multiplies: "net.calls changes at each call",
    number_that_decays: "net.beta changes at each call",
    number_that_cycles: "net.calls changes at each call",
    counter_copied: "net.calls changes at each call",
    buffer_of_another_shape: "another shape or dtype",
    buffer_of_another_dtype: "another shape or dtype",
    buffer_that_carries_gradients: "carries gradients",
    buffer_made_in_the_forward: "a buffer that it did not have: net.new",
    parameter_replaced: "net.head.weight",
    attribute_deleted: "deletes net.shape",
    object_assigned: "assigns a Config to net.config",
}


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_refused_with_the_line(f: Callable, devices: int) -> None:
    net = Habit(f)
    before = {path: dict(vars(m)) for path, m in net.named_modules()}
    state, saved = (random.getstate(), str(numpy.random.get_state())), list(net.saved)
    names = list(NAMES)
    with pytest.raises(sw.CaptureError, match=REFUSED[f]) as raised:
        parallel(net, devices=devices)(batches()[0])
    assert raised.value.source == line_of(f, "# here") and raised.value.legal
    assert not re.search(r"\bz?uf?\d", str(raised.value)), "no symbol of torch"
    assert (random.getstate(), str(numpy.random.get_state())) == state and net.saved == saved and names == NAMES
    for path, m in net.named_modules():  # nothing of the model has changed
        assert list(vars(m)) == list(before[path]) and all(vars(m)[k] is v for k, v in before[path].items())
        assert not any("new" in table for table in (m._buffers,))


def hook_that_keeps(module, args, out):
    NAMES.append(out)  # here


def test_hooks_with_side_effects() -> None:
    net = Habit(lambda m, x: m.out(m.inner(x)))
    net.inner.register_forward_hook(hook_that_keeps)
    with pytest.raises(sw.CaptureError, match="changes test_side_effects.NAMES, a list: a tensor is kept") as raised:
        parallel(net, devices=4)(batches()[0])
    assert raised.value.source == line_of(hook_that_keeps, "# here") and not NAMES


def in_the_backward(module, gradient_in, gradient_out):
    return gradient_in


def test_hooks_in_the_backward() -> None:
    net = Habit(lambda m, x: m.out(m.inner(x)))
    net.inner.register_full_backward_hook(in_the_backward)
    with pytest.raises(sw.CaptureError, match="net.inner has a hook that runs in its backward") as raised:
        parallel(net, devices=4)(batches()[0])
    assert raised.value.source == f"test_side_effects.py:{inspect.getsourcelines(in_the_backward)[1]}"


def test_a_trained_tensor_of_nobody() -> None:
    weight = torch.ones(8, dtype=D, requires_grad=True)

    def f(m, x):
        return m.out(m.inner(x) * weight)  # here

    with pytest.raises(sw.CaptureError, match="no parameter of the model") as raised:
        parallel(Habit(f), devices=4)(batches()[0])
    assert raised.value.source == line_of(f, "# here")


def test_an_lstm_keeps_its_own_list_of_weights() -> None:
    net = nn.LSTM(4, 4, dtype=D)
    weights = net._flat_weights
    graph = capture(net, (torch.randn(3, 2, 4, dtype=D),))
    assert set(graph.parameters) == {n for n, _ in net.named_parameters()} and not graph.constants
    assert net._flat_weights is weights and all(a is b for a, b in zip(weights, net.parameters()))


def plain(m, x):
    return m.out(m.drop(m.scale(m.inner(x) * m.config.beta)))


def counts_in_an_object(m, x):
    m.config.calls -= 1
    return m.out(m.inner(x))


def test_nothing_of_torch_or_python_stays_changed() -> None:
    import builtins

    kept = (
        builtins.print,
        logging.Logger.handle,
        torch.Tensor.register_hook,
        sys.stdout,
        sys.stderr,
        sys.gettrace(),
        nn.Module.__setattr__,
        Config.__setattr__,
    )
    for f in (plain, draws_of_python, counts_in_an_object):
        with contextlib.suppress(sw.CaptureError):
            parallel(Habit(f), devices=4)(batches()[0])
    assert kept == (
        builtins.print,
        logging.Logger.handle,
        torch.Tensor.register_hook,
        sys.stdout,
        sys.stderr,
        sys.gettrace(),
        nn.Module.__setattr__,
        Config.__setattr__,
    )
    assert "__getattribute__" not in vars(nn.Module) and not {"__getattribute__", "__setattr__"} & set(vars(Config))


# -- what is kept from the first call ----------------------------------------------------------------------------------

TABLES: dict[int, Tensor] = {}


@functools.lru_cache(maxsize=8)
def table(rows: int) -> Tensor:
    return torch.arange(rows * 8, dtype=D).view(rows, 8) / 50


@functools.cache
def drawn(size: int) -> Tensor:
    return torch.randn(size, dtype=D)


class Tables:
    made: ClassVar[dict[int, Tensor]] = {}

    @functools.lru_cache
    def of(self, size: int) -> Tensor:
        return torch.linspace(0, 1, size, dtype=D)

    @classmethod
    def kept(cls, size: int) -> Tensor:
        if size not in cls.made:
            cls.made[size] = torch.arange(size, dtype=D)  # here
        return cls.made[size]

    @staticmethod
    @functools.cache
    def static(size: int) -> Tensor:
        return torch.linspace(1, 2, size, dtype=D)


TABLE = Tables()


def by_lru_cache(m, x):
    return m.out(m.inner(x) + table(x.shape[0]))


def by_a_draw_that_is_kept(m, x):
    return m.out(m.inner(x) + drawn(8))


def by_a_method(m, x):
    return m.out(m.inner(x) * TABLE.of(8) + Tables.static(8))


def kept_in_an_attribute(m, x):
    if m.last is None or m.last.shape[0] != x.shape[0]:
        m.last = torch.ones(x.shape[0], 8, dtype=D).tril()  # here
    return m.out(m.inner(x) * m.last)


def kept_in_a_dict_of_the_model(m, x):
    if 8 not in m.cache:
        m.cache[8] = torch.arange(8, dtype=D)  # here
    return m.out(m.inner(x) + m.cache[8])


def kept_in_a_dict_of_the_file(m, x):
    if 8 not in TABLES:
        TABLES[8] = torch.arange(8, dtype=D)  # here
    return m.out(m.inner(x) + TABLES[8])


def kept_in_a_class(m, x):
    return m.out(m.inner(x) + Tables.kept(8))


def by_default(size: int, made: dict = {}) -> Tensor:
    if size not in made:
        made[size] = torch.arange(size, dtype=D)  # here
    return made[size]


def kept_in_a_default(m, x):
    return m.out(m.inner(x) + by_default(8))


def by_function(size: int) -> Tensor:
    if not hasattr(by_function, "made"):
        by_function.made = torch.arange(size, dtype=D)  # here
    return by_function.made


def kept_on_a_function(m, x):
    return m.out(m.inner(x) + by_function(8))


def forget() -> None:
    """The state of a process in which nothing has been called yet."""
    for function in (table, drawn, Tables.of, Tables.static):
        function.cache_clear()
    for held in (TABLES, Tables.made, by_default.__defaults__[0], vars(by_function)):
        held.clear()


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("f", [by_lru_cache, by_a_method, by_a_draw_that_is_kept], ids=lambda f: f.__name__)
def test_functions_that_keep_their_results(f: Callable, devices: int) -> None:
    """Functions that keep results keep real tensors, the same for the program and for the plain model, called later."""
    forget()
    torch.manual_seed(1)
    model = run_both(f, devices)
    assert len(model._programs) == 1
    out = model.net(batches()[0])
    assert type(out) is Tensor
    close(model(batches()[0]), out)
    assert all(
        type(function.cache_info()).__name__ == "CacheInfo" and type(function) is type(functools.lru_cache(len))
        for function in (table, drawn, vars(Tables)["of"], Tables.static)
    )


def test_a_function_in_a_closure_keeps_its_results() -> None:
    inner = functools.cache(lambda size: torch.arange(size, dtype=D) / 7)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8, dtype=D)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + inner(8)

    net = Net()
    out = parallel(net, devices=4)(batches()[0])
    assert inner.cache_info().currsize == 1 and type(inner(8)) is Tensor
    close(out, net(batches()[0]))


class Late:
    @staticmethod
    def of(size: int) -> Tensor:
        return torch.arange(size, dtype=D) / 7


def late(size: int) -> Tensor:
    return torch.arange(size, dtype=D) / 5


def by_later_ones(m, x):
    return m.out(m.inner(x) + Late.of(8) + late(8))


def test_functions_that_keep_their_results_since_an_earlier_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and classes that have changed are looked through again."""
    parallel(Habit(by_later_ones), devices=4)(batches()[0])
    monkeypatch.setattr(Late, "of", staticmethod(functools.cache(Late.of)))
    monkeypatch.setitem(globals(), "late", functools.cache(late))
    net = Habit(by_later_ones)
    out = parallel(net, devices=4)(batches()[0])
    assert type(Late.of(8)) is type(late(8)) is Tensor and Late.of.cache_info().misses == late.cache_info().misses == 1
    close(out, net(batches()[0]))


KEPT = {
    kept_in_an_attribute: (None, "net.last"),
    kept_in_a_dict_of_the_model: (None, r"net.cache\[8\]"),
    kept_in_a_dict_of_the_file: (None, r"test_side_effects.TABLES\[8\]"),
    kept_in_a_class: (Tables.kept, r"Tables.made\[8\]"),
    kept_in_a_default: (by_default, r"a default of by_default\[8\]"),
    kept_on_a_function: (by_function, "by_function.made"),
}


@pytest.mark.parametrize("f", KEPT, ids=lambda f: f.__name__)
def test_tables_that_a_forward_keeps(f: Callable) -> None:
    """Refused with the line, and right after one call of the plain model, as the error says."""
    forget()
    where, path = KEPT[f]
    net = Habit(f)
    with pytest.raises(sw.CaptureError, match=f"assigns a tensor to {path}") as raised:
        parallel(net, devices=4)(batches()[0])
    assert (
        raised.value.source == line_of(where or f, "# here")
        and "a call of the plain model before" in raised.value.legal
    )
    expected = net(batches()[0])
    assert type(expected) is Tensor
    close(parallel(net, devices=4)(batches()[0]), expected)
    forget()


@functools.cache
def of_a_weight(weight: Tensor) -> Tensor:
    return weight.detach().sum(0)


def test_a_result_kept_of_a_tensor() -> None:
    def f(m, x):
        return m.out(m.inner(x) + of_a_weight(m.inner.fc.weight))  # here

    with pytest.raises(sw.CaptureError, match="of_a_weight, which keeps its results, is given a tensor") as raised:
        parallel(Habit(f), devices=4)(batches()[0])
    assert raised.value.source == line_of(f, "# here") and of_a_weight.cache_info().currsize == 0


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, dtype=D)

    @functools.lru_cache
    def sums(self) -> Tensor:
        return self.fc.weight.detach().sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.sums()  # here


def test_a_result_kept_of_the_models_own() -> None:
    net = WithTable()
    with pytest.raises(
        sw.CaptureError, match="WithTable.sums, which keeps its results, keeps a tensor that it makes of"
    ) as raised:
        parallel(net, devices=4)(batches()[0])
    assert raised.value.source == line_of(WithTable.forward, "# here") and WithTable.sums.cache_info().currsize == 0
    assert type(net(batches()[0])) is Tensor
