"""nn.LSTM, nn.GRU, nn.RNN and their cells with a cut batch: as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_device import assert_as_one_device, close, parallel, squares
from ranks import run_ranks
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "batch_first": True, "bias": False},
    {"bidirectional": True, "batch_first": True},
]


class Recurrent(nn.Module):
    """A layer between two linear ones. `given`: whether its first states are given, made of the input."""

    def __init__(self, kind: type, given: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.given = kind(8, 6, dtype=D, **settings), given
        out = (self.layer.proj_size or 6) * (2 if self.layer.bidirectional else 1)
        self.before, self.after = nn.Linear(4, 8, dtype=D), nn.Linear(out, 4, dtype=D)

    def forward(self, x: Tensor) -> Any:
        layer, states = self.layer, None
        if self.given:
            rows = x.mean(1 if layer.batch_first else 0)
            count = layer.num_layers * (2 if layer.bidirectional else 1)
            states = [
                (rows[:, :1] * (i + 1)).expand(count, -1, width).contiguous()
                for i, width in enumerate((layer.proj_size or 6, 6))
            ]
            states = tuple(states) if isinstance(layer, nn.LSTM) else states[0]
        h, end = layer(self.before(x), states)
        return self.after(h), end


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_as_one_device(kind: type, given: bool) -> None:
    for settings in (
        SETTINGS
        + [{"proj_size": 3, "num_layers": 2}] * (kind is nn.LSTM)
        + [{"nonlinearity": "relu"}] * (kind is nn.RNN)
    ):
        net = Recurrent(kind, given, **settings)
        x = draw(8, 5, 4) if net.layer.batch_first else draw(5, 8, 4)
        mode = "semi_auto" if net.layer.batch_first else "recursive_programming"
        if mode == "semi_auto":
            model = assert_as_one_device(net, (x,), devices=4)
        else:
            model = assert_as_one_device(net, (x,), devices=4, mode=mode, cluster=FREE)
        layer = next(op for op in model.plan.operators if op.op in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
        at = 0 if net.layer.batch_first else 1
        assert layer.in_strategy[0][at] == 4 and all(
            p.local_shape(0) == p.shape for n, p in model.plan.parameters.items() if n.startswith("layer")
        )


FREE = sw.Cluster("free links", (sw.Level("link", 4, 1e18, 1e-18),), 1e15, {"float64": 1e6}, 1e6, 1e-15)


class Cells(nn.Module):
    """A loop over steps, as one writes it oneself, into a tensor made beforehand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lstm, self.gru, self.rnn = (kind(4, 4, dtype=D) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        state, g, r = None, None, None
        for i in range(x.shape[1]):
            state = self.lstm(x[:, i], state)
            g, r = self.gru(state[0], g), self.rnn(x[:, i], r)
            out[:, i] = g + r
        return out


def test_cells_in_a_loop() -> None:
    model = assert_as_one_device(Cells(), (draw(8, 3, 4),), (draw(8, 3, 4, seed=5),), devices=4)
    cells = [op for op in model.plan.operators if op.op.endswith("_cell")]
    assert len(cells) == 9 and all(op.in_strategy[0] == (4, 1) for op in cells)


def test_dropout_between_layers_is_the_same_on_any_number_of_devices() -> None:
    x, made = draw(8, 5, 4), []
    for devices, mode in ((1, "stand_alone"), (2, "semi_auto"), (4, "data_parallel")):
        net = Recurrent(nn.LSTM, num_layers=3, bidirectional=True, batch_first=True, dropout=0.4)
        model = parallel(net, devices=devices, mode=mode)
        torch.manual_seed(6)
        outputs = model(x)
        squares(outputs).backward()
        made.append((outputs, [p.grad for p in net.parameters()]))
        assert sum(op.op == "dropout" for op in model.plan.operators) == 2
    close(made[1], made[0]), close(made[2], made[0])
    net = Recurrent(nn.LSTM, num_layers=3, bidirectional=True, batch_first=True, dropout=0.4)
    assert not torch.allclose(net.eval()(x)[0], made[0][0][0])  # something is dropped
    assert_as_one_device(net, (x,), devices=4)  # and nothing in evaluation
    assert (
        torch.equal(net(x)[0], net(x)[0]) and net.layer(draw(2, 3, 8))[0].requires_grad
    )  # a capture leaves it as it was


def test_packed_sequences_are_an_error_that_says_what_to_write() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 6, batch_first=True, dtype=D)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]

    with pytest.raises(sw.CaptureError, match="packed sequences") as raised:
        parallel(Packed(), devices=4)(draw(4, 5, 4), torch.tensor([5, 3, 2, 1]))
    assert raised.value.source.startswith("test_recurrent.py") and "padded sequences" in raised.value.legal


class Two(nn.Module):
    """Two layers, for two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.LSTM(4, 6, batch_first=True, dtype=D), nn.GRU(6, 4, 2, batch_first=True, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


def test_in_a_pipeline() -> None:
    net, x, y = Two(), draw(8, 3, 4), draw(8, 3, 4, seed=2)
    one = copy.deepcopy(net)
    model = parallel(net, nn.MSELoss(), devices=4).pipeline(
        stages=2, micro_batches=2, stage_config={"first": 0, "second": 1}
    )
    got, expected = model(x, y), nn.MSELoss()(one(x), y)
    got.backward(), expected.backward()
    close([got, *(p.grad for p in net.parameters())], [expected, *(p.grad for p in one.parameters())])


def on_ranks(rank: int, world: int) -> None:
    x, net, one = draw(8, 3, 4), Two(), Two()
    model = sw.AutoParallel(net, parallel_mode="data_parallel").hsdp(threshold=0)
    got, expected = model(x[4 * rank : 4 * rank + 4]), one(x)
    close(got, expected[4 * rank : 4 * rank + 4])
    (got**2).mean().backward(), (expected**2).mean().backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()]
    close(gradients, [p.grad for p in one.parameters()])


def test_in_processes() -> None:
    run_ranks(on_ranks, 2)
