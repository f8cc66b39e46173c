"""The export of an `nn.Module` to a `Graph`, at the level of the operators that people write.

`torch.export` runs the forward once on fake tensors: nothing is allocated, so a model too large for any one machine can
be captured. Fake tensors also combine parameters that were never allocated with inputs on an ordinary device. The
training IR of the export is used unchanged; `graph_reader` reads it into a `Graph`.

Where the model was exported before, a light run of the forward may follow that program (`recapture`): the same graph
in a fraction of the time.

Example: ``capture(nn.Linear(16, 32), (torch.empty(8, 16, device="meta"),))`` is a graph of 2 parameters, 1 input and 1
operator: linear, f32[8, 16], f32[32, 16], f32[32] -> f32[8, 32].
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from types import GetSetDescriptorType
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ..autocast import current
from ..errors import CaptureError, ShardwrightError
from ..garbage_collection import gc_paused, roomy_stack
from ..graph import Graph
from ..identity_tables import IdentityMap, IdentitySet
from ..launch.progress import Work
from ..mixed_precision import MixedPrecision, captured_types, casts, masters, with_masters
from ..pytree_objects import closed, opened
from ..rules.normalization import cumulative_momentum
from ..torch_private import (
    NOISY_LOGGERS,
    PARAMETER,
    FakeTensor,
    FakeTensorMode,
    attributes_unchecked,
    buffer_table,
    code_written_late,
    hooks_of,
    hooks_of_all_modules,
    layouts_unrecorded,
    parameter_table,
    part_tables,
    pytree,
    recurrent_states,
    recurrent_weights,
    stack_lines,
    without_cudnn,
)
from .annotations import Operator, collect_marks, mark_names, whole_shape
from .conditions import Conditions, StridesAsked, path_of, watched_conditions
from .graph_checks import check_constants, check_updates
from .graph_reader import GraphReader, bare
from .graph_template import GraphTemplate
from .guards import Condition, GuardedPlace, Guards
from .hybrid_models import refused_collective
from .model_device import check_call, device_of, usable
from .module_calls import LossFunction, WithLoss, modules_by_path, outermost_left_out, scalers_refused, user_functions
from .observed.attribute_patches import modules_patched
from .observed.memoised_functions import computed_for_real
from .observed_state import Observation
from .outlines import Differs, Outline, memory_of, outline
from .recapture import (
    AsExported,
    Call,
    LightRun,
    ModelPrograms,
    Program,
    keep_for_structure,
    programs_of_structure,
    structure_of,
)
from .regions import collect_functions, collect_regions
from .second_run import Captured, check_again, with_counters
from .side_effects import Effects, ForwardOutcome, LineFinder, judged
from .source_lines import UsersLine, calling_line, innermost, is_mistake, is_users, user_frame
from .watched_calls import instead_of_checks, refuse_backward_hooks, watched_calls

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CaptureSettings", "Recording", "capture", "captures"]

_LOG = logging.getLogger("shardwright.capture")

#: The most exported programs of one model that later captures may follow: branches of the model's code.
PROGRAMS = 4

#: Part of torch's message about a model that it cannot follow -> what the user writes instead.
_INSTEAD = {
    "data-dependent": "control flow that depends on shapes and settings only, not on the values of tensors; a number "
    "to print as a further output of the forward",
    "found a fake tensor in the exported program constant": "torch's own operators, and x.detach() "
    "in the place of x.data",
    "packed sequences": "padded sequences: the layer runs over all steps, and the lengths choose what is used "
    "of them, such as h[rows, lengths - 1]",
    "not a known type": "tensors, numbers, strings and None, in tuples, lists, dicts, or as attributes of an object",
    "numpy() is not supported": "torch's own operators in the place of numpy's; numpy in a torch.library.custom_op "
    "with a sw.rule",
    "torch._C.Generator": "the same operator without generator=, which draws by the seed of the process; or the "
    "numbers as a buffer or an input",
    "uninitialized parameter": "one call of the plain model before it is wrapped, which gives lazy modules their sizes",
}


@contextlib.contextmanager
def _fake_state(
    modules: Iterable[nn.Module], empty: Callable[..., torch.Tensor], types: Mapping[torch.Tensor, torch.dtype]
) -> Iterator[None]:
    """Replace parameters and buffers by tensors without elements, tied ones by one tensor, while the context is active.

    Args:
        empty: ``empty(shape, dtype, requires_grad, is_parameter)`` makes one.
        types: each parameter or buffer that operators read in another dtype than its own -> that dtype.
    """
    memo: dict[torch.Tensor, torch.Tensor] = {}
    saved: list[tuple[dict[object, object], object, torch.Tensor]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in memo:
            memo[tensor] = empty(
                whole_shape(tensor),
                types.get(tensor, tensor.dtype),
                tensor.requires_grad and isinstance(tensor, nn.Parameter),
                isinstance(tensor, nn.Parameter),
            )
        return memo[tensor]

    try:
        for module in modules:
            for table in part_tables(module).values():
                for name, tensor in table.items():
                    if isinstance(tensor, torch.Tensor):
                        saved.append((table, name, tensor))
                        table[name] = fake(tensor)
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor


@contextlib.contextmanager
def _data_detached() -> Iterator[None]:
    """Make ``x.data`` in the model's code mean ``x.detach()``: an export takes ``x.data`` for a constant."""
    plain: GetSetDescriptorType = inspect.getattr_static(torch.Tensor, "data")

    def get(tensor: torch.Tensor) -> torch.Tensor:
        ours = isinstance(tensor, (FakeTensor, Outline)) and is_users(sys._getframe(1).f_code.co_filename)
        return tensor.detach() if ours else plain.__get__(tensor)

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, (FakeTensor, Outline)) and is_users(sys._getframe(1).f_code.co_filename):
            raise CaptureError(
                "x.data is assigned while the model runs",
                source=calling_line(),
                legal="x.copy_(...) under torch.no_grad(), or a variable of its own",
            )
        plain.__set__(tensor, value)

    torch.Tensor.data = property(get, put)  # type: ignore[assignment]  # put back below
    try:
        yield
    finally:
        del torch.Tensor.data


@dataclass
class Recording:
    """State and side effects observed by the captures of one model.

    Args:
        why: the change since an earlier capture.

    Attributes:
        modules: the modules that the forward uses, by path; modules outside of the model too.
        reads: the places that were read, by identity.
        effects: the effects of the forward at each call, besides its result.
        operators: the marked operators that were called.
        conditions: the questions that the forward has asked.
        strides: the forward's question for strides.
        guards: check that a program of this capture is still valid for the model; None until there is a program.
    """

    why: str = ""
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    reads: dict[tuple[int, object], GuardedPlace] = field(default_factory=dict)
    effects: Effects | None = None
    operators: list[Operator] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    strides: StridesAsked = field(default_factory=StridesAsked)
    guards: Guards | None = None

    def add(self, one: Captured) -> None:
        """Record one capture.

        Raises:
            CaptureError: the side effects differ from those of an earlier capture with other sizes.
        """
        effects = one.outcome.effects
        if self.effects is not None and self.effects.described() != effects.described():
            other = next(a for a, b in zip_longest(self.effects.described(), effects.described()) if a != b)
            raise CaptureError(
                f"what the forward does besides its result depends on the size of the batch: {other or ''}",
                legal="pipelines without it: each micro-batch is a part of the batch",
            )
        self.modules, self.effects, reads = one.seen.modules, effects, one.seen.reads
        self.reads.update(reads)
        self.operators.extend(one.marks)
        self.conditions += one.asked.asked(reads.values(), one.graph, [m for _, m in one.seen.modules])
        self.strides = one.asked.strides if one.asked.strides.line else self.strides


class CaptureSettings(TypedDict, total=False):
    """The keyword arguments of `captures`."""

    loss_fn: LossFunction | None
    device: torch.device | str | None
    recording: Recording | None
    hooks_around: bool
    mixed_precision: MixedPrecision | None
    programs: ModelPrograms | None


def capture(
    net: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
    **settings: Unpack[CaptureSettings],
) -> Graph:
    """Capture one call of a model.

    Args:
        net: the model; its parameters may be real, fake or meta.
        args, kwargs: the inputs of the call with their **global** shapes; real, fake or meta tensors.
        settings: as `captures` takes it.

    Returns:
        The graph of the call.

    Raises:
        SettingError, CaptureError: as of `captures`.
    """
    return captures(net, [(args, kwargs or {})], **settings)[0]


def captures(
    net: nn.Module,
    calls: Sequence[tuple[tuple[object, ...], dict[str, object]]],
    *,
    loss_fn: LossFunction | None = None,
    device: torch.device | str | None = None,
    recording: Recording | None = None,
    hooks_around: bool = False,
    mixed_precision: MixedPrecision | None = None,
    programs: ModelPrograms | None = None,
) -> list[Graph]:
    """Capture several calls of a model with the same inputs but for their sizes: later ones follow earlier ones.

    Args:
        net, calls: the model, and (args, kwargs) of each call, as of `capture`.
        loss_fn: if given, the last of `args` is its target and the graphs end in the loss.
        device: the device on which the program is to run; None: that of the model (`model_device`).
        recording: receives the observed state and side effects of the model.
        hooks_around: the caller runs the model's own hooks at its borders (`module_calls`).
        mixed_precision: the dtypes in which the model's parameters are stored and read.
        programs: the exported programs of earlier captures of the model, the latest first: a capture follows one of
            them, or one of another model of the same structure, or adds its own. The log of "shardwright.capture" says
            why it follows none.

    Returns:
        The graph of each call.

    Raises:
        SettingError: a parameter that `mixed_precision` does not support.
        CaptureError: `torch.export` could not follow the model, or a side effect of the forward cannot be repeated at
            each call; with the user's line.
    """
    with _patches(net, loss_fn):
        return _graphs(
            calls,
            partial(
                _captured,
                net,
                loss_fn=loss_fn,
                device=device,
                hooks_around=hooks_around,
                mixed_precision=mixed_precision,
            ),
            recording,
            ModelPrograms() if programs is None else programs,
            partial(structure_of, net, loss_fn, device, hooks_around, mixed_precision),
        )


@contextlib.contextmanager
def _patches(net: nn.Module, loss_fn: LossFunction | None) -> Iterator[None]:
    """The patches that all runs of a capture share."""
    functions = [function for _, function in user_functions(net, loss_fn)]
    with modules_patched(), computed_for_real(modules_by_path(net, loss_fn), functions):
        yield


def _graphs(
    calls: Sequence[tuple[tuple[object, ...], dict[str, object]]],
    captured: Callable[..., tuple[list[Captured], Differs | None]],
    recording: Recording | None,
    programs: ModelPrograms,
    structure: Callable[[Call], Hashable],
) -> list[Graph]:
    """The graphs of several calls, as described in `captures`.

    Args:
        captured: ``captured(calls, programs=..., latest=...)`` captures calls of the model.
        structure: the structure of the model in a call.
    """
    graphs: list[Graph] = []
    while len(graphs) < len(calls):
        remaining = calls[len(graphs) :]
        made: list[Captured] = []
        if programs:
            with Work("capture of the model at other sizes"):
                made, reason = captured(remaining, programs=programs, latest=programs.latest)
            if reason is not None:
                _LOG.info("the model is exported anew: %s", str(reason).partition("\n")[0])
        if len(made) < len(remaining):
            with Work("capture of the model"):
                made.append(_first_capture(remaining[len(made)], captured, programs, structure))
        for one, call in zip(made, remaining):
            if one.program not in programs or (recording is not None and recording.why):
                with Work("second run of the model"):
                    check_again(one, partial(captured, [call], later=True))
            if one.program in programs:
                programs.remove(one.program)
            programs.insert(0, one.program)
            programs.latest = one.seen
            if recording is not None:
                recording.add(one)
            graphs.append(one.graph)
        del programs[PROGRAMS:]
    return graphs


def _first_capture(
    call: Call,
    captured: Callable[..., tuple[list[Captured], Differs | None]],
    programs: ModelPrograms,
    structure: Callable[[Call], Hashable],
) -> Captured:
    """A capture that follows none of the model's own programs: it follows that of another model, or exports."""
    key, tried = structure(call), IdentitySet(program.exported for program in programs)
    lookalikes = [program for program in programs_of_structure(key) if program.exported not in tried]
    if lookalikes:
        made, reason = captured([call], programs=lookalikes, of_lookalikes=True)
        if reason is None:
            return made[0]
        _LOG.info("no program of an earlier model is followed: %s", str(reason).partition("\n")[0])
    (one,) = captured([call])[0]
    keep_for_structure(key, one.program)
    return one


@roomy_stack
@gc_paused()
@layouts_unrecorded()
def _captured(
    net: nn.Module,
    calls: Sequence[tuple[tuple[object, ...], dict[str, object]]],
    *,
    loss_fn: LossFunction | None,
    device: torch.device | str | None,
    hooks_around: bool,
    mixed_precision: MixedPrecision | None,
    programs: Sequence[Program] = (),
    latest: Observation | None = None,
    of_lookalikes: bool = False,
    finder: LineFinder | None = None,
    later: bool = False,
) -> tuple[list[Captured], Differs | None]:
    """Captures as described in `captures`: by exports, or by light runs that follow one of `programs`.

    Args:
        latest: the observation of the latest run of the model.
        of_lookalikes: True where `programs` are those of other models, so that lines of code are compared too.
        finder: looks for the line of a change.
        later: True for a second capture, in which clocks are ahead.

    Returns:
        The captures; with `programs` those before the first that follows none, or that fails on tensors without
        elements, and the reason.
    """
    for args, kwargs in calls:
        check_call(net, args, kwargs, loss_fn)
    device = usable(device_of(net, loss_fn, calls[0]) if device is None else device, net, loss_fn)
    module, prefix = (net, "") if loss_fn is None else (WithLoss(net, loss_fn), "net")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = modules_by_path(net, loss_fn)
    functions = user_functions(net, loss_fn)
    refuse_backward_hooks(modules)
    types, stored = captured_types(mixed_precision, net), masters(mixed_precision, net)
    marked = mark_names(net)

    def empty(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool, parameter: bool = False) -> torch.Tensor:
        if programs:
            return outline(shape, dtype, device, requires_grad, parameter)
        made: torch.Tensor = FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)
        made.requires_grad = requires_grad
        if parameter:  # nn.Parameter(made) would run an operator
            setattr(made, PARAMETER, True)
        return made

    paths = dict(module.named_modules(remove_duplicate=False))
    tied: IdentityMap[torch.Tensor, list[str]] = IdentityMap()
    for table in (parameter_table, buffer_table):
        for path, m in paths.items():
            for key, tensor in table(m).items():
                if tensor is not None:
                    tied.setdefault(tensor, []).append(bare(f"{path}.{key}" if path else key, prefix))
    aliases = {alias: names[0] for names in tied.values() for alias in names[1:]}

    def exported(
        args: tuple[object, ...],
        kwargs: dict[str, object],
        counters: Mapping[GuardedPlace, object],
        *,
        finder: LineFinder | None,
    ) -> Captured:
        seen = Observation(modules, functions, later, earlier[-1] if finder is None else None)
        earlier.append(seen)
        watch, hooks = _Watch(module, seen, counters, finder, bool(programs)), _hooks_on(paths.values())
        with (
            recurrent_weights(module),
            collect_marks() as marks,
            collect_functions(calling_line) as applied,
            collect_regions(module, prefix) as regions,
            seen,
            watched_calls(watch.effects, lambda: watch.running, seen),
            watched_conditions(watch.asked, lambda: watch.running, seen),
            watch,
            _objects_opened(module),
        ):
            traced = (
                LightRun(module, paths, args, kwargs, device, programs, of_lookalikes)
                if programs
                else _program(module, args, kwargs)
            )
        if _hooks_on(paths.values()) != hooks:  # the first forward alone registers hooks
            watch.outcome.effects.assign()
        called = _input_names(net, len(args) - 1) if loss_fn is not None else {}

        casting = current("cpu", device.type)  # an autocast around the call: its casts are written out too
        decisive = (
            (marked, prefix, aliases, called, stored, casting, torch.is_grad_enabled(), watch.out_spec),
            [(mark, mark.in_strategy, mark.out_strategy, mark.source, mark.priority) for mark in marks],
        )

        def read(program: Program, nodes: AsExported) -> Captured | None:
            template = program.template
            if isinstance(template, GraphTemplate) and not watch.outcome.updates:
                graph = template.graph(nodes, decisive)
                if graph is not None:
                    return Captured(with_masters(graph), seen, watch.outcome, program, marks, watch.asked)
                program.template = None
                return None
            reader = GraphReader(
                program.exported, nodes, marks, marked, prefix, aliases, called, [f for f, _ in applied], regions
            )
            reader.casting, reader.path_of = casting, partial(path_of, seen.reads.values())
            updates = watch.outcome.updates
            owners = IdentityMap[object, str]((buffer_table(m), path) for path, m in reversed(paths.items()) if updates)
            for owner, key, *_ in updates:
                path = owners[owner]
                name = bare(f"{path}.{key}" if path else key, prefix)
                reader.assigned.append(aliases.get(name, name))
            reader.out_spec, reader.masters = watch.out_spec, stored
            graph = reader.graph()
            if not watch.outcome.updates:
                program.template = reader.template(graph, decisive)
            return Captured(with_masters(graph), seen, watch.outcome, program, marks, watch.asked)

        one = None
        while one is None:  # once more for each program whose template does not fit, and is dropped
            one = traced.followed(read)
        return one

    earlier = [latest]
    made: list[Captured] = []
    try:
        with (
            outermost_left_out(net, module, loss_fn is None, hooks_around),
            _fake_state(dict.fromkeys(paths.values()), empty, types),
            recurrent_states(),
            casts(mixed_precision, net),
            cumulative_momentum(module),
            _quiet(),
            _data_detached(),
            scalers_refused(),
            without_cudnn({device.type}),
        ):
            for call in calls:
                args, kwargs = pytree.tree_map(
                    lambda x: empty(x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x,
                    opened((tuple(call[0]), call[1])),
                )
                one = with_counters(partial(exported, args, kwargs, finder=finder))
                check_constants(one.graph)
                check_updates(one.graph)
                made.append(one)
        return made, None
    except Differs as reason:
        return made, reason
    except ShardwrightError as error:
        placed = refused_collective(error)
        if placed is not None:
            raise placed from error
        if programs and not is_mistake(error.__cause__ or error):
            return made, Differs(str(error))
        raised = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        raise (error if error.source else error.located(source=user_frame(raised) or None))  # noqa: B904  same error
    except Exception as error:  # the model's own code and torch raise anything
        placed = refused_collective(error)
        if placed is not None:
            raise placed from error
        if programs and not is_mistake(error):
            return made, Differs(f"{type(error).__name__}: {error}")
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        first = str(error).strip().split("\n\n")[0]
        if any(
            isinstance(x, PackedSequence)
            for f, _ in traceback.walk_tb(error.__traceback__)
            for x in f.f_locals.values()
        ):
            first = "the sizes of packed sequences depend on the values of their lengths"
        problem = f"{type(error).__name__}: {first}"
        formatted = "FakeTensor.__format__" in first  # f"{loss:.4f}"
        if formatted or type(error).__name__ == "GuardOnDataDependentSymNode":
            first = "data-dependent"
            problem = "the forward takes a number out of a tensor (item(), float(), bool(), an if, a format), which is "
            problem += "data-dependent: no tensor has values before the program runs"
        elif "numpy() is not supported" in first:
            problem = "the forward makes a numpy array of a tensor, and no tensor has values before the program runs"
        elif "torch._C.Generator" in first:  # torch 2.9 exports no call with one
            problem = "an operator draws from a torch.Generator, whose state a program neither keeps nor begins anew"
        raise CaptureError(
            f"the model cannot be captured: {problem}",
            source=user_frame(frames) or calling_line(),
            legal=instead_of_checks(file for file, _ in frames)
            or next((legal for part, legal in _INSTEAD.items() if part in first), None),
        ) from error


def _program(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Program:
    """The exported program of a module on fake tensors."""
    with stack_lines(innermost, UsersLine), attributes_unchecked(), code_written_late():
        return Program(torch.export.export(module, args, kwargs, strict=False))


def _hooks_on(modules: Iterable[nn.Module]) -> int:
    """The number of forward hooks on the modules of a model."""
    return sum(len(hooks.forward) + len(hooks.forward_pre) for hooks in map(hooks_of, modules))


#: Hooks of all modules that run at an assignment of a buffer.
_BUFFER_HOOKS = hooks_of_all_modules().buffer_registration


class _Watch:
    """Hooks at the borders of the outermost forward, during its export.

    Args:
        module: the exported module.
        seen: observes the state that the forward reads and writes.
        counters: place -> the counter that replaces its number.
        finder: looks for the line of a change.
        traced: True where the functions that run are noted.

    Attributes:
        running: True while the forward runs.
        effects: the texts that the forward has printed and logged.
        asked: the questions that the forward has asked.
        outcome: the changes made by the forward.
        out_spec: the nesting of the outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        seen: Observation,
        counters: Mapping[GuardedPlace, object],
        finder: LineFinder | None,
        traced: bool,
    ) -> None:
        self._module, self._seen, self._counters, self._finder = module, seen, counters, finder
        self._traced = traced
        self.running, self.effects, self.outcome = False, Effects(), ForwardOutcome()
        self.asked = Conditions()
        self.out_spec: pytree.TreeSpec | None = None
        self._left_out: dict[int, object] = {}

    def __enter__(self) -> _Watch:
        self._hooks = (
            self._module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            self._module.register_forward_hook(self._end),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        lightly = self._traced  # a light run puts no tensors of its own into the model
        self._seen.begin(self._counters, exported=not lightly, traced=lightly and self._finder is None)
        self.asked.begin(pytree.tree_leaves(opened((args, kwargs))))
        # torch.export turns an assigned buffer of the outermost module into a copy, which fails where the assigned
        # tensor is an input or another buffer. Without torch's hooks the buffers of all modules are treated alike.
        for number, hook in [*_BUFFER_HOOKS.items()]:
            if str(getattr(hook, "__module__", "")).startswith("torch."):
                self._left_out[number] = _BUFFER_HOOKS.pop(number)
        self.running = True
        if self._finder is not None:
            self._finder.start()

    def _stop(self) -> None:
        if self.running and self._finder is not None:
            self._finder.stop()
        self.running = False
        self._seen.stop()

    def _end(self, _: object, __: tuple[object, ...], result: object) -> object:
        self._stop()
        _BUFFER_HOOKS.update(self._left_out)
        self.out_spec = pytree.tree_structure(opened(result))
        self.outcome = judged(self._seen, self.effects)
        if not self.outcome.updates:
            return None
        self._seen.restore()
        # Buffers are written one after another: a tensor that shares memory with the old value of a buffer is copied
        # first.
        old = {memory_of(b) for b in self._module.buffers()}
        return result, [t.clone() if memory_of(t) in old else t for *_, t in self.outcome.updates]


def _input_names(net: nn.Module, count: int) -> dict[str, str]:
    """The names in the model's own forward of the inputs which `WithLoss` passes through."""
    names = [p.name for p in inspect.signature(net.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][
        :count
    ]
    return {f"inputs_{i}": name for i, name in enumerate(names)} | {f"inputs_{count}": "target"}


@contextlib.contextmanager
def _objects_opened(module: nn.Module) -> Iterator[None]:
    """Pass opened objects to the module closed, and open its outputs, so that export sees tensors alone."""
    hooks = (
        module.register_forward_pre_hook(
            lambda _, args, kwargs: closed((args, kwargs)), prepend=True, with_kwargs=True
        ),
        module.register_forward_hook(lambda _, args, result: opened(result)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the logs and prints of a failing export (half a graph): its error says the same."""
    logs = [logging.getLogger(f"torch.{name}") for name in NOISY_LOGGERS]
    disabled, graph, written = [log.disabled for log in logs], "", io.StringIO()
    for log in logs:
        log.disabled = True  # a new level would clear what every logger has cached, and walk all of them
    try:
        with contextlib.redirect_stderr(written), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", r"The tensor attributes? self\..*_flat_weights"
            )  # see `recurrent_weights`
            yield
    except Exception as error:  # of any kind: raised again
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        for log, before in zip(logs, disabled):
            log.disabled = before
        sys.stderr.write(written.getvalue().replace(graph, "").lstrip("\n") if graph else written.getvalue())
