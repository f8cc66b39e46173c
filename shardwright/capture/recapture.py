"""Recapture: a captured model at other inputs, by a light run of its forward.

torch.export takes about a millisecond an operator. The exported program of an earlier call already has everything that
does not depend on sizes: the operators, their names, modules and lines. A light run of the forward gives the rest:

    exported at [8, 16]      linear(x, w), view(linear, [32, 64]), relu(view)
    light run at [24, 16]    linear(x, w), view(linear, [96, 64]), relu(view)
    graph at [24, 16]        the exported program, read with the numbers and shapes of the light run

The forward runs on outlines: tensors with a shape and without elements. Each operator is stopped above autograd, where
exported programs have theirs. Its result is an outline too. A call on tensors without elements gives the outline once
for all operators of one form: 12 equal layers cost what one costs.

The graph is that of an export at these inputs, because the model's own code has run on them. A size of 1, a branch on a
size, or a number made of sizes needs no rule of its own. Where the forward calls other operators than the exported
program, or calls them in other modules or on other tensors, the two differ (`Differs`), and the model is exported anew.

A further model of the same structure (modules, parameters, kind of call) follows the program of an earlier one, which
may be gone: a model that is planned in several modes, or built once for each setting that is tried. Each operator must
be called at the line of the user's code that the program has, or the model is exported. In a model of torch's modules
this is the line that calls the model: each model has the line of its own call. A program with constants is followed by
its own model alone.
"""

from __future__ import annotations

import copy
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node
from torch.nn.parameter import is_lazy

from ..autocast import Autocast, current
from ..identity_tables import IdentityMap, IdentitySet
from ..mixed_precision import MixedPrecision
from ..torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    buffer_table,
    called_above_autograd,
    exporting,
    no_python_dispatcher,
    parameter_table,
    pytree,
    storage_id,
)
from .annotations import MARK
from .observed.attribute_patches import module_calls
from .observed_state import Observation
from .outlines import (
    PLAIN,
    Differs,
    OperatorResult,
    Outline,
    Results,
    Target,
    Tensors,
    by_formula,
    computed,
    computed_on_meta,
    facts_of,
    form_of_arguments,
    is_grad_enabled,
    is_same,
    outlines_of,
    written_names,
)
from .regions import EDGE, OPAQUE
from .source_lines import calling_line, calling_module, source_of

__all__ = [
    "AsExported",
    "AsRun",
    "Call",
    "LightRun",
    "ModelPrograms",
    "Program",
    "forget_programs",
    "keep_for_structure",
    "programs_of_structure",
    "structure_of",
]

aten = torch.ops.aten

Read = TypeVar("Read")

#: (args, kwargs) of a call.
Call = tuple[tuple[object, ...], dict[str, object]]

#: Operators to which export gives another name.
_EXPORTED: dict[Target, Target] = {aten.lift_fresh.default: aten.lift_fresh_copy.default}

#: Calls of one operator that `Program.by_meta` compares.
_COMPARED = 8


# -- exported programs -------------------------------------------------------------------------------------------------


class Program:
    """An exported program that later captures of the model may follow.

    Args:
        exported: the result of torch.export.
    """

    def __init__(self, exported: ExportedProgram) -> None:
        self.exported = exported
        self.called_at = self._exported_at = calling_line()
        self.template: object = None  # the latest graph that was read of it, as a `GraphTemplate`
        self._by_meta: dict[Target, bool | None] = {}

    def moved(self) -> Program:
        """The program of a model that is called at the line that runs now."""
        now = calling_line()
        if now == self.called_at or now is None:
            return self
        made = copy.copy(self)
        made.called_at = now
        return made

    def line(self, node: Node) -> str:
        """The user's line of a node. Operators of a model of torch's modules have the line of its call."""
        line = source_of(node)
        return (self.called_at or "") if line == self._exported_at else line

    def followed(self, read: Callable[[Program, AsExported], Read]) -> Read:
        """The result of ``read(program, nodes)`` for the program itself."""
        return read(self, AsExported())

    @cached_property
    def length(self) -> int:
        """The number of its nodes."""
        return sum(len(m.graph.nodes) for m in self.exported.graph_module.modules() if hasattr(m, "graph"))

    @cached_property
    def nodes(self) -> dict[object, list[Node]]:
        """The nodes of each target."""
        found: dict[object, list[Node]] = {}
        for module in self.exported.graph_module.modules():
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                found.setdefault(node.target, []).append(node)
        return found

    def by_meta(self, target: Target, beneath: Callable[[], AbstractContextManager[None]] = nullcontext) -> bool | None:
        """True where tensors on the meta device tell of an operator what fake tensors have told in this program; None
        for an operator that the program does not call.

        Meta tensors take a fifth of the time. But autocast leaves them alone, and kernels of a device may lay out their
        results in their own way, which fake tensors follow.
        """
        if target not in self._by_meta:
            nodes = self.nodes.get(target, [])
            step = -(-len(nodes) // _COMPARED) or 1
            alike = {_called_as(node): node for node in nodes[::step]}  # equal layers call alike
            with beneath():
                self._by_meta[target] = all(map(_agrees, alike.values())) if nodes else None
        return self._by_meta[target]


def _traced_arguments(node: Node) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """(args, kwargs) of a node, with the tensors that were traced."""
    return torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))


def _called_as(node: Node) -> object:
    """A key that is equal for calls with arguments and results of one form; the node itself where there is none."""
    try:
        form = form_of_arguments((*_traced_arguments(node), node.meta.get("val")), [])
        hash(form)
    except (RuntimeError, TypeError):  # what cannot be looked up, such as a slice
        return node
    return form


def _agrees(node: Node) -> bool:
    """True where a call on the meta device gives the traced results of an operator."""
    args, kwargs = _traced_arguments(node)
    assert callable(node.target)
    tensors: list[torch.Tensor] = []
    try:
        form = form_of_arguments(args, tensors), form_of_arguments(tuple(kwargs.items()), tensors) if kwargs else ()
        with torch.no_grad():
            found = computed_on_meta(node.target, args, kwargs, form, tensors)
    except (Differs, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    memories = [storage_id(t.untyped_storage()) for t in tensors]

    def same(result: Results, traced: object) -> bool:
        if isinstance(result, (list, tuple)) and not isinstance(result, OperatorResult):
            return isinstance(traced, (list, tuple)) and all(map(same, result, traced))
        if not isinstance(traced, torch.Tensor) or result is None:
            return result is traced
        memory = storage_id(traced.untyped_storage())
        return result.form == (tuple(traced.shape), traced.stride(), traced.dtype, traced.device) and (
            memory not in memories if result.viewed is None else memory == memories[result.viewed]
        )

    return same(found, node.meta.get("val"))


# -- programs by model and by structure --------------------------------------------------------------------------------


class ModelPrograms(list[Program]):
    """The exported programs that captures of one model follow, the latest first.

    Attributes:
        latest: the observation of the latest run.
    """

    latest: Observation | None = None


class _ProgramTable(OrderedDict[Hashable, list[Program]]):
    """Programs of models, by structure, those used last at the end.

    Attributes:
        nodes: the number of nodes of all of them together.
    """

    nodes = 0


_BY_STRUCTURE = _ProgramTable()
_structures = threading.Lock()  # several threads may capture at once
#: The most nodes of all of them together, 1 to 3 KB each (GPTs of 6 to 13 layers).
MOST_NODES = 10_000
#: The most programs of one structure.
MOST_PROGRAMS = 4


def structure_of(
    net: nn.Module,
    loss_fn: Callable[..., object] | None,
    device: torch.device | str | None,
    hooks_around: bool,
    mixed_precision: MixedPrecision | None,
    call: Call,
) -> Hashable:
    """The properties of a model and of a call that decide, but for Python's state, what `torch.export` makes of them.

    Args:
        net, loss_fn, device, hooks_around, mixed_precision: as `export.captures` takes them.
        call: the inputs; the sizes of tensors count for nothing.
    """
    tensors: IdentityMap[torch.Tensor, str] = IdentityMap()
    parts: list[Hashable] = []
    for root in (net, loss_fn):
        if not isinstance(root, nn.Module):
            parts.append(_code(root))
            continue
        for path, module in root.named_modules(remove_duplicate=False):
            called = [(name, _code(f)) for name, f in vars(module).items() if callable(f)]
            parts.append((path, weakref.ref(type(module)), module.training, tuple(called)))
            for table in (parameter_table(module), buffer_table(module)):
                for name, x in table.items():
                    if x is None:
                        continue
                    first = tensors.setdefault(x, f"{path}.{name}")
                    shape = None if is_lazy(x) else tuple(x.shape)
                    parts.append((name, first, type(x), shape, x.dtype, x.device, x.requires_grad))
    leaves, spec = pytree.tree_flatten(call)
    kinds = tuple(
        (x.dtype, x.dim(), x.requires_grad)
        if isinstance(x, torch.Tensor)
        else (type(x), x if type(x) in PLAIN else None)
        for x in leaves
    )
    casting = current("cpu", *([] if device is None else [torch.device(device).type]))
    how = torch.is_grad_enabled(), torch.get_default_dtype(), casting, str(device), hooks_around
    return tuple(parts), spec, kinds, how, mixed_precision


def _code(function: object, closes_over: bool = True) -> Hashable:
    """The code of a function, else the type of an object.

    Args:
        closes_over: True for the code of the functions that it closes over as well, which tell wrappers apart; not of
            theirs, since functions may close over one another.
    """
    if isinstance(function, (types.BuiltinFunctionType, OpOverload, OpOverloadPacket)):
        return function
    if isinstance(function, partial):
        return _code(function.func)
    if not isinstance(function, types.FunctionType):
        return weakref.ref(type(function))
    if not closes_over:
        return function.__code__
    filled = [cell for cell in function.__closure__ or () if cell != types.CellType()]
    contents = [cell.cell_contents for cell in filled]
    return function.__code__, tuple([_code(x, False) for x in contents if callable(x) and not isinstance(x, nn.Module)])


def programs_of_structure(structure: Hashable) -> list[Program]:
    """The programs of earlier models of a structure, the latest first."""
    with _structures:
        found = list(_BY_STRUCTURE.get(structure, ()))
        if found:
            _BY_STRUCTURE.move_to_end(structure)
    return [program.moved() for program in found]


def keep_for_structure(structure: Hashable, program: Program) -> None:
    """Let models of a structure follow a program, unless it has constants."""
    if program.exported.constants:
        return
    with _structures:
        programs = _BY_STRUCTURE.setdefault(structure, [])
        programs.insert(0, program)
        _BY_STRUCTURE.nodes += program.length - sum(p.length for p in programs[MOST_PROGRAMS:])
        del programs[MOST_PROGRAMS:]
        _BY_STRUCTURE.move_to_end(structure)
        while len(_BY_STRUCTURE) > 1 and _BY_STRUCTURE.nodes > MOST_NODES:
            _, oldest = _BY_STRUCTURE.popitem(last=False)
            _BY_STRUCTURE.nodes -= sum(p.length for p in oldest)


def forget_programs() -> None:
    """Forget the programs of all structures: the next model is exported."""
    with _structures:
        _BY_STRUCTURE.clear()
        _BY_STRUCTURE.nodes = 0


# -- the run -----------------------------------------------------------------------------------------------------------


class OperatorCall(NamedTuple):
    """One operator call of a light run.

    Args:
        target, args, kwargs: as called.
        made, results: the results: outlines, and the `OperatorResult`s, which calls of one form share.
        module, grad, casting: the innermost module that was running, True where gradients were on, and autocast.
        line: the user's line; None: not asked for.
    """

    target: Target
    args: tuple[object, ...]
    kwargs: dict[str, object]
    made: Tensors
    results: Results
    module: nn.Module
    grad: bool
    casting: Autocast
    line: str | None


class LightRun:
    """A finished run of a module on outlines.

    Args:
        module: the module; its parameters and buffers are outlines.
        paths: its modules, by path; a module with several paths has each.
        args, kwargs: the inputs of the call, with outlines in place of tensors.
        device: the device on which the program is to run.
        programs: exported programs of the module, the latest first.
        lines: True where the lines of the user's code are compared too.

    Raises:
        Differs: the module, or an operator, needs elements.
    """

    def __init__(
        self,
        module: nn.Module,
        paths: Mapping[str, nn.Module],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        device: torch.device,
        programs: Sequence[Program],
        lines: bool = False,
    ) -> None:
        self._calls: list[OperatorCall] = []
        self._line = calling_line if lines else lambda: None
        self._failed: str | None = None
        self._programs, self._device_types = programs, sorted({"cpu", device.type})
        self._known: dict[object, Results] = {}
        self._running: list[nn.Module] = []
        self._modules, self._inputs = paths, pytree.tree_leaves((args, kwargs))
        self._named = {
            f"{path}.{name}" if path else name: tensor
            for path, m in paths.items()
            for table in (parameter_table(m), buffer_table(m))
            for name, tensor in table.items()
        }
        with ExitStack() as stack:
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            stack.enter_context(module_calls(self._entering()))
            stack.enter_context(exporting())
            expected = [target for p in programs[:1] for target in p.nodes if isinstance(target, OpOverload)]
            self._beneath = stack.enter_context(called_above_autograd(self._called, expected))
            made = module(*args, **kwargs)
            del self._beneath  # it holds this object
        if self._failed is not None:  # the model's code may have caught the error, and gone on
            raise Differs(self._failed)
        self._outputs = pytree.tree_leaves(made)

    def followed(self, read: Callable[[Program, AsExported], Read]) -> Read:
        """The result of ``read(program, nodes)`` for the first program that the run follows.

        Raises:
            Differs: there is none.
        """
        reasons = []
        for program in self._programs:
            nodes = AsRun(program, self._calls, self._modules, self._inputs, self._named, self._outputs)
            try:
                return read(program, nodes)
            except Differs as reason:
                reasons.append(reason)
        raise reasons[0]

    def _entering(self) -> Callable[..., object]:
        """A function that calls a module, and notes which of the model's modules is running."""
        running, of_model = self._running, IdentitySet(self._modules.values())

        def enter(call: Callable[..., object], module: nn.Module, *args: object, **kwargs: object) -> object:
            # A loss or an activation that the forward makes has no path: its operators belong to the module around it.
            running.append(module if module in of_model or not running else running[-1])
            try:
                return call(module, *args, **kwargs)
            finally:
                running.pop()

        return enter

    def _called(self, target: Target, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The results of an operator, in its place."""
        facts = facts_of(target)
        if facts.beside:
            with self._beneath():
                return target(*args, **kwargs)
        grad, casting = is_grad_enabled(), current(*self._device_types)
        if target is aten.lift_fresh.default and self._calls and self._calls[-1].made is args[0]:
            args = self._lifted(args)
        tensors: list[torch.Tensor] = []
        try:
            positional = form_of_arguments(args, tensors)
            form: object = positional, form_of_arguments(tuple(kwargs.items()), tensors) if kwargs else ()
            if target is MARK or target is EDGE:  # the number of a call changes nothing
                form = form_of_arguments(args[:1], [])
            key = facts, form, grad, casting.dtypes, torch.get_default_dtype()
            results = self._known.get(key)
            if results is None:
                results = self._known[key] = self._results(target, args, kwargs, form, tensors)
        except Exception as error:  # operators raise anything on tensors without elements
            self._failed = self._failed or f"{target}: {type(error).__name__}: {error}"
            raise
        made = outlines_of(results, tensors)
        if grad and facts.written and any(t.requires_grad for t in tensors):
            for x in made if isinstance(made, (list, tuple)) else (made,):
                if isinstance(x, torch.Tensor) and x.dtype.is_floating_point:
                    x.requires_grad = True
        if not facts.silent:
            module, line = self._running[-1], self._line()
            self._calls.append(OperatorCall(target, args, kwargs, made, results, module, grad, casting, line))
        return made

    def _lifted(self, args: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments of a lift without the move before it. ``torch.tensor([1, 2], device="cpu")`` moves the numbers
        to the device where they are already, and the exported program has the numbers themselves."""
        move = self._calls[-1]
        if move.target is aten.to.device and type(move.args[0]) is torch.Tensor:
            with self._beneath():
                moved = move.target(*move.args, **move.kwargs)
            if moved.device == move.args[0].device:
                self._calls.pop()
                return (moved,)
        return args

    def _results(
        self,
        target: Target,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        form: object,
        tensors: Sequence[torch.Tensor],
    ) -> Results:
        """The results of an operator as `OperatorResult`s."""
        casting = current(*self._device_types)
        agreements = [] if casting else [p.by_meta(target, self._beneath) for p in self._programs]
        by_meta = True in agreements and False not in agreements
        if by_meta and (found := by_formula(target, args, kwargs, tensors)) is not None:
            return found
        gradients = torch.no_grad() if written_names(target) else nullcontext()
        with self._beneath(), no_python_dispatcher(), gradients:
            if by_meta:
                return computed_on_meta(target, args, kwargs, form, tensors)
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            fakes.cache_enabled = False  # no operator comes twice
            return computed(target, args, kwargs, fakes)


# -- arguments and results of the nodes of an exported program ---------------------------------------------------------


class AsExported:
    """The nodes of an exported program with their own arguments and results."""

    def line(self, node: Node) -> str:
        """The user's line of a node."""
        return source_of(node)

    def source(self, node: Node, spec: InputSpec) -> object:
        """The tensor, or the plain input, that a placeholder of the program stands for."""
        return node.meta.get("val")

    def arguments(self, node: Node, grad: bool, casting: Autocast) -> tuple[tuple[object, ...], dict[str, object]]:
        """(args, kwargs) of an operator, with nodes in the place of tensors.

        Args:
            grad, casting: the state of gradients and of autocast at this point of the program.
        """
        return node.args, dict(node.kwargs)

    def made(self, node: Node) -> object:
        """The results of a node, as tensors without elements."""
        return node.meta.get("val")

    #: The `OperatorResult`s of the latest operator, which calls of one form share; None: not known.
    results: Results = None

    def passed(self, node: Node, made: object) -> None:
        """Note the results of a node that is no operator."""

    def written_out(self, region: list[Node]) -> None:
        """Note that a region is traced again, and read from there."""

    def outputs(self, nodes: Sequence[object]) -> list[object]:
        """The outputs of the program: nodes, and plain values."""
        return list(nodes)


class AsRun(AsExported):
    """The nodes of an exported program with the arguments and results of a light run.

    Args:
        program: the program.
        calls: the operators of the run.
        modules: the modules of the run, by path.
        inputs: the inputs of the run, in the order of the program's.
        named: parameters and buffers of the run, by their names in the program.
        outputs: the outputs of the run, in the order of the program's.
    """

    def __init__(
        self,
        program: Program,
        calls: Sequence[OperatorCall],
        modules: Mapping[str, nn.Module],
        inputs: Sequence[object],
        named: Mapping[str, torch.Tensor | None],
        outputs: Sequence[object],
    ) -> None:
        self._program = program
        self._calls: Iterator[OperatorCall] = iter(calls)
        self._modules, self._inputs, self._named = modules, iter(inputs), named
        self._constants, self._outputs = program.exported.constants, outputs
        self._made: dict[Node, object] = {}
        self._unseen: dict[Node, torch.Tensor | None] = {}  # the constants

    def line(self, node: Node) -> str:
        return self._program.line(node)

    def source(self, node: Node, spec: InputSpec) -> object:
        if spec.kind is InputKind.USER_INPUT:
            found = next(self._inputs)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            found = self._named.get(str(spec.target))
            if found is None:
                raise Differs(f"{spec.target} is gone")
        else:
            found = self._unseen[node] = self._constants.get(str(spec.target))
        self._made[node] = found
        return found

    def arguments(self, node: Node, grad: bool, casting: Autocast) -> tuple[tuple[object, ...], dict[str, object]]:
        target, call = node.target, next(self._calls, None)
        while call is not None and call.target is aten.detach.default and target is not call.target:
            call = next(self._calls, None)  # a detach without use, which export drops
        if call is None or (target is not call.target and target is not _EXPORTED.get(call.target)):
            raise Differs(f"the forward calls {getattr(call, 'target', 'nothing')} where it called {target}")
        # A call of a torch.autograd.Function turns gradients off around its forward.
        if (call.grad != grad and target is not OPAQUE) or call.casting.dtypes != casting.dtypes:
            raise Differs(f"{target} is called under other settings of gradients or autocast")
        if call.line is not None and self.line(node) not in ("", call.line):
            raise Differs(f"{target} is called at {call.line}, and at {self.line(node)} by an earlier model")
        path = calling_module(node)
        if self._modules.get(path, call.module) is not call.module:
            raise Differs(f"{target} is called in another module than {path!r}")
        args = self._positional(node, call.args)
        kwargs = self._matched_by_name(node, node.kwargs, call.kwargs) if node.kwargs or call.kwargs else {}
        self._made[node], self.results = call.made, call.results
        return args, kwargs

    def _positional(self, node: Node, theirs: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments by position. Both sides omit the last ones where they have their defaults."""
        mine = node.args
        if any(isinstance(a, Node) for a in mine[len(theirs) :]):
            raise Differs(f"{node.target} is called with other arguments")
        pairs = zip(mine if len(mine) >= len(theirs) else (*mine, *[None] * (len(theirs) - len(mine))), theirs)
        made, matched = self._made, self._matched
        return tuple([a if type(a) is Node and made.get(a) is b else matched(node, a, b) for a, b in pairs])

    def _matched(self, node: Node, mine: object, theirs: object) -> object:
        """An argument of the run with nodes in the place of tensors.

        Args:
            mine: the argument of the exported node.
            theirs: the argument in the run.
        """
        if type(mine) in PLAIN and type(theirs) in PLAIN:
            return theirs
        if isinstance(mine, Node):
            if not is_same(self._made.get(mine), theirs) and not self._is_constant(mine, theirs):
                raise Differs(f"{node.target} is called on another tensor")
            return mine
        if isinstance(theirs, torch.Tensor):
            raise Differs(f"{node.target} is called on another tensor")
        if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
            if len(mine) == len(theirs):
                return type(mine)([self._matched(node, a, b) for a, b in zip(mine, theirs)])
            if not any(isinstance(x, (Node, torch.Tensor)) for x in (*mine, *theirs)):
                return type(mine)(theirs)
        elif isinstance(mine, dict) and isinstance(theirs, dict):
            return self._matched_by_name(node, mine, theirs)
        elif not isinstance(mine, (list, tuple, dict)) and not isinstance(theirs, (list, tuple, dict)):
            return theirs
        raise Differs(f"{node.target} is called with other arguments")

    def _matched_by_name(
        self, node: Node, mine: Mapping[str, object], theirs: Mapping[str, object]
    ) -> dict[str, object]:
        """Likewise each of some named arguments."""
        if mine.keys() != theirs.keys():
            raise Differs(f"{node.target} is called with other arguments")
        return {name: self._matched(node, a, theirs[name]) for name, a in mine.items()}

    def _is_constant(self, node: Node, tensor: object) -> bool:
        """True where a tensor with elements that the run meets is the constant of the program."""
        mine = self._unseen.get(node)
        same = (
            mine is not None
            and isinstance(tensor, torch.Tensor)
            and not isinstance(tensor, (Outline, FakeTensor))
            and not isinstance(mine, FakeTensor)
            and (mine.dtype, mine.shape, mine.device) == (tensor.dtype, tensor.shape, tensor.device)
            and torch.equal(mine, tensor)
        )
        if same:
            self._made[node] = tensor
        return same

    def made(self, node: Node) -> object:
        return self._made.get(node)

    def passed(self, node: Node, made: object) -> None:
        self._made[node] = made

    def written_out(self, region: list[Node]) -> None:
        raise Differs("torch.vmap is traced again")

    def outputs(self, nodes: Sequence[object]) -> list[object]:
        remaining = next((c for c in self._calls if c.target is not aten.detach.default), None)
        if remaining is not None:
            raise Differs(f"the forward calls {remaining.target} at its end")
        if len(nodes) != len(self._outputs):
            raise Differs("the forward returns another number of values")
        for node, made in zip(nodes, self._outputs):
            if isinstance(node, Node):
                if not is_same(self._made.get(node), made) and not self._is_constant(node, made):
                    raise Differs("the forward returns another tensor")
            elif isinstance(made, torch.Tensor):
                raise Differs("the forward returns another tensor")
        return [node if isinstance(node, Node) else made for node, made in zip(nodes, self._outputs)]
