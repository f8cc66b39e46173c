"""Calls of modules around a captured program: modules around the user's model, calls that are led elsewhere, hooks at
the borders of a model.

1. Modules around the model. Names of parameters and modules are those of the model alone, so that a plan and a
   checkpoint mean the same parameters whichever module stands around it.

       `WithLoss`            the model, then its loss: ``loss_fn(net(*inputs), target)``
       `FunctionOfModels`    a user's function that calls one model or several, as one module

   Example, a function of a model with a layer ``fc``::

       def forward_fn(x, y):
           logits = net(x)
           return loss_fn(logits, y), logits

       dict(FunctionOfModels(forward_fn, net).named_parameters())    # fc.weight, fc.bias

2. `redirected` lets calls of a module go to another function, and `as_written` undoes it: a step function runs under
   `redirected`, a capture of its models under `as_written`.

3. Hooks that run at each call, around the captured program, on real tensors (`hooked`).

       net's forward-pre hooks    around the program, with the inputs of the call
       net's forward hooks        around the program, with its outputs; inside it where the model has a `loss_fn`,
                                  which follows the hooks
       hooks of all modules       (`register_module_forward_hook` and its like) once around the program, as hooks of
                                  net; inside it for each submodule
       hooks of submodules        inside the program: captured as a part of it
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch
from torch import nn

from ..errors import CaptureError
from ..torch_private import CALLED_INSTEAD, MODULE_TABLES, hooks_of, hooks_of_all_modules
from .annotations import Operator

__all__ = [
    "FunctionOfModels",
    "LossFunction",
    "ModelAndLoss",
    "WithLoss",
    "as_written",
    "has_global_hooks",
    "hooked",
    "modules_by_path",
    "outermost_left_out",
    "redirected",
    "refuses_others",
    "scalers_refused",
    "together",
    "user_functions",
]

# -- modules around the model

#: A loss, called as ``loss_fn(outputs, target)``.
LossFunction = Callable[..., object]


class WithLoss(nn.Module):
    """A model and its loss as one module: the last positional input goes to the loss."""

    def __init__(self, net: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.net, self.loss_fn = net, loss_fn
        self.training = net.training

    def forward(self, *inputs: object, **kwargs: object) -> object:
        return self.loss_fn(self.net(*inputs[:-1], **kwargs), inputs[-1])


class ModelAndLoss(nn.Module):
    """The wrapped model and its loss under the names that a captured graph uses."""

    def __init__(self, net: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.tables: list[tuple[str, nn.Module]]
        self.__dict__["tables"] = [("", net)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for part, module in self.tables:
            for name, tensor in module.named_parameters(prefix, recurse, remove_duplicate):
                yield part + name, tensor

    def modules(self) -> Iterator[nn.Module]:  # type: ignore[override]  # torch 2.9 has no argument to pass on
        for _, module in self.tables:
            yield from module.modules()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for part, module in self.tables:
            for name, tensor in module.named_buffers(prefix, recurse, remove_duplicate):
                yield part + name, tensor


class FunctionOfModels(nn.Module):
    """A user's function that calls models, as one module with the tables and the submodules of `net`.

    Args:
        function: the function; its inputs are those of the module.
        net: the one model that the function calls, or several models that `together` has made one.
    """

    function: Callable[..., object]
    net: nn.Module
    _originals: list[nn.Module]

    def __init__(self, function: Callable[..., object], net: nn.Module) -> None:
        super().__init__()
        for table in MODULE_TABLES:
            self.__dict__[table] = net.__dict__[table]
        self.__dict__["function"], self.__dict__["net"] = function, net
        self.__dict__["_originals"] = _called(net)  # the modules that the function itself calls
        self.__dict__["forward"] = function  # with its signature, by which a capture names the inputs
        self.training = net.training

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the model, the model itself first: marks, stages and hooks of the model are found there."""
        return self.net.named_modules(memo, prefix, remove_duplicate)

    def __deepcopy__(self, memo: dict[int, object]) -> FunctionOfModels:
        """A copy whose function calls copies of the models in place of the models."""
        made = FunctionOfModels(self.function, copy.deepcopy(self.net, memo))
        made.__dict__["_originals"] = self._originals
        calls = dict(zip(self._originals, _called(made.net)))

        @functools.wraps(self.function)
        def forward(*args: object, **kwargs: object) -> object:
            with redirected(calls):
                return self.function(*args, **kwargs)

        made.__dict__["forward"] = forward
        memo[id(self)] = made
        return made


class _Together(nn.Module):
    """Several models under their names; never called itself."""


def together(models: Mapping[str, nn.Module]) -> nn.Module:
    """One module for models that a function calls: the only model itself, else a module with each as a submodule.

    Args:
        models: name -> model; a name has no dot.
    """
    if len(models) == 1:
        return next(iter(models.values()))
    made = _Together()
    for name, model in models.items():
        made.add_module(name, model)
    made.training = any(model.training for model in models.values())
    return made


def _called(net: nn.Module) -> list[nn.Module]:
    """The models of which `together` has made `net`."""
    return list(net.children()) if isinstance(net, _Together) else [net]


def modules_by_path(net: nn.Module, loss_fn: LossFunction | None) -> list[tuple[str, nn.Module]]:
    """The modules of a model and its loss, by their paths in messages."""
    return [
        (f"{root}.{path}" if path else root, module)
        for root, whole in (("net", net), ("loss_fn", loss_fn))
        if isinstance(whole, nn.Module)
        for path, module in whole.named_modules()
    ]


def user_functions(net: nn.Module, loss_fn: LossFunction | None) -> list[tuple[str, Callable[..., object]]]:
    """The user's functions in a call besides the forwards of modules, with their names in messages."""
    functions: list[tuple[str, Callable[..., object]]] = [] if loss_fn is None else [("loss_fn", loss_fn)]
    if isinstance(net, FunctionOfModels):
        functions.append((getattr(net.function, "__name__", "the function"), net.function))
    return functions


@contextlib.contextmanager
def scalers_refused() -> Iterator[None]:
    """Refuse ``torch.amp.GradScaler.scale`` in a capture: the program would keep the scale of the first call.

    Raises:
        CaptureError: inside the ``with`` block, where a captured function scales its loss.
    """
    plain = torch.amp.GradScaler.scale

    def scale(self: object, outputs: object) -> NoReturn:
        raise CaptureError(
            "a GradScaler scales the loss inside of a captured function: its scale would stay that of the first call",
            legal="sw.optimizer(optimizer, scaler=scaler) beside sw.value_and_grad, or scaler.scale(loss) outside of "
            "the model",
        )

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = plain  # type: ignore[method-assign]


# -- calls that are led elsewhere

#: Modules whose calls are led elsewhere now, with the functions that are called, and whether other modules with trained
#: parameters may be called beside them; the innermost last.
_REDIRECTED: list[tuple[Mapping[nn.Module, Callable[..., object]], bool]] = []


@contextlib.contextmanager
def redirected(calls: Mapping[nn.Module, Callable[..., object]], others_allowed: bool = True) -> Iterator[None]:
    """Let ``module(...)`` be a call of ``calls[module]``, hooks included, inside the ``with`` block.

    Args:
        calls: module -> the function.
        others_allowed: False where no other module with trained parameters may be called; see `refuses_others`.
    """
    before = {module: vars(module).get(CALLED_INSTEAD) for module in calls}
    _REDIRECTED.append((calls, others_allowed))
    try:
        _put(calls)
        yield
    finally:
        _REDIRECTED.pop()
        _put(before)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Let every module be called as it is written inside the ``with`` block."""
    before = {module: vars(module).get(CALLED_INSTEAD) for calls, _ in _REDIRECTED for module in calls}
    outer, _REDIRECTED[:] = list(_REDIRECTED), []
    try:
        _put(dict.fromkeys(before))
        yield
    finally:
        _REDIRECTED[:] = outer
        _put(before)


def refuses_others() -> bool:
    """True inside of a `redirected` block beside whose modules no others with trained parameters may be called."""
    return not all(others_allowed for _, others_allowed in _REDIRECTED)


def _put(calls: Mapping[nn.Module, Callable[..., object] | None]) -> None:
    for module, called in calls.items():
        if called is None:
            vars(module).pop(CALLED_INSTEAD, None)
        else:
            vars(module)[CALLED_INSTEAD] = called


# -- hooks at the borders of a model


def has_global_hooks() -> bool:
    """True where the user has registered forward hooks for all modules."""
    return bool(_users(hooks_of_all_modules().forward_pre) or hooks_of_all_modules().forward)


#: A hook before a forward; without the keyword arguments it returns arguments, or one argument.
_PreHook = Callable[..., tuple[tuple[object, ...], dict[str, object]] | None]


def _users(hooks: Mapping[int, _PreHook]) -> list[tuple[int, _PreHook]]:
    """The user's hooks for all modules; Shardwright's own hook, for modules with sliced parameters, is left out."""
    return [(number, hook) for number, hook in hooks.items() if not getattr(hook, "of_shardwright", False)]


def hooked(
    net: nn.Module,
    run: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    forward: bool,
    hooks_of_net: bool = True,
    everyones: bool = False,
    target: bool = False,
) -> object:
    """Call `run` in place of `net`, between the hooks of `net`.

    Args:
        net: the module whose hooks run.
        run: the captured program, called with the arguments of the call.
        forward: run forward hooks too, which need the outputs of `net`.
        hooks_of_net: run the hooks of `net`.
        everyones: run the hooks of all modules.
        target: the last positional argument is the target of the loss, which hooks do not see.

    Returns:
        The outputs of `run`, as changed by the hooks.
    """
    args, rest = (args[:-1], args[-1:]) if target else (args, ())
    before = _users(hooks_of_all_modules().forward_pre) if everyones else []
    after = [*hooks_of_all_modules().forward.items()] if everyones and forward else []
    if hooks_of_net:
        before += hooks_of(net).forward_pre.items()
        after += hooks_of(net).forward.items() if forward else ()
    for number, hook in before:
        if number in hooks_of(net).forward_pre_with_kwargs:
            pair = hook(net, args, kwargs)
            if pair is not None:
                args, kwargs = pair
        else:
            changed: object = hook(net, args)
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
    saved: list[tuple[dict[int, object], dict[int, object]]] = []
    for table in (hooks_of(net).forward_pre, hooks_of(net).forward) if forward else (hooks_of(net).forward_pre,):
        if around:
            saved.append((table, OrderedDict(table)))
            for number in [n for n, hook in table.items() if not isinstance(getattr(hook, "__self__", None), Operator)]:
                del table[number]
    left_out = root if around or root is not net else None
    for table in (hooks_of_all_modules().forward_pre, hooks_of_all_modules().forward):
        saved.append((table, OrderedDict(table)))
        for number, hook in table.items():
            table[number] = _but_for(left_out, hook)
    try:
        yield
    finally:
        for table, before in saved:
            table.clear()
            table.update(before)


def _but_for(left_out: nn.Module | None, hook: Callable[..., object]) -> Callable[..., object]:
    """A hook that skips the module `left_out` and the modules that torch puts around the model for the export."""

    def call(module: nn.Module, *args: object) -> object:
        if module is left_out or type(module).__module__.startswith(("torch._", "torch.export", "torch.fx")):
            return None
        return hook(module, *args)

    call.__wrapped__ = hook  # type: ignore[attr-defined]  # as functools.wraps sets it
    return call
