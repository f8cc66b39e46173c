"""The paths of operators in the model, which tables and profiles show.

linear_14 of module layers.2.self_attn.q_proj, its only operator   layers.2.self_attn.q_proj
mul_9 of module layers.0.self_attn, the second of three            layers.0.self_attn.mul#2
an operator with a mark                                            the mark's path
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from ..graph import Op
from .local_program import Decision

__all__ = ["operator_paths", "plain_kind"]


def plain_kind(op: Op) -> str:
    """The kind of an operator, as tables show it: ``and`` for ``__and__``."""
    return op.kind.strip("_") if op.kind.startswith("__") else op.kind


def operator_paths(decisions: Mapping[str, Decision]) -> dict[str, str]:
    """Name of an operator -> its path; no two have the same.

    Args:
        decisions: those of a whole model, by operator.
    """
    counts = Counter(
        ".".join(d.op.module.split(".")[:depth])
        for d in decisions.values()
        for depth in range(1, d.op.module.count(".") + 2)
    )
    kinds = Counter((d.op.module, plain_kind(d.op)) for d in decisions.values())
    met: Counter[tuple[str, str]] = Counter()
    paths: dict[str, str] = {}
    for name, d in decisions.items():
        module, kind = d.op.module, plain_kind(d.op)
        met[module, kind] += 1
        if not module or not re.fullmatch(re.escape(kind) + r"_*\d*", name):
            paths[name] = name
        elif counts[module] == 1:
            paths[name] = module
        else:
            number = f"#{met[module, kind]}" if kinds[module, kind] > 1 else ""
            paths[name] = f"{module}.{kind}{number}"
    return paths
