"""Regions of a model that a capture keeps together: autograd functions, recompute regions and vmap regions.

1. *A user's* `torch.autograd.Function` becomes one operator that calls the function, forward and backward, unchanged.
   A call of ``apply`` leaves one node in the capture. Later each rank calls ``apply`` itself, so the context of the
   function (saved tensors, attributes, ``needs_input_grad``, non-differentiable outputs) is torch's own. Without a
   `shardwright.rule` the operator takes whole tensors on every rank; with the rule ``"... -> ..."`` of the class it
   can be sharded. A function of torch's own is kept where a rule describes it, as that of `nn.CrossMapLRN2d`; others
   are captured as the operators that they call.

   Users hold ``apply`` bound to their classes (``f = Scaled.apply``), so a replaced ``apply`` would miss calls. But
   ``apply`` looks up ``forward`` and ``setup_context`` on the class at each call. During a capture, every class of
   the user has replacements of these two attributes, which are removed afterwards. Of torch's own classes only two
   attributes are replaced: ``mark_dirty`` during a trial run, and the metaclass's ``__init__``, which reports new
   classes. The trial run of a function uses fake tensors, with the modes of the current export disabled.

2. *A recompute region* is a recomputed module, a recomputed operator, or a call of `torch.utils.checkpoint`. Edge
   nodes mark its beginning and its end in the capture, and are stripped when the graph is read. A region inside
   another region is a part of the outer region.

3. *A vmap region* (`torch.vmap` inside a model) is rewritten as operators on whole batches. Export leaves the region
   as it was called: a batch dim goes in, operators that do not see the batch dim follow, a batch dim comes out. A
   second trace below vmap gives operators that see the batch dim.

Example of case 3: ``torch.vmap(net)(x)``, with ``net = nn.Linear(16, 32)`` and x [8, 4, 16]. The forward of net sees
[4, 16]; the graph has one product f32[32, 16], f32[16, 32] -> f32[32, 32], of the rows of all 8 entries.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from torch.utils.hooks import RemovableHandle

from ..errors import CaptureError, SettingError
from ..graph import Graph, Op, Recompute, Value, map_values
from ..identity_tables import IdentityMap
from ..rules.registry import function_rule
from ..torch_private import (
    VMAP_ENDS,
    DisableTorchFunction,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    in_place_of_checkpoint,
    make_fx,
    pytree,
    untraced,
    version_of,
    vmap_function,
)

__all__ = [
    "EDGE",
    "IN_PLACE_OF",
    "OPAQUE",
    "Applied",
    "RecomputeSettings",
    "collect_functions",
    "collect_regions",
    "inside",
    "recomputed_ops",
    "region",
    "regions",
    "with_policy",
    "written_out",
]

_LEGAL = "torch.library.custom_op with register_fake and register_autograd, described by sw.rule"


#: Attribute of a function that a capture puts into a class: the value in its place; None where there is none.
IN_PLACE_OF = "of_shardwright_in_place_of"


#: A class of autograd functions.
Function = type[torch.autograd.Function]


class Applied:
    """``Function.apply`` with every non-tensor argument bound: takes the tensors alone, returns tensors alone.

    Attributes:
        described_as: the class, by which a rule is found.
        differentiable: for each output, True where a gradient flows through it.
    """

    def __init__(self, function: Function, leaves: Sequence[object], spec: pytree.TreeSpec) -> None:
        self.described_as, self.spec = function, spec
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.differentiable: tuple[bool, ...] = ()
        self.__name__, self.__qualname__, self.__module__ = function.__name__, function.__qualname__, __name__

    def results(self, tensors: Sequence[Tensor]) -> object:
        """The results of the user's call, by torch's ``apply``: an ``apply`` of the class has run by then."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return vars(torch.autograd.Function)["apply"].__get__(None, self.described_as)(*args, **kwargs)

    def __call__(self, *tensors: Tensor) -> object:
        made = [x for x in pytree.tree_leaves(self.results(tensors)) if isinstance(x, Tensor)]
        return made[0] if len(made) == 1 else tuple(made)

    def __repr__(self) -> str:
        constants = [x for i, x in enumerate(self.leaves) if i not in self.places]
        return f"{self.__qualname__}{re.sub(r' at 0x[0-9a-fA-F]+', '', repr(constants)) if constants else ''}"


#: Calls seen by the current capture, with the fake tensors that they return; None outside of a capture.
_CALLS: contextvars.ContextVar[list[tuple[Applied, list[Tensor]]] | None] = contextvars.ContextVar(
    "shardwright_functions", default=None
)
_LINE: contextvars.ContextVar[Callable[[], str | None]] = contextvars.ContextVar("shardwright_line")


@torch.library.custom_op("shardwright::opaque", mutates_args=())
def opaque(inputs: list[Tensor], call: int) -> list[Tensor]:
    """Call number `call` of a user's function; present in captured graphs only."""
    raise AssertionError("a captured graph is read, not run")


@opaque.register_fake
def _(inputs: list[Tensor], call: int) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _recorded()[call][1]]


def _no_backward(ctx: object, *gradients: object) -> object:
    raise AssertionError("a captured graph is read, not run")


opaque.register_autograd(_no_backward)
OPAQUE = torch.ops.shardwright.opaque.default


def _classes() -> Iterator[Function]:
    """Every class of autograd functions, bases before their subclasses; of torch's own those that a rule describes."""
    levels: list[list[Function]] = [torch.autograd.Function.__subclasses__()]
    for below in levels:
        for cls in below:
            if not cls.__module__.startswith("torch.") or function_rule(cls) is not None:
                yield cls
            if further := cls.__subclasses__():
                levels.append(further)


def _watch(cls: Function, put_back: contextlib.ExitStack) -> None:
    """Give a class a ``forward`` and a ``setup_context`` that leave a node while a model is captured.

    Outside of a capture, in other threads, and where `forward` is called by hand, both behave like the class's own.
    """
    methods: dict[str, Callable[..., object]] = {"forward": cls.forward, "setup_context": cls.setup_context}
    apart = cls.setup_context is not torch.autograd.Function.setup_context  # `forward` then gets no context

    @functools.wraps(methods["forward"])
    def forward(*args: object, **kwargs: object) -> object:
        # `apply` alone turns gradients off before it calls `forward`: a call by hand is a part of the model.
        context = None if apart else args[0]
        if _CALLS.get() is None or torch.is_grad_enabled() or not (apart or isinstance(context, FunctionCtx)):
            return methods["forward"](*args, **kwargs)
        made = _apply(cls, args if apart else args[1:], kwargs)
        if isinstance(context, FunctionCtx):
            _mark(context, made)
        return made

    @functools.wraps(methods["setup_context"])
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: object) -> None:
        if _CALLS.get() is None:
            methods["setup_context"](ctx, inputs, output)
        else:
            _mark(ctx, output)

    functions: list[tuple[str, Callable[..., object]]] = [("forward", forward)]
    if apart:
        functions.append(("setup_context", setup_context))
    for name, ours in functions:
        vars(ours)[IN_PLACE_OF] = vars(cls).get(name)
        if name in vars(cls):
            put_back.callback(setattr, cls, name, vars(cls)[name])
        else:
            put_back.callback(delattr, cls, name)
        setattr(cls, name, staticmethod(ours))


def _recorded() -> list[tuple[Applied, list[Tensor]]]:
    """The calls recorded in the capture that is running."""
    calls = _CALLS.get()
    assert calls is not None
    return calls


def _mark(ctx: FunctionCtx, output: object) -> None:
    """Mark the non-differentiable outputs of the last recorded call."""
    made = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    ctx.mark_non_differentiable(*(x for x, flows in zip(made, _recorded()[-1][0].differentiable) if not flows))


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Watch all classes of the user, including classes created meanwhile, while the context is active."""
    meta = type(torch.autograd.Function)
    plain = meta.__init__

    def made(cls: Function, *args: object, **kwargs: object) -> None:
        plain(cls, *args, **kwargs)
        if not cls.__module__.startswith("torch."):
            _watch(cls, put_back)

    with contextlib.ExitStack() as put_back:
        for cls in _classes():
            _watch(cls, put_back)
        put_back.callback(setattr, meta, "__init__", plain)
        meta.__init__ = made  # type: ignore[method-assign, assignment]  # put back at the end
        yield


@contextlib.contextmanager
def collect_functions(line: Callable[[], str | None]) -> Iterator[list[tuple[Applied, list[Tensor]]]]:
    """Let each ``apply`` of a user's function leave one node, while the context is active.

    Args:
        line: returns the user's line that is being run.

    Yields:
        The calls and their fake outputs, by call number.
    """
    calls: list[tuple[Applied, list[Tensor]]] = []
    tokens = _CALLS.set(calls), _LINE.set(line)
    try:
        with _watched():
            yield calls
    finally:
        _CALLS.reset(tokens[0])
        _LINE.reset(tokens[1])


def _apply(cls: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    calls = _CALLS.get()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    applied = Applied(cls, leaves, spec)
    tensors = [leaves[i] for i in applied.places]
    token = _CALLS.set(None)  # calls inside the function are a part of it
    try:
        made, out_spec = pytree.tree_flatten(_tried(applied, tensors, _LINE.get()))
    finally:
        _CALLS.reset(token)
    results = [x for x in made if isinstance(x, Tensor)]
    applied.differentiable = tuple(x.requires_grad for x in results)
    assert calls is not None
    calls.append((applied, results))
    outputs = iter(opaque(tensors, len(calls) - 1))
    return pytree.tree_unflatten([next(outputs) if isinstance(x, Tensor) else x for x in made], out_spec)


def _tried(applied: Applied, tensors: Sequence[Tensor], line: Callable[[], str | None]) -> object:
    """The results of a call on fake tensors of its own.

    Raises:
        CaptureError: the function writes into its inputs, or cannot run on tensors without values.
    """
    name, where = applied.__qualname__, line()

    def refused(*_: object) -> None:
        raise CaptureError(
            f"{name}, a torch.autograd.Function, marks an input as changed in place",
            source=where,
            legal="a forward that returns a new tensor",
        )

    dirty = FunctionCtx.mark_dirty
    FunctionCtx.mark_dirty = refused  # type: ignore[method-assign, assignment]  # put back below
    try:
        with DisableTorchFunction(), untraced(), FakeTensorMode(), torch.enable_grad():
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
                for x in tensors
            ]
            versions = [version_of(x) for x in fakes]
            made = applied.results(fakes)
            if [version_of(x) for x in fakes] != versions:
                refused()
    except CaptureError:
        raise
    except Exception as error:  # the user's forward raises anything
        raise CaptureError(
            f"the forward of {name}, a torch.autograd.Function, cannot run on tensors without values: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            source=where,
            legal=_LEGAL,
        ) from error
    finally:
        FunctionCtx.mark_dirty = dirty  # type: ignore[method-assign]  # as it was
    return made


# -- recompute regions

#: Attribute in a module's ``__dict__`` that holds its `RecomputeSettings`.
ATTRIBUTE = "_shardwright_recompute"


@dataclass(frozen=True)
class RecomputeSettings:
    """The user's settings of one recompute region.

    Args:
        mp_comm: collectives inside the region are run again in the backward; otherwise their results are saved.
        parallel_optimizer_comm: sharded weights are gathered again in the backward; otherwise they are kept.
        path: the name of the region in messages.
        policy: a policy of torch's selective checkpoints.
        owner: the marked operator, where the region is one.
    """

    mp_comm: bool = True
    parallel_optimizer_comm: bool = False
    path: str = ""
    policy: Callable[..., object] | None = None
    owner: object = None


#: Regions entered by the current capture, one entry a call; None outside of a capture.
_ENTERED: contextvars.ContextVar[list[RecomputeSettings] | None] = contextvars.ContextVar(
    "shardwright_regions", default=None
)


@torch.library.custom_op("shardwright::region_edge", mutates_args=())
def region_edge(call: int, entering: bool) -> torch.Tensor:
    """The beginning or the end of region number `call`."""
    return torch.empty(0, device="cpu")


@region_edge.register_fake
def _fake_region_edge(call: int, entering: bool) -> torch.Tensor:
    return torch.empty(0, device="cpu")


EDGE = torch.ops.shardwright.region_edge.default


@contextlib.contextmanager
def region(settings: RecomputeSettings | None, owner: object = None) -> Iterator[None]:
    """Assign the operators of a capture to one region, while the context is active; None: no region."""
    entered = _ENTERED.get()
    if settings is None or entered is None:
        yield
        return
    call = len(entered)
    entered.append(settings if owner is None else replace(settings, owner=owner))
    region_edge(call, True)
    yield
    region_edge(call, False)


@contextlib.contextmanager
def collect_regions(module: nn.Module, prefix: str = "") -> Iterator[list[RecomputeSettings]]:
    """Let recomputed modules, operators and checkpoints of `module` leave edge nodes, while the context is active.

    Args:
        prefix: the path of the user's model in `module`.

    Yields:
        The settings of the regions, by call number.
    """
    entered: list[RecomputeSettings] = []
    token = _ENTERED.set(entered)
    hooks = []
    for path, sub in module.named_modules():
        settings = vars(sub).get(ATTRIBUTE)
        if settings is not None:
            path = path.removeprefix(prefix).removeprefix(".") or type(sub).__name__
            hooks += _around(sub, replace(settings, path=path))
    try:
        with _checkpoints():
            yield entered
    finally:
        _ENTERED.reset(token)
        for hook in hooks:
            hook.remove()


def _around(module: nn.Module, settings: RecomputeSettings) -> list[RemovableHandle]:
    open_: list[contextlib.AbstractContextManager[object]] = []

    def before(*_: object) -> None:
        open_.append(region(settings))
        open_[-1].__enter__()

    def after(*_: object) -> None:
        open_.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


@contextlib.contextmanager
def _checkpoints() -> Iterator[None]:
    """Record calls of `torch.utils.checkpoint.checkpoint`, under any name, as regions, while the context is active."""

    def checkpoint(
        function: Callable[..., object],
        *args: object,
        use_reentrant: bool | None = None,
        context_fn: Callable[[], tuple[object, object]] = torch_checkpoint.noop_context_fn,
        determinism_check: str = "",
        debug: bool = False,
        early_stop: bool = True,
        preserve_rng_state: bool = True,
        **kwargs: object,
    ) -> object:
        policy = None
        if context_fn is not torch_checkpoint.noop_context_fn:
            policy = getattr(context_fn()[0], "policy_fn", None)
            if policy is None:
                raise CaptureError(
                    "a checkpoint has contexts of its own, which the recomputation of a plan does not enter",
                    legal="torch.utils.checkpoint.create_selective_checkpoint_contexts",
                )
        with region(RecomputeSettings(path=getattr(function, "__qualname__", type(function).__name__), policy=policy)):
            return function(*args, **kwargs)

    with in_place_of_checkpoint(checkpoint):
        yield


def inside(spans: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Index of an operator -> its region: the outermost of those that contain it.

    Args:
        spans: (call, first operator, one past the last), by call: an outer region comes before the regions inside it.
    """
    out: dict[int, int] = {}
    for call, first, last in sorted(spans):
        for i in range(first, last):
            out.setdefault(i, call)
    return out


def recomputed_ops(
    ops: list[Op],
    entered: list[RecomputeSettings],
    spans: Iterable[tuple[int, int, int]],
    names: IdentityMap[object, str],
) -> list[Op]:
    """The operators, with the recompute settings of their regions.

    Args:
        ops: the operators of a graph.
        entered: the settings of the regions, by call number.
        spans: as of `inside`.
        names: marked operators -> their names.
    """
    regions, out = inside(spans), list(ops)
    for i, call in regions.items():
        call_settings = entered[call]
        keep = call_settings.policy is not None and _saved_by_torch(call_settings.policy, out[i])
        path = call_settings.path or names.get(call_settings.owner, "")
        out[i] = replace(
            out[i],
            recompute=Recompute(call, path, False, call_settings.mp_comm, call_settings.parallel_optimizer_comm, keep),
        )
    return out


class _Called(TorchDispatchMode):
    """Record the operators that an operator dispatches to below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _saved_by_torch(policy: Callable[..., object], op: Op) -> bool:
    """True where a policy of torch's selective checkpoints saves the results of an operator.

    The policy sees the operators below autograd: one that is saved suffices.
    """
    args, kwargs = map_values((op.args, op.kwargs), lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    with torch.no_grad(), _Called() as seen:
        op.target(*args, **kwargs)
    return any(
        _says(policy(SelectiveCheckpointContext(is_recompute=False), *call[:1], *call[1], **call[2]), op, True)
        for call in seen.calls
    )


def _says(answer: object, op: Op, torchs: bool) -> bool | None:
    """True where an answer of a policy means "save", False where it means "recompute", None where it has no opinion.

    Args:
        torchs: the policy is torch's, where True means save; in a policy of Shardwright True means recompute.
    """
    if isinstance(answer, CheckpointPolicy):
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    if isinstance(answer, bool):
        return answer if torchs else (False if answer else None)
    if answer is None or answer in ("save", "recompute"):
        return None if answer is None else answer == "save"
    raise SettingError(
        f"the recompute policy says {answer!r}",
        operator=op.name,
        source=op.source or None,
        legal='True or "recompute", "save", False or None, or a torch.utils.checkpoint.CheckpointPolicy',
    )


def with_policy(graph: Graph, policy: object) -> Graph:
    """The graph with the recomputation that a policy asks for, in addition to the regions of the model.

    Args:
        policy: a function called with each `Op` (its name, kind, module, source). True or "recompute": the results of
            the operator are dropped and recomputed, together with those of adjacent operators with the same answer.
            "save": the results are saved, even inside a recomputed module. False or None: as the model has it. A
            `CheckpointPolicy` has the same meanings. A list of operators instead of a function: these are saved, and
            all others are recomputed.

    Raises:
        SettingError: another answer, or `policy` is neither a function nor a list.
    """
    if policy is None:
        return graph
    if not callable(policy):
        if not isinstance(policy, (list, tuple, set, frozenset)):
            raise SettingError(
                f"recompute={policy!r} is no policy",
                legal="a function of an operator, or a list of "
                "operators that are saved, such as [torch.ops.aten.matmul]",
            )
        saved, policy = tuple(policy), lambda op: "save" if _among(op, saved) else True
    calls = 1 + max((op.recompute.call for op in graph.ops if op.recompute is not None), default=-1)
    ops, running = [], False
    for op in graph.ops:
        save = _says(policy(op), op, False)
        if save is None or save:
            running = False
            if op.recompute is not None and save:
                op = replace(op, recompute=replace(op.recompute, keep=True))
        elif op.recompute is None:
            calls += not running
            running = True
            op = replace(op, recompute=Recompute(calls - 1, op.name, everywhere=True))
        else:
            running = False
        ops.append(op)
    return graph.with_ops(tuple(ops))


def _among(op: Op, saved: tuple[object, ...]) -> bool:
    packet = getattr(op.target, "overloadpacket", None)
    return any(op.target is s or packet is s for s in saved)


# -- vmap regions


def _named(node: torch.fx.Node) -> str:
    """The name of a vmap function, "" for any other node."""
    return vmap_function(node.target) if node.op == "call_function" else ""


def regions(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node | list[torch.fx.Node]]:
    """The nodes of a program; the nodes of an outermost vmap are yielded as one list."""
    region: list[torch.fx.Node] = []
    depth = 0
    for node in nodes:
        name = _named(node)
        depth += VMAP_ENDS.get(name, 0)
        if depth or name in VMAP_ENDS:
            region.append(node)
            if not depth:
                yield region
                region = []
        elif not name:
            yield node


def written_out(
    region: list[torch.fx.Node], value_of: Callable[[torch.fx.Node], object]
) -> tuple[torch.fx.GraphModule, list[torch.fx.Node], list[torch.fx.Node]]:
    """A vmap region as a program of its own.

    Args:
        region: the nodes of the region.
        value_of: the value, or the plain constant, of a node outside of the region.

    Returns:
        The program; the nodes whose values it takes; the nodes that it produces.
    """
    inside = set(region)
    outside = dict.fromkeys(a for node in region for a in node.all_input_nodes if a not in inside)
    taken = {node: value for node in outside if isinstance(value := value_of(node), Value)}
    made = [node for node in region if any(user not in inside for user in node.users)]

    def run(*tensors: torch.Tensor) -> list[object]:
        env: dict[torch.fx.Node, Any] = {node: value_of(node) for node in outside} | dict(zip(taken, tensors))
        for node in region:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            assert callable(node.target)
            env[node] = node.target(*args, **kwargs)
        return [env[node] for node in made]

    with FakeTensorMode():
        fakes = [
            torch.empty(v.shape, dtype=v.dtype, device=node.meta["val"].device, requires_grad=v.requires_grad)
            for node, v in taken.items()
        ]
    program = make_fx(run)(*fakes)
    program = make_fx(torch.func.functionalize(program, remove="mutations"))(*fakes)  # the rules of vmap write in place
    described = next((n for n in region if isinstance(n.target, OpOverload)), region[0])
    for node in program.graph.nodes:
        node.meta.update({k: v for k, v in described.meta.items() if k in ("nn_module_stack", "stack_trace")})
    return program, list(taken), made
