"""From an `nn.Module` to a `Graph`, at the operators that people write.

`torch.export` on fake tensors (nothing is allocated, so a model too large for any one machine captures too), its
training IR used as it is; how that is read is told in `reading`.
Fake tensors make parameters that were never allocated usable with inputs that name an ordinary device.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from .errors import CaptureError, ShardwrightError
from .graph import Graph
from .marks import collect_marks, mark_names
from .normalisation import cumulative_momentum
from .opaque import collect_functions
from .reading import Reader, bare, is_users, user_frame
from .recompute import collect_regions
from .staging import whole_shape
from .torch_private import NOISY_LOGGERS, FakeTensorMode, buffer_table, parameter_table, pytree, recurrent_weights, stack_lines
from .trees import closed, opened

__all__ = ["WithLoss", "capture"]

#: What torch says of a model that it cannot follow -> what to write instead.
_INSTEAD = {
    "data-dependent": "control flow that depends on shapes and settings only, not on the values of tensors",
    "not a known type": "tensors, numbers, strings and None, in tuples, lists, dicts, or as attributes of an object",
    "numpy() is not supported": "torch's own operators",
}


class WithLoss(nn.Module):
    """A model and its loss as one module: the last positional input goes to the loss."""

    def __init__(self, net: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.net, self.loss_fn = net, loss_fn
        self.training = net.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.loss_fn(self.net(*inputs[:-1], **kwargs), inputs[-1])


@contextlib.contextmanager
def _fake_state(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Parameters and buffers replaced by fake ones, tied ones by the same one; put back at the end."""
    memo: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict, str, Any]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            where = device if tensor.device.type == "meta" else tensor.device
            with mode:
                made = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device=where)
                memo[id(tensor)] = (nn.Parameter(made, requires_grad=tensor.requires_grad)
                                    if isinstance(tensor, nn.Parameter) else made)
        return memo[id(tensor)]

    try:
        for sub in module.modules():
            for held in (parameter_table(sub), buffer_table(sub)):
                for name, tensor in held.items():
                    if tensor is not None:
                        saved.append((held, name, tensor))
                        held[name] = fake(tensor)
        yield
    finally:
        for held, name, tensor in saved:
            held[name] = tensor


class _UsersLine:
    """In the place of the whole stack of Python, which export describes line by line for every operator: a sixth of what it
    takes in all."""

    @staticmethod
    def extract() -> type[_UsersLine]:
        return _UsersLine

    @staticmethod
    def summary() -> traceback.StackSummary:
        """The user's innermost line alone."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        lines = [] if frame is None else [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None)]
        return traceback.StackSummary.from_list(lines)


def _innermost(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
    """The user's innermost line, which may be in a helper: export keeps lines in functions called ``forward``."""
    return traceback.StackSummary.from_list([f for f in frames if is_users(f.filename)][-1:])


def capture(net: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, *, loss_fn: Any = None,
            device: torch.device | str = "cpu") -> Graph:
    """Capture one call of a model.

    Args:
        net: the model; its parameters may be real, fake or meta.
        args, kwargs: the inputs of the call with their **global** shapes; real, fake or meta tensors.
        loss_fn: if given, the last of `args` is its target and the graph ends in the loss.
        device: the device that meta tensors stand for.

    Raises:
        CaptureError: what `torch.export` could not follow, with the user's line.
    """
    module = net if loss_fn is None else WithLoss(net, loss_fn)
    prefix = "" if loss_fn is None else "net"
    device = torch.device(device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_input(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = device if leaf.device.type == "meta" else leaf.device
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=where, requires_grad=leaf.requires_grad)

    fake_args, fake_kwargs = pytree.tree_map(fake_input, opened((tuple(args), dict(kwargs or {}))))
    tied: dict[int, list[str]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False),
                         *module.named_buffers(remove_duplicate=False)]:
        tied.setdefault(id(tensor), []).append(bare(name, prefix))
    try:
        with _fake_state(module, mode, device), collect_marks() as calls, _quiet(), \
                collect_functions(_calling_line) as functions, collect_regions(module, prefix) as regions, \
                stack_lines(_innermost, _UsersLine), _objects_opened(module), cumulative_momentum(module), \
                recurrent_weights(module):
            program = torch.export.export(module, fake_args, fake_kwargs, strict=False)
    except ShardwrightError as error:
        raised = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        raise error if error.source else error.located(source=user_frame(raised) or None)
    except Exception as error:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        first = str(error).strip().split("\n\n")[0]
        raise CaptureError(f"the model cannot be captured: {type(error).__name__}: {first}",
                           source=user_frame(frames) or _calling_line(),
                           legal=next((legal for part, legal in _INSTEAD.items() if part in first), None)) from error
    aliases = {alias: names[0] for names in tied.values() for alias in names[1:]}
    called = _input_names(net, len(fake_args) - 1) if loss_fn is not None else {}
    reader = Reader(program, calls, mark_names(net), prefix, aliases, called, [f for f, _ in functions], regions)
    reader.casting = torch.is_autocast_enabled(device.type)  # around the call: its casts are written out too
    return reader.graph()


def _input_names(net: nn.Module, count: int) -> dict[str, str]:
    """The names that a model's own forward gives to the inputs which `WithLoss` passes through."""
    names = [p.name for p in inspect.signature(net.forward).parameters.values()
             if p.kind is p.POSITIONAL_OR_KEYWORD][:count]
    return {f"inputs_{i}": name for i, name in enumerate(names)} | {f"inputs_{count}": "target"}


@contextlib.contextmanager
def _objects_opened(module: nn.Module) -> Iterator[None]:
    """Opened objects reach the module closed, and what it returns is opened, so that export sees tensors alone."""
    hooks = (module.register_forward_pre_hook(lambda _, args, kwargs: closed((args, kwargs)), prepend=True,
                                              with_kwargs=True),
             module.register_forward_hook(lambda _, args, result: opened(result)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What export logs and prints beside the error that it raises (half a graph) is left out: the error says it."""
    logs = [logging.getLogger(f"torch.{name}") for name in NOISY_LOGGERS]
    levels, graph, written = [log.level for log in logs], "", io.StringIO()
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
        sys.stderr.write(written.getvalue().replace(graph, "").lstrip("\n") if graph else written.getvalue())


def _calling_line() -> str | None:
    """The user's line that is being run."""
    return user_frame([(f.filename, f.lineno or 0) for f in traceback.extract_stack()]) or None
