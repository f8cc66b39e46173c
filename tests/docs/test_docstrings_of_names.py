"""Every public name of the reference has a docstring with its arguments, its result, its errors and an example.

A member of a class is described in fewer words: its arguments are in its text, and its example may be one of its class
or one on the page of names. `test_examples_of_names` and `test_docs_pages` run the examples.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
from paths import DOCS, ROOT

import shardwright as sw

sys.path.insert(0, str(DOCS))
generated = importlib.import_module("generated")
sys.path.remove(str(DOCS))

PAGE = DOCS / "reference" / "names.md"
LISTED = generated.listed_names(PAGE)

#: Names without an example in the docstring, and the reason. Those of errors and warnings are on the page of errors.
WITHOUT_EXAMPLE = {
    "shardwright.integrations.lightning.ShardwrightStrategy": "it starts processes: docs/integrations.md has it whole"
}
#: Sections of a docstring.
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):\n((?: .*\n|\n)+)", re.MULTILINE)
#: A beginning that says what a function returns.
NOUN = re.compile(
    r"(The|A|An|Each|Every|One|All|True|False|Bytes|Seconds|Names|This|`\w+`|The \w+|Measured|Everything|flop/s|None) "
)


def sections(value: Any) -> dict[str, str]:
    text = (inspect.getdoc(value) or "") + "\n"
    return {"": text.split("\n\n")[0], "all": text, **{name: body for name, body in SECTION.findall(text)}}


def arguments(value: Callable[..., Any]) -> list[str]:
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # a class of another library
        return []
    return [name for name in found.parameters if name not in ("self", "cls") and not name.startswith("_")]


def raises(function: Callable[..., Any]) -> bool:
    """True where the function's own lines raise an error."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def returns(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None", "Self", "NoReturn")


def functions() -> Iterator[tuple[str, Any]]:
    """The functions of the reference, those of its modules too."""
    for name in LISTED:
        value = generated.public(name)
        if inspect.ismodule(value):
            yield from ((f"{name}.{each}", getattr(value, each)) for each in value.__all__)
        elif not inspect.isclass(value):
            yield name, value


def members() -> Iterator[tuple[str, str, Any]]:
    """The class, name and value of the methods and properties of the reference."""
    for name in LISTED:
        value = generated.public(name)
        if "." in name or not inspect.isclass(value) or issubclass(value, Exception):
            continue
        for member in dir(value):
            raw = inspect.getattr_static(value, member)
            function = getattr(raw, "fget", None) or getattr(raw, "func", None) or getattr(value, member)
            ours = str(getattr(function, "__module__", "")).startswith("shardwright")
            if ours and not member.startswith("_") and member not in generated.INTERNAL.get(name, ()):
                yield name, member, raw if isinstance(raw, (property, cached_property)) else function


def lacking(value: Any) -> list[str]:
    """The parts that the docstring of a public function lacks."""
    has = sections(value)
    found = [each for each in arguments(value) if not re.search(rf"\b{each}\b", has.get("Args", ""))]
    return [
        *(f"argument {each}" for each in found),
        *["Returns"] * (returns(value) and "Returns" not in has),
        *["Raises"] * (raises(value) and "Raises" not in has),
        *[">>>"] * (">>>" not in has.get("Example", "")),
    ]


def lacking_of_member(owner: str, member: str, value: Any, page: str) -> list[str]:
    """The parts that the docstring of a method or a property lacks."""
    has = sections(value)
    if not has[""].strip():
        return ["docstring"]
    if isinstance(value, (property, cached_property)):
        return []
    inherits = re.search(r"\bas [`A-Za-z. ]+|see `", has["all"])
    found = [each for each in arguments(value) if not re.search(rf"\b{each}\b", has["all"])]
    examples = has.get("Example", "") + sections(getattr(sw, owner)).get("Example", "") + page
    return [
        *(f"argument {each}" for each in found),
        *["Returns"] * (returns(value) and "Returns" not in has and not NOUN.match(has[""])),
        *["Raises"] * (raises(value) and "Raises" not in has and not inherits),
        *["an example that calls it"] * (f".{member}(" not in examples),
    ]


def test_functions_of_the_reference_say_what_they_take_give_and_raise() -> None:
    found = {name: lacking(value) for name, value in functions()}
    assert len(found) > 25
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_classes_of_the_reference_say_what_they_are_made_of() -> None:
    found = {}
    for name in LISTED:
        value = generated.public(name)
        if not inspect.isclass(value) or issubclass(value, Exception):
            continue
        has = sections(value)
        text = has.get("Args", "") + has.get("Attributes", "")
        missing = [] if has.get("Example") or name in WITHOUT_EXAMPLE else [">>>"]
        if "." not in name and name not in ("Plan", "PipelinePlan"):  # those of other libraries; made by `plan` alone
            missing += [f"argument {each}" for each in arguments(value) if not re.search(rf"\b{each}\b", text)]
        if missing:
            found[name] = missing
    assert found == {}


def test_members_of_the_reference_say_what_they_take_give_and_raise() -> None:
    parts = re.split(r"^#+ ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    in_use = [part for part in parts if part.split("\n")[0].endswith(" in use")]
    listed = list(members())
    assert len(listed) > 100
    found = {}
    for owner, member, value in listed:
        page = "".join(part for part in in_use if f"`{owner}`" in part.split("\n")[0])
        found[f"{owner}.{member}"] = lacking_of_member(owner, member, value, page)
    assert {name: parts for name, parts in found.items() if parts} == {}


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("Double.\n\nArgs:\n    x: a number.\n\nReturns:\n    It.\n\nRaises:\n    SettingError: no.\n", [">>>"]),
        ("Double.\n\nArgs:\n    y: a number.\n\nExample:\n    >>> 1\n    1\n", ["argument x", "Returns", "Raises"]),
    ],
)
def test_a_gap_is_found(text: str, lacks: list[str]) -> None:
    def double(x: int) -> int:
        if x < 0:
            raise sw.SettingError("below 0")
        return x * 2

    double.__doc__ = text
    assert lacking(double) == lacks


def test_texts_of_the_reference_name_no_module_of_the_inside() -> None:
    """A reader cannot look there. The public modules, those for other loops, and names of the docstring's own stay."""
    inside = {
        str(path.relative_to(ROOT / "shardwright").with_suffix("")).replace("/", ".")
        for path in (ROOT / "shardwright").rglob("*.py")
        if "/" in str(path.relative_to(ROOT / "shardwright")) and "integrations" not in path.parts
    }
    texts = {name: inspect.getdoc(value) or "" for name, value in functions()}
    texts |= {f"{owner}.{member}": inspect.getdoc(value) or "" for owner, member, value in members()}
    texts |= {name: inspect.getdoc(generated.public(name)) or "" for name in LISTED}
    named = {
        name: [word for word in re.findall(r"`([\w.]+)`", text) if {word, word.rpartition(".")[0]} & inside]
        for name, text in texts.items()
    }
    assert {name: words for name, words in named.items() if words} == {}


def test_every_argument_of_the_reference_has_a_type() -> None:
    """Signatures on the page hold them."""
    untyped = [
        f"{name}.{each.name}"
        for name, function in functions()
        for each in inspect.signature(function).parameters.values()
        if each.annotation is each.empty and each.name not in ("self", "cls")
    ]
    assert untyped == []


#: Words of quantities in the text of an argument, and the units or forms of which one stands beside them.
QUANTITIES = {
    r"\btimeout\b|\bseconds?\b": r"second|\bs\b|minutes?",
    r"\bmemory\b(?=[:,])": r"byte|GB|limit|memory",
    r"\bshapes?\b(?=[:,])": r"dim|shape|whole|size|tensor",
}


def test_quantities_of_the_reference_have_units() -> None:
    found = []
    for name, value in functions():
        for line in sections(value).get("Args", "").splitlines():
            argument, _, text = line.strip().partition(":")
            for word, unit in QUANTITIES.items():
                if re.search(word, f"{argument}:") and text and not re.search(rf"{unit}|as for", text):
                    found.append(f"{name}({argument}):{text}")
    assert found == []
