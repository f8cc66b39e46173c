"""Lowering: from a plan to the local program, a list of nodes that call local operators and redistributions.

The program is the same for all ranks. All that depends on the rank (its slice, its group) stands in the
redistributions, and a runtime fills it in. Both runtimes execute this program; nothing dispatches on tensor
subclasses while it runs.

    placeholders:  parameters, buffers, constants, the seed if there is one, inputs (a rank's slices)
    nodes:         local operators;  move(x): a redistribution;  extreme(m, x): a maximum or minimum over ranks
    output:        the outputs that are tensors, then the new values of buffers

`partition.local_program` has the same program as a list of instructions; this file writes it as nodes that name the
nodes they read. These are the nodes of a `torch.fx.Graph` without its bookkeeping, which takes longer: a program is
lowered at each new size. `copied` writes a node into such a graph, for code that compiles it or prints it.

Example, ``relu(linear(x))`` on 8 devices, of which each is fed the whole x [32, 16]::

    _0_weight, _0_bias, input                 placeholders
    %3 = move(input)                          a rank's rows: [4, 16]
    %4 = move(_0_weight); %5 = move(_0_bias)
    %6 = linear(%3, %4, %5); %7 = relu(%6)    [4, 32]
    %8 = move(%7)                             all rows: [32, 32]
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..graph import map_leaves
from ..layout import Digits
from ..partition.local_program import GlobalExtreme, LocalOp, PlacedValue, Redistribute, Ref, made_by
from ..pipeline.pipeline_plan import PipelinePlan
from ..redistribution import CollectiveKind
from ..sharded_plan import Plan
from ..torch_private import schema_of
from .profile_ranges import RangeNames

__all__ = [
    "Lowered",
    "Node",
    "cast",
    "copied",
    "extreme",
    "followed_by_gathers",
    "lower",
    "move",
    "number_of_result",
    "operand",
    "sole_consumer",
    "sum_of_gradient",
]


def move(x: torch.Tensor) -> torch.Tensor:
    """A redistribution of `x`. A runtime replaces it; ``node.meta["instruction"]`` says which redistribution it is."""
    raise AssertionError("a program that no runtime has bound")


def extreme(reduced: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """A maximum or minimum over ranks. A runtime replaces it, as `move`."""
    raise AssertionError("a program that no runtime has bound")


class Node:
    """A value of a local program, or its outputs, as a node of a `torch.fx.Graph` has them.

    Args:
        name: unique in its program.
        op: ``"placeholder"``, ``"call_function"`` or ``"output"``.
        target: the function that is called.
        args, kwargs: its arguments, with nodes in the place of tensors.
        all_input_nodes: the nodes among the arguments, each once.

    Attributes:
        meta: ``"instance"``: its `PlacedValue`; ``"instruction"``: the instruction that it is.
        users: the nodes that read it, in order.
    """

    __slots__ = ("all_input_nodes", "args", "kwargs", "meta", "name", "op", "target", "users")

    def __init__(
        self,
        name: str,
        op: str,
        target: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] = {},
        all_input_nodes: tuple[Node, ...] = (),
    ) -> None:
        self.name, self.op, self.target, self.args, self.kwargs = name, op, target, args, kwargs
        self.all_input_nodes = all_input_nodes
        self.meta: dict[str, Any] = {}
        self.users: dict[Node, None] = {}
        for node in all_input_nodes:
            node.users[self] = None

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Lowered:
    """A local program and the names of its inputs and outputs.

    Attributes:
        nodes: the program; redistributions and extremes are nodes whose ``meta["instruction"]`` is a `Redistribute`
            or a `GlobalExtreme`.
        plan: the plan that was lowered.
        parameters, buffers, constants: names, in the order of the placeholders; the seed, if the plan has one, and
            the inputs follow.
        updates: names of the buffers whose new values follow the outputs.
        pipeline: the plan of the pipeline that the plan is a stage of; None: of none.
    """

    nodes: list[Node]
    plan: Plan
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    updates: tuple[str, ...]
    pipeline: PipelinePlan | None = None

    @cached_property
    def names(self) -> RangeNames:
        """The names of operators and redistributions in a profile."""
        return RangeNames.of(self.pipeline or self.plan)


def lower(plan: Plan, pipeline: PipelinePlan | None = None) -> Lowered:
    """Write a plan as a local program; that of a stage with the plan of the pipeline."""
    program = plan.program
    nodes: list[Node] = []
    env: dict[str, Node] = {}
    taken: set[str] = set()

    def enter(placed: PlacedValue) -> None:
        node = env[placed.name] = Node(_identifier(placed.name, taken), "placeholder")
        node.meta["instance"] = placed
        nodes.append(node)

    def call(target: Any, *args: Node) -> Node:
        node = Node(f"%{len(nodes)}", "call_function", target, args, {}, tuple(dict.fromkeys(args)))
        nodes.append(node)
        return node

    for table in (program.parameters, program.buffers, program.constants):
        for placed in table.values():
            enter(placed)
    if program.seed is not None:
        enter(program.seed)
    for placed in program.inputs:
        enter(placed)
    for instruction in program.instructions:
        if isinstance(instruction, LocalOp):
            _compute(nodes, env, instruction)
        elif isinstance(instruction, Redistribute):
            _finish(env, call(move, env[instruction.source.name]), instruction, instruction.target)
        else:
            node = call(extreme, env[instruction.source.name], env[instruction.operand.name])
            _finish(env, node, instruction, instruction.target)
    results = [env[o.name] for o in program.outputs if isinstance(o, PlacedValue)]
    results += [env[i.name] for i in program.updates.values()]
    nodes.append(Node("output", "output", None, (tuple(results),), {}, tuple(dict.fromkeys(results))))
    parameters, buffers, constants, updates = map(
        tuple, (program.parameters, program.buffers, program.constants, program.updates)
    )
    return Lowered(nodes, plan, parameters, buffers, constants, updates, pipeline)


def copied(graph: torch.fx.Graph, node: Node, env: Mapping[Node, torch.fx.Node]) -> torch.fx.Node:
    """A node at the end of a graph that does the same.

    Args:
        env: the graph's nodes in the place of those that the node reads.
    """
    args, kwargs = map_leaves(lambda a: env[a] if type(a) is Node else a, (node.args, dict(node.kwargs)))
    if node.op == "placeholder":
        made = graph.placeholder(node.name)
    elif node.op == "output":
        made = graph.output(*args)
    else:
        made = graph.call_function(node.target, args, kwargs)
    made.meta = dict(node.meta)
    return made


def operand(node: Node, index: int = 0) -> Node:
    """The node whose value is this positional argument of a call."""
    node_argument = node.args[index]
    assert isinstance(node_argument, Node), f"argument {index} of {node} is {node_argument!r}"
    return node_argument


def sole_consumer(placeholder: Node) -> Node | None:
    """The only consumer that has a gradient; None where there are several, or none."""
    users = [u for u in placeholder.users if _has_gradient(u)]
    return users[0] if len(users) == 1 else None


def _has_gradient(node: Node) -> bool:
    """False where a backward does not reach a node: a weight may be read for its device alone."""
    if node.target is move:
        return any(map(_has_gradient, node.users))
    return node.op == "output" or any(made.value.requires_grad for made in made_by(node.meta["instruction"]))


def sum_of_gradient(placeholder: Node) -> Node | None:
    """The only consumer of a parameter or input that has a gradient, where it does nothing but sum the gradient over
    ranks; else None.

    A runtime skips such a node and takes the sum when the gradient is complete.
    """
    user = sole_consumer(placeholder)
    if user is None or user.target is not move:
        return None
    forward, backward = user.meta["instruction"].forward, user.meta["instruction"].backward
    only_sums = backward is not None and backward.is_all_reduce
    return user if forward.is_identity and only_sums else None


def followed_by_gathers(lowered: Lowered, sums: Mapping[str, tuple[int, Digits]]) -> list[str]:
    """The names of the sums of gradients that a gather follows: after the sum, the first redistribution that
    communicates in a backward, and does more than sum a gradient, gathers over the digits of the sum.

    Args:
        sums: name of a parameter -> the number of the node that uses the parameter first, and the digits of the sum.
    """
    numbers, steps = [], []
    for number, node in enumerate(lowered.nodes):
        backward = node.meta["instruction"].backward if node.target is move else None
        if backward is not None and backward.collectives and sum_of_gradient(operand(node)) is not node:
            numbers.append(number)
            steps.append(backward.steps[0])
    found = []
    for name, (use, digits) in sums.items():
        before = bisect_left(numbers, use)
        step = steps[before - 1] if before else None
        if step is not None and step.kind is CollectiveKind.ALL_GATHER and step.digits == digits:
            found.append(name)
    return found


def cast(graph: torch.fx.Graph, x: torch.fx.Node, node: Node) -> torch.fx.Node:
    """The remainder of a redistribution that moves nothing: `x`, cast where need be; the cast's backward casts the
    gradient."""
    instruction = node.meta["instruction"]
    if not isinstance(instruction, Redistribute) or not instruction.casts:
        return x
    return graph.call_method("to", (x, instruction.dtype))


def _identifier(name: str, taken: set[str]) -> str:
    """A Python identifier for `name` that is not taken yet: ``fc.weight`` and ``fc_weight`` get different ones."""
    wish = candidate = ("_" if name[:1].isdigit() else "") + re.sub(r"\W", "_", name)
    count = 1
    while candidate in taken:
        candidate, count = f"{wish}_{count}", count + 1
    taken.add(candidate)
    return candidate


def _finish(env: dict[str, Node], node: Node, instruction: Redistribute | GlobalExtreme, target: PlacedValue) -> None:
    node.meta["instruction"], node.meta["instance"] = instruction, target
    env[target.name] = node


def _compute(nodes: list[Node], env: dict[str, Node], instruction: LocalOp) -> None:
    read: dict[Node, None] = {}

    def leaf(x: object) -> object:
        if type(x) is not Ref:
            return x
        node = env[x.name]
        read[node] = None
        return node

    args, kwargs = map_leaves(leaf, (instruction.args, instruction.kwargs))
    node = Node(f"%{len(nodes)}", "call_function", instruction.target, args, kwargs, tuple(read))
    nodes.append(node)
    node.meta["instruction"] = instruction
    if _returns_one(instruction):
        (sole,) = instruction.outputs
        assert sole is not None
        env[sole.name] = node
        node.meta["instance"] = sole
        return
    for i, placed in enumerate(instruction.outputs):
        if placed is not None:
            item = env[placed.name] = Node(f"%{len(nodes)}", "call_function", _item, (node, i), {}, (node,))
            item.meta["instance"] = placed
            nodes.append(item)


def _item(results: Any, index: int) -> torch.Tensor:
    return results[index]


def number_of_result(node: Node) -> int:
    """The number of a result, at a node that takes it from an operator with several."""
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _returns_one(instruction: LocalOp) -> bool:
    schema = schema_of(instruction.target)
    if schema is None:
        return len(instruction.outputs) == 1
    return len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
