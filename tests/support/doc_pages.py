"""Pages of the documentation: their blocks of code, run in order, and their links.

A block ```` ```python ```` runs, as a doctest where it has ``>>>``. In a block ```` ```console ```` each line
``$ shardwright ...`` runs, and its output is compared. A block ```` ```python ```` that begins with ``# file: NAME`` is
written into that file. Blocks of other languages (```` ```py ````, ```` ```text ````, ```` ```sh ````) do not run. All
blocks of a page share one namespace and one folder.

A block ```` ```text ```` that begins with ``$ shardwright`` shows commands that take too long for a test: its lines are
compared with the output that docs/recorded/<page>.txt has of them (`recorded_differences`), but for one that
is stopped (^C). One that begins with ``$ shardwright run`` runs, in test_docs_launched.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import textwrap
from pathlib import Path

from shardwright.cli.main import main

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
PYTHON = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
RUN = re.compile(r"^( *)```(python|console)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^ *(`{3,}).*?^ *\1", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
WRITTEN = re.compile(r"# file: (\S+)\n")
SHOWN = re.compile(r"^( *)```text\n( *\$ shardwright (?!run ).*?)^ *```", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def run(page: Path) -> int:
    """Run the blocks of a page, one after the other, and return their number."""
    text = page.read_text(encoding="utf-8")
    names: dict = {"__name__": page.stem.replace("-", "_")}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    blocks = list(RUN.finditer(text))
    for block in blocks:
        code, line = textwrap.dedent(block[3]), text[: block.start(3)].count("\n")
        if file := WRITTEN.match(code):
            Path(file[1]).write_text(code[file.end() :], encoding="utf-8")
        elif block[2] == "console":
            _run_commands(code, f"{page.name}:{line + 1}")
        elif ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            report: list[str] = []
            runner.run(test, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            names.update(test.globs)
        else:
            exec(compile("\n" * line + code, str(page), "exec"), names)
    return len(blocks)


def _run_commands(text: str, where: str) -> None:
    """Run the commands of a console block, and compare what each prints with the lines below it."""
    checker = doctest.OutputChecker()
    for command, expected in commands_of(text):
        program, *arguments = shlex.split(command)
        assert program == "shardwright", f"{where}: {command}"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(arguments)
        assert code in (0, 1), f"{where}: {command}: exit code {code}"
        if expected.strip() and not checker.check_output(expected, printed.getvalue(), FLAGS):
            example = doctest.Example(command, expected)
            found = checker.output_difference(example, printed.getvalue(), FLAGS | doctest.REPORT_NDIFF)
            raise AssertionError(f"{where}: {command}\n{found}")


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands of a block, ``$ ...``, each with the lines below it."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def shown(page: Path) -> list[tuple[str, str]]:
    """The commands of a page's blocks ```` ```text ````, each with its output, but for those that are stopped."""
    blocks = (textwrap.dedent(block[2]) for block in SHOWN.finditer(page.read_text(encoding="utf-8")))
    return [pair for block in blocks if "^C" not in block for pair in commands_of(block)]


def recorded_differences(page: Path, record: Path) -> list[str]:
    """The commands of a page's blocks ```` ```text ```` whose output is not that of the record."""
    checker = doctest.OutputChecker()
    known = dict(commands_of(record.read_text(encoding="utf-8")))
    return [
        command
        for command, output in shown(page)
        if command not in known
        or not checker.check_output(output.rstrip() + "\n", known[command].rstrip() + "\n", FLAGS)
    ]


def anchors(text: str) -> set[str]:
    """The anchors of a page, made from its headings as GitHub makes them."""
    found: set[str] = set()
    for title in HEADING.findall(FENCED.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (anchor := slug if not number else f"{slug}-{number}") in found:
            number += 1
        found.add(anchor)
    return found


def links(text: str) -> list[str]:
    """The targets of a page's links, but for those to other hosts."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    return [target for target in LINK.findall(prose) if not target.startswith(("https://", "http://", "mailto:"))]


def broken_links(page: Path) -> list[str]:
    """The relative links of a page whose file or anchor does not exist."""
    text = page.read_text(encoding="utf-8")
    wrong = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            wrong.append(target)
    return wrong
