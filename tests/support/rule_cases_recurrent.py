"""Recurrent layers and their cells, products of groups, writes that autograd does not see: concrete calls, see
`rule_cases`."""

import torch
from rule_cases import fixed, integers, rand
from rule_reference import collected
from torch import nn

from shardwright.rules.indexing import assigned, overwritten
from shardwright.rules.recurrent import lstm  # noqa: F401  (registers the operators)

aten = torch.ops.aten
ours = torch.ops.shardwright
CASES, case = collected()


def weights(
    kind: type, layers: int = 1, bidirectional: bool = False, bias: bool = True, **more: int
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return list(kind(4, 6, layers, bias=bias, bidirectional=bidirectional, dtype=torch.float64, **more).parameters())


for first in (False, True):
    x = rand(4, 3, 4) if first else rand(3, 4, 4)
    case(1, ours.lstm.default, x, [rand(1, 4, 6), rand(1, 4, 6)], weights(nn.LSTM), True, 1, False, first)
    case(1, ours.gru.default, x, rand(4, 4, 6), weights(nn.GRU, 2, True), True, 2, True, first)
case(
    1,
    ours.lstm.default,
    rand(4, 4, 4),
    [rand(4, 4, 6), rand(4, 4, 6)],
    weights(nn.LSTM, 2, True, False),
    False,
    2,
    True,
    True,
)
case(
    1,
    ours.lstm.default,
    rand(3, 4, 4),
    [rand(1, 4, 2), fixed(rand(1, 4, 6))],
    weights(nn.LSTM, proj_size=2),
    True,
    1,
    False,
    False,
)
case(1, ours.rnn_tanh.default, rand(3, 4, 4), rand(1, 4, 6), weights(nn.RNN), True, 1, False, False)
case(1, ours.rnn_relu.default, rand(4, 3, 4), rand(1, 4, 6), weights(nn.RNN, bias=False), False, 1, False, True)
case(1, aten.lstm_cell.default, rand(4, 4), [rand(4, 6), rand(4, 6)], *weights(nn.LSTM))
case(1, aten.gru_cell.default, rand(4, 4), rand(4, 6), *weights(nn.GRU))
case(1, aten.rnn_tanh_cell.default, rand(4, 4), rand(4, 6), *weights(nn.RNN))
case(1, aten.rnn_relu_cell.default, rand(4, 4), rand(4, 6), *weights(nn.RNN, bias=False))


def whole_numbers(*shape: int) -> torch.Tensor:
    return integers(9, *shape).float() - 4  # the kernel knows no float64; sums of these are exact


ends = torch.tensor([3, 3, 10], dtype=torch.int32)
case(2, aten._grouped_mm.default, whole_numbers(10, 16), whole_numbers(3, 16, 32), ends)
case(
    1, aten._grouped_mm.default, whole_numbers(10, 4), whole_numbers(3, 4, 32), ends
)  # one unit of what the kernel takes
case(
    2,
    aten._grouped_mm.default,
    whole_numbers(3, 8, 16),
    whole_numbers(16, 12),
    torch.tensor([4, 8, 12], dtype=torch.int32),
)
case(
    2,
    aten._grouped_mm.default,
    whole_numbers(16, 12),
    whole_numbers(12, 32),
    torch.tensor([4, 8, 12], dtype=torch.int32),
)
case(4, aten._grouped_mm.default, whole_numbers(4, 8, 16), whole_numbers(4, 16, 8))

case(2, assigned, rand(4, 8), fixed(rand(4, 8)))
case(2, overwritten, rand(4, 8), rand(4, 8))
case(2, overwritten, rand(4, 8), rand(8))
case(2, overwritten, rand(4, 8), rand(4, 1))
