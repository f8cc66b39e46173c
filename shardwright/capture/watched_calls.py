"""Calls of a forward that a captured program would repeat wrongly or leave out: prints and logs, hooks, numbers taken
out of tensors.

    print, a log                    recorded, and repeated at each call of the program
    the same of a tensor's values   an error: no tensor has values while a model is captured. A number that was taken
                                    out of a tensor by ``item()`` is a symbol of torch then, such as ``zuf0``
    a hook on a tensor or module    an error
    a seed, a generator's state     an error: random numbers of a program are those of the process's seed at each call
    set_autocast_enabled            an error: the casts of a program are those of its contexts
    a check of a tensor's values    left out: arguments of distributions, variances of `gaussian_nll_loss`
    a size that values decide       the same without it: `nn.AdaptiveLogSoftmaxWithLoss` over all classes, `ctc_loss` of
                                    padded targets; an error where there is no such form (`one_hot` of unknown classes)
    a collective of torch           an error (`hybrid_models.refused_collective`)
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import io
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TextIO

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn import functional

from ..errors import CaptureError, place_text
from ..identity_tables import IdentityMap
from ..rules.loss import ctc_losses
from ..torch_private import COMPILER, EXPORTER, AdaptiveOutput, hooks_of, hooks_of_all_modules
from .hybrid_models import refused_collective
from .observed.places import GuardedPlace
from .observed.stand_ins import by_user, frames, original_of
from .side_effects import Effects, Logged, Printed, TextStream
from .source_lines import calling_line

__all__ = ["Files", "in_all_files", "instead_of_checks", "refuse_backward_hooks", "watched_calls"]

_VALUELESS = re.compile(r"(Fake|Functional)Tensor\(")

#: The text of a number without a value, which `_VALUELESS` finds.
_UNKNOWN = "FakeTensor(a number)"


class Files(Protocol):
    """The globals of the user's files, as an observation has them."""

    @property
    def files(self) -> list[dict[str, object]]: ...

    def put_stand_in(self, place: GuardedPlace, value: object, stand_in: object) -> None:
        """Put a function in the place of a value until the end of the capture."""


@contextlib.contextmanager
def watched_calls(effects: Effects, running: Callable[[], bool], seen: Files) -> Iterator[None]:
    """Record prints and logs of a forward in `effects` instead of writing them, and refuse hooks on its tensors.

    Args:
        effects: receives the texts.
        running: returns True while the forward runs.
        seen: the user's files.
    """

    def note_text(stream: str | TextStream, text: str) -> None:
        if _VALUELESS.search(text):
            raise CaptureError(
                "the forward prints the values of tensors, which are not there while it is captured: what a tensor "
                "holds, and what item() takes out of it, is known once the program runs",
                legal="a text without tensors, or a further output of the forward that is printed outside",
            )
        last, line = effects.entries[-1] if effects.entries else None, calling_line()
        if isinstance(last, Printed) and (last.stream, last.source) == (stream, line):
            effects.entries[-1] = Printed(stream, last.text + text, line)
        else:
            effects.entries.append(Printed(stream, text, line))

    def without_value(kind: type, name: str) -> Callable[..., str]:
        plain = getattr(kind, name)

        def text(self: torch.SymInt | torch.SymFloat | torch.SymBool, *args: object) -> str:
            unknown = isinstance(self, torch.SymBool) or not self.node.has_hint()
            return _UNKNOWN if unknown and running() and by_user() else plain(self, *args)

        return text

    def without_collective(name: str) -> Callable[..., object]:
        plain = getattr(groups, name)

        def call(self: object, *args: object, **kwargs: object) -> object:
            error = refused_collective(name, calling_line()) if running() and threading.get_ident() == thread else None
            if error is not None:
                raise error
            return plain(self, *args, **kwargs)

        return call

    _make_tables()
    thread = threading.get_ident()  # other threads, of a save in the background say, go on
    groups = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    plain_print: Callable[..., None] = builtins.print
    plain_handle = logging.Logger.handle

    def print_(*args: object, **kwargs: object) -> None:
        file = original_of(kwargs.get("file"))
        if file is None or isinstance(file, _Stream) or not running() or not by_user():
            plain_print(*args, **kwargs)
            return
        text = io.StringIO()
        plain_print(*args, **{**kwargs, "file": text, "flush": False})
        note_text(file, text.getvalue())

    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if not running() or not by_user() or _once():
            plain_handle(self, record)
            return
        text = record.getMessage()
        if _VALUELESS.search(text):
            raise CaptureError(
                "the forward logs the values of tensors, which are not there while it is captured: what a tensor "
                "holds, and what item() takes out of it, is known once the program runs",
                legal="a text without tensors, or a further output of the forward that is logged outside",
            )
        effects.entries.append(Logged(self, record.levelno, text, record.pathname, record.lineno))

    def refused(name: str) -> Callable[..., object]:
        plain = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: object, **kwargs: object) -> object:
            if running() and by_user():
                raise CaptureError(
                    f"the forward calls {name} on a tensor, which the captured program would leave out",
                    legal="a torch.autograd.Function with that backward, or a further output of the forward on "
                    f"which {name} is called outside",
                )
            return plain(self, *args, **kwargs)

        return call

    def without_state(owner: object, name: str, problem: str, legal: str) -> Callable[..., object]:
        plain = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            if running() and by_user():
                raise CaptureError(f"the forward calls {name}(), {problem}", legal=legal)
            return plain(*args, **kwargs)

        return call

    states = [
        (owner, name, without_state(owner, name, problem, legal))
        for problem, legal, owners in _STATES
        for owner, names in owners
        for name in names
        if hasattr(owner, name)  # some are deprecated
    ]
    with contextlib.ExitStack() as stack:
        in_all_files(seen, [(getattr(owner, name), ours) for owner, name, ours in (*states, *_WITHOUT_VALUES)])
        for owner, name, ours in (
            *states,
            *_WITHOUT_VALUES,
            (Distribution, "_validate_args", False),  # private torch name: what set_default_validate_args sets
            (builtins, "print", print_),
            (logging.Logger, "handle", handle),
            *((torch.Tensor, n, refused(n)) for n in _TENSOR_HOOKS),
            *((kind, n, without_value(kind, n)) for kind in _NUMBERS for n in ("__str__", "__repr__", "__format__")),
            *((groups, n, without_collective(n)) for n in _COLLECTIVES if hasattr(groups, n)),
            (sys, "stdout", _Stream(sys.stdout, "stdout", note_text, running)),
            (sys, "stderr", _Stream(sys.stderr, "stderr", note_text, running)),
        ):
            if name in vars(owner):  # as stored: getattr of a class unwraps methods of C++
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, ours)
        yield


#: Methods of a process group that torch's own collectives end in, where these leave no operator in the program.
_COLLECTIVES = (
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
    "send",
)
# -- functions of torch that look at values, without looking ----------------------------------------------------------


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """`F.gaussian_nll_loss` without its check that variances are not negative."""
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.shape != input.shape and (
        var.dim() != input.dim() or sum(y for x, y in zip(input.shape, var.shape) if x != y) != 1
    ):
        raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: torch.Tensor, target_: torch.Tensor) -> object:
    """`nn.AdaptiveLogSoftmaxWithLoss` over all classes: torch computes each cluster for the rows that are in it."""
    alone = target_.dim() == 0
    rows, target = (input_.unsqueeze(0), target_.unsqueeze(0)) if alone else (input_, target_)
    output = self.log_prob(rows).gather(1, target.unsqueeze(1)).squeeze(1)
    loss = (-output).mean()
    return AdaptiveOutput(output.squeeze(0) if alone else output, loss)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes == -1:
        raise CaptureError(
            "one_hot without num_classes: the number of classes depends on the values of a tensor",
            source=calling_line(),
            legal="F.one_hot(x, num_classes=…)",
        )
    if not _ONE_HOT_IS_SEEN:
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()
    return _PLAIN_ONE_HOT(tensor, num_classes)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: object,
    target_lengths: object,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`F.ctc_loss` of padded targets."""
    alone = log_probs.dim() == 2
    if targets.dim() != (1 if alone else 2):
        raise CaptureError(
            f"ctc_loss of targets of shape {list(targets.shape)} beside log_probs of shape {list(log_probs.shape)}: "
            "labels one after another in one dim cannot be cut with the batch",
            source=calling_line(),
            legal="padded targets of shape [batch, labels], with their lengths",
        )
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    lengths = []
    for numbers in (input_lengths, target_lengths):
        made = torch.as_tensor(numbers, device=targets.device).reshape(-1)
        if made.shape[0] != log_probs.shape[1]:
            raise CaptureError(
                f"ctc_loss of {log_probs.shape[1]} rows with {made.shape[0]} lengths",
                source=calling_line(),
                legal="lengths as a tensor that is an input, with one number for each row",
            )
        lengths.append(made)
    if torch.is_autocast_enabled(log_probs.device.type):
        log_probs = log_probs.float()  # as autocast does with torch's own
    losses = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        losses = losses / lengths[1].to(losses.dtype).clamp_min(1)
    return losses.squeeze(0) if alone and reduction == "none" else _reduced(losses, reduction)


_PLAIN_ONE_HOT: Callable[..., torch.Tensor] = functional.one_hot
#: False for torch 2.9, whose `one_hot` takes a number out of a tensor.
_ONE_HOT_IS_SEEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) > (2, 9)

#: Functions of torch that look at values of tensors, and the functions in their places while a model is captured.
_WITHOUT_VALUES: tuple[tuple[object, str, object], ...] = (
    (functional, "gaussian_nll_loss", _gaussian_nll_loss),
    (functional, "one_hot", _one_hot),
    (functional, "ctc_loss", _ctc_loss),
    (nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax),
)


def instead_of_checks(files: Iterable[str]) -> str | None:
    """The alternative to a check of values that stays, such as that of a distribution with ``validate_args=True``.

    Args:
        files: those of the stack of an error.
    """
    if any("/torch/distributions/" in file for file in files):
        return "the distribution without validate_args=True: a check of values is left out where the default is used"
    return None


#: Functions that set a state of torch: what is wrong, what the user writes instead, and the names by their owners.
_STATES: tuple[tuple[str, str, tuple[tuple[object, tuple[str, ...]], ...]], ...] = (
    (
        "which a program does not repeat: its random numbers follow from the seed of the process, and differ at each "
        "call",
        "torch.manual_seed before the call of the model; numbers that stay the same as a buffer, or as an input",
        (
            (torch, ("manual_seed", "seed", "set_rng_state")),
            (torch.random, ("manual_seed", "seed", "set_rng_state", "fork_rng")),
            (torch.cuda, ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")),
        ),
    ),
    (
        "which the capture does not see: the casts of a program are those of the contexts around its operators",
        "with torch.autocast(device_type, dtype, enabled=…): around the operators",
        (
            (
                torch,
                (
                    "set_autocast_enabled",
                    "set_autocast_dtype",
                    "set_autocast_cpu_enabled",
                    "set_autocast_cpu_dtype",
                    "set_autocast_gpu_dtype",
                ),
            ),
        ),
    ),
)
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


@functools.cache
def _make_tables() -> None:
    """Let torch make its tables of functions and methods, which it keeps, before any of these is replaced."""
    for name in (COMPILER, EXPORTER):
        importlib.import_module(name)
    torch.overrides.get_testing_overrides()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)


def in_all_files(seen: Files, functions: Iterable[tuple[object, object]]) -> None:
    """Put functions in the places of others until the end of the capture, whatever their names are in the user's files.

    Args:
        seen: the files: ``from torch import manual_seed as seed`` is an entry. The observation puts the others back.
        functions: (the other function, the function in its place) of each.
    """
    stand_ins = IdentityMap[object, object](functions)
    for file in seen.files:
        for key, value in list(file.items()):
            if value in stand_ins:
                seen.put_stand_in(GuardedPlace(file, key, f"{file.get('__name__')}.{key}"), value, stand_ins[value])


class _Stream:
    """A stream that records the writes of the user's forward, and passes all other writes on."""

    def __init__(
        self, stream: TextIO, name: str, note: Callable[[str, str], None], running: Callable[[], bool]
    ) -> None:
        self._stream, self._name, self._note, self._running = stream, name, note, running

    def write(self, text: str) -> int:
        if self._running() and by_user():
            self._note(self._name, text)
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _once() -> bool:
    """True for a message that is given once, by `logger.warning_once` of transformers, say."""
    for depth, frame in enumerate(frames()):
        if frame.f_code.co_name.endswith("_once"):
            return True
        if depth > 8:
            break
    return False


def refuse_backward_hooks(modules: list[tuple[str, nn.Module]]) -> None:
    """Refuse hooks of modules that run in the backward.

    Raises:
        CaptureError: with the line of the hook.
    """
    for path, hooks in [
        *((path, table) for path, m in modules for table in (hooks_of(m).backward, hooks_of(m).backward_pre)),
        ("all modules", hooks_of_all_modules().backward),
        ("all modules", hooks_of_all_modules().backward_pre),
    ]:
        for hook in hooks.values():
            code = getattr(getattr(hook, "__func__", hook), "__code__", None)
            line = None if code is None else place_text(code.co_filename, code.co_firstlineno)
            raise CaptureError(
                f"{path} has a hook that runs in its backward, which the captured program would leave out",
                source=line,
                legal="a torch.autograd.Function in the forward, a hook of a parameter, or "
                "register_full_backward_hook on the AutoParallel model",
            )
