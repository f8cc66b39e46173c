"""The notebooks of the pages: ``python docs/notebooks.py`` runs them and writes what they show.

1. `run`: the cells of a notebook, run by IPython in this process, and what each shows. No kernel is needed.
2. `page`: a notebook as a page in MyST, for Sphinx: its texts, its code, and the outputs that its file holds.

A notebook needs IPython to run, and nothing but this file to become a page.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parent / "notebooks"

Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    """A notebook's file."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def text(notebook: Notebook) -> str:
    """The text of a notebook's file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def run(notebook: Notebook) -> Notebook:
    """The notebook after a run from top to bottom, in the current folder.

    Raises:
        RuntimeError: a cell fails; the notebook's own error is its cause.
    """
    from IPython.core.interactiveshell import InteractiveShell  # noqa: PLC0415  pages are made without it
    from traitlets.config import Config  # noqa: PLC0415

    cells, number = [], 0
    config = Config({"HistoryManager": {"enabled": False}})
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, IPYTHONDIR=folder), prompts_kept():
        InteractiveShell.clear_instance()
        shell = InteractiveShell.instance(config=config)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    number += 1
                    shown = outputs(shell, "".join(cell["source"]), number)
                    cell = {**cell, "execution_count": number, "outputs": shown}
                cells.append(cell)
        finally:
            shell.restore_sys_module_state()
            InteractiveShell.clear_instance()
    return {**notebook, "cells": cells}


@contextmanager
def prompts_kept() -> Iterator[None]:
    """A shell gives `sys` prompts, by which libraries know a terminal: they are put back at the end."""
    names = ("ps1", "ps2", "ps3")
    before = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(sys, name, before[name])
            elif hasattr(sys, name):
                delattr(sys, name)


def outputs(shell: Any, source: str, number: int) -> list[dict[str, Any]]:
    """The texts that a cell prints, the values that it shows, and its result, as the file of a notebook holds them.

    Raises:
        RuntimeError: the cell fails.
    """
    from IPython.utils.capture import capture_output  # noqa: PLC0415

    values: list[Any] = []  # of the last line
    shell.display_trap.hook = values.append
    with capture_output() as captured:
        done = shell.run_cell(source, store_history=True)
    if not done.success:
        raise RuntimeError(f"cell {number} fails") from (done.error_before_exec or done.error_in_exec)
    out: list[dict[str, Any]] = []
    if captured.stdout:
        out.append({"name": "stdout", "output_type": "stream", "text": lines(captured.stdout)})
    out += [_output("display_data", shown.data) for shown in captured.outputs]
    results = [shell.display_formatter.format(value)[0] for value in values if value is not None]
    return out + [_output("execute_result", data, execution_count=number) for data in results]


def _output(kind: str, data: Mapping[str, str], **more: int) -> dict[str, Any]:
    return {"data": {name: lines(value) for name, value in data.items()}, **more, "metadata": {}, "output_type": kind}


def lines(words: str) -> list[str]:
    """A text as the file of a notebook holds it: a list of lines."""
    return words.splitlines(keepends=True)


# -- pages -------------------------------------------------------------------------------------------------------------


def page(notebook: Notebook, name: str) -> str:
    """A notebook as a page in MyST.

    Args:
        notebook: with outputs.
        name: of its file.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", ())]
    title, _, rest = parts[0].partition("\n")
    about = f"This page is a notebook: {{download}}`{name} <{name}>`. It holds what its cells show when they run."
    return "\n\n".join([title, about, rest.strip(), *parts[1:]]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """An output as a part of a page."""
    data = output.get("data") or {"text/plain": output["text"]}
    if "text/html" in data:
        return f'```{{raw}} html\n<div class="output">{"".join(data["text/html"])}</div>\n```'
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def main() -> None:
    """Run every notebook, and write its file."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        with TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                done = run(read(path))
            finally:
                os.chdir(before)
        path.write_text(text(done), encoding="utf-8")
        print(path.name, file=sys.stderr)


if __name__ == "__main__":
    main()
