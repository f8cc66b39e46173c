"""Second derivatives: gradients that are differentiated again (``create_graph=True``), as in a gradient penalty.

    output = model(x)
    slope, = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.mean() + slope.square().sum()).backward()

A redistribution and its transpose are each the transpose of the other, so that the gradient of a gradient runs the
forward's steps again. A function of the runtimes for which this is not written down is `differentiated_once`: its
second derivative is an error that says what is possible. In several processes gradients of parameters are sums that
autograd does not see (`refuse_graph`); gradients of inputs are differentiated twice there too, unless the program is
compiled.

Example: with ``nn.Linear(4, 1)`` as the model and x [8, 4] each row of ``slope`` is the weight w. The lines above give
w the gradient x.mean(0) + 2 · 8 · w, under any plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingError

__all__ = ["differentiated_once", "refuse_graph", "refuse_graph_of_compiled"]

_LEGAL = 'parallel_mode="stand_alone", which differentiates as often as one device'


class _Refused(torch.autograd.Function):
    """Gradients that are not differentiated again."""

    @staticmethod
    def forward(ctx: Any, what: str, legal: str, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.what, ctx.legal = what, legal
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise SettingError(
            f"a second derivative (create_graph=True) of a parallel model, through {ctx.what}", legal=ctx.legal
        )


def differentiated_once(what: str, legal: str = _LEGAL) -> Callable[..., Any]:
    """A decorator of a ``backward`` whose results are not differentiated again: in the place of torch's
    ``once_differentiable``, with an error that says what is possible.

    Args:
        what: the function in words.
        legal: the alternative.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., object]:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *gradients)
            with torch.no_grad():
                made = backward(ctx, *gradients)
            results = list(made) if isinstance(made, tuple) else [made]
            at = [i for i, g in enumerate(results) if isinstance(g, Tensor)]
            wanted = [results[i].detach().requires_grad_() for i in at]
            for i, gradient in zip(at, _Refused.apply(what, legal, *wanted) if wanted else ()):
                results[i] = gradient
            return tuple(results) if isinstance(made, tuple) else results[0]

        return run

    return decorate


def refuse_graph(name: str) -> None:
    """Refuse the gradient of a parameter in several processes that is to be differentiated again.

    Raises:
        SettingError: always.
    """
    raise SettingError(
        f"create_graph=True of a backward in several processes: the gradient of the parameter {name!r} is a sum over "
        "ranks that autograd does not see",
        legal="a penalty on gradients of inputs: torch.autograd.grad(output, x, create_graph=True), with x that "
        "requires a gradient; or one process, sw.init(devices=…)",
    )


def refuse_graph_of_compiled(results: Iterable[object]) -> None:
    """Refuse a backward of a compiled program that is to be differentiated again: torch.compile makes none."""
    for x in results:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(_refuse_compiled)


def _refuse_compiled(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise SettingError(
            "create_graph=True of a backward of a compiled program: torch.compile makes no second derivative",
            legal="compile=False",
        )
