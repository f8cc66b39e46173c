"""The wide capture of a further size of a pipeline's inputs, derived where the forward has run around it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shardwright as sw
from shardwright.capture.export import captures
from shardwright.graph import Form, form_of, values_in
from shardwright.parallel.graph_cache import DerivedCaptures
from tests.support.capture_count import counted_captures

D = torch.float64


@pytest.fixture(autouse=True)
def four_devices():
    sw.init(devices=4)


class Net(nn.Module):
    """Two layers, an attention-like product over the sequence, positions, views that hold the size of the batch."""

    most, heads = 10**9, 2

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.place = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(32, 8)
        self.to(D)

    def forward(self, x):
        rows, length, _ = x.shape
        h = self.a(x) + self.place(torch.arange(length))
        q = h.reshape(rows, length, self.heads, -1).transpose(1, 2)
        h = (q @ q.transpose(-1, -2) / length @ q).transpose(1, 2).reshape(rows * length, -1)
        if rows * length > self.most:
            h = h.tanh()
        h = self.b(h).view(rows, length, -1)[:, 1:]
        return mse_loss(h, torch.zeros_like(h))


def drawn(rows, length):
    return torch.randn(rows, length, 8, dtype=D, generator=torch.Generator().manual_seed(rows * 100 + length))


def piped(net):
    model = sw.AutoParallel(copy.deepcopy(net), varying=(0, 1)).dataset_strategy("full_batch")
    return model.pipeline(stages=2, micro_batches=2, stage_config={"a": 0, "b": 1})


def test_a_size_inside_of_those_that_ran_runs_the_forward_once(monkeypatch):
    runs, net = counted_captures(monkeypatch), Net()
    model, counts = piped(net), []
    for rows, length in ((8, 8), (32, 16), (16, 12), (32, 8), (16, 16), (8, 4), (64, 8)):
        before, x = len(runs), drawn(rows, length)
        found, wanted = model(x), net(x)
        found.backward(), wanted.backward()
        torch.testing.assert_close(found, wanted)
        counts.append(len(runs) - before)
    # 4 and 8 rows of 8; 16 and 32 of 16: the largest; inside of it; 32 and 64 rows of 8 are outside.
    assert counts == [2, 2, 1, 1, 1, 1, 2] and runs.count("export") == 1
    for found, wanted in zip(model.parameters(), net.parameters()):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_a_derived_capture_is_that_of_a_run():
    net, recording = Net(), type("Recording", (), {})()
    recording.guards = type("Guards", (), {"hold": lambda self: True})()
    shapes, derived = [(2, 3), (5, 3), (3, 7), (6, 8), (1, 9)], DerivedCaptures()

    def call(rows, length):
        return (torch.empty(rows, length, 8, dtype=D, device="meta"),), {}

    derived.note(*captures(net, [call(8, 9), call(16, 9)]), call(16, 9), recording)
    for rows, length in shapes:
        graph, wide = captures(net, [call(rows, length), call(2 * rows, length)])
        assert derived.may(call(2 * rows, length))
        made = derived.of(graph, call(2 * rows, length))
        if made is None:  # torch leaves out operators of one row
            assert rows == 1
            continue
        assert [(op.name, op.args, op.kwargs, op.inputs, op.outputs) for op in made.ops] == [
            (op.name, op.args, op.kwargs, op.inputs, op.outputs) for op in wide.ops
        ]
        assert values_in(made.outputs) == values_in(wide.outputs) and made.inputs == wide.inputs
        assert [form_of(op) for op in made.ops] == [Form(op) for op in made.ops]


def test_a_branch_between_the_micro_batch_and_the_wide_capture_is_seen():
    net = Net()
    model = piped(net)
    net.most = model.net.most = 200
    for rows, length in ((8, 8), (24, 4), (8, 16)):
        torch.testing.assert_close(model(drawn(rows, length)), net(drawn(rows, length)))
    with pytest.raises(sw.ShardwrightError, match="with more rows"):  # 128 elements, 256 in the wide capture
        model(drawn(32, 8))


def test_a_model_that_changed_since_runs_for_the_wide_capture_too():
    net = Net()
    model = piped(net)
    for rows in (8, 32):
        torch.testing.assert_close(model(drawn(rows, 8)), net(drawn(rows, 8)))
    model.net.most = 100  # the micro-batch has 64 elements, the wide capture 128
    with pytest.warns(sw.RecaptureWarning), pytest.raises(sw.ShardwrightError, match="with more rows"):
        model(drawn(16, 8))


@pytest.mark.parametrize("cap", [min, max])
def test_a_number_that_follows_neither_the_rows_nor_another_dim_is_not_derived(cap):
    class Capped(nn.Module):
        def forward(self, x):
            return x.sum(1) * float(cap(x.shape[0], 8))

    recording = type("Recording", (), {"guards": type("Guards", (), {"hold": lambda self: True})()})()

    def call(rows, length):
        return (torch.empty(rows, length, dtype=D, device="meta"),), {}

    unlike = 0
    for (first, other), length in itertools.product([(16, 2), (2, 3), (9, 12)], (4, 5)):
        derived = DerivedCaptures()
        derived.note(*captures(Capped(), [call(first, 4), call(2 * first, 4)]), call(64, 8), recording)
        graph, wide = captures(Capped(), [call(other, length), call(2 * other, length)])
        made = derived.of(graph, call(2 * other, length))
        unlike += made is None
        assert made is None or [op.args for op in made.ops] == [op.args for op in wide.ops]
    assert unlike
