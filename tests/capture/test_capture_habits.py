"""Habits of users' models: each small model has one, and means the same in parallel: see `habit_models`."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable

import pytest
import torch
from habit_models import NAMES, STEPS, D, Habit, batches, counter_of_the_program, run_both
from one_device import close, parallel
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")

log = logging.getLogger("habits")
SCALE = 2.0

# -- done as on one device ---------------------------------------------------------------------------------------------


def buffer_of_a_submodule(m, x):
    h = m.inner(x)
    m.inner.e = 0.9 * m.inner.e + 0.1 * h.mean().detach()
    return m.out(h) + m.inner.e


def buffer_of_the_root(m, x):
    h = m.inner(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.out(h - m.mean)


def buffer_by_setattr(m, x):
    h = m.inner(x)
    m.mean = h.detach().mean(0)
    return m.out(h + m.mean)


def buffer_in_the_table(m, x):
    h = m.inner(x)
    m._buffers["mean"] = m.mean + h.detach().sum(0)
    return m.out(h)


def buffer_without_gradients(m, x):
    h = m.inner(x)
    with torch.no_grad():
        m.mean = m.mean * 0.5 + h.mean(0)
    return m.out(h + m.mean)


def buffers_that_change_places(m, x):
    h = m.inner(x)
    m.before, m.mean = m.mean, h.detach().mean(0)
    return m.out(h + m.before)


def buffers_swapped(m, x):
    h = m.inner(x) + m.mean + 2 * m.before
    m.mean.add_(1)
    m.before, m.mean = m.mean, m.before
    return m.out(h)


def buffer_assigned_twice(m, x):
    h = m.inner(x)
    m.mean = h.detach().mean(0)
    h = h - m.mean
    m.mean = m.mean * 2 + h.detach().amax(0)
    return m.out(h)


def buffer_of_the_input(m, x):
    m.mean = x[0]
    return m.out(m.inner(x) + m.mean)


def buffer_that_carries_gradients_nowhere(m, x):
    h = m.inner(x)
    m.mean = 0.9 * m.mean + 0.1 * h.mean(0)
    return m.out(h)


def buffer_that_is_a_queue(m, x):
    h = m.inner(x)
    m.queue = torch.cat([m.queue[2:], h[:2].detach()])
    return m.out(h) + m.queue.mean()


def buffer_that_is_not_saved(m, x):
    h = m.inner(x)
    m.hidden = m.hidden + h.detach().mean(0)
    return m.out(h * m.hidden)


def buffer_in_place(m, x):
    h = m.inner(x)
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return m.out(h + m.mean)


def counter(m, x):
    m.calls += 1
    return m.out(m.inner(x))


def counter_of_a_submodule_twice(m, x):
    m.inner.calls = m.inner.calls + 1
    h = m.inner(x)
    m.inner.calls += 2
    return m.out(h)


def counter_of_seconds(m, x):
    m.time += 0.1
    return m.out(m.inner(x))


def counter_in_a_dict(m, x):
    m.stats["calls"] += 1
    return m.out(m.inner(x))


def counter_in_an_object(m, x):
    m.config.calls -= 1
    return m.out(m.inner(x))


def counters_by_the_batch(m, x):
    m.calls += x.shape[0]
    m.stats["calls"] += x.shape[1]
    return m.out(m.inner(x))


def first_call(m, x):
    h = m.inner(x)
    if m.first:
        h = h * 3
        m.first = False
    return m.out(h)


def shape_noted(m, x):
    m.shape = x.shape
    m.cache[tuple(x.shape)] = "seen"
    return m.out(m.inner(x))


def longest_noted(m, x):
    if x.shape[0] > m.calls:
        m.calls = x.shape[0]
    return m.out(m.inner(x))


def passed_by_an_attribute(m, x):
    m.passed = m.inner(x)
    out = m.out(m.passed)
    del m.passed
    return out


def printed(m, x):
    print("forward of", x.shape, m.training)
    sys.stdout.write("direct\n")
    return m.out(m.inner(x))


QUIET = [
    buffer_of_a_submodule,
    buffer_of_the_root,
    buffer_by_setattr,
    buffer_in_the_table,
    buffer_without_gradients,
    buffers_that_change_places,
    buffers_swapped,
    buffer_assigned_twice,
    buffer_of_the_input,
    buffer_that_carries_gradients_nowhere,
    buffer_that_is_a_queue,
    buffer_that_is_not_saved,
    buffer_in_place,
    counter,
    counter_of_a_submodule_twice,
    counter_of_seconds,
    counter_in_a_dict,
    counter_in_an_object,
    counter_of_the_program,
    counters_by_the_batch,
    first_call,
    shape_noted,
    longest_noted,
    passed_by_an_attribute,
    printed,
]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("f", QUIET, ids=lambda f: f.__name__)
def test_as_on_one_device(f: Callable, devices: int) -> None:
    model = run_both(f, devices, text=f is printed)
    if devices == 4:
        assert model.plan.operator("inner.fc").in_strategy[:2] == ((2, 1), (2, 1))
    assert len(model._programs) == (2 if f in (first_call, longest_noted, shape_noted) else 1)


# -- changed between calls ---------------------------------------------------------------------------------------------


def reads(m, x):
    h = m.inner(x) * m.beta * m.config.beta * m.space.beta * m.scales[0] * m.beta_of_class * SCALE * m.table
    return m.out(m.drop(m.scale(h)) + m.mean)


def set_beta(net, step):
    net.beta = (2.0, 5.0, 5.0, 2.0, 2.0)[step]


def set_config(net, step):
    net.config.beta = 5.0 if step > 2 else 2.0


def set_namespace(net, step):
    net.space.beta = 5.0 if step > 2 else 2.0


def set_entry(net, step):
    net.scales[0] = 5.0 if step > 2 else 2.0


def set_class(net, step):
    Habit.beta_of_class = 5.0 if step in (2, 3) else 2.0


def set_global(net, step):
    global SCALE
    SCALE = 5.0 if step in (2, 3) else 2.0


def set_dropout(net, step):
    net.drop.p = 1.0 if step == 3 else 0.0


def set_tensor(net, step):
    if step == 3:
        net.table = torch.full((8,), 3.0, dtype=D)


def change_tensor(net, step):
    net.table[step] = 7.0


def set_buffer(net, step):
    if step == 2:
        net.mean = torch.full((8,), 7.0, dtype=D)


def set_method(net, step):
    if step == 2:
        net.scale = lambda h: h * 3


def set_forward(net, step):
    if step == 2:
        net.inner.forward = lambda x: net.inner.fc(x) - 1


def freeze(net, step):
    net.head.requires_grad_(step < 3)


def switch(net, step):
    net.train(step % 2 == 0)
    net.drop.p = 0.0


def add_a_hook(net, step):
    if step == 1:
        net.hook = net.inner.register_forward_hook(lambda module, args, result: result * 0.5)
    if step == 3:
        net.hook.remove()


CHANGES = {
    set_beta: 2,
    set_config: 2,
    set_namespace: 2,
    set_entry: 2,
    set_class: 2,
    set_global: 2,
    set_dropout: 2,
    set_tensor: 2,
    change_tensor: 1,
    set_buffer: 2,
    set_method: 2,
    set_forward: 2,
    freeze: 2,
    switch: 2,
    add_a_hook: 2,
}


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changed_between_calls(change: Callable, devices: int) -> None:
    try:
        model = run_both(reads, devices, change)
    finally:
        Habit.beta_of_class = 2.0
    assert len(model._programs) == CHANGES[change]  # going back is no new one


def weighted(weight: list[float], tensor: Tensor, beta: float):
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return weight[0] * beta * F.mse_loss(out * tensor, target) * SCALE

    def change(net: Habit, step: int) -> None:
        nonlocal beta, tensor
        if step == 2:
            beta = 0.5
        if step == 3:
            weight[0] = 4.0
        if step == 4:
            tensor = torch.full((4,), 2.0, dtype=D)

    loss.change = change
    return loss


@pytest.mark.parametrize("devices", [1, 4])
def test_what_a_loss_closes_over(devices: int) -> None:
    both = [weighted([1.0], torch.ones(4, dtype=D), 3.0) for _ in range(2)]
    made, at = iter(both), []

    def change(net: Habit, step: int) -> None:
        at.append(step)
        both[0 if len(at) <= STEPS else 1].change(net, step)

    model = run_both(lambda m, x: m.out(m.inner(x)), devices, change, loss=lambda: next(made))
    assert len(model._programs) == 4


@pytest.mark.parametrize("devices", [1, 4])
def test_a_submodule_is_replaced(devices: int) -> None:
    """A head of another width, as for another task, and back; an adapter around a layer."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.a, self.b = base, nn.Linear(8, 2, bias=False, dtype=D), nn.Linear(2, 4, bias=False, dtype=D)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    net = Habit(lambda m, x: m.out(m.inner(x)))
    sw.shard(net.inner.fc, ((2, 1), (2, 1)) if devices == 4 else None)
    model, x, old = parallel(net, devices=devices), batches()[0], net.head
    with pytest.warns(sw.RecaptureWarning) as caught:
        for head in (old, nn.Linear(8, 6, dtype=D), old, Adapter(old)):
            net.head = head
            net.zero_grad()
            out = model(x)
            out.square().mean().backward()
            mine = {n: p.grad.clone() for n, p in net.named_parameters()}
            net.zero_grad()
            expected = net(x)
            expected.square().mean().backward()
            close((out, mine), (expected, {n: p.grad for n, p in net.named_parameters()}))
    assert [str(w.message).split(":")[0] for w in caught] == ["net.head is another one"] * 2 and len(
        model._programs
    ) == 3


def test_one_line_says_what_has_changed() -> None:
    model = parallel(Habit(reads), devices=4)
    x = batches()[0]
    model(x)
    words = {
        set_beta: "net.beta was 2.0 and is 5.0",
        set_config: "net.config.beta was 2.0 and is 5.0",
        set_entry: "net.scales holds something else",
        set_tensor: "net.table is another object: a tensor of shape [8]",
        set_buffer: "net.mean is another one",
        set_dropout: "net.drop.p was 0.0 and is 1.0",
        set_method: "net.scale was missing and is set_method.<locals>.<lambda>",
    }
    for change, text in words.items():
        for step in range(4):
            change(model.net, step) if not (change is set_beta and step == 3) else None
        with pytest.warns(sw.RecaptureWarning) as caught:
            model(x)
        assert len(caught) == 1 and str(caught[0].message).startswith(text)
        assert caught[0].filename.endswith("test_capture_habits.py")
    with pytest.warns(sw.RecaptureWarning) as caught:
        model.net.head.register_forward_pre_hook(lambda module, args: None)
        model(x)
    assert str(caught[0].message).startswith("net.head has 1 forward-pre hooks and had 0")


def test_equal_objects_are_no_change() -> None:
    net = Habit(reads)
    model, x = parallel(net, devices=4), batches()[0]
    model(x)
    net.beta, net.scales[0], net.config.beta = float("2.0"), float("2.0"), float("2.0")
    model(x)
    assert len(model._programs) == 1


def test_what_is_not_read_may_change() -> None:
    net = Habit(lambda m, x: m.out(m.inner(x)))
    model, x = parallel(net, devices=4), batches()[0]
    for step in range(3):
        net.beta, net.label, net.config.calls, net.saved = step, object(), step, [step]
        model(x)
    assert len(model._programs) == 1


# -- text and hooks ----------------------------------------------------------------------------------------------------


def test_logged_at_each_call(caplog) -> None:
    def f(m, x):
        log.warning("rows: %d", x.shape[0])
        return m.out(m.inner(x))

    caplog.set_level(logging.WARNING, "habits")
    model = parallel(Habit(f), devices=4)
    for _ in range(3):
        model(batches()[0])
    assert [r.getMessage() for r in caplog.records if r.name == "habits"] == ["rows: 8"] * 3


def test_printed_into_a_file_at_each_call() -> None:
    file = io.StringIO()

    def f(m, x):
        print("rows", x.shape[0], file=file)
        return m.out(m.inner(x))

    model = parallel(Habit(f), devices=4)
    for _ in range(3):
        model(batches()[0])
    assert file.getvalue() == "rows 8\n" * 3


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_hooks_at_the_borders(devices: int, inside: bool) -> None:
    """The model's own hooks see real tensors at each call, and may change them."""

    def prepare(net: Habit) -> None:
        net.register_forward_pre_hook(lambda module, args: NAMES.append(float(args[0].sum())))
        net.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
        if inside:
            net.register_forward_hook(lambda module, args, out: out + 1)
        else:
            net.register_forward_hook(lambda module, args, out: NAMES.append(round(float(out.detach().sum()), 6)))
            net.register_forward_hook(lambda module, args, out: out + args[0].mean())

    model = run_both(
        lambda m, x: m.out(m.inner(x)), devices, prepare=prepare, loss=(lambda: F.mse_loss) if inside else None
    )
    assert len(model._programs) == 1


def test_hooks_at_the_borders_are_verified_too() -> None:
    net = Habit(lambda m, x: m.out(m.inner(x)))
    net.register_forward_hook(lambda module, args, out: out + args[0].mean())
    report = sw.verify(net, (batches()[0],), devices=4, steps=2)
    assert report.ok, report


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_hooks_inside_and_of_all_modules(inside: bool) -> None:
    def prepare(net: Habit) -> None:
        net.inner.register_forward_hook(lambda module, args, out: out * 3)
        net.head.register_forward_pre_hook(lambda module, args: (args[0] - 1,))

    everyones = [
        nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5),
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:])),
    ]
    try:
        model = run_both(
            lambda m, x: m.out(m.inner(x)), 4, prepare=prepare, loss=nn.MSELoss if inside else None, marked=False
        )
    finally:
        for hook in everyones:
            hook.remove()
    x = batches()[0]
    if not inside:
        close(model(x), model.net(x))  # without them it is another program
    assert len(model._programs) == (1 if inside else 2)
