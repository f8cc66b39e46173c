"""Figures of the pages: each is measured and kept where the scripts of benchmarks/ keep theirs, or is a constant of the
program. A figure in `code` or in a block of code is a value that a user writes or output: the block runs, or is listed
with a reason in test_docs_pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

from paths import DOCS, ROOT

from shardwright.cli import doctor_command
from shardwright.cli.forked_ranks import LONG
from shardwright.cost.communication_schedule import LIBRARY
from shardwright.launch import agent
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.runtime.distributed import watchdog
from shardwright.solver.search_memory import MOST

UNITS = r"(?:ns|us|ms|s|seconds?|minutes?|hours?|[KMGT]i?B(?:/s)?|%|percent|times)"
NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?"
#: A figure with a unit, which may stand behind the second of two numbers.
FIGURE = re.compile(rf"({NUMBER})(?: (?:to|and|or|,) ({NUMBER}))? ?({UNITS})(?![\w/]| \d)")
CODE = re.compile(r"^ *(`{3,}).*?^ *\1|`+[^`]+`+", re.DOTALL | re.MULTILINE)

#: Figures that are no measurements -> the same, made from the program's own constants.
CONSTANTS = {
    "docs/how-to/doctor.md": {"8 MiB": f"{4 * LONG >> 20} MiB", "20 seconds": f"{doctor_command.SECONDS:g} seconds"},
    "docs/launching.md": {"10 seconds": f"{agent.GRACE} seconds", "4 seconds": f"{watchdog.GRACE:g} seconds"},
    "docs/learn/gpus.md": {"25 MiB": f"{LIBRARY >> 20} MiB"},
    "docs/learn/memory.md": {"64 KB": f"{OptimizerParallel().threshold} KB"},
    "docs/learn/search.md": {"3 GB": f"{MOST / 1e9:g} GB"},
    "docs/what-is-there.md": {"25 MiB": f"{LIBRARY >> 20} MiB", "3 GB": f"{MOST / 1e9:g} GB"},
}

#: Figures that another test compares, or that the page takes from a block of its own; and pages that are records.
ELSEWHERE = {
    "docs/learn/many-hosts.md": {"10 seconds": "tests/runtime/distributed ends runs within this time"},
    "docs/how-to/read-a-profile.md": {"8 times": "the ratio 7.76 of the table below it, a recorded run"},
    "docs/understand/cost-model.md": {
        size: "the sizes of `shardwright calibrate`: tests/cli" for size in ("4 KiB", "16 MiB", "256 MiB")
    },
}
RECORDS = {"docs/models.md": "made by tests/zoo", "docs/versions.md": "the record of the runs of the suite"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def figures(text: str) -> list[str]:
    """The figures with units outside of code, as in "13 s"."""
    prose = " ".join(CODE.sub("", text).split())
    return [f"{number} {unit}" for first, last, unit in FIGURE.findall(prose) for number in (first, last) if number]


def kept() -> set[str]:
    """The figures of benchmarks/README.md, where each has its script, its day and its load; a multiple has no unit."""
    text = " ".join((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").replace("µs", "us").split())
    return {*figures(text), *(f"{number} times" for number in re.findall(NUMBER, text))}


def unchecked(page: str, text: str) -> list[str]:
    """The figures of a page that are neither kept, nor constants, nor known to another test."""
    known = {*kept(), *CONSTANTS.get(page, {}), *ELSEWHERE.get(page, {})}
    return [figure for figure in figures(text) if figure not in known]


def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return {named(page): page.read_text(encoding="utf-8") for page in found if named(page) not in RECORDS}


def test_figures_of_pages_are_measured_or_constants() -> None:
    texts = pages()
    assert sum(map(len, map(figures, texts.values()))) > 40
    assert {page: found for page, text in texts.items() if (found := unchecked(page, text))} == {}


def test_a_figure_that_nobody_measured_is_found() -> None:
    text = "It takes 14 s or 17.5 s, 40 to 91 % of `5 s`.\n\n```text\n6 ms\n```\n\nA bucket has 25 MiB and 1.35MB."
    assert figures(text) == ["14 s", "17.5 s", "40 %", "91 %", "25 MiB", "1.35 MB"]
    assert unchecked("docs/learn/gpus.md", text) == ["17.5 s", "40 %", "91 %"]


def test_constants_of_pages_are_those_of_the_program() -> None:
    texts = pages()
    for page, constants in CONSTANTS.items():
        assert [shown for shown, made in constants.items() if shown != made] == [], page
        assert set(constants) <= set(figures(texts[page])), page
    assert all(set(known) <= set(figures(texts[page])) for page, known in ELSEWHERE.items())


def result(script: str) -> dict | list:
    return json.loads((ROOT / "benchmarks" / "results" / f"{script}.json").read_text(encoding="utf-8"))


def test_kept_figures_of_searches_are_those_of_their_run() -> None:
    """Seconds, growth and gap of each search that has an answer."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = " ".join(text.split("### `planning_limits.py`")[1].split("\n### ")[0].split())
    searches = [row for row in result("planning_limits") if row.get("gap") is not None]
    assert len(searches) > 8
    for row in searches:
        grown = f"{row['grown MB'] / 1e3:.1f} GB" if row["grown MB"] > 1e3 else f"{row['grown MB']:.0f} MB"
        gap = f"{row['gap'] * 100:.2f} %" if row["gap"] < 0.01 else f"{row['gap'] * 100:.1f} %"
        assert f"{row['seconds']:.0f} s, {grown}, {gap if row['gap'] else '0'}" in section


def test_kept_figures_of_the_large_page_are_those_of_its_run() -> None:
    """And within what is asked of them."""
    run = result("report_page")
    assert (run["layers"], run["bytes"] < 5e6, run["median"] < 2) == (96, True, True)
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    least, most = min(run["seconds"]), max(run["seconds"])
    shown = (
        f"{run['bytes'] / 1e6:.2f} MB, laid out by chromium in {run['median']:.2f} s ({least:.2f} to {most:.2f}, five"
    )
    assert shown in text


def test_multiples_in_the_tables_of_benchmarks_are_measured() -> None:
    """Numbers without a unit too, such as a step's time over that of plain torch."""
    text = (DOCS / "understand" / "benchmarks.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ") and "measures" not in row]
    numbers = {number for row in rows for number in re.findall(rf"{NUMBER}", row) if "." in number}
    known = " ".join((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split())
    assert len(numbers) > 15
    assert sorted(number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", known)) == []


def test_figures_of_the_readme_are_measured() -> None:
    """Each number in the column "measured", below it, and the number of models, is among the scripts' figures."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    models = (DOCS / "models.md").read_text(encoding="utf-8")
    kept = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8") + models
    table = readme.split("## Why not ...")[1].split("\n## ")[0]
    rows = [line.split("|")[-2] for line in table.splitlines() if line.startswith("| ")][1:]
    numbers = [number.rstrip(".,") for row in rows for number in re.findall(r"\d[\d.,]*", row)]
    assert len(rows) == 6 and len(numbers) > 10
    cannot = readme.split("## What it cannot do")[1].split("\n## ")[0]
    assert figures(cannot) == ["56 us"], "the microseconds of a check at each call"
    numbers.append("56")
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", kept)] == []
    equal, all_ = re.search(r"(\d+) of (\d+) models are equal", models).groups()
    assert equal == all_ and f"{all_} models of transformers" in readme
