"""The parts that all commands share: the parser with its examples, ``--json``, ``--import``, ``--quiet``, and the
target of a command.

1. A command is a function ``add_..._parser(subparsers)``. It calls ``subparsers.add_parser`` and sets two defaults:
   ``func``, which takes the parsed arguments and returns the exit code, and ``parser``, its parser, for errors found
   later. Beside argparse's own keywords

       add_parser(..., examples=((line, meaning), ...))       the last lines of the help; a test runs each
       add_argument(..., completes="file" or "directory")     the kind of path that a shell completes

   The parser of ``shardwright run``, in `launch.run`, is made in the same way.

2. The target of a command is a training script as it stands, or a function that returns the arguments to work on.

       a script       runs as ``python script.py`` would, up to the first call of its `AutoParallel` model. That call is
                      handed over, and the script ends (`first_call`)
       a function     returns keyword arguments, or (net, inputs, targets, loss_fn) (`arguments_of`)
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import SettingError, ShardwrightError

if TYPE_CHECKING:
    import torch

    from ..parallel.auto_parallel import AutoParallel

__all__ = [
    "INTERRUPTED",
    "OPTIONS_BEHIND",
    "Nothing",
    "Parser",
    "add_import_option",
    "add_json_option",
    "add_quiet_option",
    "arguments_of",
    "failed",
    "first_call",
    "import_modules",
    "positive",
    "print_json",
    "rank_number",
    "refused",
    "say",
    "take_options_behind",
    "without_weights",
]

# -- the parser


#: The exit code of a command that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130

#: The end of the help of commands whose target is a script.
OPTIONS_BEHIND = (
    "Options may stand behind the target too; what is none of them, and all that stands behind --, is the script's."
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with examples. Its errors are one line, not below thirty lines of usage.

    Args:
        examples: (command line, meaning) of each.
        keywords: as `argparse.ArgumentParser` takes them.

    Attributes:
        examples: as given.
        arguments: all that were added.
        commands: the parsers of its commands, by name.
    """

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **keywords: Any) -> None:
        self.examples, self.arguments = examples, list[argparse.Action]()
        self.commands: Mapping[str, Parser] = {}
        self._intermixed = False  # True inside of argparse's own function for options between arguments
        super().__init__(*args, **keywords)  # adds --help

    def add_argument(self, *names: Any, completes: str | None = None, **keywords: Any) -> argparse.Action:
        """Add an argument.

        Args:
            names, keywords: as argparse takes them.
            completes: "file" or "directory" for a path, which a shell completes (shtab reads the attribute
                ``complete`` of an argument).
        """
        action = super().add_argument(*names, **keywords)
        if completes is not None:
            vars(action)["complete"] = completes
        self.arguments.append(action)
        return action

    def add_subparsers(self, **keywords: Any) -> Any:
        """Add commands, as argparse does."""
        made = super().add_subparsers(**keywords)
        self.commands = made.choices
        return made

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; options may also stand in front of an argument that may be left out, as in
        ``explain plan.json --import my_module q_proj``."""
        left_out = any(not a.option_strings and a.nargs in ("?", "*", "+") for a in self.arguments)
        if self._intermixed or not left_out:
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def format_help(self) -> str:
        """The help, and below it the examples."""
        lines = [part for line, meaning in self.examples for part in (f"  {line}", f"      {meaning}")]
        return super().format_help() + "".join(f"{line}\n" for line in (["", "examples:", *lines] if lines else ()))

    def options_near(self, word: str) -> str:
        """The option that a word such as ``--parallel_mode`` may stand for, or all options, as a sentence."""
        near = self.option_near(word)
        return (f"did you mean {near}? " if near else "") + f"the options are {', '.join(self._options())}"

    def option_near(self, word: str) -> str:
        """The option that a word such as ``--parallel_mode`` may stand for; "": none."""
        return "".join(difflib.get_close_matches(word.partition("=")[0], self._options(), 1, 0.55))

    def _options(self) -> list[str]:
        return [name for action in self.arguments for name in action.option_strings if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line."""
        unknown = re.match(r"unrecognized arguments: (--\S+)", message)
        if unknown:
            message += f"; {self.options_near(unknown[1])}"
        misspelt = re.match(r"argument command: invalid choice: '([^']*)'", message)
        if misspelt:
            near = difflib.get_close_matches(misspelt[1], self.commands, 1)
            known = ", ".join(self.commands)
            message = f"there is no command {misspelt[1]!r}; " + (f"did you mean {near[0]}? " if near else "")
            message += f"the commands are {known}"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def refused(arguments: argparse.Namespace, error: Exception) -> NoReturn:
    """End with exit code 2 and the error, of a command that has nothing to work on."""
    arguments.parser.error(str(error))
    raise AssertionError("argparse has ended this process")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, for a command that prints tables. Its values are printed by `print_json`."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object in place of the tables: seconds, bytes, bytes a second"
    )


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``, for a command that may take long."""
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="show no progress (default: a line on a terminal, elsewhere one every ten seconds on standard error)",
    )


def print_json(value: dict[str, object]) -> None:
    """Print a value on standard output as one JSON object. A number that is infinite or unknown is None."""
    print(json.dumps(value, indent=1, allow_nan=False), flush=True)


def say(text: str) -> None:
    """Print sentences and tables on standard output; a terminal gets them wrapped to its width."""
    from ..report.console_tables import console_of, saying  # noqa: PLC0415  imports rich

    write = saying(console_of(None))
    for line in text.splitlines():
        write(line)
    sys.stdout.flush()


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--import``, for a command that reads plans with operators of the user (`import_modules`)."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import a module first, which registers operators of yours (may be repeated)",
    )


def failed(command: str, error: Exception, code: int) -> int:
    """Print the error of a command on standard error, and return the exit code."""
    print(f"shardwright {command}: error: {error}", file=sys.stderr)
    return code


# -- the target


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


def take_options_behind(arguments: argparse.Namespace, add_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """Take options that stand behind the target out of the script's arguments."""
    script_args = arguments.script_args
    end = script_args.index("--") if "--" in script_args else len(script_args)
    parser = type(arguments.parser)(prog=arguments.parser.prog, add_help=False, allow_abbrev=False)
    add_options(parser)
    _, rest = parser.parse_known_args(script_args[:end], arguments)
    unknown = next((word for word in rest if word.startswith("--")), None)
    if unknown is not None and ":" in arguments.target:  # a function, which takes no arguments
        legal = arguments.parser.options_near(unknown)
        raise Nothing(f"{arguments.target} takes no arguments, but got {' '.join(rest)}; {legal}")
    for word in rest:
        near = arguments.parser.option_near(word) if word.startswith("--") and arguments.target != "diff" else ""
        if near:
            print(
                f"{arguments.parser.prog}: {word} is for {arguments.target}; that of this command is {near}. Behind -- "
                "all words are the script's.",
                file=sys.stderr,
            )
    arguments.script_args = rest + script_args[end + 1 :]


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Keep only shapes and dtypes of parameters, on the meta device, inside the ``with`` block.

    A parameter loses its values when a module registers it, so that later initialisation fills nothing, and a model
    larger than the memory can be built. Moving a module to a device leaves such parameters on the meta device.

    Private here: ``nn.Module._apply``, through which ``to``, ``cuda`` and their like go.
    """
    from torch import nn  # noqa: PLC0415  torch takes seconds to import
    from torch.nn.modules.module import register_module_parameter_registration_hook  # noqa: PLC0415  imports torch
    from torch.utils.weak import WeakIdKeyDictionary  # noqa: PLC0415  imports torch

    #: Parameter -> its meta parameter, while the parameter lives.
    shells: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def shell(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        made: nn.Parameter | None = shells.get(parameter)
        if made is None:  # one meta parameter for each: tied ones stay tied
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
            shells[parameter] = made
        return made

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
