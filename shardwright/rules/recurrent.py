"""Recurrent layers, nn.LSTM, nn.GRU, nn.RNN and their cells: the batch may be cut, steps and weights stay whole.

torch's recurrent operators draw the numbers of their dropout internally. The operators here have no dropout. Where a
model has dropout between its layers, each layer becomes an operator of its own, followed by a plain dropout. Its
numbers are drawn like those of every other dropout.

Example: an LSTM of 2 layers with dropout 0.1 becomes a layer, a dropout, and a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph import Op, Value
from .dims import local_operator, named, operand, whole
from .registry import Rule, register

__all__ = ["layer_by_layer", "without_dropout"]

aten = torch.ops.aten

_ARGUMENTS = "Tensor[] params, bool has_biases, int num_layers, bool bidirectional, bool batch_first"


@local_operator(f"lstm(Tensor input, Tensor[] hx, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def lstm(
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """`aten.lstm` without dropout."""
    return aten.lstm.input(x, hx, params, biases, layers, 0.0, False, bidirectional, batch_first)


def _simple(name: str) -> object:
    plain = getattr(aten, name).input

    def run(
        x: torch.Tensor,
        hx: torch.Tensor,
        params: list[torch.Tensor],
        biases: bool,
        layers: int,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        return plain(x, hx, params, biases, layers, 0.0, False, bidirectional, batch_first)

    return local_operator(f"{name}(Tensor input, Tensor hx, {_ARGUMENTS}) -> (Tensor, Tensor)")(run)


_OURS = {aten.lstm.input: lstm} | {getattr(aten, name).input: _simple(name) for name in ("gru", "rnn_tanh", "rnn_relu")}


def without_dropout(target: object, arguments: dict[str, Any]) -> tuple[object, tuple[object, ...], float] | None:
    """The dropout-free operator for a recurrent operator of torch.

    Returns:
        The operator, its arguments, and the probability of the dropout between its layers; None for other operators.
    """
    if target not in _OURS:
        return None
    drops = arguments["dropout"] if arguments["train"] and arguments["num_layers"] > 1 else 0.0
    names = ("input", "hx", "params", "has_biases", "num_layers", "bidirectional", "batch_first")
    return _OURS[target], tuple(arguments[n] for n in names), drops


def layer_by_layer(
    emit: Callable[[object, tuple[object, ...], dict[str, object]], Sequence[Value]],
    target: object,
    args: tuple[Any, ...],
    drops: float,
) -> list[Value]:
    """The outputs of a recurrent operator, recorded as one operator per layer with a dropout between layers."""
    x, hx, params, biases, layers, bidirectional, batch_first = args
    states, directions = (hx if isinstance(hx, (list, tuple)) else [hx]), 2 if bidirectional else 1
    each, ends = len(params) // layers, []
    for i in range(layers):
        layer_states = [emit(aten.slice.Tensor, (s, 0, i * directions, (i + 1) * directions), {})[0] for s in states]
        x, *end = emit(
            target,
            (
                x,
                layer_states if target is lstm else layer_states[0],
                list(params[i * each : (i + 1) * each]),
                biases,
                1,
                bidirectional,
                batch_first,
            ),
            {},
        )
        ends.append(end)
        if i + 1 < layers:
            x = emit(aten.dropout.default, (x, drops, True), {})[0]
    return [x, *(emit(aten.cat.default, (list(state), 0), {})[0] for state in zip(*ends))]


def _text(values: Sequence[Value | None], batch: int, count: int, prefix: str) -> list[str]:
    """The texts of operands: the first `count` have the batch along a dim, the others stay whole."""
    texts = []
    for i, value in enumerate(values):
        assert value is not None
        names = whole(named(len(value.shape), f"{prefix}{i}_"))
        if i < count:
            names[batch if i == 0 else len(names) - 2] = "b"
        texts.append(operand(names))
    return texts


def _layers(op: Op) -> str:
    """The notation: states have the batch along dim 1; the batch dim of the sequences is an argument."""
    at, states = (0 if op.argument("batch_first") else 1), len(op.outputs)
    return f"{', '.join(_text(op.inputs, at, states, 'i'))} -> {', '.join(_text(op.outputs, at, states, 'o'))}"


def _cell(op: Op) -> str:
    states = 3 if op.kind == "lstm_cell" else 2
    return f"{', '.join(_text(op.inputs, 0, states, 'i'))} -> {', '.join(_text(op.outputs, 0, states, 'o'))}"


register(tuple(_OURS.values()), Rule(_layers))
register(
    (aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default), Rule(_cell)
)
