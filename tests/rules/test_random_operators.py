"""Random numbers belong to positions of whole tensors: the same on any number of devices, under any layout."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from one_device import close, parallel, squares
from ranks import run_ranks
from small_networks import Apply, D, draw, labels
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw
from shardwright.process_runtime import RandomStream, of_micro_batch, stream
from shardwright.rules import random_operators
from shardwright.rules.random_numbers import counter_rng
from shardwright.rules.random_numbers.counter_rng import KINDS, PLAIN, device_words, host_words, key

CROSS_ENTROPY = nn.CrossEntropyLoss()
X, T = draw(16, 8), labels(16)
EXACT, FAST = torch.tensor([5, 0, 1, 0]), torch.tensor([5, 0, 0, 0])

mask, numbers = torch.ops.shardwright.mask.default, torch.ops.shardwright.draw.default


def bits(start: int, step: int, count: int) -> Tensor:
    return host_words(start, step, np.array([0]), count)[0]


def as_unsigned(words: Tensor) -> np.ndarray:
    return words.numpy().view(np.uint64)


# -- the generator -----------------------------------------------------------------------------------------------------


def test_words_are_those_of_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    made = host_words(1234567, 0x9E3779B97F4A7C15, np.array([1]), 5)[0]  # as published for the seed 1234567
    assert as_unsigned(made).tolist() == known


def test_words_are_the_same_on_every_device() -> None:
    offsets = np.array([3, 0, 2**40])
    start, step = key(2**64 - 1, 7, 2)
    assert step % 2 == 1
    cpu = torch.device("cpu")
    assert torch.equal(host_words(start, step, offsets, 9), device_words(start, step, torch.tensor(offsets), 9, cpu))
    assert torch.equal(host_words(start, step, offsets[:1], 9), device_words(start, step, 3, 9, cpu))


@pytest.mark.parametrize("micro", [(), (0, 3, 4)], ids=["whole", "micro-batch"])
@pytest.mark.parametrize("width", [6000, 6001], ids=["even", "odd"])
def test_a_device_copies_nothing_from_the_host(width: int, micro: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators, here on four threads of the CPU: rows that begin in equal and in different halves of a
    word, and rows of a micro-batch whose batch is in pieces."""
    seed = of_micro_batch(EXACT, 2)
    starts, rest = [torch.tensor([20]), torch.tensor([1000])], (None, [0, 1], [40, 3000], [80, width], 3)
    with monkeypatch.context() as one_thread:
        one_thread.setattr(torch, "get_num_threads", lambda: 1)
        wanted = mask(seed, starts, *rest, 0.4, torch.bool, None, list(micro))
        numbers_wanted = numbers(seed, starts, *rest, "uniform", D, None, list(micro))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in ("from_numpy", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, None)
    monkeypatch.setattr(counter_rng, "host_words", None)
    found = PLAIN[mask](seed, starts, *rest, 0.4, torch.float16, None, list(micro))
    assert torch.equal(found, wanted.half())
    assert torch.equal(PLAIN[numbers](seed, starts, *rest, "uniform", D, None, list(micro)), numbers_wanted)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("shape", [(7,), (6, 10), (4, 7, 5), (3, 1, 9), (70001,), (3, 40000)])
def test_a_slice_is_the_slice_of_the_whole(shape: tuple[int, ...], threads: int) -> None:
    whole, generator = list(shape), torch.Generator().manual_seed(0)
    torch.set_num_threads(threads)
    try:
        kept = mask(EXACT, [], None, [], whole, whole, 3, 0.7, torch.bool, None)
        drawn = {kind: numbers(EXACT, [], None, [], whole, whole, 3, kind, D, None) for kind in KINDS}
        for _ in range(4):
            begin = [int(torch.randint(0, s, (), generator=generator)) for s in shape]
            size = [int(torch.randint(1, s - b + 1, (), generator=generator)) for s, b in zip(shape, begin)]
            part = tuple(slice(b, b + s) for b, s in zip(begin, size))
            where = [torch.tensor([b]) for b in begin], None, list(range(len(shape))), size, whole, 3
            assert torch.equal(mask(EXACT, *where, 0.7, torch.bool, None), kept[part])
            assert torch.equal(mask(EXACT, *where, 0.7, D, None), kept[part].to(D))
            for kind, values in drawn.items():
                assert torch.equal(numbers(EXACT, *where, kind, D, None), values[part]), kind
    finally:
        torch.set_num_threads(1)
    assert kept.dtype == torch.bool and (kept.numel() < 10 or 0 < kept.sum() < kept.numel())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([(), (3,), (2, 4)]),
    st.sampled_from([(), (2,)]),
    st.data(),
)
def test_micro_batches_draw_the_rows_of_the_whole_batch(
    count: int, pieces: int, piece: int, minor: tuple[int, ...], major: tuple[int, ...], data: st.DataObject
) -> None:
    """Any slice of any micro-batch: a dim of some pieces, each of which stands beside those of the others."""
    dim, size = len(major), [*major, pieces * piece, *minor]
    whole = [*major, pieces * count * piece, *minor]
    kept = mask(EXACT, [], None, [], whole, whole, 3, 0.7, D, None)
    drawn = numbers(EXACT, [], None, [], whole, whole, 3, "integer", torch.int64, None)
    begin = [data.draw(st.integers(0, s - 1)) for s in size]
    length = [data.draw(st.integers(1, s - b)) for s, b in zip(size, begin)]
    part = tuple(slice(b, b + n) for b, n in zip(begin, length))
    where = [torch.tensor([b]) for b in begin], None, list(range(len(size))), length, size, 3
    for k in range(count):
        seed = of_micro_batch(EXACT, k)
        mine = (
            x.unflatten(dim, (pieces, count, piece)).select(dim + 1, k).flatten(dim, dim + 1)[part]
            for x in (kept, drawn)
        )
        micro = [dim, count, pieces]
        assert torch.equal(mask(seed, *where, 0.7, D, None, micro), next(mine))
        assert torch.equal(numbers(seed, *where, "integer", torch.int64, None, micro), next(mine))


def test_fast_numbers_differ_between_micro_batches() -> None:
    def mine(k: int) -> Tensor:
        return mask(of_micro_batch(FAST, k), [], None, [], [64, 8], [64, 8], 3, 0.5, D, None, [0, 3, 2])

    assert torch.equal(mine(1), mine(1)) and (mine(0) != mine(1)).any() and (mine(1) != mine(2)).any()


def deviations(counts: Tensor, expected: Tensor | float) -> float:
    """The distance of the chi-square statistic of counts from its mean, in standard deviations."""
    terms = (counts.double() - expected) ** 2 / expected
    return abs(float(terms.sum()) - (counts.numel() - 1)) / math.sqrt(2 * counts.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_bits_are_even_and_independent(seed: int) -> None:
    """Neighbours in a tensor, operators, calls and seeds that follow one another."""
    n = 1 << 16
    along = bits(*key(seed, 0, 0), n)
    across = {
        "operators": torch.stack([bits(*key(seed, 0, i), 64) for i in range(512)]),
        "calls": torch.stack([bits(*key(seed, i, 0), 64) for i in range(512)]),
        "seeds": torch.stack([bits(*key(seed + i, 0, 0), 64) for i in range(512)]),
    }
    assert along.unique().numel() == n and all(words.unique().numel() == words.numel() for words in across.values())
    pairs = {"neighbours": (along[:-1], along[1:]), "halves": (along, (along >> 32 & 0xFFFFFFFF) | along << 32)}
    pairs |= {what: (words[:-1].flatten(), words[1:].flatten()) for what, words in across.items()}
    shifts = torch.arange(64)
    for what, (one, other) in pairs.items():
        set_ = (one[:, None] >> shifts & 1).double() - 0.5
        next_ = (other[:, None] >> shifts & 1).double() - 0.5
        sigma = 0.5 / math.sqrt(one.numel())
        assert set_.mean(0).abs().max() < 4.5 * sigma, what  # each bit
        correlation = set_.T @ next_ / one.numel()  # each with each of the next
        if what == "halves":
            correlation -= torch.diag_embed(torch.diagonal(correlation, 32), 32) + torch.diag_embed(
                torch.diagonal(correlation, -32), -32
            )  # with itself
        assert correlation.abs().max() < 5.5 * sigma / 2, what
        for shift in (0, 24, 31, 56):  # pairs of six-bit numbers
            both = (one >> shift & 63) * 64 + (other >> shift & 63)
            if what == "halves" and shift == 31:
                continue  # share bits
            assert deviations(torch.bincount(both, minlength=4096), one.numel() / 4096) < 5, (what, shift)


def test_numbers_have_their_distributions() -> None:
    size = [1 << 9, 1 << 8]
    n = math.prod(size)

    def drawn(kind: str, dtype: torch.dtype = D) -> Tensor:
        return numbers(EXACT, [], None, [], size, size, 1, kind, dtype, None).flatten()

    even = drawn("uniform")
    normal, waits = drawn("normal"), drawn("exponential")
    for _values, through in ((even, even), (normal, torch.special.ndtr(normal)), (waits, 1 - torch.exp(-waits))):
        at = torch.arange(1, n + 1, dtype=D) / n
        assert (through.sort().values - at).abs().max() < 1.95 / math.sqrt(n)  # Kolmogorov, 0.1 %
    assert abs(normal.mean()) < 4 / math.sqrt(n) and abs(normal.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((normal**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert waits.min() > 0 and even.min() >= 0 and even.max() < 1
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert drawn("uniform", dtype).max() < 1 and abs(drawn("uniform", dtype).double().mean() - 0.5) < 0.005
    sides = drawn("integer", torch.int64) % 6
    assert sides.min() == 0 and deviations(torch.bincount(sides), n / 6) < 4


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", [EXACT, FAST], ids=["exact", "fast"])
def test_masks_keep_as_much_as_asked(seed: Tensor, p: float) -> None:
    size = [512, 512]
    kept = mask(seed, [], None, [], size, size, 0, p, torch.float32, None)
    n = kept.numel()
    assert abs(kept.double().mean() - p) <= 4.5 * math.sqrt(p * (1 - p) / n)
    if 0.05 < p < 0.95:
        rows, columns = ((kept.double().mean(d) - p) / math.sqrt(p * (1 - p) / 512) for d in (0, 1))
        assert rows.abs().max() < 5 and columns.abs().max() < 5
        lagged = ((kept.double()[:, :-1] - p) * (kept.double()[:, 1:] - p)).mean() / (p * (1 - p))
        assert abs(lagged) < 4.5 / math.sqrt(n)


def test_choices_have_their_probabilities() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0, 4.0]], dtype=D).expand(20_000, 4)
    choose = torch.ops.shardwright.choose.default
    chosen = choose(EXACT, [], weights, [], [20_000], 0, 2, True)
    assert deviations(torch.bincount(chosen.flatten(), minlength=4)[[0, 2, 3]], torch.tensor([1, 3, 4]) * 5000) < 4
    first, second = choose(EXACT, [], weights, [], [20_000], 0, 2, False).unbind(1)
    assert deviations(torch.bincount(first, minlength=4)[[0, 2, 3]], torch.tensor([1, 3, 4]) * 2500) < 4
    after = torch.bincount(second[first == 3], minlength=4)
    assert after[3] == 0 and after[1] == 0
    assert deviations(after[[0, 2]], torch.tensor([0.25, 0.75]) * int((first == 3).sum())) < 4


def test_operators_pass_through_torch_compile() -> None:
    def dropped(seed: Tensor, x: Tensor) -> Tensor:
        size = list(x.shape)
        return x * PLAIN[mask](seed, [], x.detach(), [], size, size, 0, 0.5, torch.bool, None)

    x = X.clone().requires_grad_()
    compiled = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    for seed in (EXACT, torch.tensor([5, 1, 1, 0])):
        close(compiled(seed, x), dropped(seed, x))
        close(torch.autograd.grad(compiled(seed, x).sum(), x), torch.autograd.grad(dropped(seed, x).sum(), x))


# -- the seed of a call ------------------------------------------------------------------------------------------------


def test_calls_are_counted_from_when_torch_was_seeded() -> None:
    mine = RandomStream()
    torch.manual_seed(3)
    first = [mine.draw(True).tolist() for _ in range(3)]
    assert first == [[3, 0, 1, 0], [3, 1, 1, 0], [3, 2, 1, 0]]
    torch.randn(5)  # a loader's
    assert mine.draw(False).tolist() == [3, 3, 0, 0]
    torch.manual_seed(3)
    assert mine.upcoming() == (3, 0) == mine.upcoming()
    mine.draw(True)
    torch.manual_seed(4)
    torch.randn(5)  # before the first call
    assert mine.draw(True).tolist() == [4, 0, 1, 0]
    torch.manual_seed(-1)
    assert mine.draw(True).tolist() == [-1, 0, 1, 0]


@pytest.mark.parametrize("ranks", [False, True])
def test_a_run_that_is_seeded_alike_again_draws_alike(ranks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a model was built between the seed and the first call; ranks, whose states may differ, count on."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks)
    mine, runs = RandomStream(), []
    for steps in (3, 5000, 3):
        torch.manual_seed(3)
        torch.randn(5)
        runs.append([mine.draw(True)[1].item() for _ in range(steps)])
    assert runs[0] == [0, 1, 2] and runs[2] == ([5003, 5004, 5005] if ranks else [0, 1, 2])
    saved = mine.state_dict()
    torch.manual_seed(3)
    torch.randn(5)
    mine.load_state_dict(saved | {"calls": 7})
    assert [mine.draw(True)[1].item() for _ in range(2)] == [7, 8]


def test_a_run_goes_on_where_it_was_saved() -> None:
    mine, later = RandomStream(), RandomStream()
    torch.manual_seed(3)
    mine.draw(True), mine.draw(True)
    saved = mine.state_dict()
    expected = [mine.draw(True).tolist() for _ in range(2)]
    torch.manual_seed(99)
    later.load_state_dict(saved)
    assert [later.draw(True).tolist() for _ in range(2)] == expected
    torch.manual_seed(99)
    assert later.draw(True).tolist() == [99, 0, 1, 0]


# -- networks ----------------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """A network with a dropout, and one in a module, marked or not."""

    def __init__(self, mark: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second, self.inner = nn.Linear(8, 16, dtype=D), nn.Linear(16, 8, dtype=D), nn.Dropout(0.25)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.drop = F.dropout if mark is None else sw.shard(F.dropout, (mark,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.relu(self.first(x)))
        return self.second(self.drop(x, 0.4, self.training) + 0.01 * torch.randn_like(x))


def trained(mark: Any = None, steps: int = 3, seed: int = 7, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps, and the parameters after them."""
    net = Dropped(mark)
    model = parallel(net, CROSS_ENTROPY, **options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(seed)
    losses = []
    for step in range(steps):
        torch.rand(step)  # whatever the loop itself draws
        loss = model(X, T)
        loss.backward()
        losses.append(loss.item())
        optimizer.step(), optimizer.zero_grad()
    return losses, dict(net.named_parameters())


@pytest.fixture(scope="module")
def on_one_device() -> tuple[list[float], dict[str, Tensor]]:
    losses, parameters = trained(mode="stand_alone")
    assert len(set(losses)) == 3 and losses != trained(mode="stand_alone", seed=8)[0]
    return losses, parameters


@pytest.mark.parametrize(
    "mark", [None, ((2, 4)), ((8, 1)), ((1, 8)), ((4, 1)), sw.Layout((2, 4), ("a", "b"))("b", "a")], ids=str
)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_losses_are_those_of_one_device(mark: Any, devices: int, on_one_device) -> None:
    if mark is not None:
        cuts = mark.cuts if isinstance(mark, sw.Layout) else mark
        if devices != 8:
            mark = tuple(min(c, devices // (1 if i == 0 else min(cuts[0], devices))) for i, c in enumerate(cuts))
    losses, parameters = trained(mark, devices=devices)
    assert losses == pytest.approx(on_one_device[0], rel=1e-12)
    close(parameters, on_one_device[1])


@pytest.mark.parametrize("devices", [2, 8])
def test_data_parallel_draws_for_the_whole_batch(devices: int, on_one_device) -> None:
    losses, parameters = trained(devices=devices, mode="data_parallel", dataset="data_parallel")
    assert losses == pytest.approx(on_one_device[0], rel=1e-12)
    close(parameters, on_one_device[1])


def test_calls_differ_seeds_repeat_and_evaluation_draws_nothing() -> None:
    net = nn.Sequential(nn.Linear(8, 16, dtype=D), nn.Dropout(0.5))
    model = parallel(net)
    torch.manual_seed(2)
    one, two = model(X), model(X)
    assert not torch.equal(one, two)
    kept = (one != 0).double().mean()
    assert 0.3 < kept < 0.7
    close(one[one != 0], 2 * net[0](X)[one != 0])
    model.eval()
    before = torch.get_rng_state()
    close(model(X), net[0](X))
    assert torch.equal(torch.get_rng_state(), before)
    model.train()
    torch.manual_seed(2)
    assert torch.equal(model(X), one) and torch.equal(model(X), two)


def test_two_models_do_not_share_their_numbers() -> None:
    nets = [parallel(nn.Dropout(0.5)) for _ in range(2)]
    torch.manual_seed(2)
    assert not torch.equal(nets[0](X), nets[1](X))


def test_two_operators_do_not_share_their_numbers() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.dropout(x), F.dropout(x)

    one, two = parallel(Twice())(X)
    assert 0.2 < ((one == 0) == (two == 0)).double().mean() < 0.8


def in_place(change: str, *args: Any):
    return lambda m, x: getattr(torch.empty_like(x @ m.w), change)(*args)


DRAWING = {
    "rand": lambda m, x: torch.rand(16, 8, dtype=D) * x,
    "randn": lambda m, x: (x @ m.w) + torch.randn(8, dtype=D),
    "randint": lambda m, x: torch.randint(2, 9, (16, 8)) + x,
    "randperm": lambda m, x: x @ m.w * torch.randperm(8),
    "likes": lambda m, x: torch.rand_like(x @ m.w) + torch.randn_like(x) + torch.randint_like(x, 7),
    "bernoulli": lambda m, x: torch.bernoulli((x @ m.w).sigmoid()) + torch.bernoulli(x, 0.3),
    "normal": lambda m, x: torch.normal(x @ m.w, 2.0) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs()),
    "uniform_": in_place("uniform_", -1, 1),
    "exponential_": in_place("exponential_", 2.0),
    "normal_": in_place("normal_", 1, 2),
    "bernoulli_": in_place("bernoulli_", 0.3),
    "geometric_": in_place("geometric_", 0.3),
    "cauchy_": in_place("cauchy_"),
    "random_": in_place("random_", 50),
    "log_normal_": in_place("log_normal_"),
    "bernoulli_ of tensors": lambda m, x: torch.empty_like(x).bernoulli_((x @ m.w).sigmoid()),
    "multinomial": lambda m, x: torch.multinomial((x @ m.w).softmax(1), 3) * 1.0,
    "multinomial again": lambda m, x: torch.multinomial((x @ m.w).softmax(1), 12, True) * 1.0,
    "rrelu": lambda m, x: F.rrelu(x @ m.w, training=True),
    "rrelu_": lambda m, x: F.rrelu(x @ m.w, training=True, inplace=True),
    "dropout_": lambda m, x: F.dropout(x @ m.w, 0.3, inplace=True),
    "alpha_dropout": lambda m, x: F.alpha_dropout(x @ m.w, 0.3, training=True),
    "dropout1d": lambda m, x: F.dropout1d((x @ m.w).view(16, 4, 2), 0.5),
    "dropout2d": lambda m, x: F.dropout2d((x @ m.w).view(16, 2, 2, 2), 0.5),
    "dropout3d": lambda m, x: F.dropout3d((x @ m.w).view(16, 2, 1, 2, 2), 0.5),
    "feature_alpha_dropout": lambda m, x: F.feature_alpha_dropout((x @ m.w).view(16, 2, 4), 0.5, training=True),
    "native_dropout": lambda m, x: torch.native_dropout(x @ m.w, 0.5, True),
    "gumbel_softmax": lambda m, x: F.gumbel_softmax(x @ m.w),
    "attention": lambda m, x: F.scaled_dot_product_attention(*[(x @ m.w).view(4, 2, 4, 4)] * 3, dropout_p=0.3),
    "causal attention": lambda m, x: F.scaled_dot_product_attention(
        *[(x @ m.w).view(4, 2, 4, 4)] * 3, dropout_p=0.3, is_causal=True
    ),
    "without gradients": lambda m, x: torch.no_grad()(lambda y: F.dropout(y, 0.5))(x @ m.w) + x @ m.w,
}


LIKE_TORCHS = {
    "dropout": lambda m, x: F.dropout(x, 0.3),
    "alpha_dropout": lambda m, x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda m, x: F.feature_alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda m, x: F.dropout2d(x, 0.3),
    "native_dropout": lambda m, x: torch.native_dropout(x, 0.3, True),
    "rand": lambda m, x: torch.rand(128, 512, dtype=D),
    "randn_like": lambda m, x: torch.randn_like(x),
    "randint": lambda m, x: torch.randint(-3, 40, (128, 512)),
    "bernoulli": lambda m, x: torch.bernoulli(x),
    "normal": lambda m, x: torch.normal(x, 2 * x),
    "uniform_": lambda m, x: torch.empty_like(x).uniform_(-1, 3),
    "exponential_": lambda m, x: torch.empty_like(x).exponential_(2.5),
    "normal_": lambda m, x: torch.empty_like(x).normal_(1, 3),
    "cauchy_": lambda m, x: torch.empty_like(x).cauchy_(1, 2),
    "geometric_": lambda m, x: torch.empty_like(x).geometric_(0.3),
    "log_normal_": lambda m, x: torch.empty_like(x).log_normal_(0.5, 0.5),
    "random_": lambda m, x: torch.empty_like(x).random_(),
    "random_ to": lambda m, x: torch.empty_like(x).random_(9),
    "random_ integers": lambda m, x: torch.empty_like(x, dtype=torch.int16).random_(),
    "rrelu": lambda m, x: F.rrelu(x - 1, training=True),
    "gumbel_softmax": lambda m, x: F.gumbel_softmax(x[..., :16]),
    "multinomial": lambda m, x: torch.multinomial(x.flatten(0, 2)[:, :4].repeat(16, 1).cumsum(1), 2),
    "randperm": lambda m, x: torch.randperm(65536),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}


@pytest.mark.parametrize("name", LIKE_TORCHS)
def test_numbers_are_distributed_as_torchs(name: str) -> None:
    """Kolmogorov-Smirnov, 0.1 %, of what our operators give and torch's give; a channel counts as one number."""
    x = torch.full((32, 64, 4, 8), 0.4, dtype=D)
    torch.manual_seed(1)
    ours = pytree.tree_leaves(parallel(Apply(LIKE_TORCHS[name]), mode="stand_alone")(x))
    theirs = pytree.tree_leaves(LIKE_TORCHS[name](None, x))
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.dtype == yours.dtype and mine.shape == yours.shape
        if name in ("dropout2d", "feature_alpha_dropout"):
            assert (mine == mine[..., :1, :1]).all()
            mine, yours = mine[..., 0, 0], yours[..., 0, 0]
        mine, yours = (v.flatten().double().round(decimals=9) for v in (mine, yours))  # atoms, but for rounding
        at = torch.cat([mine, yours]).unique()
        apart = (
            torch.searchsorted(mine.sort().values, at, right=True)
            - torch.searchsorted(yours.sort().values, at, right=True)
        ).abs().max() / mine.numel()
        assert apart < 1.95 * math.sqrt(2 / mine.numel()), apart


@pytest.mark.parametrize("name", DRAWING)
def test_every_random_operator_draws_as_on_one_device(name: str) -> None:
    net = Apply(DRAWING[name])
    results = []
    for options in ({"mode": "stand_alone"}, {"devices": 8}, {"devices": 4, "mode": "data_parallel"}):
        counterpart = copy.deepcopy(net)
        model = parallel(counterpart, **options)
        torch.manual_seed(11)
        outputs = [model(X) for _ in range(2)]
        loss = squares(outputs)
        if loss.requires_grad:
            loss.backward()
        results.append((outputs, {n: p.grad for n, p in counterpart.named_parameters()}))
    first, second = (pytree.tree_leaves(output)[0] for output in results[0][0])
    assert not torch.equal(first, second)
    for other in results[1:]:
        close(other, results[0], name)


def test_plans_with_random_operators_are_verified_and_shown(tmp_path) -> None:
    net = Dropped((2, 4))
    torch.manual_seed(5)
    torch.rand(3)
    stream.draw(True)
    before, random = stream.upcoming(), torch.get_rng_state()
    report = sw.verify(net, (X,), T, loss_fn=CROSS_ENTROPY)
    assert report.ok and report.max_gradient_difference < 1e-12, report.summary()
    assert stream.upcoming() == before and torch.equal(torch.get_rng_state(), random)
    plan = sw.plan(Dropped((2, 4)), (X,), CROSS_ENTROPY, T)
    assert plan.operator("drop").in_strategy == ((2, 4),) and plan.operator("drop").op == "dropout"
    parallel(Dropped((2, 4)), CROSS_ENTROPY, save_graphs=tmp_path)(X, T)
    text = (tmp_path / "rank_5" / "execute.ir").read_text()
    assert "= drop(%<seed>, " in text and "# seed %<seed>" in text


def test_a_wrong_place_is_found(monkeypatch) -> None:
    """The purpose of verification: a rank that draws for another's positions."""

    monkeypatch.setattr(
        random_operators,
        "_starts",
        lambda b, size, digits: b.lay(
            b.call(torch.ops.aten.zeros.default, [math.prod(d.size for d in digits)], dtype=torch.int64), [digits]
        ),
    )
    report = sw.verify(Dropped((2, 4)), (X,), T, loss_fn=CROSS_ENTROPY, steps=1, dtypes=(D,))
    assert not report.ok and report.first_difference.op == "dropout", report.summary()


# -- fast --------------------------------------------------------------------------------------------------------------


def test_fast_numbers_differ_between_shards_and_agree_between_replicas() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = sw.shard(F.dropout, ((4, 1),))

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x, 0.5)

    ones = torch.ones(16, 64, dtype=D)
    model = parallel(Both(), random="fast")
    torch.manual_seed(4)
    shards: list[list[Tensor]] = []
    model(ones)  # plans
    body = list(model._programs.values())[-1].body
    body.record = lambda node, made: shards.append(made) if "drop" in str(node.target) else None
    torch.manual_seed(4)
    out, again = model(ones), model(ones)
    torch.manual_seed(4)
    assert torch.equal(model(ones), out) and not torch.equal(out, again)
    assert set(out.unique().tolist()) == {0.0, 2.0} and 0.4 < (out != 0).double().mean() < 0.6
    of_rank = [mask for _, mask in shards[0]]
    assert all(torch.equal(of_rank[2 * i], of_rank[2 * i + 1]) for i in range(4))
    assert all(not torch.equal(of_rank[2 * i], of_rank[2 * j]) for i in range(4) for j in range(i))
    exact = parallel(Both())
    torch.manual_seed(4)
    assert not torch.equal(exact(ones), out)


@pytest.mark.parametrize("name", ["likes", "randperm", "multinomial", "rrelu", "exponential_", "dropout2d", "rand"])
def test_fast_numbers_of_every_kind(name: str) -> None:
    model = parallel(Apply(DRAWING[name]), random="fast")
    torch.manual_seed(4)
    one, two = model(X), model(X)
    torch.manual_seed(4)
    assert torch.equal(model(X), one) and not torch.equal(one, two)


def test_the_default_generator_is_left_alone() -> None:
    states = []
    for random in ("exact", "fast"):
        model = parallel(Dropped((2, 4)), CROSS_ENTROPY, random=random)
        model(X, T)
        torch.manual_seed(4)
        model(X, T)
        states.append(torch.get_rng_state())
    torch.manual_seed(4)
    torch.rand(())  # all that a call takes
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], torch.get_rng_state())


def test_unknown_settings() -> None:
    with pytest.raises(sw.SettingError, match="unknown random 'native'") as raised:
        sw.AutoParallel(Dropped(), random="native")
    assert raised.value.legal == '"exact" or "fast"'
    with pytest.raises(sw.MissingRuleError, match="complex random numbers"):
        sw.plan(Apply(lambda m, x: torch.randn(8, dtype=torch.complex128) + x @ m.w), (X,))


# -- processes ---------------------------------------------------------------------------------------------------------


SETTINGS = (
    ("semi_auto", "full_batch", "exact"),
    ("data_parallel", "data_parallel", "exact"),
    ("semi_auto", "full_batch", "fast"),
)


def on_a_rank(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for seed, (mode, dataset, random) in enumerate(SETTINGS):
        net = Dropped((2, 2))
        sw.init()
        model = sw.AutoParallel(net, CROSS_ENTROPY, mode, random=random).dataset_strategy(dataset)
        torch.manual_seed(seed)
        losses = []
        for _ in range(3):
            torch.rand(rank)  # ranks' loaders draw as they like
            x, t = (X, T) if dataset == "full_batch" else (X.chunk(world)[rank], T.chunk(world)[rank])
            loss = model(x, t)
            loss.backward()
            losses.append(loss.item())
        found[f"{mode} {random}"] = losses, {n: p.grad.full_tensor() for n, p in net.named_parameters()}
    torch.manual_seed(100 + rank // 2)
    with pytest.raises(sw.RuntimeMismatchError, match=r"ranks \[2, 3\] would draw other random numbers than rank 0"):
        sw.AutoParallel(Dropped(), CROSS_ENTROPY).dataset_strategy("full_batch")(X, T)
    torch.manual_seed(5)
    with pytest.raises(sw.RuntimeMismatchError, match=r"ranks \[3\] would draw"):
        sw.AutoParallel(Dropped(), CROSS_ENTROPY, random="fast" if rank == 3 else "exact").dataset_strategy(
            "full_batch"
        )(X, T)
    torch.manual_seed(rank)  # nothing is drawn: seeds may differ
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Dropout()).eval()
    nn.init.ones_(net[0].weight), nn.init.ones_(net[0].bias)
    sw.AutoParallel(net, CROSS_ENTROPY).dataset_strategy("full_batch")(X, T)
    return found


def test_processes_draw_what_one_process_draws() -> None:
    by_rank = run_ranks(on_a_rank, 4)
    for seed, (mode, _dataset, random) in enumerate(SETTINGS):
        net, name = Dropped((2, 2)), f"{mode} {random}"
        model = parallel(net, CROSS_ENTROPY, devices=4, mode=mode, random=random)
        torch.manual_seed(seed)
        losses = []
        for _ in range(3):
            loss = model(X, T)
            loss.backward()
            losses.append(loss.item())
        for found in by_rank:
            assert found[name][0] == pytest.approx(losses, rel=1e-12), name
            close(found[name][1], {n: p.grad for n, p in net.named_parameters()}, name)
