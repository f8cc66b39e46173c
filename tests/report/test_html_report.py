"""A plan as one HTML file: its figures are the plan's, its texts are escaped, and a browser folds and searches it.
Values as a notebook shows them: tables and pictures that say what the value is.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import gpt
import language
import pytest
import torch
from hypothesis import given, settings, strategies as st
from paths import EXAMPLES
from pipeline_networks import Chain, setting
from torch import nn

import shardwright as sw
from shardwright.cluster import Cluster
from shardwright.operator_explanation import seconds_of
from shardwright.report import html_report
from shardwright.report.format import size_text, time_text
from shardwright.report.html_elements import SlicePictures, html_table
from shardwright.report.html_report import page
from shardwright.report.operator_names import OperatorNames

# -- the page


sys.path.insert(0, str(EXAMPLES))


def gpt_plan(mode: str = "semi_auto", layers: int = 3, devices: int = 8, **how: object) -> sw.Plan:
    net, loss, tokens = gpt.GPT(layers=layers), language.Loss(), torch.zeros(8, 64, dtype=torch.long)
    if mode == "semi_auto":
        gpt.mark(net, loss, 2, 4)
    return sw.plan(net, (tokens,), loss, tokens, parallel_mode=mode, devices=devices, **how)


class Page(HTMLParser):
    """The elements of a page: (tag, attributes, text inside), and its text by part."""

    VOID = ("meta", "input", "br", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), list[str]())
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, inside in self.open:
            inside.append(data)

    def with_attribute(self, name: str) -> dict[str, str]:
        """Value of an attribute -> the text inside."""
        return {str(given[name]): " ".join("".join(text).split()) for _, given, text in self.elements if name in given}


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return gpt_plan()


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto", "dynamic_programming"])
def test_figures_are_those_of_the_plan(mode: str) -> None:
    made = gpt_plan(mode)
    found = Page(page([made]))
    stats, parts = found.with_attribute("data-stat"), found.with_attribute("data-part")
    assert stats["a step"].startswith(f"a step{time_text(made.cost)}")
    assert stats["peak memory"].startswith(f"peak memory{size_text(made.peak)}")
    assert stats["a rank sends"].startswith(f"a rank sends{size_text(made.sent)}")
    elements = sum(p.numel() for p in gpt.GPT(layers=3).parameters())
    assert f"{elements:,}" in stats["parameters"]
    assert set(parts) == {"summary", "layers", "parameters", "certificate", "memory", "communication", "timeline"}
    for line in str(made.describe()).splitlines()[1:]:
        assert " ".join(line.split()) in parts["summary"]
    assert f"cost {made.cost:.6g} s" in parts["certificate"]
    if made.bound is None:
        assert "no lower bound" in parts["certificate"]
    else:
        assert f"lower bound {made.bound:.6g} s, gap {made.gap:.3%}" in parts["certificate"]


def test_every_operator_and_parameter_is_there_once(plan: sw.Plan) -> None:
    text = page([plan])
    listed = [
        str(given["data-names"]).split()
        for tag, given, _ in Page(text).elements
        if tag == "details" and given.get("class") == "op"
    ]
    names = [name for words in listed for name in words if name in plan.decisions]
    assert set(names) == set(plan.decisions), "equal layers are folded, and each operator can be searched"
    assert len(listed) < len(plan.decisions) / 2
    total = sum(float(part) for part in re.findall(r"details class=\"op\".*?(\d+\.\d)%</small>", text))
    assert total == pytest.approx(100, abs=0.05 * len(listed)), "operators make up the step"
    shown = Page(text).with_attribute("data-part")["parameters"]
    for name in gpt.GPT(layers=3).state_dict():
        assert re.sub(r"blocks\.\d", "blocks.{0-2}", name) in shown


def test_alternatives_of_the_dearest_operators(plan: sw.Plan) -> None:
    text = page([plan], explain=1)
    explained = [part for part in text.split('<details class="op"')[1:] if "are not priced here" not in part]
    dearest = max(OperatorNames(plan).decisions, key=lambda name: plan.price.by_operator.get(name, 0.0))
    assert len(explained) == 1 and dearest in explained[0]
    assert "are not priced here: shardwright explain plan.json" in page([plan], explain=0)


class Hostile(nn.Module):
    """A module of a name that would run in a browser."""

    NAME = "<script>alert(1)</script>\"'&"

    def __init__(self) -> None:
        super().__init__()
        self.add_module(self.NAME, nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.NAME)(x) * self.scale


def test_names_are_escaped_and_nothing_is_fetched() -> None:
    made = sw.plan(Hostile(), (torch.ones(4, 8),), devices=4, parallel_mode="data_parallel")
    text = page([made], ["</title><script>alert(2)</script>"])
    assert len(re.findall("<script", text)) == 1, "the page's own"
    assert "&lt;script&gt;alert(1)" in text and "&lt;script&gt;alert(2)" in text
    Page(text)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text) and "url(" not in text
    assert "default-src 'none'" in text


def test_two_plans_and_pipelines(plan: sw.Plan, tmp_path: Path) -> None:
    other = gpt_plan("data_parallel")
    found = Page(page([plan, other], ["a.json", "b.json"]))
    heads = ["".join(text) for tag, _, text in found.elements if tag == "h2"]
    assert [head.partition(":")[0] for head in heads] == ["a.json", "b.json"]
    (difference,) = ["".join(text) for _, given, text in found.elements if given.get("id") == "difference"]
    assert "mode: semi_auto -> data_parallel" in difference
    how = {"pipeline": setting("zbv", 4), "hsdp": {"threshold": 0}}
    staged = sw.plan(
        Chain(),
        (torch.ones(32, 16),),
        nn.MSELoss(),
        torch.ones(32, 16),
        parallel_mode="data_parallel",
        devices=8,
        **how,
    )
    staged.report(tmp_path / "staged.html")
    text = (tmp_path / "staged.html").read_text()
    assert f"{staged.simulation.bubble:.1%}" in text and "stage 3 on ranks" in text
    for refused in ([], [plan] * 3):
        with pytest.raises(sw.SettingError, match="a report of") as caught:
            page(refused)
        assert "one plan, or two" in str(caught.value)


def test_a_loaded_plan_has_the_same_page(plan: sw.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    pages = [page([one], explain=0) for one in (plan, sw.Plan.load(tmp_path / "plan.json"))]
    ours, theirs = (re.sub(r"marked at \S+:\d+", "", text) for text in pages)  # a file's marks stand in the file
    assert ours == theirs


def test_jinja2_that_is_missing_is_named(plan: sw.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(sw.SettingError, match=r"needs Jinja2") as caught:
        html_report.page([plan])
    assert "shardwright[report]" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_devices_of_one_colour_hold_one_slice(data: st.DataObject) -> None:
    """The picture of a layout, against the slices that ranks hold."""
    matrix = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    names = [f"a{i}" for i in range(len(matrix))]
    dims = data.draw(st.integers(1, 3))
    axes = [data.draw(st.sampled_from([None, *range(len(matrix))])) for _ in range(dims)]
    axes = [axis if axis not in axes[:i] else None for i, axis in enumerate(axes)]
    layout = sw.Layout(tuple(matrix), tuple(names))(*("None" if axis is None else names[axis] for axis in axes))
    shape = (8,) * dims
    pictures = SlicePictures()
    picture = pictures.of(layout, shape, Cluster.of(None, layout.devices))
    (symbol,) = re.findall(rf'<symbol id="{picture.symbol}".*?</symbol>', pictures.symbols(), re.S)
    colours: dict[tuple[float, float], str] = {}
    for colour, path in re.findall(r'<path fill="([^"]*)"[^>]* d="([^"]*)"/>', symbol):
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)h", path):
            if float(x) > 64:  # a device; left of it is the tensor
                colours[float(y), float(x)] = colour
    assert len(colours) == layout.devices, "each device has a place of its own"
    drawn = [colours[place] for place in sorted(colours)] if len({y for y, _ in colours}) == 1 else None
    held = [str(layout.slice(shape, rank)) for rank in range(layout.devices)]
    assert len(set(colours.values())) == len(set(held)), "as many colours as slices"
    if drawn is not None:  # one host lies flat: ranks from left to right
        assert len(set(zip(drawn, held))) == len(set(held)), "one colour for one slice"


# -- in a browser ------------------------------------------------------------------------------------------------------

#: Appended to the page: what a reader does, and what is there then.
DRIVE = """<script>
const seen = {};
const shown = part => [...document.querySelectorAll(part)].filter(e => e.checkVisibility()).length;
seen.width = innerWidth; seen.wide = document.documentElement.scrollWidth;
seen.back = getComputedStyle(document.body).backgroundColor;
seen.folded = shown(".op"); seen.all = document.querySelectorAll(".op").length;
search.value = "mlp_or_nothing"; search.dispatchEvent(new Event("input")); seen.none = shown(".op");
search.value = WORD; search.dispatchEvent(new Event("input")); seen.found = shown(".op"); seen.says = found.textContent;
search.value = ""; search.dispatchEvent(new Event("input")); seen.again = shown(".op");
const module = document.querySelector(".module"); module.open = true; seen.unfolded = shown(".op");
const picture = document.querySelector("svg.slices");
for (let e = picture; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
picture.focus(); seen.focus = document.activeElement === picture; seen.tip = tip.hidden ? "" : tip.textContent;
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
press("ArrowRight"); press("ArrowRight"); seen.second = tip.textContent;
press("ArrowLeft"); press("ArrowLeft"); seen.last = tip.textContent;
const frame = picture.getBoundingClientRect(), [x, y] = at(picture.dataset.mesh.split(",").map(Number), 5);
const move = x => picture.dispatchEvent(
  new MouseEvent("mousemove", {bubbles: true, clientX: frame.left + x, clientY: frame.top + y + 3}));
move(x + 3); seen.pointed = tip.textContent; seen.outlined = picture.querySelectorAll("rect").length;
move(3); seen.tensor = tip.textContent; seen.plain = picture.querySelectorAll("rect").length;
const dims = [...document.querySelectorAll("[data-dims]")].map(e => e.dataset.dims);
seen.held = Object.fromEntries(dims.map(each => [each, [...Array(8).keys()].map(rank => held(each, rank))]));
document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"})); seen.gone = tip.hidden;
document.dispatchEvent(new KeyboardEvent("keydown", {key: "/"})); seen.slash = document.activeElement === search;
document.body.innerHTML = "<pre id=seen></pre>"; document.getElementById("seen").textContent = JSON.stringify(seen);
</script></body>"""


def in_a_browser(text: str, folder: Path, word: str, *flags: str) -> dict:
    """The values that `DRIVE` has seen of a page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium is installed")
    path = folder / "page.html"
    path.write_text(text.replace("</body>", DRIVE.replace("WORD", json.dumps(word))))
    base = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", *flags]
    base.append("--disable-dev-shm-usage")  # ranks of other tests may have filled /dev/shm
    done = subprocess.run([browser, *base, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert seen, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(seen[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def held_by_ranks(plan: sw.Plan) -> Iterator[tuple[str, list[str]]]:
    """The digits of each tensor of an operator as its picture has them, and the slices of the ranks."""
    for operator in plan.operators:
        shapes, layouts = (*operator.in_shapes, *operator.out_shapes), (*operator.in_layouts, *operator.out_layouts)
        for shape, layout in zip(shapes, layouts):
            slices = [layout.slice(shape, rank) for rank in range(8)]
            said = [
                ", ".join(f"{s.start}:{s.stop}" if c > 1 else ":" for s, c in zip(held, layout.cuts)) for held in slices
            ]
            if shape:
                yield SlicePictures().of(layout, shape, Cluster.of(None, 8)).dims, [f"[{each}]" for each in said]


def test_layers_of_unlike_seconds_are_folded() -> None:
    """The first block gets its input from the embedding, otherwise than the others do."""
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3)]
    net = nn.Sequential(nn.Embedding(512, 64), *blocks)
    sw.shard(net[0], ((2, 1), (4, 1)))
    made = sw.plan(net, (torch.zeros(8, 16, dtype=torch.long),), devices=8)
    text = Page(page([made], explain=0)).with_attribute("data-part")["layers"]
    assert "{1-3} (3 equal layers)" in text and "(2 equal layers)" not in text
    spent = [seconds_of(made, (name,)) for name in ("layer_norm", "layer_norm_1")]
    assert spent[0] > spent[1] and f"(3 x {time_text(spent[1])} to {time_text(spent[0])})" in text
    assert "as of 2 of 3" in text


def test_a_reader_folds_searches_and_points(plan: sw.Plan, tmp_path: Path) -> None:
    text = page([plan], explain=0)
    seen = in_a_browser(text, tmp_path, "blocks.{0-2}.up")
    assert 0 < seen["folded"] < seen["all"], "layers are folded"
    assert seen["none"] == 0 and 0 < seen["found"] < seen["all"]
    assert seen["again"] == seen["folded"] < seen["unfolded"]
    assert seen["focus"] and "devices" in seen["tip"] and seen["gone"] and seen["slash"]
    assert seen["second"].startswith("rank 1 holds") and seen["last"].startswith("rank 7 holds")
    assert seen["pointed"].startswith("rank 5 holds") and seen["outlined"] == 1
    assert seen["tensor"] == seen["tip"] and seen["plain"] == 0
    expected = dict(held_by_ranks(plan))
    assert {dims: said for dims, said in seen["held"].items() if not dims.startswith("0:")} == expected
    assert any(dims.startswith("0:") and "part 1 of 4 of dim 0" in said for dims, said in seen["held"].items())
    light = seen["back"]
    dark = in_a_browser(text, tmp_path, "up", "--force-dark-mode")
    assert light == "rgb(255, 255, 255)" and dark["back"] != light


def test_a_narrow_screen(plan: sw.Plan, tmp_path: Path) -> None:
    seen = in_a_browser(page([plan, plan], explain=0), tmp_path, "up", "--window-size=390,900")
    assert seen["wide"] <= seen["width"], "nothing is cut off at the right"


# -- tables in a notebook


AXES = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))


def cells(html: str) -> list[list[str]]:
    """The texts of a table, line by line."""
    lines = re.findall(r"<tr>(.*?)</tr>", html)
    found = [re.findall(r"<t[hd] .*?>(.*?)</t[hd]>", line) for line in lines]
    return [[unescape(re.sub(r"<svg.*?</svg>", "picture", cell)) for cell in line] for line in found]


def test_a_table_escapes_texts_and_leaves_empty_columns_out() -> None:
    html = html_table("a<b", ("one", "two"), [("<x>", ""), ("y", "")], ["c&d"])
    assert html.startswith("<div><b>a&lt;b</b>") and html.endswith("c&amp;d</div>")
    assert cells(html) == [["one"], ["<x>"], ["y"]]
    assert "<table>" not in html_table("title", ("one",), [])


@pytest.mark.parametrize("dims", [("dp", "mp"), ("mp", "None"), (("sp", "dp"), "mp"), ("None", "None")])
def test_a_pointer_on_a_device_shows_its_slice(dims: tuple[object, ...]) -> None:
    layout, shape = AXES(*dims), (8, 8)
    html = layout._repr_html_()
    said = dict(re.findall(r"<title>rank (\d+): (.*?)</title>", html))
    assert sorted(map(int, said)) == list(range(8))
    for rank in range(8):
        held = enumerate(zip(layout.slice(shape, rank), layout.cuts))
        parts = [f"part {piece.start * cut // 8} of {cut} of dim {dim}" for dim, (piece, cut) in held if cut > 1]
        assert said[str(rank)] == (", ".join(parts) or "the whole tensor")
    assert [line[1] for line in cells(html)[1:]] == [f"{cut} parts" if cut > 1 else "whole" for cut in layout.cuts]


def test_a_layout_without_dims_shows_its_axes() -> None:
    assert cells(AXES._repr_html_())[1:] == [["dp", "2", "(0, 4)"], ["sp", "2", "(0, 2)"], ["mp", "2", "(0, 1)"]]


def test_a_plan_its_operators_and_a_mark() -> None:
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), torch.zeros(8, 16)
    mark = sw.shard(torch.matmul, ((2, 4), (4, 1)), priority=3)
    sw.shard(net[0], ((2, 1), (4, 1)))
    plan = sw.plan(net, (x,), devices=8)
    html = plan._repr_html_()
    assert f"a step {time_text(plan.cost)} by the cost model; a device holds {size_text(plan.peak)}" in html
    assert f"a rank sends {size_text(plan.sent)}" in html
    shown = cells(plan.operators[0]._repr_html_())
    assert [line[:4] for line in shown[1:]] == [
        ["in 0 input", "(8, 16)", "(2, 1)", "(4, 16)"],
        ["in 1 0.weight", "(32, 16)", "(4, 1)", "(8, 16)"],
        ["in 2 0.bias", "(32,)", "(4,)", "(8,)"],
        ["out 0", "(8, 32)", "(2, 4)", "(4, 8)"],
    ]
    assert all(line[5] == "picture" for line in shown[1:])
    html = mark._repr_html_()
    assert cells(html)[1:] == [["in 0", "(2, 4)"], ["in 1", "(4, 1)"]] and "priority 3" in html
    assert "not marked" in sw.Operator(torch.matmul)._repr_html_()
