"""``shardwright verify``: compare a plan with one device, for a training script as it stands or for a function's model.

Of a script the first call of its `AutoParallel` model is verified, with its model, loss, settings and batch.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.scripts import Nothing, arguments_of, first_call, positive

if TYPE_CHECKING:
    from shardwright.verify import VerifyReport

__all__ = ["add_parser", "verify"]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``verify`` to the commands."""
    parser = subparsers.add_parser(
        "verify", allow_abbrev=False, help="compare a plan with one device: losses, gradients, parameters",
        description="Compare a model under its plan with the same model on one device. Exit code 0: they agree, 1: "
                    "they do not or the model cannot be planned, 2: there is nothing to verify. Where the plan cuts nothing "
                    "or sends nothing, the report says that nothing was proved.",
        usage="%(prog)s [--devices N] [--steps K] [--cut] script.py [script arguments]\n"
              "       %(prog)s [--devices N] [--steps K] [--cut] module:function | file.py:function")
    parser.add_argument("--devices", type=positive, metavar="N", help="how many devices (default: as the target says)")
    parser.add_argument("--steps", type=positive, metavar="K", help="steps of the optimizer (default: 3)")
    parser.add_argument("--cut", action="store_true", help="plan on links that are next to free, so that searches cut whatever "
                                                           "can be cut")
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
            report = verify_script(arguments.target, arguments.script_args, arguments.devices, arguments.steps, arguments.cut)
        else:
            report = verify_function(arguments.target, arguments.script_args, arguments.devices, arguments.steps, arguments.cut)
    except Nothing as error:
        arguments.parser.error(str(error))
    except ShardwrightError as error:
        print(f"shardwright verify: error: {error}", file=sys.stderr)
        return 1
    print(report.summary(), flush=True)
    return 0 if report.ok else 1


def verify_script(script: str, script_args: list[str], devices: int | None, steps: int | None,
                  cut: bool = False) -> VerifyReport:
    """Run a script until it first calls an `AutoParallel` model, and verify that call.

    Raises:
        ShardwrightError: the model cannot be planned.
    """
    from shardwright.verify import verify_call

    return first_call(script, script_args, devices, lambda model, args, kwargs: verify_call(
        model, args, kwargs, devices=devices, steps=steps or 3, cut=cut))


def verify_function(target: str, rest: list[str], devices: int | None, steps: int | None,
                    cut: bool = False) -> VerifyReport:
    """Verify what a function returns.

    Raises:
        ShardwrightError: the model cannot be planned, or the function returns something else.
    """
    given = arguments_of(target, rest, "shardwright.verify")
    from shardwright.verify import verify as compare

    told = (("devices", devices), ("steps", steps), ("cut", cut or None))
    given |= {key: value for key, value in told if value is not None}
    return compare(**given)
