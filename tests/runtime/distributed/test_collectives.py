"""Steps on real Gloo processes: what a bound step sends is what `convert_shards` computes. By memory:
`test_shared_memory`."""

import math
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from ranks import RankFailed, run_ranks

from shardwright.layout import Digit, Layout
from shardwright.redistribution import composed, redistribution, through
from shardwright.runtime.distributed import collectives
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.gradient_sums import SumInTurns
from shardwright.runtime.distributed.process_groups import ProcessGroups, Scratch
from shardwright.runtime.local.shards import convert_shards

WORLD = 4
A, B, ALL = Digit(2, 2), Digit(2, 1), Digit(4, 1)

# (name, source dims, target dims, source's partial digits): on 4 ranks, tensors of 3 dims
PAIRS = {
    "slice": (((), (), ()), ((A,), (B,), ()), ()),
    "slice_minor": (((A,), (), ()), ((A, B), (), ()), ()),
    "slice_two_digits": (((), (), ()), ((), (), (B, A)), ()),
    "all_gather": (((A,), (B,), ()), ((), (), ()), ()),
    "all_gather_last_dim": (((), (), (ALL,)), ((), (), ()), ()),
    "all_gather_minor": (((A, B), (), ()), ((A,), (), ()), ()),
    "all_gather_strided": (((B, A), (), ()), ((), (), ()), ()),
    "all_reduce": (((), (), ()), ((), (), ()), (ALL,)),
    "all_reduce_of_a_slice": (((A,), (), ()), ((A,), (), ()), (B,)),
    "reduce_scatter": (((), (), ()), ((ALL,), (), ()), (ALL,)),
    "reduce_scatter_two_dims": (((), (), ()), ((), (B,), (A,)), (ALL,)),
    "reduce_scatter_inner": (((A,), (), ()), ((A,), (), (B,)), (B,)),
    "all_to_all": (((ALL,), (), ()), ((), (), (ALL,)), ()),
    "all_to_all_two_dims": (((A,), (B,), ()), ((), (), (B, A)), ()),
    "all_to_all_half": (((A,), (B,), ()), ((A,), (), (B,)), ()),
    "permute": (((A,), (B,), ()), ((B,), (A,), ()), ()),
    "permute_partly": (((A,), (B,), ()), ((), (A,), (B,)), ()),
    "permute_within": (((A, B), (), ()), ((B, A), (), ()), ()),
    "all_to_all_and_gather": (((), (), (ALL,)), ((A,), (), ()), ()),
    "all_to_all_and_gather_minor": (((), (), (B, A)), ((A,), (), ()), ()),
    "all_to_all_and_gather_beside": (((), (A,), (B,)), ((), (), (A,)), ()),
    "several": (((A,), (), ()), ((), (), (B, A)), (B,)),
}


def layouts(name, reduction="sum"):
    source, target, partial = PAIRS[name]
    return Layout.of(WORLD, source, partial, reduction), Layout.of(WORLD, target)


def local(layout, shape, rank, dtype=torch.float64):
    """This rank's tensor: a slice of one tensor all know; terms differ by rank, replicas do not."""
    generator = torch.Generator().manual_seed(sum(d.value(rank) * d.stride for d in layout.partial))
    whole = torch.randint(0, 99, shape, generator=generator) - 40
    return (whole[layout.slice(shape, rank)] % (2 if dtype == torch.bool else 99)).to(dtype)


def convert(found, x, rank, groups):
    for bound in bind_all(found, x.shape, rank, groups):
        x = bound(x)
    return x


def every_pair(rank, world, exchanges, share=False):
    groups = ProcessGroups(world, rank, exchanges=exchanges, share=share)
    out = {}
    for name in PAIRS:
        for shape in ((8, 4, 12), (8, 8, 4)):
            source, target = layouts(name)
            x = local(source, shape, rank)
            before = x.clone()
            out[name, shape] = convert(redistribution(source, target), x, rank, groups)
            assert torch.equal(x, before), f"{name} writes to its input"
            transposed = local(source, (shape[0], shape[2], shape[1]), rank).transpose(1, 2)  # not contiguous
            if source == Layout.of(WORLD, (source.dims[0], (), ()), source.partial):
                out[name, shape, "strided"] = convert(redistribution(source, target), transposed, rank, groups)
    return out


def assert_as_in_one_process(results):
    for key in results[0]:
        name, shape, strided = key[0], key[1], len(key) == 3
        source, target = layouts(name)
        shards = [
            local(source, (shape[0], shape[2], shape[1]), r).transpose(1, 2) if strided else local(source, shape, r)
            for r in range(WORLD)
        ]
        for rank, expected in enumerate(convert_shards(redistribution(source, target), shards, stepwise=True)):
            assert torch.equal(results[rank][key], expected), f"{key} on rank {rank}"


def test_every_kind_of_step_by_all_to_alls():
    assert_as_in_one_process(run_ranks(every_pair, WORLD, None))


def every_pair_by_swaps(rank, world):
    collectives.SWAPPED = 0
    return every_pair(rank, world, None)


def test_every_kind_of_step_where_two_ranks_swap():
    assert_as_in_one_process(run_ranks(every_pair_by_swaps, WORLD))


def test_every_kind_of_step_by_the_librarys_collectives():
    assert_as_in_one_process(run_ranks(every_pair, WORLD, False))


def test_the_pairs_hold_every_kind_of_step():
    steps = [s for name in PAIRS for s in redistribution(*layouts(name)).steps]
    assert {s.kind for s in steps} == {"slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert {bool(s.permuted) for s in steps if s.kind == "all_to_all"} == {True, False}
    shapes = {name: (8, 4, 12) for name in PAIRS}
    geometries = [
        s.geometry(before)
        for name, shape in shapes.items()
        for found in [redistribution(*layouts(name))]
        for s, before in zip(found.steps, found.local_shapes(found.source.local_shape(shape)))
    ]
    assert any(g.pre_perm for g in geometries) and any(g.post_perm for g in geometries)


def types_and_sizes(rank, world, swapped):
    collectives.SWAPPED = swapped
    groups = ProcessGroups(world, rank, share=False)
    out = {}
    for name in ("all_reduce", "all_reduce_of_a_slice", "reduce_scatter_two_dims"):
        for reduction in ("max", "min"):
            for dtype in (torch.float32, torch.int64, torch.bool):
                source, target = layouts(name, reduction)
                out[name, reduction, dtype] = convert(
                    redistribution(source, target), local(source, (4, 4, 4), rank, dtype), rank, groups
                )
    for name in ("all_gather", "permute", "all_to_all"):
        for dtype in (torch.bool, torch.int32, torch.bfloat16, torch.complex64):
            source, target = layouts(name)
            out[name, "sum", dtype] = convert(
                redistribution(source, target), local(source, (4, 4, 4), rank, dtype), rank, groups
            )
    source, target = layouts("all_reduce")
    scattered = {}
    for label, numel, limits in (
        ("gathered", 1 << 10, (1 << 20, 8 << 20)),
        ("padded", 1001, (0, 8 << 20)),
        ("scattered", 1 << 10, (0, 8 << 20)),
        ("native", 1 << 10, (0, 0)),
    ):
        collectives.GATHERED_TERMS, collectives.GATHERED_COPIES = limits
        torch.manual_seed(rank)
        x = torch.randn(numel, 1, 1)  # rounds: the order of the sum shows
        scattered[label] = (
            x,
            convert(redistribution(source, target), x, rank, groups),
            ended(SumInTurns((ALL,), groups)(x.flatten().clone())),
        )
    pair = ended(SumInTurns((A,), groups)(x.flatten().clone()))
    collectives.RING = 0
    rings = [
        (
            x,
            convert(redistribution(source, target), x, rank, groups),
            ended(SumInTurns((ALL,), groups)(x.flatten().clone())),
        )
        for x in (torch.randn(1001, 1, 1), torch.randn(1001, 1, 1, dtype=torch.float64))
    ]
    return out, scattered, rings, pair


@pytest.mark.parametrize("swapped", [0, collectives.SWAPPED])
def test_reductions_types_and_sizes(swapped):
    results = run_ranks(types_and_sizes, WORLD, swapped)
    for name, reduction, dtype in results[0][0]:
        source, target = layouts(name, reduction)
        shards = [local(source, (4, 4, 4), r, dtype) for r in range(WORLD)]
        for rank, expected in enumerate(convert_shards(redistribution(source, target), shards, stepwise=True)):
            got = results[rank][0][name, reduction, dtype]
            assert got.dtype == dtype and torch.equal(got, expected), (name, reduction, dtype)
    for label in results[0][1]:
        terms = [results[r][1][label][0] for r in range(WORLD)]
        in_order = ((terms[0] + terms[1]) + terms[2]) + terms[3]
        for rank in range(WORLD):
            for got in results[rank][1][label][1:]:
                assert torch.equal(got.flatten(), in_order.flatten()), f"{label}: not in the order of the ranks"
    for rank in range(WORLD):
        assert torch.equal(results[rank][3], (terms[rank % 2] + terms[rank % 2 + 2]).flatten())
    for number in range(len(results[0][2])):
        total = sum(results[r][2][number][0] for r in range(WORLD))
        for rank in range(WORLD):
            _, converted, in_turns = results[rank][2][number]
            torch.testing.assert_close(converted, total)
            assert torch.equal(converted, results[0][2][number][1]) and torch.equal(in_turns, converted.flatten()), rank


MOVED = (
    torch.int16,
    torch.uint16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
)
SUMMED = (torch.int16, torch.complex64, torch.complex128, torch.float16, torch.bfloat16)


def rare_types(rank, world, exchanges, share):
    """Every kind of step, in each dtype that some library lacks."""
    groups = ProcessGroups(world, rank, exchanges=exchanges, share=share)
    out = {}
    for name in PAIRS:
        source, target = layouts(name)
        for dtype in SUMMED if source.partial else MOVED:
            x = rare(source, rank, dtype)
            out[name, dtype] = convert(redistribution(source, target), x, rank, groups).resolve_conj()
    total = Layout.of(WORLD, (), (ALL,))
    number = torch.tensor(rank + 1j)
    out["a number", torch.complex64] = convert(redistribution(total, total.without_partial()), number, rank, groups)
    return out


def rare(layout, rank, dtype):
    x = local(layout, (8, 4, 12), rank, torch.int64) % 32  # whole numbers of bfloat16, and so are their sums
    return torch.complex(x.double(), -2 * x.double()).to(dtype).conj() if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize(("exchanges", "share"), [(None, True), (None, False), (False, False)])
def test_dtypes_that_libraries_lack(exchanges, share):
    results = run_ranks(rare_types, WORLD, exchanges, share)
    for name, dtype in results[0]:
        if name == "a number":
            assert all(r[name, dtype] == torch.tensor(6 + 4j) for r in results)
            continue
        source, target = layouts(name)
        shards = [rare(source, r, dtype).resolve_conj() for r in range(WORLD)]
        for rank, expected in enumerate(convert_shards(redistribution(source, target), shards, stepwise=True)):
            got = results[rank][name, dtype]
            assert got.dtype == dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (name, dtype)


SLICED = {"within": ((A,), (), ()), "beside": ((A,), (B,), ()), "all": ((), (B, A), ())}


def reduced_and_sliced(rank, world):
    """Sums over two or four ranks of which each keeps a slice: (large, small) messages."""
    out = {}
    for name, target in SLICED.items():
        for partial in ((ALL,), (A,)):
            source = Layout.of(WORLD, ((), (), ()), partial)
            found = through(source, source.without_partial(), Layout.of(WORLD, target))
            assert [step.kind for step in found.steps] == ["all_reduce", "slice"]
            for collectives.GATHERED_TERMS in (0, 1 << 20):
                steps = bind_all(found, (8, 4, 12), rank, groups := ProcessGroups(world, rank, share=False))
                assert len(steps) == 1 and groups.exchanges
                x = local(source, (8, 4, 12), rank)
                out[name, partial, collectives.GATHERED_TERMS] = steps[0](x)
    return out


def test_a_sum_and_a_slice_are_one_exchange():
    results = run_ranks(reduced_and_sliced, WORLD)
    for name, partial, limit in results[0]:
        source = Layout.of(WORLD, ((), (), ()), partial)
        found = through(source, source.without_partial(), Layout.of(WORLD, SLICED[name]))
        shards = [local(source, (8, 4, 12), r) for r in range(WORLD)]
        for rank, expected in enumerate(convert_shards(found, shards, stepwise=True)):
            assert torch.equal(results[rank][name, partial, limit], expected), (name, partial, limit)


def pairs_of_exchange_and_gather(count):
    """Random conversions on 8 ranks in which an all-gather follows an all-to-all of equal pieces."""
    draw = random.Random(0)
    while count:
        digits = draw.choice([(2, 2, 2), (4, 2), (2, 4)])
        strides = [math.prod(digits[k + 1 :]) for k in range(len(digits))]
        spread = [[[], [], []], [[], [], []]]
        for size, stride in zip(digits, strides):
            for dims in spread:
                if (dim := draw.randrange(4)) < 3:
                    dims[dim].insert(draw.randrange(len(dims[dim]) + 1), Digit(size, stride))
        source, target = (Layout.of(8, dims) for dims in spread)
        found = redistribution(source, target)
        if any(
            (one.kind, two.kind) == ("all_to_all", "all_gather") and not one.permuted
            for one, two in zip(found.steps, found.steps[1:])
        ):
            count -= 1
            yield found


def exchanged_and_gathered(rank, world, pairs):
    out, of_each = [], (ProcessGroups(world, rank, share=False), ProcessGroups(world, rank, share=False))
    for found in pairs:
        x = local(found.source, (8, 16, 24), rank)
        joined, apart = [], []
        for results, collectives.GATHERED_PIECES, groups in zip((joined, apart), (1 << 20, 0), of_each):
            assert len(bind_all(found, x.shape, rank, groups)) < len(found.steps)
            results.append(convert(found, x, rank, groups))
            results.append(convert(found, x.transpose(0, 1).contiguous().transpose(0, 1), rank, groups))
        out.append((joined, apart))
    return out


def test_an_all_to_all_and_an_all_gather_are_one_exchange():
    pairs = list(pairs_of_exchange_and_gather(40))
    results = run_ranks(exchanged_and_gathered, 8, pairs)
    for number, found in enumerate(pairs):
        shards = [local(found.source, (8, 16, 24), r) for r in range(8)]
        for rank, expected in enumerate(convert_shards(found, shards, stepwise=True)):
            for got in (t for way in results[rank][number] for t in way):
                assert torch.equal(got, expected), (str(found), rank)


@given(st.data())
def test_two_arrangements_are_one_where_they_nest(data):
    sizes = data.draw(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4))
    perm = data.draw(st.permutations(range(len(sizes))))
    x = torch.arange(math.prod(sizes)).view(sizes).permute(perm)
    second, left = [], x.numel()
    while left > 1:
        second.append(data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= second[-1]
    order = data.draw(st.permutations(range(len(second))))
    once = composed(tuple(sizes), tuple(perm), tuple(second), tuple(order))
    expected = x.reshape(second).permute(order).flatten()
    if once is not None:
        assert torch.equal(torch.arange(x.numel()).view(once[0]).permute(once[1]).flatten(), expected)
    assert once is not None or tuple(x.shape) != tuple(second)


def ended(turns):
    while (total := next(turns)) is None:
        pass
    return total


def sums_that_ride(rank, world):
    """By what comes between two turns of a sum: its term, the sum, how many exchanges were others', whether it was
    taken along by one of them, and whether it still waits at its end."""
    groups = ProcessGroups(world, rank, share=False)
    gathered = redistribution(Layout.of(WORLD, ((ALL,), ())), Layout.of(WORLD, ((), ())))
    other = redistribution(Layout.of(WORLD, ((A,), ())), Layout.of(WORLD, ((), ())))
    count, exchange = [0], collectives.exchange

    def counted(*args, **kwargs):
        count[0] += 1
        return exchange(*args, **kwargs)

    def gather(found, dtype=torch.float32):
        whole = torch.arange(96).view(12, 8).to(dtype)
        got = convert(found, whole[found.source.slice((12, 8), rank)], rank, groups)
        assert torch.equal(got, whole), (rank, found)

    collectives.exchange = counted
    torch.manual_seed(rank)
    out = {}
    for name, between in (
        ("together", lambda: gather(gathered)),
        ("nothing", lambda: None),
        ("another type", lambda: gather(gathered, torch.float64)),
        ("other ranks", lambda: gather(other)),
    ):
        x, sums = torch.randn(1000), SumInTurns((ALL,), groups)
        kept = x.clone()
        turns, count[0] = sums(x, True), 0
        next(turns)
        between()
        taken = not groups.seen((ALL,)).riders
        out[name] = kept, ended(turns), count[0], taken, bool(groups.seen((ALL,)).riders)
    collectives.exchange = exchange
    turns = SumInTurns((ALL,), groups)(torch.zeros(3), True)
    next(turns)
    assert groups.seen((ALL,)).riders
    SumInTurns((ALL,), groups).forget()
    assert not groups.seen((ALL,)).riders
    gather(gathered)
    return out


def test_a_short_sum_travels_with_the_next_gather_of_its_ranks():
    results = run_ranks(sums_that_ride, WORLD)
    for name, exchanges in (("together", 1), ("nothing", 0), ("another type", 1), ("other ranks", 1)):
        terms = [results[r][name][0] for r in range(WORLD)]
        for r in range(WORLD):
            _, got, count, taken, waits = results[r][name]
            assert torch.equal(got, ((terms[0] + terms[1]) + terms[2]) + terms[3]), (name, r)
            assert (count, taken, waits) == (exchanges, name == "together", False), (name, r)


def two_stages(rank, world):
    """Two stages of two devices; the second asks for a group of which the first knows nothing."""
    base = rank // 2 * 2
    groups = ProcessGroups(2, rank - base, base=base)
    digits = (Digit(2, 1),)
    source = Layout.of(2, ((),), digits)
    total = torch.tensor([float(rank)])
    if base:
        total = convert(redistribution(source, Layout.replicated(2, 1)), total, rank - base, groups)
        assert groups.of(digits) is groups.of(digits)
        assert dist.get_process_group_ranks(groups.of(digits)) == [2, 3]
    whole = ProcessGroups(world, rank)
    assert whole.of((ALL,)) is whole.of((B, A)) is dist.group.WORLD
    return total


def test_groups_of_a_pipeline_stage():
    assert [x.item() for x in run_ranks(two_stages, WORLD)] == [0.0, 1.0, 5.0, 5.0]


def compiled(rank, world):
    groups = ProcessGroups(world, rank)
    programs, inputs = [], []
    for name in ("slice", "reduce_scatter_inner", "permute_partly", "all_reduce"):
        found = redistribution(*layouts(name))
        inputs.append(local(found.source, (8, 4, 12), rank))
        programs.append((name, bind_all(found, inputs[-1].shape, rank, groups)))

    @torch.compile(fullgraph=True, backend="eager")
    def run(*inputs):
        out = []
        for x, (_, bounds) in zip(inputs, programs):
            for bound in bounds:
                x = bound(x)
            out.append(x)
        return out

    return {(name, (8, 4, 12)): x for (name, _), x in zip(programs, run(*inputs))}


def test_steps_can_be_traced_by_compile():
    torch.compile(torch.relu, backend="eager")(torch.ones(1))  # its imports: once here, and not in every rank
    assert_as_in_one_process(run_ranks(compiled, WORLD))


def fails(rank, world):
    if rank == 2:
        raise ValueError("the third rank")
    dist.barrier()


def hangs(rank, world):
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def dies(rank, world):
    import os

    if rank == 3:
        os._exit(7)
    time.sleep(0.5)


def test_a_rank_that_fails_hangs_or_dies_is_reported():
    with pytest.raises(RankFailed, match="(?s)rank 2.*ValueError: the third rank"):
        run_ranks(fails, WORLD)
    for seconds in (2.0, 10.0, 100.0):  # a busy machine may need more of them until the ranks have met
        with pytest.raises(RankFailed) as failed:
            run_ranks(hangs, WORLD, timeout=seconds)
        if re.search(r"(?s)did not finish.*rank 1:.*in hangs|timeout|Timed out|timed out", str(failed.value)):
            break
    else:
        raise failed.value
    with pytest.raises(RankFailed, match="rank 3 died with exit code 7|rank [012]:"):
        run_ranks(dies, WORLD)


def test_sums_share_the_memory_that_they_receive_into():
    scratch, like = Scratch(), torch.zeros(0)
    first = scratch.take(10, like)
    second = scratch.take(4, like)
    assert first.data_ptr() != second.data_ptr()  # both are under way
    scratch.give(first)
    assert scratch.take(8, like) is first
    other = scratch.take(4, like.double())
    assert other.dtype == torch.float64 and other.numel() >= 4
    scratch.give(second)
    larger = scratch.take(20, like)
    assert larger.numel() >= 20
    scratch.give(larger)
    assert scratch.take(20, like) is larger and scratch.take(1, like) is not second  # which was too small, and is gone
