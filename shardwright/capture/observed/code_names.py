"""Names in the bytecode of the user's functions: globals, variables of enclosing functions, attributes, imports.

Example::

    def forward(self, x):                  global       scale, with the chain ()
        from .layers import gate           import       (".layers", "gate")
        return gate(x) * scale * cfg.k     global       cfg, with the chain ("k",)
                                           identifiers  gate, scale, cfg, k, layers
"""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

from ...identity_tables import IdentityMap
from ..source_lines import is_users

__all__ = ["NameRead", "Names", "names_of", "names_read", "user_function"]


def user_function(value: object) -> types.FunctionType | None:
    """The user's own function behind a method, a partial or a wrapper of torch; None for a function of a library."""
    while True:
        if isinstance(value, (functools.partial, functools.partialmethod)):
            value = value.func
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif (
            isinstance(value, types.FunctionType)
            and not is_users(value.__code__.co_filename)
            and hasattr(value, "__wrapped__")
        ):
            value = value.__wrapped__
        else:
            break
    if isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename):
        return value
    return None


class NameRead(NamedTuple):
    """A name that a function's code refers to: ``trainer.net`` is the name ``trainer`` with the chain ``("net",)``.

    Attributes:
        kind: "global", "cell" (a variable of an enclosing function) or "argument" (the function's first one).
        name: the name.
        chain: the attributes that are read from it, one from the other.
    """

    kind: str
    name: str
    chain: tuple[str, ...]


class Names(NamedTuple):
    """The names in a code object and in the functions that it defines inside.

    Args:
        reads: the names that it refers to, each with its longest chain.
        imports: (module, name) of each import inside of the function; leading dots are of relative imports.
        identifiers: the names of attributes and globals, and texts that may be such names.
    """

    reads: tuple[NameRead, ...]
    imports: tuple[tuple[str, str], ...]
    identifiers: frozenset[str]


#: Code object -> the names in it. Hashing a code object by its content takes longer than a walk of its names.
_NAMES: IdentityMap[types.CodeType, Names] = IdentityMap()
#: The number of code objects that are remembered.
_KEPT_NAMES = 4096


def names_read(code: types.CodeType) -> tuple[NameRead, ...]:
    """The names that a code object refers to, and the functions that it defines inside, each with its longest chain."""
    return names_of(code).reads


def names_of(code: types.CodeType) -> Names:
    """All names in a code object."""
    known = _NAMES.get(code)
    if known is None:
        if len(_NAMES) >= _KEPT_NAMES:
            _NAMES.clear()
        known = _NAMES[code] = _names_in(code)
    return known


def _names_in(code: types.CodeType) -> Names:
    found: dict[NameRead, None] = {}
    imports: dict[tuple[str, str], None] = {}
    identifiers = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names = names_of(each)
            reads = (read for read in names.reads if read.kind != "argument")
            found.update(
                dict.fromkeys(read for read in reads if read.kind == "global" or read.name in code.co_freevars)
            )
            imports.update(dict.fromkeys(names.imports))
            identifiers |= names.identifiers
    first = code.co_varnames[:1] if code.co_argcount else ()
    current: NameRead | None = None
    before: tuple[object, object] = 0, None  # the last two constants: level and names of an import
    for instruction in dis.get_instructions(code):
        kind, named = instruction.opname, instruction.argval
        if kind in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            continue
        if kind in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR") and current is not None:
            current = current._replace(chain=(*current.chain, named))
            continue
        if current is not None:
            found[current] = None
            current = None
        if kind == "LOAD_CONST":
            before = before[1], named
        elif kind == "IMPORT_NAME":
            level, wanted = before
            module = "." * (level if isinstance(level, int) else 0) + named
            imports.update(dict.fromkeys((module, name) for name in (wanted if isinstance(wanted, tuple) else ())))
            imports.setdefault((module, ""))
        elif kind in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            current = NameRead("global", named, ())
        elif kind in ("LOAD_DEREF", "STORE_DEREF", "LOAD_CLASSDEREF") and named in code.co_freevars:
            current = NameRead("cell", named, ())
        elif kind.startswith(("LOAD_FAST", "LOAD_DEREF")):
            *earlier, last = named if isinstance(named, tuple) else (named,)  # one instruction may load two variables
            found.update(dict.fromkeys(NameRead("argument", other, ()) for other in earlier if other in first))
            current = NameRead("argument", last, ()) if last in first else None
    if current is not None:
        found[current] = None
    return Names(tuple(found), tuple(imports), frozenset(identifiers))
