"""The table of the zoo's results, as it stands in ``docs/models.md``. No timings: two runs write the same."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from models import MODELS, Model
from runs import DEVICES, MODES, STEPS, Outcome

__all__ = ["PATH", "VERSIONS", "text"]

PATH = Path(__file__).resolve().parents[2] / "docs" / "models.md"

#: The libraries that say what the models are.
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "diffusers", "torch_geometric")

HEADS = {
    "semi_auto": "semi_auto, each operator marked at random",
    "sharding_propagation": "sharding_propagation of a few marks",
    "recursive_programming": "recursive_programming",
    "dynamic_programming": "dynamic_programming",
}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "-"


VERSIONS = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)

HEAD = f"""# Models that are tested

Written by `WRITE_MODELS=1 python -m pytest tests/zoo`, with {VERSIONS}.

Each model is as its library has it, small and with random weights. It is captured once and planned for {DEVICES} devices in
{len(MODES)} modes, on links that cost next to nothing, so that a search cuts whatever can be cut. Each plan trains for
{STEPS} steps, all devices in one process. Losses, gradients and the state after the last step are compared with the same {STEPS} steps on one
device. A percentage says that they are equal, and how many of the operators that have a dim to be cut in two the plan does
cut (rounded down to tens).

Equal means within 1e-10 of the largest value of a tensor in float64. Most models compute some of their operators in float32
whatever their own type; what is computed from those is compared within 1e-4. The column *precision* names the coarsest type
on the way to the loss, and the operator that brings it in.
"""


def text(outcomes: Mapping[tuple[str, str], Outcome], precision: Mapping[str, str], waits: Mapping[str, str]) -> str:
    """The page.

    Args:
        outcomes: by model and mode.
        precision: by model, that of its loss.
        waits: models that are not tested yet, and why.
    """
    equal = [m for m in MODELS.values() if m.name not in waits]
    lines = [
        HEAD,
        f"{len(equal)} of {len(MODELS)} models are equal in all modes." + (f" {len(waits)} wait." if waits else ""),
        "",
    ]
    lines.append("| model | library | " + " | ".join(HEADS[mode] for mode in MODES) + " | precision | note |")
    lines.append("|---" * (len(MODES) + 4) + "|")
    lines += [_row(m, outcomes, precision, waits) for m in MODELS.values()]
    return "\n".join(lines) + "\n"


def _row(
    m: Model, outcomes: Mapping[tuple[str, str], Outcome], precision: Mapping[str, str], waits: Mapping[str, str]
) -> str:
    if m.name in waits:
        cells, precise, note = ["waits"] * len(MODES), "", f"{m.note}; waits for {waits[m.name]}".removeprefix("; ")
    else:
        cells = [f"{int(outcomes[m.name, mode].share * 10) * 10} %" for mode in MODES]
        precise, note = precision[m.name], m.note
    return f"| {m.name} | {m.library} | {' | '.join(cells)} | {precise} | {note} |"
