"""What a user asks to be computed again in the backward, while a model is captured: which operators belong together.

A recomputed module, a recomputed operator and a call of `torch.utils.checkpoint` are one thing, a *region*: nodes of ours
at its beginning and end stand around its operators, and are stripped where the graph is read. Regions within a region
are a part of it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .errors import CaptureError, SettingError
from .graph import Graph, Op, Recompute, map_values
from .torch_private import TorchDispatchMode, in_place_of_checkpoint

__all__ = ["EDGE", "Settings", "collect_regions", "inside", "recomputed_ops", "region", "with_policy"]

#: The attribute of a module's ``__dict__`` that holds its `Settings`.
ATTRIBUTE = "_shardwright_recompute"


@dataclass(frozen=True)
class Settings:
    """What a user says of one region; see `shardwright.recompute`.

    Args:
        policy: that of torch's selective checkpoints.
        owner: the marked operator, where it is one.
    """

    mp_comm: bool = True
    parallel_optimizer_comm: bool = False
    path: str = ""
    policy: Callable[..., Any] | None = None
    owner: Any = None


#: The regions entered by the capture that is under way, each once a call; None outside of one.
_ENTERED: contextvars.ContextVar[list[Settings] | None] = contextvars.ContextVar("shardwright_regions", default=None)


@torch.library.custom_op("shardwright::region_edge", mutates_args=())
def region_edge(call: int, entering: bool) -> torch.Tensor:
    """The beginning or the end of region number `call`."""
    return torch.empty(0)


@region_edge.register_fake
def _(call: int, entering: bool) -> torch.Tensor:
    return torch.empty(0)


EDGE = torch.ops.shardwright.region_edge.default


@contextlib.contextmanager
def region(settings: Settings | None, owner: Any = None) -> Iterator[None]:
    """While active, and while a model is captured, operators belong to one region; None: nothing happens."""
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
def collect_regions(module: nn.Module, prefix: str = "") -> Iterator[list[Settings]]:
    """While active, recomputed modules, operators and checkpoints of `module` leave edges; yields the regions by call.

    Args:
        prefix: of the path of the user's model in `module`.
    """
    entered: list[Settings] = []
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


def _around(module: nn.Module, settings: Settings) -> list[Any]:
    open_: list[contextlib.AbstractContextManager] = []

    def before(*_: Any) -> None:
        open_.append(region(settings))
        open_[-1].__enter__()

    def after(*_: Any) -> None:
        open_.pop().__exit__(None, None, None)
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


@contextlib.contextmanager
def _checkpoints() -> Iterator[None]:
    """Calls of `torch.utils.checkpoint.checkpoint`, under whatever name they are made, are regions."""
    def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None,
                   context_fn: Callable[[], Any] = torch_checkpoint.noop_context_fn, determinism_check: str = "",
                   debug: bool = False, early_stop: bool = True, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
        policy = None
        if context_fn is not torch_checkpoint.noop_context_fn:
            policy = getattr(context_fn()[0], "policy_fn", None)
            if policy is None:
                raise CaptureError("a checkpoint has contexts of its own, which the recomputation of a plan does not "
                                   "enter", legal="torch.utils.checkpoint.create_selective_checkpoint_contexts")
        with region(Settings(path=getattr(function, "__qualname__", type(function).__name__), policy=policy)):
            return function(*args, **kwargs)

    with in_place_of_checkpoint(checkpoint):
        yield


def inside(spans: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Index of an operator -> the region that it belongs to: the outermost.

    Args:
        spans: (call, first operator, one past the last), by call: an outer one comes before those within it.
    """
    out: dict[int, int] = {}
    for call, first, last in sorted(spans):
        for i in range(first, last):
            out.setdefault(i, call)
    return out


def recomputed_ops(ops: list[Op], entered: list[Settings], spans: Iterable[tuple[int, int, int]],
                   names: dict[int, str]) -> list[Op]:
    """The operators with what is said of their regions.

    Args:
        names: ``id(operator)`` of marked operators -> how they are called.
    """
    regions, out = inside(spans), list(ops)
    for i, call in regions.items():
        said = entered[call]
        keep = said.policy is not None and _saved_by_torch(said.policy, out[i])
        path = said.path or names.get(id(said.owner), "")
        out[i] = replace(out[i], recompute=Recompute(call, path, False, said.mp_comm, said.parallel_optimizer_comm,
                                                     keep))
    return out


class _Called(TorchDispatchMode):
    """Notes what an operator comes to below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _saved_by_torch(policy: Callable[..., Any], op: Op) -> bool:
    """Whether a policy as torch's selective checkpoints take it saves the results of an operator, or of one of those
    that it comes to."""
    args, kwargs = map_values((op.args, op.kwargs), lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    with torch.no_grad(), _Called() as seen:
        op.target(*args, **kwargs)
    return any(_says(policy(SelectiveCheckpointContext(is_recompute=False), *call[:1], *call[1], **call[2]), op, True)
               for call in seen.calls)


def _says(answer: Any, op: Op, torchs: bool) -> bool | None:
    """Whether an answer of a policy means "save"; None: it has no opinion.

    Args:
        torchs: of torch's policies True means save, of ours it means recompute.
    """
    if isinstance(answer, CheckpointPolicy):
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    if isinstance(answer, bool):
        return answer if torchs else (False if answer else None)
    if answer is None or answer in ("save", "recompute"):
        return None if answer is None else answer == "save"
    raise SettingError(f"the recompute policy says {answer!r}", operator=op.name, source=op.source or None,
                       legal='True or "recompute", "save", False or None, or a torch.utils.checkpoint.CheckpointPolicy')


def with_policy(graph: Graph, policy: Any) -> Graph:
    """A graph whose operators are recomputed as a policy says, beside what the model itself asks for.

    Args:
        policy: called with each `Op` (its name, kind, module, source): True or "recompute": its results are dropped and
            computed again, together with those of its neighbours of which this is said too. "save": they are kept, in a
            recomputed module too. False or None: as the model has it. A `CheckpointPolicy` is understood likewise. Or,
            in the place of a function, the operators that are saved: all others are recomputed.

    Raises:
        SettingError: another answer, or what is no policy.
    """
    if policy is None:
        return graph
    if not callable(policy):
        if not isinstance(policy, (list, tuple, set, frozenset)):
            raise SettingError(f"recompute={policy!r} is no policy", legal="a function of an operator, or a list of "
                               "operators that are saved, such as [torch.ops.aten.matmul]")
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


def _among(op: Op, saved: tuple) -> bool:
    packet = getattr(op.target, "overloadpacket", None)
    return any(op.target is s or packet is s for s in saved)
