"""``torch.autograd.grad(loss, net.parameters())`` in several processes.

A program computes on plain leaves, which autograd knows; the parameters are DTensors on their memory, which autograd
does not know. The gradients of parameters come at the end of a backward, when the ranks' terms are summed. So a request
for gradients of parameters is a backward to their leaves, whose results are not added to ``grad``:

    leaves      those of the wanted parameters, found in the graph of the outputs
    backward    to these leaves alone, while ``grad`` of the parameters is empty
    results     what the backward has left in ``grad``; then ``grad`` is what it was before

While a process has parallel models and a process group, ``torch.autograd.grad`` is replaced by `_grad`, which passes
all other requests on. The last of the models puts torch's own back. A name that was imported before (``from
torch.autograd import grad``) is torch's own.

Example: a weight [32, 16] in slices [8, 16] on 4 ranks. ``torch.autograd.grad(loss, [net.weight])`` returns the summed
gradient, a DTensor [32, 16] with a local tensor [8, 16], and ``net.weight.grad`` stays None.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...capture.annotations import CUT
from ...capture.hybrid_models import is_own
from ...errors import SettingError
from ...torch_private import gradient_hooks
from ..replaced_parameters import successor_of
from ..second_derivatives import refuse_graph

__all__ = ["note_leaf", "reached", "requested"]

#: Attribute of a leaf: its parameter, and the sums of its program's gradients, or None.
_OF = "_shardwright_leaf_of"

_PLAIN = torch.autograd.grad
_LEGAL = "loss.backward() and the parameters' grad"

_users = 0


class _Sums(Protocol):
    """The sums of a program's gradients, as they are read here."""

    @property
    def accumulates(self) -> bool: ...

    @property
    def waits(self) -> bool: ...


def note_leaf(leaf: Tensor, parameter: Tensor, sums: _Sums | None) -> None:
    """Note whose leaf a tensor is."""
    setattr(leaf, _OF, (parameter, sums))


def requested(model: object) -> None:
    """Answer requests for gradients of parameters that are slices, as long as a parallel model lives; without a process
    group nothing is done. It begins before the first call: Python reads ``torch.autograd.grad`` before ``model(x)``."""
    global _users
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _users += 1
        torch.autograd.grad = _grad  # type: ignore[assignment]  # torch's has overloads
        weakref.finalize(model, _released).atexit = False


def _released() -> None:
    global _users
    _users -= 1
    if not _users and torch.autograd.grad is _grad:
        torch.autograd.grad = _PLAIN


def _grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, of parameters that are slices too."""
    several = [inputs] if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence) else list(inputs)
    several = [successor_of(x) if isinstance(x, Tensor) else x for x in several]  # anything else is torch's error
    places = [i for i, x in enumerate(several) if isinstance(x, Tensor) and (hasattr(x, CUT) or is_own(x))]
    further: dict[str, Any] = dict(
        create_graph=create_graph,
        only_inputs=only_inputs,
        allow_unused=allow_unused,
        is_grads_batched=is_grads_batched,
        materialize_grads=materialize_grads,
    )
    if not places:
        return _PLAIN(outputs, inputs, grad_outputs, retain_graph, **further)
    wanted = [several[i] for i in places]
    if create_graph:
        refuse_graph(_name(wanted[0]))
    if is_grads_batched:
        raise SettingError("is_grads_batched=True of gradients of parameters in several processes", legal=_LEGAL)
    of_autograd = [i for i in range(len(several)) if i not in places]
    made: list[Tensor | None] = [None] * len(several)
    results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    found = _of_parameters(results, wanted, grad_outputs, bool(retain_graph) or bool(of_autograd))
    for i, gradient in zip(places, found):
        made[i] = torch.zeros_like(several[i]) if gradient is None and materialize_grads else gradient
        if made[i] is None and not allow_unused:
            raise RuntimeError(
                f"The parameter {_name(several[i])!r} appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
    if of_autograd:
        rest = _PLAIN(outputs, [several[i] for i in of_autograd], grad_outputs, retain_graph, **further)
        for i, gradient in zip(of_autograd, rest):
            made[i] = gradient
    return tuple(made)


def _name(parameter: Tensor) -> str:
    return str(getattr(parameter, CUT, ""))


def _of_parameters(
    outputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None,
    retain: bool,
) -> list[Tensor | None]:
    """The gradients of parameters, by a backward to their leaves."""
    for parameter in wanted:
        if gradient_hooks(parameter).after:
            raise SettingError(
                f"torch.autograd.grad of the parameter {_name(parameter)!r}, which has a post-accumulate hook that "
                "would be called",
                legal=_LEGAL,
            )
    leaves = reached(outputs, wanted, refuses_open_sums=True)
    if not leaves:
        return [None] * len(wanted)
    before = [parameter.grad for parameter in wanted]
    try:
        for parameter in wanted:
            parameter.grad = None
        torch.autograd.backward(outputs, grad_outputs, retain_graph=retain, inputs=leaves)
        return [parameter.grad for parameter in wanted]
    finally:
        for parameter, gradient in zip(wanted, before):
            parameter.grad = gradient


def reached(outputs: Sequence[Tensor], wanted: Sequence[Tensor], refuses_open_sums: bool = False) -> list[Tensor]:
    """The tensors to which a backward has to go for the gradients of some tensors: of a parameter the leaves that
    programs have computed on, and the parameter itself where a script has computed of it; others as they are.

    Raises:
        SettingError: gradients of a leaf wait for their sum, and `refuses_open_sums` is True.
    """
    found = [x for x in wanted if not hasattr(x, CUT) and not is_own(x)]
    parameters = set(wanted)
    for leaf in _leaves(outputs):
        parameter, sums = getattr(leaf, _OF, (leaf, None))
        if refuses_open_sums and sums is not None and (sums.accumulates or sums.waits):
            raise SettingError(
                "torch.autograd.grad of parameters under no_sync(), or while gradients of a backward under it wait for "
                "their sum",
                legal=_LEGAL,
            )
        if parameter in parameters:
            found.append(leaf)
    return found


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of parameters in the graph of some outputs.

    Raises:
        SettingError: the loss of a pipeline, whose parameters are on the ranks of their stages alone.
    """
    found: list[Tensor] = []
    waiting: list[Node] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == "_ReturnedResultBackward":
            raise SettingError(
                "torch.autograd.grad of parameters through a pipeline in several processes: each rank has the "
                "parameters of its own stage alone",
                legal=_LEGAL,
            )
        leaf = getattr(node, "variable", None)
        if leaf is not None and (hasattr(leaf, _OF) or hasattr(leaf, CUT)):
            found.append(leaf)
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further
    return found
