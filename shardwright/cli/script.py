"""The target of a command: a training script as it stands, or a function that returns the arguments to work on.

1. A script runs as ``python script.py`` would, up to the first call of its `AutoParallel` model. That call is handed
   over, and the script ends (`first_call`).
2. A function returns keyword arguments, or (net, inputs, targets, loss_fn) (`arguments_of`).
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, ShardwrightError

if TYPE_CHECKING:
    import torch

    from ..parallel.auto_parallel import AutoParallel

__all__ = ["Nothing", "arguments_of", "first_call", "import_modules", "positive", "rank_number", "without_weights"]


class Nothing(Exception):
    """The command line names no target to work on."""


class _Stop(BaseException):
    """Ends the script. It is no Exception, so that the script does not catch it."""

    def __init__(self, result: object, error: ShardwrightError | KeyboardInterrupt | None = None) -> None:
        self.result, self.error = result, error


def first_call(
    script: str,
    script_args: Sequence[str],
    devices: int | None,
    take: Callable[[AutoParallel, tuple[object, ...], dict[str, object]], object],
) -> Any:
    """Run a script until it first calls an `AutoParallel` model.

    Args:
        script: the path of the script.
        script_args: its arguments.
        devices: the number of devices that the script finds; None: as it says itself.
        take: called with the model and the call's args and kwargs. The script ends after it.

    Returns:
        The result of `take`.

    Raises:
        Nothing: the script ended without such a call.
        ShardwrightError: an error of `take`. Errors of the script itself are raised as they are.
    """
    from ..parallel.auto_parallel import observed  # noqa: PLC0415  imports torch

    def observer(model: AutoParallel, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        try:
            result = take(model, args, kwargs)
        except (ShardwrightError, KeyboardInterrupt) as error:  # a script may catch Ctrl-C
            raise _Stop(None, error) from None
        raise _Stop(result)

    if devices is not None:
        os.environ["SHARDWRIGHT_DEVICES"] = str(devices)
    sys.argv = [script, *script_args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # like Python, in place of this command's own folder
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
    """The result of a function, as keyword arguments.

    Args:
        target: ``module:function`` or ``file.py:function``.
        rest: the words behind the target on the command line, of which there may be none.
        taker: the function that takes the arguments, such as "shardwright.verify".

    Raises:
        Nothing: there is no such function.
        SettingError: the function returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise Nothing(f"no such script: {target}")
    if rest:
        raise Nothing(f"{target} takes no arguments, but got {' '.join(rest)}")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise Nothing(f"{place} has no function {name!r}")
    result = function()
    if isinstance(result, tuple) and 2 <= len(result) <= 4:
        result = dict(zip(("net", "inputs", "targets", "loss_fn"), result))
    if not isinstance(result, dict):
        raise SettingError(
            f"{target} returns {type(result).__name__}",
            legal=f"a dict of keyword arguments for {taker}, or (net, inputs, targets, loss_fn)",
        )
    return result


def _module(place: str) -> ModuleType:
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
    """Keep only shapes and dtypes of parameters, on the meta device, inside the ``with`` block.

    A parameter loses its values when a module registers it, so that later initialisation fills nothing, and a model
    larger than the memory can be built. Moving a module to a device leaves such parameters on the meta device.

    Private here: ``nn.Module._apply``, through which ``to``, ``cuda`` and their like go.
    """
    from torch import nn  # noqa: PLC0415  torch takes seconds to import
    from torch.nn.modules.module import register_module_parameter_registration_hook  # noqa: PLC0415  imports torch

    #: id of a parameter -> the parameter, to tell another one that got its id later, and its meta parameter.
    shells: dict[int, tuple[weakref.ref[object], nn.Parameter]] = {}

    def shell(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        held = shells.get(id(parameter))
        if held is None or held[0]() is not parameter:  # one meta parameter for each: tied ones stay tied
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            held = shells[id(parameter)] = weakref.ref(parameter), made
        return held[1]

    plain = nn.Module._apply

    def _apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return plain(self, lambda x: _moved(function, x), recurse)

    hook = register_module_parameter_registration_hook(shell)  # type: ignore[arg-type]  # a hook may return a parameter
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
        hook.remove()


def _moved(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The result of `function` for a tensor; a tensor without values only takes the dtype of the result."""
    import torch  # noqa: PLC0415  torch takes seconds to import

    if not x.is_meta:
        return function(x)
    return x.to(function(torch.empty(0, dtype=x.dtype, device="cpu")).dtype)


def positive(text: str) -> int:
    """A whole number of at least 1, for a parser."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def rank_number(text: str) -> int:
    """A rank, for a parser."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank from 0")
    return int(text)


def import_modules(modules: list[str]) -> None:
    """Import the user's modules, which register operators.

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
