"""``shardwright verify``: compare a plan with one device, for a training script as it stands or for a function's model.

A script runs as ``python script.py`` would, up to the first call of its `AutoParallel` model. That call is verified,
with its model, loss, settings and batch, and the script goes no further.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from typing import TYPE_CHECKING, Any

from shardwright.errors import SettingError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.verify import VerifyReport

__all__ = ["add_parser", "verify"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``verify`` to the commands."""
    parser = subparsers.add_parser(
        "verify", allow_abbrev=False, help="compare a plan with one device: losses, gradients, parameters",
        description="Compare a model under its plan with the same model on one device. Exit code 0: they agree, 1: "
                    "they do not or the model cannot be planned, 2: there is nothing to verify.",
        usage="%(prog)s [--devices N] [--steps K] script.py [script arguments]\n"
              "       %(prog)s [--devices N] [--steps K] module:function | file.py:function")
    parser.add_argument("--devices", type=_positive, metavar="N", help="how many devices (default: as the target says)")
    parser.add_argument("--steps", type=_positive, metavar="K", help="steps of the optimizer (default: 3)")
    parser.add_argument("target", help="a training script that calls an AutoParallel model; or a function without "
                                       "arguments that returns the keyword arguments of shardwright.verify as a dict, "
                                       "or (net, inputs, targets, loss_fn)")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    parser.set_defaults(func=verify, parser=parser)


def verify(arguments: argparse.Namespace) -> int:
    """Do what the parsed arguments ask for and return the exit code.

    What the script or function itself raises goes through.
    """
    try:
        if os.path.isfile(arguments.target):
            report = verify_script(arguments.target, arguments.script_args, arguments.devices, arguments.steps)
        else:
            report = verify_function(arguments.target, arguments.script_args, arguments.devices, arguments.steps)
    except _Nothing as error:
        arguments.parser.error(str(error))
    except ShardwrightError as error:
        print(f"shardwright verify: error: {error}", file=sys.stderr)
        return 1
    print(report.summary(), flush=True)
    return 0 if report.ok else 1


class _Nothing(Exception):
    """There is nothing to verify."""


class _Stop(BaseException):
    """Ends the script. No Exception: the script must not catch it."""

    def __init__(self, report: VerifyReport | None, error: ShardwrightError | None = None) -> None:
        self.report, self.error = report, error


def verify_script(script: str, script_args: list[str], devices: int | None, steps: int | None) -> VerifyReport:
    """Run a script until it first calls an `AutoParallel` model, and verify that call.

    Raises:
        ShardwrightError: the model cannot be planned.
    """
    from shardwright.parallel import AutoParallel, observed
    from shardwright.verify import verify_call

    def observer(model: AutoParallel, args: tuple, kwargs: dict[str, Any]) -> None:
        try:
            report = verify_call(model, args, kwargs, devices=devices, steps=steps or 3)
        except ShardwrightError as error:
            raise _Stop(None, error) from None
        raise _Stop(report)

    if devices is not None:
        os.environ["SHARDWRIGHT_DEVICES"] = str(devices)
    sys.argv = [script, *script_args]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as Python does; what is there is this command's folder
    try:
        with observed(observer):
            runpy.run_path(script, run_name="__main__")
    except _Stop as stop:
        if stop.report is None:
            assert stop.error is not None
            raise stop.error from None
        return stop.report
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
    raise _Nothing(f"{script} ended without a call of an AutoParallel model")


def verify_function(target: str, rest: list[str], devices: int | None, steps: int | None) -> VerifyReport:
    """Verify what a function returns.

    Raises:
        ShardwrightError: the model cannot be planned, or the function returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise _Nothing(f"no such script: {target}")
    if rest:
        raise _Nothing(f"{target} takes no arguments, but got {' '.join(rest)}")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise _Nothing(f"{place} has no function {name!r}")
    given = function()
    if isinstance(given, tuple) and 2 <= len(given) <= 4:
        given = dict(zip(("net", "inputs", "targets", "loss_fn"), given))
    if not isinstance(given, dict):
        raise SettingError(f"{target} returns {type(given).__name__}",
                           legal="a dict of keyword arguments for shardwright.verify, or (net, inputs, targets, "
                                 "loss_fn)")
    from shardwright.verify import verify as compare

    given |= {key: value for key, value in (("devices", devices), ("steps", steps)) if value is not None}
    return compare(**given)


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path[0] = os.getcwd()  # as python -m does
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise _Nothing(f"no such module: {place}")
        return importlib.import_module(place)
    if not os.path.isfile(place):
        raise _Nothing(f"no such file: {place}")
    sys.path[0] = os.path.dirname(os.path.abspath(place))
    name = os.path.splitext(os.path.basename(place))[0]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)
