"""`CollectiveKind`: each kind has an entry in each table; its amounts, sizes and transposes are those that are seen."""

import copy
import json
import math
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from ranks import run_ranks
from test_redistributions import pairs

from shardwright.cost import primitive_costs
from shardwright.errors import SettingError
from shardwright.layout import Digit, Layout
from shardwright.redistribution import (
    CollectiveKind,
    Placement,
    Window,
    halo_exchange,
    halo_reduce,
    redistribution,
    transpose,
)
from shardwright.runtime.distributed import collectives, scheduled_collectives
from shardwright.runtime.distributed.collectives import bind
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.local import shards

WORLD = 4
A, B, ALL = (Digit(2, 2),), (Digit(2, 1),), (Digit(4, 1),)
#: The kinds that are a step between two layouts.
STEPS = [kind for kind in CollectiveKind if kind.source is not None]
#: The rows that a kernel of 3 reads beside a slice of 4 rows.
HALO = (Window(count=16, size=16, stride=1, padding=1, extent=3).cut(0, ALL),)
HALOS = (CollectiveKind.HALO_EXCHANGE, CollectiveKind.HALO_REDUCE)


def one_step(kind):
    """A redistribution of a matrix on 4 ranks with one step, of this kind."""
    layouts = {
        Placement.SHARD: Layout.of(WORLD, (ALL, ())),
        Placement.REPLICA: Layout.replicated(WORLD, 2),
        Placement.PARTIAL: Layout.replicated(WORLD, 2).with_partial(ALL),
    }
    source, target = layouts[kind.source], layouts[kind.target]
    if kind in HALOS:
        return (halo_exchange if kind is CollectiveKind.HALO_EXCHANGE else halo_reduce)(source, HALO)
    if kind is CollectiveKind.ALL_TO_ALL:
        target = Layout.of(WORLD, ((), ALL))
    if kind is CollectiveKind.PERMUTE:
        source, target = Layout.of(WORLD, (A, B)), Layout.of(WORLD, (B, A))
    found = redistribution(source, target)
    assert [step.pattern for step in found.steps] == [kind]
    return found


@pytest.mark.parametrize(
    ("table", "kinds"),
    [
        pytest.param(primitive_costs.LINES, list(CollectiveKind), id="seconds"),
        pytest.param(shards.EXECUTORS, STEPS, id="all ranks in one process"),
        pytest.param(collectives.EXECUTORS, STEPS, id="one rank of a process group"),
        pytest.param(
            scheduled_collectives.BEGINNINGS,
            [kind for kind in STEPS if kind.travels_alone],
            id="one rank, begun and waited for later",
        ),
    ],
)
def test_each_kind_has_its_entry(table, kinds):
    assert set(table) == set(kinds)


def test_a_kind_is_its_word():
    words = ["slice", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
    words += ["halo_exchange", "halo_reduce", "send", "recv"]
    assert list(CollectiveKind) == words and [f"{kind}" for kind in CollectiveKind] == words
    for kind, word in zip(CollectiveKind, words):
        assert CollectiveKind(word) is kind and {word: 1}[kind] == {kind: 1}[word] == 1
        assert str(kind) == word and repr(kind) == repr(word) and f"{kind:>15}" == f"{word:>15}"
        assert json.dumps({kind: kind}) == json.dumps({word: word})
        assert pickle.loads(pickle.dumps(kind)) is kind and copy.deepcopy(kind) is kind
    with pytest.raises(SettingError, match="(?s)'gossip'.*legal: slice, all_reduce, .*, recv$"):
        CollectiveKind("gossip")


def test_amounts_by_hand():
    amounts = {kind: (kind.sent(4, 100), kind.received(4, 100), kind.size_after(4, 100)) for kind in CollectiveKind}
    assert amounts == {
        "slice": (0, 0, 25),
        "all_reduce": (150, 150, 100),
        "all_gather": (300, 300, 400),
        "reduce_scatter": (75, 75, 25),
        "all_to_all": (75, 75, 100),
        "permute": (100, 100, 100),
        "halo_exchange": (100, 100, 100),
        "halo_reduce": (100, 100, 100),
        "send": (100, 0, 100),
        "recv": (0, 100, 100),
    }
    assert CollectiveKind.REDUCE_SCATTER.sent(3, 100) == 67 and CollectiveKind.ALL_REDUCE.sent(3, 100) == 134


@given(pairs())
def test_the_size_after_each_step(drawn):
    source, target, shape = drawn
    found = redistribution(source, target)
    shapes = found.local_shapes(source.local_shape(shape))
    for step, before, after in zip(found.steps, shapes, shapes[1:]):
        assert step.kind.size_after(step.size, math.prod(before)) == math.prod(after)
        assert step.pattern.size_after(step.size, math.prod(before)) == math.prod(after)


# -- transposes --------------------------------------------------------------------------------------------------------


def test_the_transpose_of_the_transpose():
    for kind in CollectiveKind:
        back = kind.transpose.transpose
        assert back is (CollectiveKind.REDUCE_SCATTER if kind is CollectiveKind.SLICE else kind), kind


@pytest.mark.parametrize("kind", STEPS)
def test_the_transpose_is_that_of_the_layouts(kind):
    """The gradient reaches a replica as terms, except for a slice, after which no replica is left."""
    found = one_step(kind)
    if kind in HALOS:  # no layout changes
        assert [step.pattern for step in found.steps] == [kind] and found.steps[0].halo == HALO[0]
        return
    back = transpose(found, ALL if kind.target is Placement.REPLICA else ())
    assert [step.pattern for step in back.steps] == [kind.transpose]


def test_a_complete_gradient_of_a_replica_needs_no_collective():
    assert [step.kind for step in transpose(one_step(CollectiveKind.ALL_GATHER)).steps] == [CollectiveKind.SLICE]
    assert not transpose(one_step(CollectiveKind.ALL_REDUCE)).steps


# -- the amounts, as executors send them -------------------------------------------------------------------------------


def before(kind, shape):
    """The local shape before the step of a kind."""
    rows, columns = one_step(kind).source.local_shape(shape)
    return (HALO[0].length if kind is CollectiveKind.HALO_REDUCE else rows), columns


def passed_on(rank, world, shape):
    """By kind of step: (elements before, sent to others, received from others, elements after) of this rank."""
    collectives.GATHERED_TERMS = 0  # a small all-reduce gathers every term: fewer messages, but more bytes
    collectives.SWAPPED = 1 << 60
    groups, out, count = ProcessGroups(world, rank, exchanges=True, share=False), {}, [0, 0]
    exchange = collectives.exchange

    def counted(group, x, sends=(), receives=()):
        equal = [x.numel() // group.size] * group.size
        for k, numbers in enumerate((sends or equal, receives or equal)):
            count[k] += sum(numbers) - numbers[group.position]
        return exchange(group, x, sends, receives)

    collectives.exchange = counted
    for kind in STEPS:
        found = one_step(kind)
        x = torch.zeros(before(kind, shape))
        count[:] = 0, 0
        made = bind(found.steps[0], tuple(x.shape), rank, groups)(x)
        out[kind] = (x.numel(), *count, made.numel())
    return out


def test_executors_send_the_amounts():
    results = run_ranks(passed_on, WORLD, (16, 8))
    for kind in STEPS:
        (step,) = one_step(kind).steps
        for size, _, _, after in (result[kind] for result in results):
            assert after == math.prod(step.local_shape_after(before(kind, (16, 8)))), kind
            assert kind in HALOS or after == kind.size_after(WORLD, size), kind
        size = results[0][kind][0]
        assert max(result[kind][1] for result in results) == step.sent(size), kind
        if kind not in HALOS:
            assert step.sent(size) == kind.sent(WORLD, size), kind
            assert max(result[kind][2] for result in results) == kind.received(WORLD, size), kind


@given(st.sampled_from([kind for kind in STEPS if kind not in HALOS]), st.sampled_from([(4, 4), (16, 8)]))
def test_executors_in_one_process_keep_the_sizes(kind, shape):
    found = one_step(kind)
    size = math.prod(found.source.local_shape(shape))
    made = shards.convert_shards(found, [torch.zeros(found.source.local_shape(shape))] * WORLD, stepwise=True)
    assert {x.numel() for x in made} == {kind.size_after(WORLD, size)}
