"""Lowering: from a plan to the local program, an ordinary `torch.fx.Graph` of local operators and redistributions.

The program is the same for all ranks. All that depends on the rank (its slice, its group) stands in the
redistributions, and a runtime fills it in. Both runtimes execute this program; nothing dispatches on tensor
subclasses while it runs.

    placeholders:  parameters, buffers, constants, the seed if there is one, inputs (a rank's slices)
    nodes:         local operators;  move(x): a redistribution;  extreme(m, x): a maximum or minimum over ranks
    output:        the outputs that are tensors, then the new values of buffers

`partition.local_program` has the same program as a list of instructions; this file writes it as a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..graph import map_leaves
from ..partition.local_program import GlobalExtreme, LocalOp, PlacedValue, Redistribute, Ref
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan
from ..torch_private import schema_of
from .profile_ranges import RangeNames

__all__ = ["Lowered", "cast", "extreme", "lower", "move", "number_of_result", "operand", "sum_of_gradient"]


def move(x: torch.Tensor) -> torch.Tensor:
    """A redistribution of `x`. A runtime replaces it; ``node.meta["instruction"]`` says which redistribution it is."""
    raise AssertionError("a program that no runtime has bound")


def extreme(reduced: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """A maximum or minimum over ranks. A runtime replaces it, as `move`."""
    raise AssertionError("a program that no runtime has bound")


@dataclass(frozen=True)
class Lowered:
    """A local program and the names of its inputs and outputs.

    Attributes:
        graph: the program; redistributions and extremes are nodes whose ``meta["instruction"]`` is a `Redistribute`
            or a `GlobalExtreme`.
        plan: the plan that was lowered.
        parameters, buffers, constants: names, in the order of the placeholders; the seed, if the plan has one, and
            the inputs follow.
        updates: names of the buffers whose new values follow the outputs.
        pipeline: the plan of the pipeline that the plan is a stage of; None: of none.
    """

    graph: torch.fx.Graph
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
    graph = torch.fx.Graph()
    env: dict[str, torch.fx.Node] = {}
    taken: set[str] = set()

    def enter(instance: PlacedValue) -> None:
        env[instance.name] = graph.placeholder(_identifier(instance.name, taken))
        env[instance.name].meta["instance"] = instance

    for table in (program.parameters, program.buffers, program.constants):
        for instance in table.values():
            enter(instance)
    if program.seed is not None:
        enter(program.seed)
    for instance in program.inputs:
        enter(instance)
    for instruction in program.instructions:
        if isinstance(instruction, LocalOp):
            _compute(graph, env, instruction)
        elif isinstance(instruction, Redistribute):
            node = graph.call_function(move, (env[instruction.source.name],))
            _finish(env, node, instruction, instruction.target)
        else:
            node = graph.call_function(extreme, (env[instruction.source.name], env[instruction.operand.name]))
            _finish(env, node, instruction, instruction.target)
    results = [env[o.name] for o in program.outputs if isinstance(o, PlacedValue)]
    graph.output(tuple(results + [env[i.name] for i in program.updates.values()]))
    parameters, buffers, constants, updates = map(
        tuple, (program.parameters, program.buffers, program.constants, program.updates)
    )
    return Lowered(graph, plan, parameters, buffers, constants, updates, pipeline)


def operand(node: torch.fx.Node, index: int = 0) -> torch.fx.Node:
    """The node whose value is this positional argument of a call."""
    node_argument = node.args[index]
    assert isinstance(node_argument, torch.fx.Node), f"argument {index} of {node} is {node_argument!r}"
    return node_argument


def sum_of_gradient(placeholder: torch.fx.Node) -> torch.fx.Node | None:
    """The only consumer of a parameter or input, where it does nothing but sum the gradient over ranks; else None.

    A runtime skips such a node and takes the sum when the gradient is complete.
    """
    if len(placeholder.users) != 1:
        return None
    user = next(iter(placeholder.users))
    if user.target is not move:
        return None
    forward, backward = user.meta["instruction"].forward, user.meta["instruction"].backward
    only_sums = backward is not None and backward.is_all_reduce
    return user if forward.is_identity and only_sums else None


def cast(graph: torch.fx.Graph, x: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
    """The remainder of a redistribution that moves nothing: `x`, cast where need be; the cast's backward casts the
    gradient."""
    instruction = node.meta["instruction"]
    if not isinstance(instruction, Redistribute) or not instruction.casts:
        return x
    return graph.call_method("to", (x, instruction.dtype))


def _identifier(name: str, taken: set[str]) -> str:
    """A Python identifier for `name` that is not taken yet: ``fc.weight`` and ``fc_weight`` get different ones."""
    wish = candidate = ("_" if name[:1].isdigit() else "") + "".join(c if c.isalnum() else "_" for c in name)
    count = 1
    while candidate in taken:
        candidate, count = f"{wish}_{count}", count + 1
    taken.add(candidate)
    return candidate


def _finish(
    env: dict[str, torch.fx.Node], node: torch.fx.Node, instruction: Redistribute | GlobalExtreme, target: PlacedValue
) -> None:
    node.meta["instruction"], node.meta["instance"] = instruction, target
    env[target.name] = node


def _compute(graph: torch.fx.Graph, env: dict[str, torch.fx.Node], instruction: LocalOp) -> None:
    args, kwargs = map_leaves(
        lambda leaf: env[leaf.name] if isinstance(leaf, Ref) else leaf, (instruction.args, instruction.kwargs)
    )
    node = graph.call_function(instruction.target, args, kwargs)
    node.meta["instruction"] = instruction
    if _returns_one(instruction):
        (sole,) = instruction.outputs
        assert sole is not None
        env[sole.name] = node
        node.meta["instance"] = sole
        return
    for i, instance in enumerate(instruction.outputs):
        if instance is not None:
            item = graph.call_function(_item, (node, i))
            item.meta["instance"] = instance
            env[instance.name] = item


def _item(results: Any, index: int) -> torch.Tensor:
    return results[index]


def number_of_result(node: torch.fx.Node) -> int:
    """The number of a result, at a node that takes it from an operator with several."""
    index = node.args[1]
    assert isinstance(index, int)
    return index


def _returns_one(instruction: LocalOp) -> bool:
    schema = schema_of(instruction.target)
    if schema is None:
        return len(instruction.outputs) == 1
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
