"""The parts of pages that are made when the site is built.

A page names such a part in a comment on a line of its own: ``<!-- made: commands -->`` stands for every command of the
command line, ``<!-- made: names plan Plan -->`` for the docstrings of `shardwright.plan` and `shardwright.Plan`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import notebooks

import shardwright
from shardwright.cli.main import build_parser
from shardwright.rules import registry

MADE = re.compile(r"^<!-- made: (\w+)(?: ([^>]*?))? -->$", re.MULTILINE)
WIDTH = 100  # columns of a help text


# -- commands ----------------------------------------------------------------------------------------------------------


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its commands, in the order of its help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def commands() -> str:
    """A heading and the help text for each command of the command line."""
    parts = []
    for parser in parsers(build_parser()):
        formatter = parser.formatter_class
        parser.formatter_class = lambda prog, formatter=formatter: formatter(prog, width=WIDTH)  # type: ignore[assignment,misc]
        title = parser.prog if " " in parser.prog else f"{parser.prog} itself"
        lines = [
            part for line in parser.format_help().rstrip().splitlines() for part in textwrap.wrap(line, WIDTH) or [""]
        ]
        parts.append("\n".join([f"## {title}\n", "```text", *lines, "```"]))
    return "\n\n".join(parts)


# -- public names ------------------------------------------------------------------------------------------------------


#: Members of classes that the package itself calls, or that stand in the place of torch's own: on no page.
INTERNAL = {
    "AutoParallel": (
        "call_function",
        "call_model",
        "compile",
        "forward",
        "infer",
        "leaves_unsummed",
        "models",
        "program_settings",
        "register_forward_pre_hook",
        "train",
        "with_same_settings",
    ),
    "Plan": ("count_optimizer", "memory_under", "once", "register_files", "scheduled"),
    "PipelinePlan": ("register_files",),
}


def public(name: str) -> Any:
    """The value of a public name: one of `shardwright`, or one of its modules by its whole path."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module) if module else shardwright, last)


def names(listed: str) -> str:
    """A heading and the docstring for each public name of a list."""
    return "\n\n".join(
        f"### `{name if '.' in name else f'sw.{name}'}`\n\n```{{eval-rst}}\n{directive(name)}\n```"
        for name in listed.split()
    )


def directive(name: str) -> str:
    """The directive of Sphinx that documents a public name."""
    if "." in name:  # heirs of other libraries' classes, whose members are on the pages of those
        return f".. autoclass:: {name}"
    value = public(name)
    if inspect.ismodule(value):
        return f".. automodule:: shardwright.{name}\n   :members:"
    if inspect.isclass(value) and not issubclass(value, Exception):
        left_out = f"\n   :exclude-members: {', '.join(INTERNAL[name])}" if name in INTERNAL else ""
        return f".. autoclass:: shardwright.{name}\n   :members:\n   :inherited-members: Module{left_out}"
    return f".. auto{'exception' if inspect.isclass(value) else 'function'}:: shardwright.{name}"


# -- operators ---------------------------------------------------------------------------------------------------------


def operators() -> str:
    """A table of the operators that have a rule, each with its overloads."""
    found: dict[str, list[str]] = {}
    for overload in registry._RULES:
        if isinstance(overload, str):  # of a library, ``library::name``, or a function by its path
            found.setdefault(overload, []).append("all" if "::" in overload else "a `torch.autograd.Function`")
            continue
        library, _, rest = str(overload).partition(".")
        name, _, kind = rest.partition(".")
        if library != "shardwright":  # the package's own, into which others are expanded
            found.setdefault(f"{library}.{name}", []).append(kind or "all")
    rows = [f"| `{name}` | {', '.join(sorted(kinds))} |" for name, kinds in sorted(found.items())]
    return "\n".join(["| operator | overloads |", "|---|---|", *rows])


PARTS: dict[str, Callable[..., str]] = {"commands": commands, "names": names, "operators": operators}


def filled(text: str) -> str:
    """A page with its made parts in the place of their comments."""
    return MADE.sub(lambda found: PARTS[found[1]](*([found[2]] if found[2] else [])), text)


def listed_names(page: Path) -> list[str]:
    """The public names that a page documents."""
    return [
        name
        for kind, rest in MADE.findall(page.read_text(encoding="utf-8"))
        if kind == "names"
        for name in rest.split()
    ]


# -- Sphinx ------------------------------------------------------------------------------------------------------------


def on_source_read(app: Any, document: str, source: list[str]) -> None:
    """Fill a page in before Sphinx reads it; make a page of a notebook."""
    path = Path(app.env.doc2path(document))
    source[0] = filled(source[0]) if path.suffix == ".md" else notebooks.page(json.loads(source[0]), path.name)


def on_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Mark indented code of a docstring as code: a block of four spaces after an empty line."""
    lines[:] = marked(lines)


def marked(lines: list[str]) -> list[str]:
    """The lines of a docstring, with ``::`` before each indented block that stands alone."""
    result: list[str] = []
    within = False
    for index, line in enumerate(lines):
        indented = line.startswith("    ")
        alone = indented and index > 0 and not lines[index - 1].strip()
        before = next((text for text in reversed(lines[:index]) if text.strip()), "")
        if alone and not within and not before.startswith(" ") and not before.endswith("::"):
            result += ["::", ""]
        within = indented or (within and not line.strip())
        result.append(line)
    return result
