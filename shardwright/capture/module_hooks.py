"""Hooks of modules at the borders of a model: they run at each call, around the captured program, on real tensors.

net's forward-pre hooks    around, with the inputs of the call
net's forward hooks        around, with its outputs; inside where the model has a `loss_fn`, which follows them
hooks of all modules       (`register_module_forward_hook` and its like) once around, as net's; inside for each submodule
hooks of submodules        inside: captured as a part of the program
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..torch_private import hooks_of, hooks_of_all_modules
from .annotations import Operator

__all__ = ["has_global_hooks", "hooked", "outermost_left_out"]


def has_global_hooks() -> bool:
    """Whether there are forward hooks of all modules."""
    return bool(_users(hooks_of_all_modules().forward_pre) or hooks_of_all_modules().forward)


def _users(hooks: Mapping[int, Callable[..., Any]]) -> list[tuple[int, Callable[..., Any]]]:
    """The hooks of all modules that are the user's: ours looks at calls of modules whose parameters are slices."""
    return [(number, hook) for number, hook in hooks.items() if not getattr(hook, "of_shardwright", False)]


def hooked(
    net: nn.Module,
    run: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    forward: bool,
    own: bool = True,
    everyones: bool = False,
    target: bool = False,
) -> Any:
    """Call `run` as `net`, between hooks.

    Args:
        forward: whether forward hooks run too, which need the outputs of `net`.
        own: with the hooks of `net`.
        everyones: with those of all modules.
        target: whether the last positional argument is the loss's, which hooks do not see.
    """
    args, rest = (args[:-1], args[-1:]) if target else (args, ())
    before = _users(hooks_of_all_modules().forward_pre) if everyones else []
    after = [*hooks_of_all_modules().forward.items()] if everyones and forward else []
    if own:
        before += hooks_of(net).forward_pre.items()
        after += hooks_of(net).forward.items() if forward else ()
    for number, hook in before:
        if number in hooks_of(net).forward_pre_with_kwargs:
            changed = hook(net, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(net, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = run(*args, *rest, **kwargs)
    for number, hook in after:
        with_kwargs = (
            number in hooks_of(net).forward_with_kwargs or number in hooks_of_all_modules().forward_with_kwargs
        )
        changed = hook(net, args, kwargs, result) if with_kwargs else hook(net, args, result)
        if changed is not None:
            result = changed
    return result


@contextlib.contextmanager
def outermost_left_out(net: nn.Module, root: nn.Module, forward: bool, around: bool) -> Iterator[None]:
    """While active, hooks that run around the program do not run inside.

    Args:
        root: the module that is exported: `net`, or `net` and its loss.
        forward: whether forward hooks of `net` run around too.
        around: whether any do; otherwise hooks of all modules leave out `root` alone where it is not the user's.
    """
    kept: list[tuple[OrderedDict, OrderedDict]] = []
    for table in (hooks_of(net).forward_pre, hooks_of(net).forward) if forward else (hooks_of(net).forward_pre,):
        if around:
            kept.append((table, OrderedDict(table)))
            for number in [n for n, hook in table.items() if not isinstance(getattr(hook, "__self__", None), Operator)]:
                del table[number]
    left_out = root if around or root is not net else None
    for table in (hooks_of_all_modules().forward_pre, hooks_of_all_modules().forward):
        kept.append((table, OrderedDict(table)))
        for number, hook in table.items():
            table[number] = _but_for(left_out, hook)
    try:
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)


def _but_for(left_out: nn.Module | None, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that leaves out a module, and those that torch puts around the model to export it."""

    def call(module: nn.Module, *args: Any) -> Any:
        if module is left_out or type(module).__module__.startswith(("torch._", "torch.export", "torch.fx")):
            return None
        return hook(module, *args)

    call.__wrapped__ = hook
    return call
