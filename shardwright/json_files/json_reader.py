"""JSON files as they are read everywhere in the package: strictly, and within limits.

    read_object(path, ...)     the text of a file, and the object in it
    parse(text, ...)           the value of a text

A file comes from anywhere. Refused, with the file, the line and the place in the document, are

    a file of more bytes than its reader takes
    anything that the standard of JSON does not have: NaN, Infinity, half of a surrogate pair
    a key that stands twice in one object, of which Python would silently keep the second value
    objects and lists more than `DEPTH` deep, an integer of more than `DIGITS` digits, a number beyond those of 64 bits

The depth is measured before the text is parsed, because a parser that calls itself at each level runs out of stack.
Quotes and brackets alone decide it: each turn removes all innermost pairs at once.

    {"a": [[1], []]}   ->   [[[][]]]   ->   [[]]   ->   []   ->   nothing: 3 turns

Errors name the place as Python would: ``tensors["model.w1"].shape[0]``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ..errors import ShardwrightError, did_you_mean, shown
from ..garbage_collection import gc_paused

__all__ = [
    "DEPTH",
    "DIGITS",
    "MIB",
    "JsonObject",
    "check_fields",
    "field_line",
    "kind_of",
    "parse",
    "read_object",
    "section_places",
    "short",
    "step",
]

#: An object of JSON: its values are of any kind, and their reader tests each.
JsonObject: TypeAlias = dict[str, Any]

#: Objects and lists within one another, at most.
DEPTH = 100

#: Digits of an integer, at most: the states of numpy's generators have 39.
DIGITS = 100

MIB = 1 << 20

_OPENING, _CLOSING = b"{", b"}"
_SQUARE = bytes.maketrans(_OPENING + _CLOSING, b"[]")
_NO_MARKS = bytes(sorted(set(range(256)) - set(b'"[]{}')))
_STRING = re.compile(rb'"[^"]*"')
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|-?(?:NaN|Infinity|\d[\d.eE+-]*)', re.DOTALL)
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * (DIGITS + 1)
_PLAIN = re.compile(r"[A-Za-z_]\w{0,40}", re.ASCII)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class _Fault(Exception):
    """A text that is refused.

    Args:
        message: the fault.
        test: True for the token at fault; None: a key that its object has already.
    """

    def __init__(self, message: str, test: Callable[[str], bool] | None = None) -> None:
        super().__init__(message)
        self.message, self.test = message, test


def read_object(
    path: str | os.PathLike[str],
    error: type[ShardwrightError],
    name: str,
    legal: str,
    limit: int = 256 * MIB,
    edited: bool = False,
) -> tuple[str, JsonObject]:
    """The text of a file, and the JSON object in it.

    Args:
        path: the file.
        error: the class of errors.
        name: the name of the document in errors: "the plan".
        legal: the legal documents, for errors.
        limit: the bytes of the file, at most.
        edited: True for a document that people edit: its field "$schema" is for their editor, and left out.

    Raises:
        ShardwrightError: of class `error`: the file cannot be read, or holds no such object; with the line.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
            size = max(len(content), os.fstat(file.fileno()).st_size)  # of a pipe 0
    except (OSError, ValueError) as problem:  # ValueError: a path with a null character
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{name} cannot be read: {reason}", source=str(path), legal=legal) from None
    if len(content) > limit:
        raise error(
            f"{name} has {size:,} bytes, and at most {limit:,} are read", source=str(path), legal=f"{legal}, no longer"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"{name} cannot be read: it is not text, from byte {problem.start:,} on", source=str(path), legal=legal
        ) from None
    encoded = parse(text, error, name, str(path), legal)
    if not isinstance(encoded, dict):
        raise error(f"{name} is {kind_of(encoded)}, and no object", source=str(path), legal=legal)
    if edited and not isinstance(schema := encoded.pop("$schema", ""), str):
        raise error(f"{name}: '$schema' is {kind_of(schema)}", source=str(path), legal="the path of a JSON Schema")
    return text, encoded


def parse(text: str, error: type[ShardwrightError], name: str, source: str, legal: str, lines: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        error: the class of errors.
        name: the name of the document in errors: "the plan".
        source: the file, as errors name it.
        legal: the legal documents, for errors.
        lines: True: errors name the line after the file; False: the text has no lines that a user knows.

    Raises:
        ShardwrightError: of class `error`: no JSON, or beyond the limits; with the line and the place.
    """
    content = text.encode("utf-8", "surrogatepass")
    integer = _integer if _LONG in content.translate(_ZEROS) else int  # a function of Python takes time for each
    try:
        _check_depth(content)
        with gc_paused():  # nothing that is read is garbage; looking for it takes two thirds of the time
            encoded = json.loads(
                text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=integer
            )
        if _HALF.search(text):
            _check_strings(encoded)
        return encoded
    except json.JSONDecodeError as fault:
        where = f"{source}:{fault.lineno}" if lines else source
        raise error(f"{name} is no JSON, or cut short: {fault.msg}", source=where, legal=legal) from None
    except _Fault as fault:
        at, place = _found(text, fault)
        raise error(
            f"{name} is refused{f', at {place}' if place else ''}: {fault.message}",
            source=f"{source}:{text.count(chr(10), 0, at) + 1}" if lines else source,
            legal=legal,
        ) from None


def check_fields(
    encoded: Iterable[str], known: Collection[str], kind: type[ShardwrightError], what: str, source: str
) -> None:
    """Refuse fields of an object that nothing would read: a field that was misspelt by hand is not ignored.

    Args:
        encoded: the object's fields.
        known: the fields that are read.
        kind: the class of the error.
        what: the object in words: "the operator matmul1".
        source: its place in the file.

    Raises:
        ShardwrightError: of class `kind`: the first unknown field, and the known ones.
    """
    unknown = next((word for word in encoded if word not in known), None)
    if unknown is not None:
        raise kind(
            f"{what} has an unknown field {shown(unknown)}",
            source=source,
            legal=did_you_mean(unknown, sorted(known), {}),
        )


def kind_of(value: object) -> str:
    """The kind of a JSON value, for errors."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _check_depth(marks: bytes) -> None:
    if b"\\" in marks:
        marks = marks.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = _STRING.sub(b"", marks.translate(_SQUARE, _NO_MARKS)).partition(b'"')[0]
    depth = 0
    while marks and depth <= DEPTH:
        without_pairs = marks.replace(b"[]", b"")
        if len(without_pairs) == len(marks):  # brackets that nothing closes, or opens: the parser will say so
            depth += marks.count(b"[")
            break
        marks, depth = without_pairs, depth + 1
    if depth > DEPTH:
        raise _Fault(f"objects and lists are more than {DEPTH} deep", lambda token: False)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                raise _Fault(f"{short(key)} stands twice in one object: {short(seen[key])} and {short(value)}")
            seen[key] = value
    return made


def step(key: str | int) -> str:
    """A key or an index as a part of a place in a document: ``.shape``, ``["model.w1"]``, ``[0]``."""
    return f".{key}" if isinstance(key, str) and _PLAIN.fullmatch(key) else f"[{short(key)}]"


def short(value: object) -> str:
    """A value as JSON for a message, cut after 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _constant(token: str) -> NoReturn:
    raise _Fault(f"{token} is no number of JSON", lambda other: other == token)


def _float(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise _Fault(f"the number {_shortened(token)} is beyond those of 64 bits", lambda other: other == token)
    return value


def _integer(token: str) -> int:
    if len(token.lstrip("-")) > DIGITS:
        raise _Fault(
            f"an integer of {len(token.lstrip('-')):,} digits, and at most {DIGITS} are read",
            lambda other: other == token,
        )
    return int(token)


def _shortened(token: str) -> str:
    return token if len(token) <= 30 else f"{token[:27]}..."


def _check_strings(encoded: object) -> None:
    stack = [encoded]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _Fault(
                    f"the text {short(value)} has half of a surrogate pair",
                    lambda token, value=value: token[:1] == '"' and json.loads(token) == value,  # type: ignore[misc]
                ) from None
        elif isinstance(value, dict):
            stack += (*value, *value.values())
        elif isinstance(value, list):
            stack += value


def section_places(text: str, section: str) -> list[int]:
    """The indices in the text at which lists and objects of that name begin."""
    return [found.start() for found in re.finditer(rf'(?<!\\)"{section}"\s*:\s*[\[{{]', text)]


def field_line(text: str, name: str, value: object) -> int:
    """The line number of the first field of this name and value in a text; 1 where there is none."""
    decoder = json.JSONDecoder()
    for found in re.finditer(rf'(?<!\\)"{name}"\s*:\s*', text):
        try:
            if repr(decoder.raw_decode(text, found.end())[0]) == repr(value):
                return text.count("\n", 0, found.start()) + 1
        except ValueError:
            continue  # within a string
    return 1


# -- the place of a fault ----------------------------------------------------------------------------------------------


def _found(text: str, fault: _Fault) -> tuple[int, str]:
    """The offset of a fault in the text, and its place in the document. Called for errors alone: it takes its time."""
    at = 0
    for at, place, token, deep, twice in _walked(text):
        if (twice if fault.test is None else fault.test(token)) or deep > DEPTH:
            return at, place if deep <= DEPTH else ""
    return at, ""


def _text_of(token: str) -> str:
    """The text of a string; of one that is no JSON, its letters."""
    try:
        return json.loads(token, strict=False)
    except ValueError:
        return token


@dataclass
class _Container:
    """An object or a list around a token.

    Attributes:
        kind: "{" or "[".
        key: the current key or index; None before the first key of an object.
        keys: the keys so far.
    """

    kind: str
    key: str | int | None
    keys: set[str] = field(default_factory=set)


def _walked(text: str) -> Iterator[tuple[int, str, str, int, bool]]:
    """The tokens of a text: offset, place in the document, token, depth, True for a key that its object has already.

    The text is valid up to the first fault that is looked for.
    """
    around: list[_Container] = []
    names = True  # the next string of an object is a key
    for found in _TOKEN.finditer(text):
        token, twice = found[0], False
        if around and around[-1].kind == "{" and names and token[:1] == '"':
            key = _text_of(token)
            twice = key in around[-1].keys
            around[-1].key = key
            around[-1].keys.add(key)
        place = "".join(map(step, (each.key for each in around if each.key is not None))).removeprefix(".")
        yield found.start(), place, token, len(around) + (token in "[{"), twice
        if token in ("{", "["):
            around.append(_Container(token, None if token == "{" else 0))
            names = True
        elif token in ("}", "]") and around:
            around.pop()
            names = False
        elif token == ",":
            names = True
            if around and isinstance(index := around[-1].key, int):
                around[-1].key = index + 1
        elif token == ":":
            names = False
