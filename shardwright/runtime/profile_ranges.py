"""Named ranges of a step in a profile: what torch.profiler and nsys show of operators, redistributions and messages.

A step asks once whether a profiler is active (`profiling`). Only then it runs a variant of its program whose calls are
ranges of ``record_function``; the backward of a call is named by hooks of the autograd functions that it has made.

    sw::step rank 3 of 8, plan 0123456789abcdef        one call of a program
    sw::step 8 ranks in one process, plan 0123456789…  likewise, in the local runtime
    sw::layers.3.mlp.up linear                         an operator, by its path and kind
    sw::rank 3                                         a part of it, where the local runtime takes rank after rank
    sw::redistribute: the result of layers.3.mlp.relu [2@4, -] -> [8@1, -] by all_to_all(4@1)
    sw::gather: layers.3.mlp.up.weight                  a weight, where a pipeline or a backward gathers it by itself
    sw::scatter: the gradient of layers.3.mlp.up.weight
    sw::bucket 2: reduce_scatter of the gradients of layers.3.mlp.up.bias to layers.3.mlp.up.weight (2)
    sw::stage 1, micro-batch 0, forward                an action of a pipeline's schedule
    sw::receive: the value 'add_4', micro-batch 0, ...  a message between stages

Behind an operator or a redistribution: "backward", "recomputed". Behind a redistribution or a bucket: "issue", "wait".
Behind a gather in a backward: "again".

`rehearsal.trace_comparison` reads the names; `RangeNames` makes them for both. The path of an operator in the model
(`operator_paths`) is shown by tables too:

    linear_14 of module layers.2.self_attn.q_proj, its only operator   layers.2.self_attn.q_proj
    mul_9 of module layers.0.self_attn, the second of three            layers.0.self_attn.mul#2
    an operator with a mark                                            the mark's path
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ..cost.communication_schedule import ScheduledMessage
from ..graph import Op
from ..partition.local_program import Decision, GlobalExtreme, Instruction, LocalOp, Redistribute
from ..pipeline.pipeline_plan import PipelinePlan
from ..pipeline.schedules import Action
from ..sharded_plan import Plan
from ..torch_private import profiler_enabled as profiling, pytree

__all__ = [
    "BACKWARD",
    "ISSUE",
    "PREFIX",
    "RECOMPUTED",
    "REGATHERED",
    "UNSUMMED",
    "WAIT",
    "RangeNames",
    "action_range",
    "around_backward",
    "bucket_text",
    "gather_text",
    "named",
    "named_module",
    "named_steps",
    "named_when_profiled",
    "operator_paths",
    "plain_kind",
    "profiling",
    "range_of",
    "rank_text",
    "receive_text",
    "scatter_text",
    "step_range",
]

X = TypeVar("X")
Y = TypeVar("Y")

# -- paths of operators


def plain_kind(op: Op) -> str:
    """The kind of an operator, as tables show it: ``and`` for ``__and__``."""
    return op.kind.strip("_") if op.kind.startswith("__") else op.kind


def operator_paths(decisions: Mapping[str, Decision]) -> dict[str, str]:
    """Name of an operator -> its path; no two have the same.

    Args:
        decisions: those of a whole model, by operator.
    """
    counts = Counter(
        ".".join(d.op.module.split(".")[:depth])
        for d in decisions.values()
        for depth in range(1, d.op.module.count(".") + 2)
    )
    kinds = Counter((d.op.module, plain_kind(d.op)) for d in decisions.values())
    met: Counter[tuple[str, str]] = Counter()
    paths: dict[str, str] = {}
    for name, d in decisions.items():
        module, kind = d.op.module, plain_kind(d.op)
        met[module, kind] += 1
        if not module or not re.fullmatch(re.escape(kind) + r"_*\d*", name):
            paths[name] = name
        elif counts[module] == 1:
            paths[name] = module
        else:
            number = f"#{met[module, kind]}" if kinds[module, kind] > 1 else ""
            paths[name] = f"{module}.{kind}{number}"
    return paths


# -- ranges


#: The begin of each name, and what stands behind some.
PREFIX, BACKWARD, RECOMPUTED, REGATHERED, ISSUE, WAIT = "sw::", " backward", " recomputed", " again", " issue", " wait"

#: Functions of autograd that one call makes, at most; those beyond have no name.
FUNCTIONS = 1 << 10

#: The name of the sum of a gradient that a backward under ``no_sync`` has left.
UNSUMMED = "bucket: gradients kept under no_sync"

#: The kinds of actions of a pipeline's schedule, in words.
_ACTIONS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}

_NOTHING = contextlib.nullcontext()


def range_of(text: str) -> AbstractContextManager[object]:
    """A range of a name while a profiler is active, else nothing."""
    return record_function(PREFIX + text) if profiling() else _NOTHING


class _Groups(Protocol):
    base: int
    rank: int


class _OnRank(Protocol):
    """A `distributed.parameters.ShardedState`: the parameters of one rank, with its process groups."""

    @property
    def groups(self) -> _Groups: ...


def step_range(plan: Plan | PipelinePlan, sharded: _OnRank | None) -> AbstractContextManager[object]:
    """The range of one call of a program.

    Args:
        plan: its plan.
        sharded: the parameters of this rank; None: all ranks are in this process.
    """
    if not profiling():
        return _NOTHING
    ranks = f"{plan.devices} rank{'s' * (plan.devices > 1)} in one process"
    where = ranks if sharded is None else f"rank {sharded.groups.base + sharded.groups.rank} of {plan.devices}"
    return range_of(f"step {where}, plan {plan.fingerprint}")


def action_range(action: Action) -> AbstractContextManager[object]:
    """The range of an action of a pipeline's schedule."""
    if not profiling():
        return _NOTHING
    return range_of(f"stage {action.stage}, micro-batch {action.micro}, {_ACTIONS[action.kind]}")


def named(call: Callable[..., object], text: str) -> Callable[..., object]:
    """A call as a range, and its backward as ranges too."""

    def run(*args: object, **kwargs: object) -> object:
        with record_function(PREFIX + text):
            made = call(*args, **kwargs)
        around_backward(made, (args, kwargs), lambda: _entered(text + BACKWARD), _exited)
        return made

    return run


def named_when_profiled(call: Callable[[X], Y], text: str) -> Callable[[X], Y]:
    """A function that is a range while a profiler is active."""

    def run(x: X) -> Y:
        if not profiling():
            return call(x)
        with record_function(PREFIX + text):
            return call(x)

    return run


def _entered(text: str) -> record_function:
    return record_function(PREFIX + text).__enter__()


def _exited(entered: record_function) -> None:
    entered.__exit__(None, None, None)


def around_backward(made: object, inputs: object, begin: Callable[[], X | None], end: Callable[[X], None]) -> None:
    """Call `begin` before, and `end` with its result after, each autograd function that a call has made.

    Args:
        made: the results of the call.
        inputs: its tensors, in any nesting.
        begin: None of it: `end` is not called.
    """
    for function in _functions_between(made, inputs):
        _watch(function, begin, end)


def _watch(function: torch.autograd.graph.Node, begin: Callable[[], X | None], end: Callable[[X], None]) -> None:
    begun: list[X | None] = []

    def before(*_: object) -> None:
        begun.append(begin())

    def after(*_: object) -> None:
        if begun and (entered := begun.pop()) is not None:
            end(entered)

    function.register_prehook(before)
    function.register_hook(after)


def _functions_between(made: object, inputs: object) -> list[torch.autograd.graph.Node]:
    """The functions of autograd that lie between results and what they were computed from."""
    starts = [x.grad_fn for x in _tensors(made) if x.grad_fn is not None]
    if not starts:
        return []
    seen = {x.grad_fn for x in _tensors(inputs)}
    out: list[torch.autograd.graph.Node] = []
    while starts and len(out) < FUNCTIONS:
        function = starts.pop()
        # By the type: a custom function may have an attribute `name` of its own.
        if function in seen or type(function).__name__ == "AccumulateGrad":
            continue
        seen.add(function)
        out.append(function)
        starts += [f for f, _ in function.next_functions if f is not None]
    return out


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


# -- names


class RangeNames:
    """The names of a plan's operators and redistributions.

    Args:
        decisions: those of the whole model, by operator.
    """

    def __init__(self, decisions: Mapping[str, Decision]) -> None:
        self.paths = operator_paths(decisions)
        self._kinds = {name: d.op.kind for name, d in decisions.items()}

    @classmethod
    def of(cls, plan: Plan | PipelinePlan) -> RangeNames:
        """The names of a plan; with a pipeline, of all its stages."""
        plans = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
        return cls({name: d for each in plans for name, d in each.decisions.items()})

    def operator(self, name: str) -> str:
        """``layers.3.mlp.up linear``: the path of an operator, and its kind where the path does not say it."""
        path, kind = self.paths.get(name, name), self._kinds.get(name, "")
        return path if not kind or kind in path else f"{path} {kind}"

    def redistribution(self, instruction: Redistribute | GlobalExtreme) -> str | None:
        """The name of a redistribution; None where it moves nothing, in no direction."""
        steps = ", ".join(map(str, instruction.forward.steps))
        if isinstance(instruction, Redistribute):
            backward = "" if instruction.backward is None else ", ".join(map(str, instruction.backward.steps))
            if not (steps or backward or instruction.casts):
                return None
            steps = steps or ("a cast" if instruction.casts else f"nothing, its gradient by {backward}")
        source, target = (str(v.layout).partition(": ")[2] for v in (instruction.source, instruction.target))
        return f"redistribute: {self.value(instruction)} {source} -> {target} by {steps}"

    def value(self, instruction: Redistribute | GlobalExtreme) -> str:
        """The value that a redistribution moves: ``the result of layers.3.mlp.relu``, or the name of a parameter, a
        buffer or an input."""
        name = instruction.source.value.name
        producer = instruction.producer if isinstance(instruction, Redistribute) else instruction.operator
        return f"the result of {self.operator(producer)}" if producer in self.paths else name

    def of_instruction(self, instruction: Instruction | None) -> str | None:
        """The name of an instruction; None: it has none."""
        if isinstance(instruction, LocalOp):
            return self.operator(instruction.operator)
        return None if instruction is None else self.redistribution(instruction)


def gather_text(name: str) -> str:
    """The name of the gather of a weight by itself."""
    return f"gather: {name}"


def scatter_text(name: str) -> str:
    """The name of the reduction of a weight's gradient by itself."""
    return f"scatter: the gradient of {name}"


def rank_text(rank: int) -> str:
    """The name of the part of one rank, where the local runtime takes rank after rank."""
    return f"rank {rank}"


def receive_text(what: str) -> str:
    """The name of a message between stages."""
    return f"receive: {what}"


def bucket_text(number: int, message: ScheduledMessage) -> str:
    """The name of a message of weights or gradients: ``bucket 2: all_reduce of the gradients of a to b (12)``."""
    names = list(dict.fromkeys(member.name for member in message.members))
    what = "weights" if message.role == "gather" else "gradients"
    several = f"{names[0]} to {names[-1]} ({len(names)})" if len(names) > 1 else names[0]
    return f"bucket {number}: {message.kind} of the {what} of {several}{', again' * message.repeats_forward}"


# -- programs


def named_module(module: torch.fx.GraphModule, names: RangeNames) -> Callable[..., Any]:
    """The program whose calls with an instruction (``node.meta["instruction"]``) are ranges."""
    graph, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in module.graph.nodes:
        text = names.of_instruction(node.meta.get("instruction"))
        if text is None or node.op not in ("call_function", "call_module"):
            env[node] = graph.node_copy(node, env.__getitem__)
            continue
        call = module.get_submodule(node.target) if node.op == "call_module" else node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = graph.call_function(named(call, text), args, kwargs)
    return torch.fx.GraphModule(module, graph).forward


class _Node(Protocol):
    """A node of a local program: what this file reads of it."""

    all_input_nodes: tuple[Any, ...]  # nodes of the same kind
    meta: dict[str, Any]


N = TypeVar("N", bound=_Node)
Values = TypeVar("Values", bound=Sequence[object])


def named_steps(
    steps: Sequence[tuple[N, int, Callable[[Values], object]]],
    slots: Mapping[N, int],
    names: RangeNames,
    skipped: Collection[N],
) -> list[tuple[N, int, Callable[[Values], object]]]:
    """The steps of a program in the local runtime, as (node, slot, function of all values); `skipped` nodes do nothing
    and have no name."""
    out = []
    for node, slot, step in steps:
        text = None if node in skipped else names.of_instruction(node.meta.get("instruction"))
        read = [slots[a] for a in node.all_input_nodes]
        out.append((node, slot, step if text is None else _named_step(step, text, read)))
    return out


def _named_step(step: Callable[[Values], object], text: str, read: Sequence[int]) -> Callable[[Values], object]:
    def run(env: Values) -> object:
        with record_function(PREFIX + text):
            made = step(env)
        around_backward(made, [env[slot] for slot in read], lambda: _entered(text + BACKWARD), _exited)
        return made

    return run
