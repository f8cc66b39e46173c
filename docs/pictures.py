"""Pictures of the pages, made by the program: ``python docs/pictures.py`` writes them.

``python docs/pictures.py --report`` writes those of reports too, which needs Debian's chromium.

1. `slices`: a tensor under a `Layout`, one box for each slice, with the ranks that hold it.
2. `memory`: the memory of a device in plans of one model, by kind.
3. `host_time`, `redistributions`, `searches`, `further_sizes`: figures of the last recorded runs of the benchmarks
   (benchmarks/results, in JSON).
4. `pipeline`: a simulated step of four stages, which the README has as text.
5. `reports`: HTML reports of the plans of docs/how-to/read-a-plan.md and docs/learn/pipelines.md, as a browser shows
   them. docs/how-to/pictures/reports.json has a digest of each page whose picture is there, so that a test finds
   pictures that are stale.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from browser import Browser
from PIL import Image
from torch import nn

import shardwright as sw
from shardwright.report.html_report import page
from shardwright.report.timeline import picture

DOCS = Path(__file__).parent
REPORTS = DOCS / "how-to" / "pictures"
RESULTS = DOCS.parent / "benchmarks" / "results"
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
CELL, MARGIN = 48, 8  # pixels


def slices(layout: sw.Layout, shape: Sequence[int], title: str) -> str:
    """An SVG of a tensor of two dims: a box for each slice, which names the ranks that hold it."""
    holders: dict[tuple[int, int, int, int], list[int]] = {}
    for rank in range(layout.devices):
        rows, columns = layout.slice(shape, rank)
        holders.setdefault((rows.start, rows.stop, columns.start, columns.stop), []).append(rank)
    width, height = shape[1] * CELL + 2 * MARGIN, shape[0] * CELL + 2 * MARGIN + 24
    parts = [_head(width, height, title), f'<text x="{MARGIN}" y="20" class="title">{escape(title)}</text>']
    for (top, bottom, left, right), ranks in sorted(holders.items()):
        x, y = MARGIN + left * CELL, MARGIN + 24 + top * CELL
        w, h = (right - left) * CELL, (bottom - top) * CELL
        text = ("rank " if len(ranks) == 1 else "ranks ") * (w > CELL) + ", ".join(map(str, ranks))
        parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{COLOURS[ranks[0] % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + w / 2:g}" y="{y + h / 2 + 5:g}" class="inside">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def bars(rows: Mapping[str, Mapping[str, float]], title: str, unit: str, digits: int = 1) -> str:
    """An SVG of horizontal bars, each of which is a sum of kinds."""
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    most = max(sum(row.values()) for row in rows.values())
    names, length = 240, 420
    width, height = names + length + 90, 60 + 30 * len(rows) + 24
    parts = [_head(width, height, title), f'<text x="{MARGIN}" y="20" class="title">{escape(title)}</text>']
    for number, (name, row) in enumerate(rows.items()):
        x, y = float(names), 36 + 30 * number
        parts.append(f'<text x="{names - 8}" y="{y + 15}" class="name">{escape(name)}</text>')
        for kind, value in row.items():
            w = length * value / most
            colour = COLOURS[kinds.index(kind)]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="20" fill="{colour}"/>')
            x += w
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}" class="value">{sum(row.values()):.{digits}f} {unit}</text>')
    x, y = float(names), 48 + 30 * len(rows)
    for kind, colour in zip(filter(None, kinds), COLOURS):
        parts.append(f'<rect x="{x:g}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18:g}" y="{y + 11}" class="value">{escape(kind)}</text>')
        x += 34 + 7 * len(kind)
    return "\n".join([*parts, "</svg>\n"])


def memory() -> str:
    """The memory of one device in plans of one model, as the page learn/memory.md has it."""
    with torch.device("meta"):
        layers = [layer for _ in range(2) for layer in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))]
        net = nn.Sequential(*layers)
        inputs, targets = (torch.empty(2048, 1024),), torch.empty(2048, 1024)
    settings: dict[str, dict[str, Any]] = {
        "data_parallel": {"parallel_mode": "data_parallel"},
        "hsdp level1": {"parallel_mode": "data_parallel", "hsdp": {"optimizer_level": "level1"}},
        "hsdp level3": {"parallel_mode": "data_parallel", "hsdp": {"optimizer_level": "level3"}},
        "dynamic_programming": {"parallel_mode": "dynamic_programming"},
    }
    rows = {}
    for name, chosen in settings.items():
        plan = sw.plan(net, inputs, nn.MSELoss(), targets, devices=8, cluster="h100x8", **chosen)
        rows[name] = {kind: size / 2**20 for kind, size in plan.memory(0).items()}
    return bars(rows, "A device's memory, summed by kind, of 8: four layers of 1024 x 4096, batch 2048, Adam", "MiB")


def figures(script: str, section: str) -> dict[str, float]:
    """Medians of one section of a script's last recorded run: name -> figure.

    Args:
        script: its name without its ending; the run is benchmarks/results/<script>.json.
        section: the section.
    """
    found = {
        each["name"]: float(each["spread"]["median"])
        for each in json.loads((RESULTS / f"{script}.json").read_text(encoding="utf-8"))["figures"]
        if each["section"] == section
    }
    if not found:
        raise ValueError(f"benchmarks/results/{script}.json has no figures of {section!r}")
    return found


def host_time() -> str:
    """The host's time of a step over that of plain torch."""
    found = figures("accelerator", "host ms of a step")
    rows = {name.removesuffix(" / eager"): {"": ratio} for name, ratio in found.items()}
    return bars(rows, "Host time of a step of GPT, one rank of eight, as a multiple of plain torch's", "x", 2)


def redistributions() -> str:
    """The host's time of a redistribution, in units of `torch.add`."""
    found = figures("accelerator", "units of torch.add")
    rows = {name.removesuffix(", forward"): {"": units} for name, units in found.items() if name.endswith(", forward")}
    return bars(rows, "Host time of a redistribution's forward, as a multiple of one torch.add", "x", 0)


def searches() -> str:
    """Seconds of searches within limits of memory."""
    names = {"gpt": "GPT", "llama": "Llama", "mixtral": "mixture of experts"}
    rows = {}
    for case in json.loads((RESULTS / "planning_limits.json").read_text(encoding="utf-8")):
        if case["mode"] == "dynamic_programming":
            limit = f"{case['GB']:g} GB" if case["GB"] else "no limit"
            name = f"{names[case['model']]}, {limit}{', refused' if 'error' in case else ''}"
            rows[name] = {"": case["seconds"]}
    return bars(rows, "dynamic_programming, 96 layers on 64 devices: seconds of one core", "s", 0)


def further_sizes() -> str:
    """Seconds of a model's first call, and of a call at further sizes."""
    kinds = {"first": "first, s", "further": "further sizes, s"}
    run = json.loads((RESULTS / "further_sizes.json").read_text(encoding="utf-8"))["figures"]
    found = {case: figures("further_sizes", case) for case in dict.fromkeys(each["section"] for each in run)}
    rows = {f"{case}, {name}": {"": row[kind]} for case, row in found.items() for name, kind in kinds.items()}
    return bars(rows, "Models of 12 layers: seconds of planning at the first sizes, and at further ones", "s", 2)


def _head(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, quote=True)}">\n<style>text {{font: 13px sans-serif; fill: #777}} '
        ".title {font-weight: bold} .name {text-anchor: end} rect {stroke: #fff} "
        ".inside {fill: #fff; text-anchor: middle}</style>"
    )


def pipeline() -> str:
    """The step in time of sixteen layers of GPT-3's width, on four stages of sixteen devices."""
    sys.path.insert(0, str(DOCS.parent / "examples"))
    import gpt3  # noqa: PLC0415  an example, found by the path above

    stages = {"tokens": 0, "positions": 0, "norm": 3, "head": 3} | {f"blocks.{i}": i // 4 for i in range(16)}
    asked = gpt3.gpt3(16, 64) | {"parallel_mode": "recursive_programming"}
    schedule = {"stages": 4, "micro_batches": 8, "scheduler": "1f1b", "stage_config": stages}
    plan = sw.plan(**asked, devices=64, cluster="h200x8x8", pipeline=schedule)
    return picture(plan.simulation, [f"ranks {stage.ranks[0]}-{stage.ranks[-1]}" for stage in plan.stages])


def made() -> dict[Path, str]:
    """Every picture of the pages, by its file."""
    layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
    folder = DOCS / "learn" / "pictures"
    return {
        folder / "dp-mp.svg": slices(layout("dp", "mp"), (4, 8), 'layout("dp", "mp") of a tensor of 4 x 8'),
        folder / "mp-sp-dp.svg": slices(layout("mp", ("sp", "dp")), (2, 4), '("mp", ("sp", "dp")), 2 x 4'),
        folder / "mp-dp-sp.svg": slices(layout("mp", ("dp", "sp")), (2, 4), '("mp", ("dp", "sp")), 2 x 4'),
        folder / "memory.svg": memory(),
        DOCS / "pipeline.svg": pipeline(),
        DOCS / "understand" / "pictures" / "host-time.svg": host_time(),
        DOCS / "understand" / "pictures" / "redistributions.svg": redistributions(),
        DOCS / "understand" / "pictures" / "searches.svg": searches(),
        DOCS / "understand" / "pictures" / "further-sizes.svg": further_sizes(),
    }


class Shown(NamedTuple):
    """A report as a picture shows it.

    Attributes:
        text: the page.
        script: run in the page before the picture is taken.
        width, height: of the screen, in pixels.
        dark: True for a reader who prefers dark pages.
    """

    text: str
    script: str = ""
    width: int = 1280
    height: int = 1180
    dark: bool = False


def first_block(file: str) -> dict[str, Any]:
    """The names that the first block of code of a page defines."""
    text = (DOCS / file).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "report"}
    exec(text.split("```python\n")[1].split("```")[0], names)
    return names


def reports() -> dict[str, Shown]:
    """The reports of the pages: name of a picture -> the page."""
    marked, staged = first_block("how-to/read-a-plan.md"), first_block("learn/pipelines.md")
    tokens = marked["tokens"]
    other = sw.plan(marked["Net"](), (tokens,), devices=8, parallel_mode="data_parallel")
    one = page([marked["plan"]], ["plan.json"])
    both = page([marked["plan"], other], ["plan.json", "other.json"], explain=0)
    operator = "location.hash = 'layers.0.up'"
    return {
        "report": Shown(one),
        "report-dark": Shown(one, dark=True),
        "report-operator": Shown(one, operator, height=900),
        "report-two": Shown(both),
        "report-pipeline": Shown(
            page([staged["model"].plan], ["pipeline.json"], explain=0), "location.hash = 'timeline'", height=620
        ),
        "report-phone": Shown(one, width=390, height=844),
    }


def digests(shown: Mapping[str, Shown]) -> dict[str, str]:
    """Name of a picture -> the digest of what it shows. Lines of the program that made the plan do not count."""
    return {
        name: hashlib.sha256(re.sub(r"[\w./<>&;-]+:\d+", "", repr(each)).encode()).hexdigest()[:16]
        for name, each in shown.items()
    }


def write_reports() -> None:
    """Write the pictures of the reports, and their digests."""
    shown = reports()
    with TemporaryDirectory() as folder, Browser() as browser:
        file = Path(folder) / "plan.html"
        for name, each in shown.items():
            file.write_text(each.text, encoding="utf-8")
            browser.open(file, each.width, each.height, each.dark)
            browser.value(f"{each.script}; new Promise(done => setTimeout(done, 200))")
            browser.value("1")
            path = REPORTS / f"{name}.png"
            browser.picture(path)
            Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=96).save(path, optimize=True)
    text = json.dumps({"torch": torch.__version__.partition("+")[0], "pages": digests(shown)}, indent=1)
    (REPORTS / "reports.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--report" in sys.argv:
        write_reports()
    for path, text in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
