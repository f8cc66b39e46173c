"""Module hooks at the borders of a model: hooks that run at each call, around the captured program, on real tensors.

net's forward-pre hooks    around the program, with the inputs of the call
net's forward hooks        around the program, with its outputs; inside it where the model has a `loss_fn`, which
                           follows the hooks
hooks of all modules       (`register_module_forward_hook` and its like) once around the program, as hooks of net;
                           inside it for each submodule
hooks of submodules        inside the program: captured as a part of it
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
    """True where the user has registered forward hooks for all modules."""
    return bool(_users(hooks_of_all_modules().forward_pre) or hooks_of_all_modules().forward)


def _users(hooks: Mapping[int, Callable[..., Any]]) -> list[tuple[int, Callable[..., Any]]]:
    """The user's hooks for all modules; Shardwright's own hook, for modules with sliced parameters, is left out."""
    return [(number, hook) for number, hook in hooks.items() if not getattr(hook, "of_shardwright", False)]


def hooked(
    net: nn.Module,
    run: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    *,
    forward: bool,
    own: bool = True,
    everyones: bool = False,
    target: bool = False,
) -> Any:
    """Call `run` in place of `net`, between the hooks of `net`.

    Args:
        net: the module whose hooks run.
        run: the captured program, called with the arguments of the call.
        forward: run forward hooks too, which need the outputs of `net`.
        own: run the hooks of `net`.
        everyones: run the hooks of all modules.
        target: the last positional argument is the target of the loss, which hooks do not see.

    Returns:
        The outputs of `run`, as changed by the hooks.
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
    """Keep hooks that run around the program from running inside it, while the context is active.

    Args:
        net: the user's model.
        root: the exported module: `net`, or `net` and its loss.
        forward: forward hooks of `net` run around the program too.
        around: True where any hooks run around the program. False: only the hooks of all modules are changed; they skip
            `root` where `root` is not the user's module.
    """
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
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
    """A hook that skips the module `left_out` and the modules that torch puts around the model for the export."""

    def call(module: nn.Module, *args: Any) -> Any:
        if module is left_out or type(module).__module__.startswith(("torch._", "torch.export", "torch.fx")):
            return None
        return hook(module, *args)

    call.__wrapped__ = hook  # type: ignore[attr-defined]  # as functools.wraps sets it
    return call
