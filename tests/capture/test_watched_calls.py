"""Calls that a program would leave out: seeds and states of torch's generators, autocast that is set; and functions of
torch that look at values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from habit_models import D, Habit, batches
from one_device import assert_as_one_device, close, parallel
from test_export import line_of
from torch import Tensor, distributions as td, nn
from torch.nn import functional as F
from torch.nn.functional import one_hot as indicators
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
    of_a_generator: r"(aten\.rand\.generator|an operator) draws from a torch\.Generator",
    of_a_generator_with_a_rule: r"(aten\.bernoulli\.default|an operator) draws from a torch\.Generator",
    of_a_generator_in_place: r"(aten\.normal_\.default|an operator) draws from a torch\.Generator",
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


# -- functions of torch that look at values ----------------------------------------------------------------------------


class Looks(nn.Module):
    """Two layers around ``f(self, h)``."""

    def __init__(self, f: Callable[[Any, Tensor], Any], clusters: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.f = nn.Linear(8, 8, dtype=D), nn.Linear(8, 4, dtype=D), f
        if clusters:
            self.classes = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], dtype=D)

    def forward(self, x: Tensor) -> Any:
        return self.f(self, self.layer(x))


TARGETS = torch.tensor([0, 4, 5, 9, 10, 19, 3, 12])
ROWS = torch.arange(8) % 4

LOOKING: dict[str, Callable[[Any, Tensor], Any]] = {
    "log_prob of a Normal": lambda m, h: td.Normal(h, h.exp()).log_prob(h * 2),
    "log_prob of a Categorical": lambda m, h: td.Categorical(logits=m.head(h)).log_prob(ROWS),
    "entropy of a Bernoulli": lambda m, h: td.Bernoulli(logits=h).entropy(),
    "kl_divergence": lambda m, h: td.kl_divergence(td.Normal(h, h.exp()), td.Normal(0.0, 1.0)),
    "a MultivariateNormal": lambda m, h: td.MultivariateNormal(h[:, :2], torch.eye(2, dtype=D)).log_prob(h[:, 2:4]),
    "gaussian_nll_loss": lambda m, h: F.gaussian_nll_loss(h, h.detach() * 2, h.exp()),
    "gaussian_nll_loss of rows": lambda m, h: F.gaussian_nll_loss(
        h, h.detach() * 2, h[:, 0].exp(), True, reduction="sum"
    ),
    "GaussianNLLLoss": lambda m, h: nn.GaussianNLLLoss(reduction="none")(h, h.detach() * 2, h * h),
    "AdaptiveLogSoftmaxWithLoss": lambda m, h: tuple(m.classes(h, TARGETS)),
    "one_hot": lambda m, h: m.head(h) * F.one_hot(ROWS, 4),
}


@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto", "dynamic_programming"])
@pytest.mark.parametrize("name", LOOKING)
def test_values_that_are_not_looked_at(name: str, mode: str) -> None:
    options = {"cluster": sw.Cluster.of("h100x8", 4).with_free_links()} if mode == "dynamic_programming" else {}
    net = Looks(LOOKING[name], clusters=name.startswith("Adaptive"))
    td.Distribution.set_default_validate_args(True)  # torch.compile, of an earlier test, sets it to False for good
    assert_as_one_device(net, (batches()[0],), (batches()[1],), devices=4, mode=mode, **options)
    with pytest.raises(ValueError, match="parameter"):
        td.Normal(torch.zeros(1), -torch.ones(1))  # looked at again
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(torch.zeros(1), torch.zeros(1), -torch.ones(1))


def labels(reduction: str, zero_infinity: bool, as_lists: bool) -> Callable[[Tensor, Tensor], Tensor]:
    lengths = [6, 6, 5, 6, 4, 6, 6, 3], [2, 3, 1, 2, 2, 3, 1, 3]
    given = lengths if as_lists else tuple(map(torch.tensor, lengths))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        made = F.ctc_loss(out.log_softmax(2), target, *given, reduction=reduction, zero_infinity=zero_infinity)
        return made.square().mean()

    return loss


@pytest.mark.parametrize("mode", ["semi_auto", "dynamic_programming"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("as_lists", [False, True])
def test_ctc(reduction: str, as_lists: bool, mode: str) -> None:
    x = torch.randn(6, 8, 8, dtype=D, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(1, 4, (8, 3), generator=torch.Generator().manual_seed(2))
    options = {"cluster": sw.Cluster.of("h100x8", 4).with_free_links()} if mode == "dynamic_programming" else {}
    for zero_infinity in (False, True):
        loss = labels(reduction, zero_infinity, as_lists)
        model = assert_as_one_device(
            Looks(lambda m, h: m.head(h)), (x, targets), loss_fn=loss, devices=4, mode=mode, **options
        )
    if mode == "dynamic_programming":  # in semi_auto dim 0, which are steps here, counts as the batch
        assert model.plan.operator("ctc_loss").in_strategy[0] == (1, 4, 1)


def test_ctc_of_one_row() -> None:
    x, target = torch.randn(6, 8, dtype=D), torch.tensor([1, 2, 2])

    def f(m: Any, h: Tensor) -> Tensor:
        return F.ctc_loss(m.head(h).log_softmax(1), target, torch.tensor(6), torch.tensor(3))

    assert_as_one_device(Looks(f), (x,), devices=2)


MISTAKES: dict[str, tuple[Callable[[Any, Tensor], Any], str, str]] = {
    "one_hot": (lambda m, h: h[:, :4] * F.one_hot(ROWS), "one_hot without num_classes", "num_classes=…"),
    "one_hot by another name": (lambda m, h: h[:, :4] * indicators(ROWS), "one_hot without", "num_classes=…"),
    "labels in one dim": (
        lambda m, h: F.ctc_loss(h.view(2, 4, 8).log_softmax(2), torch.ones(4).long(), [2] * 4, [1] * 4),
        "labels one after another",
        "padded targets",
    ),
    "other lengths": (
        lambda m, h: F.ctc_loss(h.view(2, 4, 8).log_softmax(2), torch.ones(4, 1).long(), [2] * 2, [1] * 2),
        "4 rows with 2 lengths",
        "an input",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_values_that_have_to_be_looked_at(name: str) -> None:
    f, problem, legal = MISTAKES[name]
    with pytest.raises(sw.CaptureError, match=problem) as raised:
        parallel(Looks(f), devices=4)(batches()[0])
    assert legal in raised.value.legal and raised.value.source.startswith("test_watched_calls.py")


def test_a_check_of_values_is_named() -> None:
    def f(m: Any, h: Tensor) -> Tensor:
        torch._assert_async((h < 100).all(), "too large")  # here
        return h

    with pytest.warns(UserWarning, match=rf"{line_of(f, '# here')}: torch._assert_async is left out"):
        parallel(Looks(f), devices=4)(batches()[0])


def test_a_check_of_a_distribution_that_is_asked_for() -> None:
    """Torch 2.15 makes it an operator; earlier versions take a number out of a tensor."""
    model = parallel(Looks(lambda m, h: td.Normal(h, h.exp(), validate_args=True).rsample()), devices=4)
    if hasattr(td.distribution, "_all_true_or_runtime_assert"):
        with pytest.warns(UserWarning, match="torch._assert_async is left out"):
            model(batches()[0])
        return
    with pytest.raises(sw.CaptureError, match="takes a number out of a tensor") as raised:
        model(batches()[0])
    assert "without validate_args=True" in raised.value.legal
