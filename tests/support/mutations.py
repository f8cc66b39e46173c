"""Documents that are wrong: a JSON text, changed at random in its structure or in its letters."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

__all__ = ["mutated", "mutated_text"]

#: Values that stand where another kind, another size or another number should.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 7, 3, 10**9, 2**31, 2**63, -(2**63), 10**50, 0.5, -0.0, 1e308, "", "x", "0", "-1",
    "1" * 50, "../x", "/etc/passwd", "\x1b[2J", "a\0b", "é" * 200, "None", "nan", [], [[]], {}, [None], [1, 2], [-1],
    [10**12] * 3, {"a": 1}, {"tuple": 1}, {"tensor": "AAAA", "dtype": "float32", "shape": [10**12]}, {"float": "x"},
    {"dict": [[[], 1]]}, {"set": [{}]}, {"device": "nowhere"}, {"dtype": "onnx"}, {"object": "x"}, {"%": "nothing"},
    [[[[1]]]], "float32", "float99",
]  # fmt: skip

#: Texts that replace a letter.
LETTERS = [
    "NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "9" * 10_000, "[" * 400, "[" * 20_000, '{"a":' * 300, '"', "\\",
    "\\ud800", "\0", "\x1b", ",", ":", "[", "]", "{", "}", "-", "e9", ".5", "true", "null", "\n", " ", "0",
    "\ufeff", "é",
]  # fmt: skip


def mutated(text: str, rng: random.Random) -> str:
    """A JSON text with one to three changes of its structure, or of its letters."""
    if rng.random() < 0.35:
        return mutated_text(text, rng)
    words = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        words = changed(words, rng)
    made = json.dumps(words, ensure_ascii=False, indent=rng.choice((None, 1)))
    return mutated_text(made, rng) if rng.random() < 0.1 else made


def mutated_text(text: str, rng: random.Random) -> str:
    """A text of any kind with a change of its letters."""
    at = rng.randrange(len(text) + 1)
    length = rng.choice((0, 1, 1, 2, rng.randint(0, len(text))))
    kind = rng.randrange(5)
    if kind == 0:
        return text[:at] + text[at + length :]
    if kind == 1:
        return text[:at] + rng.choice(LETTERS) + text[at + length :]
    if kind == 2:
        return text[:at] + text[at : at + length] * 2 + text[at + length :]
    if kind == 3:
        return text[:at]
    other = rng.randrange(len(text) + 1)
    return text[:at] + text[other : other + 20] + text[at:]


def places(words: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values of a document."""
    inner = words.items() if isinstance(words, dict) else enumerate(words) if isinstance(words, list) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def changed(words: Any, rng: random.Random) -> Any:
    """The document itself, with one value replaced, removed, renamed, repeated or exchanged; or an odd one."""
    path = rng.choice(places(words))
    if not path:
        return rng.choice([words, *copy.deepcopy(ODD)])
    around: Any = words
    for key in path[:-1]:
        around = around[key]
    key, how = path[-1], rng.randrange(8)
    if how == 0:
        del around[key]
    elif how == 1 and isinstance(around, dict):
        around[rng.choice(("", "x", "\x1b", "../x", *around))] = around.pop(key)
    elif how == 2 and isinstance(around, list):
        around.insert(rng.randrange(len(around) + 1), around[key])
    elif how == 3:
        others = list(around) if isinstance(around, dict) else list(range(len(around)))
        other = rng.choice(others)
        around[key], around[other] = around[other], around[key]
    elif how == 4 and type(around[key]) in (int, float):
        around[key] += rng.choice((1, -1, around[key], 1000, 2**40))
    else:
        around[key] = copy.deepcopy(rng.choice(ODD))
    return words
