"""Every model of the zoo on four devices, in four modes, with most operators cut: as on one device."""

from __future__ import annotations

import os
from functools import lru_cache

import pytest
import table
import torch
from models import MODELS
from runs import MODES, Outcome, Zoo

pytestmark = pytest.mark.filterwarnings("ignore")

#: Models that cannot be planned or captured yet -> what they wait for.
WAITS: dict[str, str] = {}

#: How many of the operators that have a dim to be cut a plan cuts at least.
LEAST = {"semi_auto": 0.95, "sharding_propagation": 0.7, "recursive_programming": 0.55, "dynamic_programming": 0.55}

OUTCOMES: dict[tuple[str, str], Outcome] = {}
PRECISION: dict[str, str] = {}


@lru_cache(maxsize=1)
def zoo(name: str) -> Zoo:
    made = Zoo(MODELS[name])
    decided = made.precision
    PRECISION[name] = (
        ""
        if decided is None
        else str(decided.dtype).removeprefix("torch.")
        + (f" by {decided.source}" if decided.dtype != torch.float64 and decided.source else "")
    )
    return made


def _params() -> list:
    return [
        pytest.param(
            name,
            mode,
            marks=[
                *([pytest.mark.long] if model.slow or mode == "dynamic_programming" else []),
                *([pytest.mark.skip(reason=f"waits for {WAITS[name]}")] if name in WAITS else []),
            ],
            id=f"{name}-{mode}",
        )
        for name, model in MODELS.items()
        for mode in MODES
    ]


@pytest.mark.parametrize(("name", "mode"), _params())
def test_as_on_one_device(name: str, mode: str) -> None:
    if MODELS[name].library != "torch":
        pytest.importorskip(MODELS[name].library, exc_type=ImportError)
    one = zoo(name).one
    moved = [g is not None and bool(g.abs().max() > 0) for g in one.gradients.values()]
    assert all(loss.isfinite() for loss in one.losses.values()) and sum(moved) > len(moved) / 2
    outcome = zoo(name).run(mode)
    worst = outcome.worst
    assert worst.ok, (
        f"{worst.tensor} differs by {worst.difference:.1e}, more than {worst.tolerance:.0e} ({worst.precision})"
    )
    assert outcome.share >= LEAST[mode] and outcome.parameters[0] > 0 and outcome.sends, outcome
    OUTCOMES[name, mode] = outcome


def test_the_zoo_is_large() -> None:
    assert len(MODELS) - len(WAITS) >= 40 and set(WAITS) <= set(MODELS)


def test_the_table_in_the_docs_is_that_of_this_run() -> None:
    """With WRITE_MODELS=1 it is written."""
    missing = [
        f"{name}-{mode}" for name in MODELS if name not in WAITS for mode in MODES if (name, mode) not in OUTCOMES
    ]
    if missing:
        pytest.skip(f"{len(missing)} results are not of this run, such as {missing[0]}")
    made = table.text(OUTCOMES, PRECISION, WAITS)
    if os.environ.get("WRITE_MODELS"):
        table.PATH.write_text(made, encoding="utf-8")
    held = table.PATH.read_text(encoding="utf-8")
    if table.VERSIONS not in held:
        pytest.skip(f"the table is of other versions than {table.VERSIONS}")
    assert held == made, "run `WRITE_MODELS=1 python -m pytest tests/zoo` and read what changed in docs/models.md"
