"""Calls that a program would leave out: seeds and states of torch's generators, and autocast that is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from habit_models import D, Habit, batches
from one_device import close, parallel
from test_export import line_of
from torch import Tensor
from torch.random import fork_rng as forked, manual_seed as renamed

import shardwright as sw


def seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return m.out(m.inner(x) * torch.rand(8, 8, dtype=D))


def seeded_by_another_name(m: Any, x: Tensor) -> Tensor:
    renamed(3)  # here
    return m.out(m.inner(x) * torch.rand(8, 8, dtype=D))


def seeded_at_random(m: Any, x: Tensor) -> Tensor:
    torch.seed()  # here
    return m.out(m.inner(x))


def seeded_for_an_accelerator(m: Any, x: Tensor) -> Tensor:
    torch.cuda.manual_seed_all(3)  # here
    return m.out(m.inner(x))


def in_a_fork(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):  # here
        noise = torch.rand(8, 8, dtype=D)
    return m.out(m.inner(x) * noise)


def in_a_fork_by_another_name(m: Any, x: Tensor) -> Tensor:
    with forked(devices=[]):  # here
        noise = torch.rand(8, 8, dtype=D)
    return m.out(m.inner(x) * noise)


def drawn_twice(m: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    a = torch.rand(8, 8, dtype=D)
    torch.set_rng_state(state)  # here
    return m.out(m.inner(x) * a * torch.rand(8, 8, dtype=D))


def of_a_generator(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return m.out(m.inner(x) * torch.rand(8, 8, dtype=D, generator=generator))  # here


def of_a_generator_with_a_rule(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return m.out(m.inner(x) * torch.bernoulli(x.sigmoid(), generator=generator))  # here


def of_a_generator_in_place(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return m.out(m.inner(x) * torch.empty(8, 8, dtype=D).normal_(generator=generator))  # here


REFUSED = {
    seeded: r"calls manual_seed\(\)",
    seeded_by_another_name: r"calls manual_seed\(\)",
    seeded_at_random: r"calls seed\(\)",
    seeded_for_an_accelerator: r"calls manual_seed_all\(\)",
    in_a_fork: r"calls fork_rng\(\)",
    in_a_fork_by_another_name: r"calls fork_rng\(\)",
    drawn_twice: r"calls set_rng_state\(\)",
    of_a_generator: r"aten\.rand\.generator draws from a torch\.Generator",
    of_a_generator_with_a_rule: r"aten\.bernoulli\.default draws from a torch\.Generator",
    of_a_generator_in_place: r"aten\.normal_\.default draws from a torch\.Generator",
}


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto"])
@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_seeds_in_a_forward(f: Callable, mode: str) -> None:
    model = parallel(Habit(f), devices=4, mode=mode, on_missing_rule="replicate")
    before = torch.random.manual_seed, torch.random.fork_rng, torch.seed
    state = torch.manual_seed(11).get_state()
    with pytest.raises(sw.CaptureError, match=REFUSED[f]) as raised:
        model(batches()[0])
    assert raised.value.source == line_of(f, "# here") and "an input" in raised.value.legal
    assert torch.equal(torch.default_generator.get_state(), state)  # the process is not seeded
    assert before == (torch.random.manual_seed, torch.random.fork_rng, torch.seed)
    assert renamed is torch.random.manual_seed and forked is torch.random.fork_rng


def test_seeds_outside_of_a_forward() -> None:
    """Two calls after the same seed draw the same numbers, whichever the number of devices."""
    made = []
    for devices in (1, 4):
        model = parallel(Habit(lambda m, x: m.out(m.inner(x) * torch.rand(8, 8, dtype=D))), devices=devices)
        for _ in range(2):
            torch.manual_seed(3)
            made.append(model(batches()[0]))
    for other in made[1:]:
        close(other, made[0])


# -- autocast ----------------------------------------------------------------------------------------------------------


def autocast_turned_off(m: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", False)  # here
    h = m.inner(x)
    torch.set_autocast_enabled("cpu", True)
    return m.out(h)


def autocast_of_another_type(m: Any, x: Tensor) -> Tensor:
    torch.set_autocast_dtype("cpu", torch.float16)  # here
    return m.out(m.inner(x))


def autocast_around(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.out(m.inner(x))


@pytest.mark.parametrize("f", [autocast_turned_off, autocast_of_another_type], ids=lambda f: f.__name__)
def test_autocast_that_is_set(f: Callable) -> None:
    before = torch.set_autocast_enabled, torch.set_autocast_dtype
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(sw.CaptureError, match=r"set_autocast_\w+\(\)") as raised:
        parallel(Habit(f).float(), devices=4)(batches()[0].float())
    assert raised.value.source == line_of(f, "# here") and "with torch.autocast" in raised.value.legal
    assert before == (torch.set_autocast_enabled, torch.set_autocast_dtype)
    assert "internal" not in str(raised.value)


def test_autocast_as_a_context() -> None:
    net, x = Habit(autocast_around).float(), batches()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = parallel(net, devices=4)(x), net(x)
    assert ours.dtype is theirs.dtype is torch.float32
    torch.testing.assert_close(ours, theirs)
