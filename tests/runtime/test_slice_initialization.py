"""Parts of random parameters that a rank draws alone: those of an ordinary construction, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from collective_log import rank_of_eight
from torch import nn

import shardwright as sw
from shardwright.runtime import deferred_init, slice_initialization
from shardwright.runtime.slice_initialization import (
    Numbers,
    draws_by_place,
    jumped,
    row_blocks,
    truncates_by_place,
    words_drawn,
)

UNIFORM, NORMAL = torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors are large here; the generator is left as it was."""
    monkeypatch.setattr(slice_initialization, "LARGE", 16)
    monkeypatch.setattr(slice_initialization, "JUMP", 1)
    monkeypatch.setattr(slice_initialization, "BLOCK", 400)
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
    if not draws_by_place(fill, dtype):
        assert torch.__version__ < "2.10" and fill is NORMAL and dtype.itemsize == 2
        pytest.skip("torch 2.9 draws normal numbers of two bytes in another order")
    draw = random.Random(str((fill, dtype)))
    for _ in range(40):
        rows, width = draw.randint(1, 20), draw.choice((1, 3, 16, 33, 64))
        if rows * width < 16:
            continue
        begin, end = sorted(draw.choices(range(rows + 1), k=2))
        torch.manual_seed(draw.randrange(1000))
        torch.rand(draw.randrange(700))
        start, numel = torch.get_rng_state(), rows * width
        whole = fill(torch.empty(numel, dtype=dtype), 0.25, 0.5)
        after = torch.rand(5)
        blocks = [(a * width, b * width) for a, b in row_blocks(begin, end, width, numel)]
        for spans, into in (([(begin * width, end * width)], torch.empty(numel, dtype=dtype)), (blocks, None)):
            torch.set_rng_state(start)
            numbers = Numbers()
            pieces = numbers.pieces(fill, dtype, numel, spans if begin < end else [], 0.25, 0.5, into=into)
            part = torch.cat([torch.empty(0, dtype=dtype), *pieces])
            assert torch.equal(part, whole[begin * width : end * width])
            assert into is None or torch.equal(into[begin * width : end * width], part)
            numbers.arrive()
            assert torch.equal(torch.rand(5), after)
    assert words_drawn(UNIFORM, torch.float64, 17) == 34


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_truncated_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    draw = random.Random(str(dtype))
    if torch.__version__.startswith("2.13"):
        assert truncates_by_place(dtype)
    for bound in (0.7, 1.5, 3.0, 50.0) if truncates_by_place(dtype) else ():
        rows, width = draw.randint(30, 90), draw.choice((3, 16, 33))
        torch.manual_seed(draw.randrange(1000))
        torch.rand(draw.randrange(700))
        start, numel = torch.get_rng_state(), rows * width
        whole = nn.init.trunc_normal_(torch.empty(numel, dtype=dtype), 0.0, 1.0, -bound, bound)
        after, numbers = torch.rand(5), Numbers()
        torch.set_rng_state(start)
        spans = [(a * width, b * width) for a, b in row_blocks(0, rows, width, numel)]
        bounds = [torch.tensor(x, dtype=dtype).item() for x in (-bound, bound)]
        assert torch.equal(torch.cat([*numbers.truncated(dtype, numel, spans, 0.0, 1.0, *bounds)]), whole)
        numbers.arrive()
        assert torch.equal(torch.rand(5), after)


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
    plain, drawn = Numbers.pieces, []

    def pieces(self: Numbers, fill, dtype: torch.dtype, numel: int, spans, *args, into=None) -> Iterator[torch.Tensor]:
        drawn.append((sum(last - first for first, last in spans), numel))
        return plain(self, fill, dtype, numel, spans, *args, into=into)

    monkeypatch.setattr(Numbers, "pieces", pieces)
    start(Layers)
    some, whole = (sum(each) for each in zip(*drawn))
    assert len(drawn) >= 8 and some <= whole / 5
    assert (0, 48 * 24) in drawn  # the weight that was dropped


def test_where_torch_draws_in_another_way_the_whole_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = slice_initialization._as_whole
    monkeypatch.setattr(
        slice_initialization, "_as_whole", lambda fill, *given: fill is not NORMAL and plain(fill, *given)
    )
    plain_pieces = Numbers.pieces
    monkeypatch.setattr(
        Numbers,
        "pieces",
        lambda self, fill, *given, **more: (
            pytest.fail("in parts") if fill is NORMAL else plain_pieces(self, fill, *given, **more)
        ),
    )
    draws_by_place.cache_clear()
    try:
        assert not draws_by_place(NORMAL, torch.float32)
        start(Tokens)
    finally:
        draws_by_place.cache_clear()


class Kinds(nn.Module):
    """Parameters of one to four dims, by every way that a part can be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.empty(40, 24).normal_(1, 2)), nn.Parameter(torch.rand(50))
        self.kernel, self.experts = nn.Conv2d(6, 12, 3).weight, nn.Parameter(torch.randn(6, 10, 8).mul(0.5))
        self.far, self.near, self.rare = (nn.Parameter(torch.empty(33, 19)) for _ in range(3))
        nn.init.trunc_normal_(self.far, std=0.02)
        nn.init.trunc_normal_(self.near, 0.5, 1, -1, 1.5)
        nn.init.trunc_normal_(self.rare, 0, 1, 2, 3)  # of these torch draws other numbers
        self.ones, self.full = nn.Parameter(torch.ones(9, 12)), nn.Parameter(torch.full((9, 12), 3.0))
        self.wide = nn.Parameter(torch.rand(19, 24).double().sub_(0.5))
        self.one, self.tied = nn.Embedding(40, 24), nn.Linear(24, 40, bias=False)
        self.tied.weight = self.one.weight
        self.last = nn.Parameter(torch.zeros(16, 4).bernoulli_(0.3))  # whole


@pytest.mark.parametrize("seed", range(6))
def test_any_slice_is_that_of_an_ordinary_construction(seed: int) -> None:
    draw, slices, kept = random.Random(seed), dict[str, tuple[slice, ...]](), dict[str, torch.Tensor]()
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = Kinds()
    torch.manual_seed(5)
    one, after = Kinds(), torch.rand(3)

    def part(name: str, tensor: torch.Tensor) -> tuple[slice, ...]:
        dims = [
            sorted(draw.choices(range(size + 1), k=2)) if draw.random() < 0.6 else (0, size) for size in tensor.shape
        ]
        slices[name] = tuple(slice(*each) for each in dims)
        return slices[name]

    def keep(name: str, old: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        assert whole.shape == old.shape and whole.dtype == old.dtype
        kept[name] = whole[slices.get(name, ...)].clone()
        return torch.empty(0)

    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        deferred_init.materialize(net, keep, real=False, part=part)
    assert after.shape == (3,) and len(slices) >= 10
    for name, whole in one.named_parameters():
        assert torch.equal(kept[name], whole.detach()[slices.get(name, ...)]), name


def test_a_layer_that_is_cut_in_columns() -> None:
    """Rank 3 of 8, whose part of the weight is an eighth of each row."""
    make = lambda: nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16))
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = make()
    torch.manual_seed(5)
    one = make()
    sw.shard(net[1], ((1, 8), (1, 8)))
    with rank_of_eight(rank=3):
        model = sw.AutoParallel(net, None, "semi_auto").dataset_strategy("full_batch")
        model(torch.ones(4, 32))
        assert torch.equal(net[1].weight.to_local(), one[1].weight[:, 9:12])
        assert torch.equal(net[0].weight.to_local(), one[0].weight)


def grown(make: Callable[[], nn.Module], part: tuple[slice, ...]) -> tuple[int, torch.Tensor]:
    """By how many KiB the most memory of this process grows where a module's first parameter is made, and its part."""
    torch.manual_seed(5)
    with sw.no_init_parameters():
        net = make()
    kept = list[torch.Tensor]()

    def keep(name: str, old: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        kept.append(whole[part].clone())
        return torch.empty(0)

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    deferred_init.materialize(net, keep, real=False, part=lambda name, tensor: part)
    return peak() - before, kept[0]


def peak() -> int:
    """The most memory of this process, in KiB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def test_a_large_tensor_takes_no_more_memory_and_numbers_than_its_rows() -> None:
    """Two rows of 2¹⁵, of 2 GiB together, which are neither drawn nor written."""
    more, kept = grown(lambda: nn.Linear(1 << 14, 1 << 15, bias=False), (slice(30_000, 30_002), slice(1 << 14)))
    assert more < 1 << 14
    torch.manual_seed(5)
    torch.set_rng_state(jumped(torch.get_rng_state(), 30_000 << 14))
    bound = 128**-1.0
    assert torch.equal(kept, torch.empty(2, 1 << 14).uniform_(-bound, bound))


class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1 << 11, 1 << 11))
        nn.init.trunc_normal_(self.weight, std=0.9)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(1 << 13, 1 << 12, bias=False), Truncated], ids=["columns", "rounds"]
)
def test_what_is_drawn_whole_takes_the_memory_of_a_block(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some columns of 128 MiB, and of 16 MiB that are drawn several times."""
    monkeypatch.setattr(slice_initialization, "BLOCK", 1 << 18)
    more, kept = grown(make, (slice(None), slice(100, 108)))
    assert more < 20 << 10 and kept.shape[1] == 8
    torch.manual_seed(5)
    assert torch.equal(kept, make().weight.detach()[:, 100:108])
