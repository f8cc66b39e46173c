"""Calls of operators that are prepared once: tensors from the values of a step, all other arguments as they are."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
import torch
from small_networks import draw
from torch import nn

import shardwright as sw
from shardwright.partition.local_program import LocalOp
from shardwright.runtime.local.operators import Call, _call
from shardwright.runtime.lowering import Node

A, B, C, D = NODES = [Node(name, "placeholder") for name in "abcd"]
#: Arguments of a call, and the same with the values of a step.
CALLS = {
    "no tensor": (((2, [3]), {}), ((2, [3]), {})),
    "no argument": (((), {}), ((), {})),
    "one tensor": (((A,), {}), (("a",), {})),
    "one tensor, constants": (((B, 2, (3,)), {"dim": 4}), (("b", 2, (3,)), {"dim": 4})),
    "two tensors": (((B, A), {}), (("b", "a"), {})),
    "two tensors, constants": (((B, A, None), {}), (("b", "a", None), {})),
    "three tensors": (((A, A, C, 1), {}), (("a", "a", "c", 1), {})),
    "four tensors": (((D, C, B, A), {}), (("d", "c", "b", "a"), {})),
    "a tensor after a constant": (((A, [4], B), {}), (("a", [4], "b"), {})),
    "a list of tensors": ((([A, B], 1), {}), ((["a", "b"], 1), {})),
    "an index": (((A, [None, (B, 2)]), {}), (("a", [None, ("b", 2)]), {})),
    "a named tensor": (((A,), {"weight": B, "dim": 0}), (("a",), {"weight": "b", "dim": 0})),
    "only named tensors": (((), {"dim": 0, "tensors": [A]}), ((), {"dim": 0, "tensors": ["a"]})),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call(name: str) -> None:
    (args, kwargs), (wanted, named) = CALLS[name]
    places = {node: i for i, node in enumerate(NODES)}
    run = _call(lambda *args, **kwargs: (args, kwargs), args, kwargs, lambda node: itemgetter(places[node]))
    for values in ("abcd", "efgh"):  # the second call sees nothing of the first
        turned = dict(zip("abcd", values))
        assert run(list(values)) == (replaced(wanted, turned), replaced(named, turned))


def test_a_call_changes_no_list_of_another() -> None:
    """A function that changes the list of tensors it is given."""
    run = _call(lambda tensors: tensors.pop(), ([A, B],), {}, lambda node: itemgetter(NODES.index(node)))
    assert [run([1, 2, 3, 4]), run([5, 6, 7, 8])] == [2, 6]


def test_an_operand_that_ranks_compute_with_independently_is_expanded_for_each() -> None:
    call = Call.__new__(Call)
    call.slots, call.rank_shapes, call.gradients, call.axes = {B: 1}, {B: (1, 2)}, {B: None}, None
    call._shapes, call.__dict__["_expanded"] = {B: (4, 2)}, None
    x = torch.randn(1, 2, 3, requires_grad=True)
    made = call._get(B)([None, x])
    assert torch.equal(made, x.expand(4, 2, 3)) and made.grad_fn.name() == "SameOnAllRanksBackward"


class Signed(nn.Module):
    """Equal layers but for a constant, whose kind or sign alone may differ from that of another layer."""

    def __init__(self, constants: list[Any]) -> None:
        super().__init__()
        self.constants = constants
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in constants)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, constant in zip(self.layers, self.constants):
            h = torch.relu(layer(x)) + 1
            x = torch.copysign(h, torch.full_like(h, constant)) + (h + constant).sum(0) + h.sum(1, keepdim=True)
        return x.square().mean()


@pytest.mark.parametrize("constants", [[1.0] * 4, [0.0, -0.0, 1, 1.0, True, -1, 0.0]])
def test_calls_of_equal_layers_share_their_steps_and_others_do_not(constants, monkeypatch) -> None:
    """Steps are made once a form; losses and gradients are those of one device."""
    made: list[str] = []
    plain = Call.step
    monkeypatch.setattr(Call, "step", lambda call: [made.append(call.node.name), plain(call)][1])
    torch.manual_seed(0)
    net, x = Signed(constants), draw(8, 8)
    loss = net(x)
    loss.backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    sw.init(devices=4)
    model = sw.AutoParallel(net, parallel_mode="semi_auto").dataset_strategy("data_parallel")
    alike = model(x)
    alike.backward()
    torch.testing.assert_close(alike, loss)
    for parameter, gradient in zip(net.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
    calls = [i for i in model.plan.program.instructions if isinstance(i, LocalOp)]
    distinct = len(set(map(repr, constants))) + 1  # the input of the first layer has no gradient
    assert len(made) <= len(calls) * min(1, distinct / len(constants)) + 3


def replaced(a: Any, values: dict[str, str]) -> Any:
    """The same arguments with other values of a step."""
    if isinstance(a, dict):
        return {k: replaced(v, values) for k, v in a.items()}
    return type(a)(replaced(e, values) for e in a) if isinstance(a, (list, tuple)) else values.get(a, a)
