"""The benchmark of durability in its short form: some kills, some damages, nothing lost."""

from __future__ import annotations

import json
import sys

import forked_python
import pytest
from paths import BENCHMARKS
from ranks import PATIENCE

BENCHMARK = BENCHMARKS / "durability.py"


@pytest.mark.long
def test_nothing_is_lost_by_kills_or_damage(tmp_path) -> None:
    done = forked_python.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", str(tmp_path / "figures.json")],
        timeout=PATIENCE,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    kills, damages = figures["kills"], figures["damages"]
    assert kills["kills"] == 4 and kills["runs"] >= 2
    assert damages["damages"] == 27 and len(damages["by_kind"]) == 24
    assert all(kills[kind] == 0 for kind in ("lost", "wrong", "unnoticed", "failed")) and damages["unnoticed"] == 0
