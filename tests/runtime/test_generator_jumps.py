"""Rows of random parameters that a rank draws alone: those of an ordinary construction, bit for bit."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator

import pytest
import torch
from collective_log import rank_of_eight
from torch import nn

import shardwright as sw
from shardwright.runtime import deferred_init, generator_jumps
from shardwright.runtime.generator_jumps import Numbers, draws_by_place, jumped, words_of

UNIFORM, NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors are large here; the generator is left as it was."""
    monkeypatch.setattr(deferred_init, "LARGE", 16)
    monkeypatch.setattr(generator_jumps, "JUMP", 1)
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("words", [0, 1, 622, 623, 624, 625, 19_937, 123_457, 3_000_001])
@pytest.mark.parametrize("before", [0, 5, 624])
def test_a_jump_is_as_many_draws(words: int, before: int) -> None:
    torch.manual_seed(3)
    torch.rand(before)
    there = jumped(torch.get_rng_state(), words)
    torch.rand(words)
    expected = torch.rand(700)
    torch.set_rng_state(there)
    assert torch.equal(torch.rand(700), expected)


def test_a_number_that_normal_has_kept_is_not_lost() -> None:
    torch.manual_seed(3)
    torch.empty(3).normal_()  # the fourth is kept
    there = jumped(torch.get_rng_state(), 1000)
    torch.rand(1000)
    expected = torch.empty(3).normal_()
    torch.set_rng_state(there)
    assert torch.equal(torch.empty(3).normal_(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", [UNIFORM, NORMAL], ids=["uniform", "normal"])
def test_rows_are_those_of_the_whole(fill: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    assert draws_by_place(fill, dtype)
    draw = random.Random(str((fill, dtype)))
    for _ in range(40):
        rows, width = draw.randint(1, 20), draw.choice((1, 3, 16, 33, 64))
        if rows * width < 16:
            continue
        begin, end = sorted(draw.choices(range(rows + 1), k=2))
        torch.manual_seed(draw.randrange(1000))
        torch.rand(draw.randrange(700))
        start, part = torch.get_rng_state(), torch.empty(rows, width, dtype=dtype)
        whole = fill(torch.empty(rows, width, dtype=dtype), 0.25, 0.5)
        after = torch.rand(5)
        torch.set_rng_state(start)
        numbers = Numbers()
        numbers.fill_rows(fill, part, begin, end, 0.25, 0.5)
        assert torch.equal(part[begin:end], whole[begin:end])
        numbers.arrive()
        assert torch.equal(torch.rand(5), after)
    assert words_of(UNIFORM, torch.float64, 17) == 34


# -- models ------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Values of all kinds: fills, overwritten, tied, converted, computed, of several rows at once, and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(48, 24)
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        self.head = nn.Linear(24, 48)
        self.head.weight = self.tokens.weight  # its own is dropped
        nn.init.normal_(self.layers[0].weight, std=0.02)
        nn.init.trunc_normal_(self.layers[1].weight)  # takes as many numbers as it needs
        self.scaled = nn.Parameter(torch.randn(40, 24) * 0.1 + 1)
        self.uneven = nn.Parameter(torch.rand(19, 24).double())
        torch.manual_seed(17)
        nn.init.xavier_uniform_(self.layers[2].weight)
        self.layers[2].weight.data.mul_(0.5)
        with torch.no_grad():
            self.layers[2].weight[3] = 0.0  # one row alone: the whole is drawn
        self.columns = nn.Parameter(torch.empty(24, 24).normal_())
        self.last = nn.Linear(24, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.last(self.layers(self.tokens(tokens))) @ self.columns
        return self.head(x).sum() + self.scaled.sum() + self.uneven.sum()


class Tokens(nn.Module):
    """Normal numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(48, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens).sum()


def start(make: Callable[[], nn.Module]) -> None:
    """Compare a model whose parameters are cut in rows, after its first call as rank 3 of 8, with one device."""
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = make()
    torch.manual_seed(5)
    one = make()
    with rank_of_eight(rank=3):
        model = sw.AutoParallel(net, None, "data_parallel").dataset_strategy("full_batch")
        model.hsdp(threshold=0, optimizer_level="level1")
        model(torch.arange(16).reshape(8, 2))
        held = {name: (p.to_local().detach().clone(), p.placements) for name, p in net.named_parameters()}
    for name, whole in one.named_parameters():
        local, placements = held[name]
        if placements[0].is_shard():
            whole = [*whole.detach().chunk(8), *[whole.detach()[:0]] * 8][3]
        assert torch.equal(local, whole), name


def test_a_rank_draws_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(draws_by_place(fill, torch.float32) for fill in (UNIFORM, NORMAL))
    plain, drawn = Numbers.fill_rows, []

    def fill_rows(self: Numbers, fill, whole, begin: int, end: int, *args) -> None:
        drawn.append((len(whole[begin:end].flatten()), whole.numel()))
        plain(self, fill, whole, begin, end, *args)

    monkeypatch.setattr(Numbers, "fill_rows", fill_rows)
    start(Layers)
    some, whole = (sum(each) for each in zip(*drawn))
    assert len(drawn) >= 8 and some <= whole / 5
    assert (0, 48 * 24) in drawn  # the weight that was dropped


def test_where_torch_draws_in_another_way_the_whole_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generator_jumps._as_whole
    monkeypatch.setattr(generator_jumps, "_as_whole", lambda fill, *given: fill is not NORMAL and plain(fill, *given))
    monkeypatch.setattr(Numbers, "fill_rows", lambda self, fill, *given: fill is not NORMAL or pytest.fail("in rows"))
    draws_by_place.cache_clear()
    try:
        assert not draws_by_place(NORMAL, torch.float32)
        start(Tokens)
    finally:
        draws_by_place.cache_clear()


def test_a_large_tensor_takes_no_more_memory_and_numbers_than_its_rows() -> None:
    """Two rows of 2¹⁵, of 2 GiB together, which are neither drawn nor written."""
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = nn.Linear(1 << 14, 1 << 15, bias=False)
    rows, kept = (30_000, 30_002), list[torch.Tensor]()

    def keep(name: str, old: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        kept.append(whole[slice(*rows)].clone())
        return torch.empty(0)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    deferred_init.materialize(net, keep, real=False, rows=lambda name, tensor: rows)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB
    torch.manual_seed(5)
    torch.set_rng_state(jumped(torch.get_rng_state(), rows[0] << 14))
    bound = net.in_features**-0.5
    assert torch.equal(kept[0], torch.empty(2, 1 << 14).uniform_(-bound, bound))
