"""Sums over ranks in the memory of their terms, on the code path of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from collective_log import rank_of_eight
from one_device import close
from ranks import all_passed, run_ranks, run_scenarios
from small_networks import D, draw
from test_scheduled_collectives import as_a_library
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.partition.in_place_sums import sums_in_place
from shardwright.partition.local_program import LocalOp, LocalProgram, Redistribute, Ref

#: They cannot be cut: what has no mark is whole.
ROWS = 7


class Copies(TorchDispatchMode):
    """Counts the copies of tensors of some elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.count += made.numel() >= self.numel
        return made


class Block(nn.Module):
    """Columns, then rows: a sum of the result in the forward, of the gradient of the input in the backward."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], ranks: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate = (nn.Linear(width, 2 * width, bias=False, dtype=D) for _ in range(2))
        self.down, self.before = nn.Linear(2 * width, width, bias=False, dtype=D), nn.Linear(width, width, dtype=D)
        for layer in (self.up, self.gate):
            sw.shard(layer, ((1, 1), (ranks, 1)))
        sw.shard(self.down, ((1, ranks), (1, ranks)))
        self.columns, self.between = sw.Operator(torch.mul).shard(((1, ranks), (1, ranks))), between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, torch.tanh(self.before(x)))


BLOCKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gated": lambda m, x: torch.tanh(m.down(torch.relu(m.up(x)) * m.gate(x))),
    "result": lambda m, x: m.down(torch.relu(m.up(x))),
    "skip": lambda m, x: x + m.down(torch.relu(m.up(x))),  # the gradient of the sum goes to both terms
    "gradient of a pointwise operator": lambda m, x: m.down(torch.relu(m.up(torch.relu(x)) + m.up(x))),
    "summed once for two layouts": lambda m, x: torch.tanh(y := m.down(torch.relu(m.up(x)))) + m.columns(y, y),
    "view of the terms": lambda m, x: torch.tanh(m.down(torch.relu(m.up(x))).view(-1, 8, 8).transpose(1, 2)).sum(1),
    "softmax, which saves its result": lambda m, x: m.down(torch.softmax(m.up(x), -1) * m.gate(x)).softmax(-1),
}


def numbers(name: str) -> Callable[[int, int], None]:
    def run(rank: int, world: int) -> None:
        as_a_library()
        one, net = Block(BLOCKS[name], world), Block(BLOCKS[name], world)
        model = sw.AutoParallel(net).dataset_strategy("full_batch")
        x = draw(ROWS, 64).requires_grad_()
        for call in (model, one):
            for _ in range(2):
                call(x).square().mean().backward()
            again = call(x)
            for _ in range(2):  # one graph, twice
                again.square().mean().backward(retain_graph=True)
        for p, q in zip(net.parameters(), one.parameters()):
            close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad, name)
        grads = []
        for call in (model, one):
            y = draw(ROWS, 64).requires_grad_()
            (slope,) = torch.autograd.grad(call(y).square().sum(), y, create_graph=True)
            (curve,) = torch.autograd.grad((slope**3).sum(), y, create_graph=True)
            (curve.square().sum() + slope.square().sum()).backward()
            grads += [y.grad, curve.detach()]
        close(grads[0], grads[2], name), close(grads[1], grads[3], name)
        with torch.no_grad():
            close(model(x), one(x), name)

    return run


@pytest.mark.long
def test_numbers_are_those_of_one_device() -> None:
    all_passed(run_ranks(run_scenarios, 2, {name: numbers(name) for name in BLOCKS}))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_sums_in_place(name: str) -> None:
    program, there, back = of_block(name)
    moves = [(k, i) for k, i in enumerate(program.instructions) if isinstance(i, Redistribute)]
    forward = {k for k, i in moves if i.forward.is_all_reduce}
    backward = {k for k, i in moves if i.cause != "parameter" and i.backward and i.backward.is_all_reduce}
    assert forward and backward and (there, back) == (forward, backward)


def of_block(name: str = "result", change: Any = None) -> tuple[LocalProgram, frozenset[int], frozenset[int]]:
    """The program of a block, changed, and the places that are in place."""
    plan = sw.plan(Block(BLOCKS[name], 8), (torch.zeros(ROWS, 64, dtype=D).requires_grad_(),), devices=8)
    program = plan.program if change is None else change(plan.program)
    return program, *sums_in_place(program, ())


def test_what_is_read_later_is_copied() -> None:
    program, (place,), (back,) = of_block()
    instructions = program.instructions
    terms, summed = instructions[place].source, instructions[place].target
    tanh = next(i for i in instructions if isinstance(i, LocalOp) and i.target is torch.ops.aten.tanh.default)

    def with_reader(read: Any, target: Any = torch.ops.aten.tanh.default) -> Callable[[LocalProgram], LocalProgram]:
        made = replace(read, name="further", layout=terms.layout)
        further = replace(tanh, target=target, args=(Ref(read.name),), outputs=(made,))
        return lambda p: replace(p, instructions=(*p.instructions, further))

    assert of_block(change=with_reader(summed))[1] == {place}
    assert not of_block(change=with_reader(terms))[1]  # an instruction reads the terms later
    assert not of_block(change=lambda p: replace(p, outputs=(*p.outputs, terms)))[1]  # a result
    producer = next(k for k, i in enumerate(instructions) if isinstance(i, LocalOp) and terms in i.outputs)

    def saves_its_result(p: LocalProgram) -> LocalProgram:
        changed = replace(
            p.instructions[producer], target=torch.ops.aten.relu.default, args=p.instructions[producer].args[:1]
        )
        return replace(p, instructions=(*p.instructions[:producer], changed, *p.instructions[producer + 1 :]))

    assert not of_block(change=saves_its_result)[1]
    # The gradient of a sum goes to both of its terms.
    assert not of_block(change=with_reader(instructions[back].target))[2]


def copies_of(model: sw.AutoParallel, args: tuple[Any, ...], numel: int) -> int:
    model(*args).sum().backward()  # makes the plan
    with Copies(numel) as seen:
        model(*args).sum().backward()
    return seen.count


def test_a_block_copies_nothing_before_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime.distributed import rank_executor

    counts = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(rank_executor, "sums_in_place", lambda *_: (frozenset(), frozenset()))
        with rank_of_eight(rank=3):
            model = sw.AutoParallel(Block(BLOCKS["gated"], 8)).dataset_strategy("full_batch")
            counts.append(copies_of(model, (torch.ones(ROWS, 64, dtype=D),), ROWS * 64))
    assert counts[1] - counts[0] == 2  # the result in the forward, the gradient of the input in the backward
