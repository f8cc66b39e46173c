"""What a command line can be pointed at: a training script as it stands, or a function that returns what to work on.

A script runs as ``python script.py`` would, up to the first call of its `AutoParallel` model. That call is handed over,
and the script goes no further.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, ShardwrightError

if TYPE_CHECKING:
    import torch

    from ..parallel.auto_parallel import AutoParallel

__all__ = ["Nothing", "arguments_of", "first_call", "import_modules", "positive", "without_weights"]


class Nothing(Exception):
    """There is nothing to work on."""


class _Stop(BaseException):
    """Ends the script. No Exception: the script must not catch it."""

    def __init__(self, result: Any, error: ShardwrightError | None = None) -> None:
        self.result, self.error = result, error


def first_call(
    script: str,
    script_args: Sequence[str],
    devices: int | None,
    take: Callable[[AutoParallel, tuple, dict[str, Any]], Any],
) -> Any:
    """Run a script until it first calls an `AutoParallel` model.

    Args:
        devices: how many the script is to find; None: as it says itself.
        take: what to do with the call: it gets the model and its arguments. The script ends with that.

    Returns:
        What `take` returns.

    Raises:
        Nothing: the script ended without such a call.
        ShardwrightError: what `take` raises. What the script itself raises goes through.
    """
    from ..parallel.auto_parallel import observed

    def observer(model: AutoParallel, args: tuple, kwargs: dict[str, Any]) -> None:
        try:
            result = take(model, args, kwargs)
        except ShardwrightError as error:
            raise _Stop(None, error) from None
        raise _Stop(result)

    if devices is not None:
        os.environ["SHARDWRIGHT_DEVICES"] = str(devices)
    sys.argv = [script, *script_args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as Python does; what is there is this command's folder
    try:
        with observed(observer):
            runpy.run_path(script, run_name="__main__")
    except _Stop as stop:
        if stop.error is not None:
            raise stop.error from None
        return stop.result
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
    raise Nothing(f"{script} ended without a call of an AutoParallel model")


def arguments_of(target: str, rest: Sequence[str], taker: str) -> dict[str, Any]:
    """What a function returns, as keyword arguments.

    Args:
        target: ``module:function`` or ``file.py:function``.
        rest: what stands behind it on the command line, where nothing may.
        taker: the function that they are for, such as "shardwright.verify".

    Raises:
        Nothing: there is no such function.
        SettingError: it returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise Nothing(f"no such script: {target}")
    if rest:
        raise Nothing(f"{target} takes no arguments, but got {' '.join(rest)}")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise Nothing(f"{place} has no function {name!r}")
    given = function()
    if isinstance(given, tuple) and 2 <= len(given) <= 4:
        given = dict(zip(("net", "inputs", "targets", "loss_fn"), given))
    if not isinstance(given, dict):
        raise SettingError(
            f"{target} returns {type(given).__name__}",
            legal=f"a dict of keyword arguments for {taker}, or (net, inputs, targets, loss_fn)",
        )
    return given


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path[0] = os.getcwd()  # as python -m does
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise Nothing(f"no such module: {place}")
        return importlib.import_module(place)
    if not os.path.isfile(place):
        raise Nothing(f"no such file: {place}")
    sys.path[0] = os.path.dirname(os.path.abspath(place))
    name = os.path.splitext(os.path.basename(place))[0]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """While active, modules keep the shapes and types of their parameters alone, on the meta device.

    A parameter loses its values where a module takes it, so that what builds the model afterwards fills nothing, and a
    model that fits no memory can be built. Moving a module to a device leaves them where they are.

    Private here: ``nn.Module._apply`` is what all of ``to``, ``cuda`` and their like go through.
    """
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    shells: dict[int, tuple[weakref.ref, nn.Parameter]] = {}

    def shell(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        held = shells.get(id(parameter))
        if held is None or held[0]() is not parameter:  # tied parameters stay one
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            held = shells[id(parameter)] = weakref.ref(parameter), made
        return held[1]

    plain = nn.Module._apply

    def _apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return plain(self, lambda x: _moved(function, x), recurse)

    hook = register_module_parameter_registration_hook(shell)
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
        hook.remove()


def _moved(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A tensor as `function` would have it; one without values stays without."""
    import torch

    if not x.is_meta:
        return function(x)
    return x.to(function(torch.empty(0, dtype=x.dtype)).dtype)


def positive(text: str) -> int:
    """A whole number from 1, for a parser."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def import_modules(modules: list[str]) -> None:
    """Import modules of the user's, which register operators.

    Raises:
        Nothing: there is no such module.
    """
    for name in modules:
        sys.path[0] = os.getcwd()
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise Nothing(f"no such module: {name}") from None
