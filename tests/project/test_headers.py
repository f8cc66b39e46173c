"""Headers: the module docstring of each file of the package has a worked example with numbers or names.

Example: "Sums.\\n\\nExample: 1 and 2 are 3." has one, "Sums of 2 numbers." has none.
"""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

PACKAGE = ROOT / "shardwright"

#: Files without content of their own: a folder's header lists its modules, `__main__` calls the command line.
OF_FOLDERS = ("__init__.py", "__main__.py")

#: The word before an example; the text behind it is the example.
WORD = re.compile(r"\b(?:an? |for |worked )?example\b", re.IGNORECASE)

#: A number, or a name in quotes.
CONCRETE = re.compile(r"\d|\"[^\"]+\"")


def examples(header: str) -> list[str]:
    """The parts of a header that can be its example: the text from the word on, and each indented block."""
    found = [header[word.end() :] for word in WORD.finditer(header)]
    return found + re.findall(r"(?:^ {4}.*\n?)+", header, re.MULTILINE)


def has_example(header: str) -> bool:
    """True where one of the examples has a number or a name."""
    return any(CONCRETE.search(example) for example in examples(header))


def test_every_header_has_an_example() -> None:
    headers = {
        str(path.relative_to(PACKAGE)): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in OF_FOLDERS
    }
    assert len(headers) > 200
    assert [name for name, header in headers.items() if not has_example(header)] == []


@pytest.mark.parametrize(
    "header",
    [
        "Sums of terms.\n\nExample: the terms 1 and 2 have the sum 3.",
        'Sums of terms, for example that of "loss".',
        "Sums of terms.\n\n    1, 2 -> 3\n\nNothing else.",
    ],
)
def test_an_example_is_found(header: str) -> None:
    assert has_example(header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Sums of 2 terms.",
        "Sums of terms.\n\n1. `summed` adds them.\n2. `broadcast` sends the sum.",
        "Sums of terms.\n\nExample: some terms have a sum.",
        "Sums of terms.\n\n    terms -> sum\n",
    ],
)
def test_a_header_without_an_example_is_found(header: str) -> None:
    assert not has_example(header)
