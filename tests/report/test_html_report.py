"""A plan as one HTML file: its figures are the plan's, its texts are escaped, and a browser folds and searches it.
Values as a notebook shows them: tables and pictures that say what the value is.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from paths import DOCS, EXAMPLES
from pipeline_networks import Chain, setting
from torch import nn

import shardwright as sw
from shardwright.cluster import Cluster, format_bytes
from shardwright.operator_explanation import seconds_of
from shardwright.planners.plan_search import Search
from shardwright.report import html_report, report_content
from shardwright.report.format import count_text, size_text, time_text
from shardwright.report.html_elements import Branch, Grid, Leaf, SlicePictures, gathered, html_table, unfolded
from shardwright.report.html_report import page
from shardwright.report.operator_names import OperatorNames

sys.path[:0] = [str(EXAMPLES), str(DOCS)]
import browser
import gpt
import language

# -- the page


def gpt_plan(mode: str = "semi_auto", layers: int = 3, devices: int = 8, **how: object) -> sw.Plan:
    net, loss, tokens = gpt.GPT(layers=layers), language.Loss(), torch.zeros(8, 64, dtype=torch.long)
    if mode == "semi_auto":
        gpt.mark(net, loss, 2, 4)
    return sw.plan(net, (tokens,), loss, tokens, parallel_mode=mode, devices=devices, **how)


@cache
def plan_of_mode(mode: str, layers: int = 3, devices: int = 8) -> sw.Plan:
    """The plan of a mode: what a page asks of it, such as the prices of other strategies, is asked once."""
    return gpt_plan(mode, layers, devices)


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
    return plan_of_mode("semi_auto")


@pytest.mark.parametrize(
    ("mode", "layers", "devices"),
    [("stand_alone", 3, 8), ("data_parallel", 3, 8), ("semi_auto", 3, 8), ("dynamic_programming", 1, 4)],
)
def test_figures_are_those_of_the_plan(mode: str, layers: int, devices: int) -> None:
    """Without alternatives, whose prices take a search for each plan: those of the marked plan are looked at below."""
    made = plan_of_mode(mode, layers, devices)
    found = Page(page([made], explain=0))
    stats, parts = found.with_attribute("data-stat"), found.with_attribute("data-part")
    assert stats["a step"].startswith(f"a step{time_text(made.cost)}")
    assert stats["peak memory"].startswith(f"peak memory{size_text(made.peak)}")
    assert stats["a rank sends"].startswith(f"a rank sends{size_text(made.sent)}")
    elements = sum(p.numel() for p in gpt.GPT(layers=layers).parameters())
    assert f"{elements:,}" in stats["parameters"]
    assert set(parts) == {"summary", "layers", "parameters", "certificate", "memory", "communication", "timeline"}
    for line in str(made.describe()).splitlines()[1:]:
        assert " ".join(line.split()) in parts["summary"]
    assert f"cost {time_text(made.cost, 6)}" in parts["certificate"]
    if made.bound is None:
        assert "no lower bound" in parts["certificate"]
    else:
        assert f"lower bound {time_text(made.bound, 6)}, gap {made.gap:.3%}" in parts["certificate"]


def test_a_page_prices_the_strategies_of_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[Search] = []
    price = Search.cost_graph
    monkeypatch.setattr(Search, "cost_graph", lambda search, *given: (priced.append(search), price(search, *given))[1])
    made = sw.plan(Chain(), (torch.ones(32, 16),), nn.MSELoss(), torch.ones(32, 16), devices=4)
    text = page([made], explain=3)
    assert text.count("Alternatives") + text.count("alternatives") >= 3 and len(priced) == 1


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
    assert "are not priced here: plan.explain(" in page([plan], explain=0)
    of_a_file = page([plan], ["folder/edited.json"], explain=0)
    assert "are not priced here: shardwright explain folder/edited.json blocks.0.up prices" in of_a_file


def test_alternatives_of_a_large_plan_are_priced_without_a_search(
    plan: sw.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_content, "CHEAP", 1)
    monkeypatch.setattr(report_content, "explained", None)  # a search
    explained = [part for part in page([plan]).split('<details class="op"')[1:] if "are not priced here" not in part]
    assert len(explained) == 3
    assert all(re.search(r"(next best|better): .* a step if nothing else changes", part) for part in explained)
    assert all('data-head="alone"' in part and "plan.explain(" in part for part in explained)


def test_a_page_counts_the_operators_that_it_omits(monkeypatch: pytest.MonkeyPatch, plan: sw.Plan) -> None:
    assert "are not listed" not in page([plan])
    monkeypatch.setattr(report_content, "MOST_OPERATORS", 2)
    assert re.search(r">\d+ further operators are not listed", page([plan])) is not None


def test_layers_that_are_split_alike_keep_their_lines(monkeypatch: pytest.MonkeyPatch, plan: sw.Plan) -> None:
    """Two parts of unlike layers may read the same, and parts are indented."""
    lines = ["layer 0: in parts", "    up: data 8", "layer 1: in parts", "    up: data 8"]
    monkeypatch.setattr(report_content, "describe", lambda plan: SimpleNamespace(body=lambda: lines, headline="plan"))
    text = page([plan], explain=0)
    assert text.count("up: data 8") == 2 and text.count('style="--in:4"') == 2


def test_no_sum_of_seconds_is_a_rounding_error() -> None:
    assert report_content._rest(0.1 + 0.2, 0.3) == 0.0 and report_content._rest(1.0, 0.25) == 0.75
    for mode in ("semi_auto", "data_parallel"):
        text = re.sub(r"<script.*", "", page([plan_of_mode(mode)], explain=0), flags=re.DOTALL)
        assert not re.search(r"\de-\d+ (s|ms|us)\b", text)


def test_a_sentence_stands_once(plan: sw.Plan) -> None:
    found = Page(page([plan], explain=0))
    message = Counter(" ".join("".join(text).split()) for tag, _, text in found.elements if tag in ("p", "text"))
    assert not [line for line, times in message.items() if times > 1 and line.count(" ") > 5 and "layout [" not in line]


def test_the_page_counts_operators_as_the_plan_does(plan: sw.Plan) -> None:
    made = sw.plan(nn.Linear(8, 8), (torch.ones(4, 8),), devices=4, parallel_mode="data_parallel")
    for each in (plan, made):
        stats = Page(page([each], explain=0)).with_attribute("data-stat")
        assert stats["operators"].startswith(f"operators{len(each.decisions):,}")
        assert f"{len(each.decisions)} operators" in repr(each)


def test_large_numbers_are_short() -> None:
    assert [count_text(n) for n in (999_999, 8_030_261_376, 1_200_000)] == ["999,999", "8.03 billion", "1.2 million"]


def test_operators_without_a_cost_share_a_row() -> None:
    leaf = lambda title, part, sent=0: Leaf(
        title, title, (title,), "", "", "", "", (part,), part, (sent,), "", (), False, None, Grid((), ()), None, (), ()
    )
    costs, sends, a, b = leaf("mul", 0.9), leaf("send", 0.0, 8), leaf("view", 0.0), leaf("view#1", 0.0)
    inner = Branch("model", inside=[a, costs, b, sends])
    tree = unfolded(gathered(Branch("", inside=[inner, leaf("relu", 0.1)])))
    (model, relu) = tree.inside
    assert model.open and [each.title for each in model.inside[:2]] == ["mul", "send"] and relu.title == "relu"
    assert model.inside[2].small and not model.inside[2].open and model.inside[2].inside == [a, b]


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
    other = plan_of_mode("data_parallel")
    found = Page(page([plan, other], ["a.json", "b.json"], explain=0))
    heads = ["".join(text) for tag, _, text in found.elements if tag == "h2"]
    assert [head.partition(":")[0] for head in heads[1:]] == ["a.json", "b.json"]
    (difference,) = ["".join(text) for _, given, text in found.elements if given.get("id") == "difference"]
    assert "mode: semi_auto -> data_parallel" in difference and difference.count("a step: ") == 1
    places = [given.get("id") or tag for tag, given, _ in found.elements if tag == "main" or given.get("id")]
    assert places.index("difference") < places.index("main"), "the difference comes first"
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

in_a_browser = pytest.mark.skipif(browser.found is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.Browser() as opened:
        yield opened


SHOWN = "[...document.querySelectorAll('.op')].filter(e => e.checkVisibility()).length"
TIP = "tip.hidden ? '' : tip.textContent"


def held_by_ranks(plan: sw.Plan) -> Iterator[tuple[str, list[str]]]:
    """The digits of each tensor of an operator as its picture has them, and the slices of the ranks."""
    for operator in plan.operators:
        shapes, layouts = (*operator.in_shapes, *operator.out_shapes), (*operator.in_layouts, *operator.out_layouts)
        for shape, layout in zip(shapes, layouts):
            slices = [layout.slice(shape, rank) for rank in range(8)]
            message = [
                ", ".join(f"{s.start}:{s.stop}" if c > 1 else ":" for s, c in zip(held, layout.cuts)) for held in slices
            ]
            if shape:
                yield SlicePictures().of(layout, shape, Cluster.of(None, 8)).dims, [f"[{each}]" for each in message]


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


@in_a_browser
def test_a_reader_folds_searches_and_points(plan: sw.Plan, tmp_path: Path, chromium: browser.Browser) -> None:
    """With real keys and a real pointer."""
    path = tmp_path / "page.html"
    path.write_text(page([plan], explain=0))
    chromium.open(path)
    value, press = chromium.value, chromium.press
    everything, folded = value("document.querySelectorAll('.op').length"), value(SHOWN)
    assert 0 < folded < everything, "layers are folded"
    press("/")
    assert value("document.activeElement === search")
    press(*"blocks.{0-2}.up")
    assert 0 < value(SHOWN) < everything and re.fullmatch(r"\d+ of \d+", value("found.textContent"))
    press(*"or_nothing")
    assert value(SHOWN) == 0
    value("search.select()")
    press("x", "Escape")  # Escape empties a search
    value("search.value = ''; search.dispatchEvent(new Event('input'))")
    assert value(SHOWN) == folded
    value("document.querySelector('.module:not([open]) summary').focus()")
    press("Enter")
    assert value(SHOWN) > folded, "a module is unfolded by a key"
    value("document.querySelector('.op').open = true; var picture = document.querySelector('.op svg.slices')")
    value("picture.scrollIntoView({block: 'center'}); picture.previousElementSibling.tabIndex = 0")
    value("picture.previousElementSibling.focus()")
    press("Tab")
    assert value("document.activeElement === picture") and "devices" in value(TIP)
    tip = value(TIP)
    press("ArrowRight", "ArrowRight")
    assert value(TIP).startswith("rank 1 holds")
    press("ArrowLeft", "ArrowLeft")
    assert value(TIP).startswith("rank 7 holds")
    press("Escape")
    assert value(TIP) == ""
    x, y, mesh = value(
        "(() => {const b = picture.getBoundingClientRect(), m = picture.dataset.mesh.split(',').map(Number);"
        "const [x, y] = at(m, 5); return [b.left + x + 3, b.top + y + 3, b.left]})()"
    )
    chromium.move(x, y)
    assert value(TIP).startswith("rank 5 holds") and value("picture.querySelectorAll('rect').length") == 1
    chromium.move(mesh + 3, y)
    assert value(TIP) == tip and value("picture.querySelectorAll('rect').length") == 0
    dims = "[...document.querySelectorAll('[data-dims]')].map(e => e.dataset.dims)"
    held = value(f"Object.fromEntries({dims}.map(e => [e, [...Array(8).keys()].map(rank => held(e, rank))]))")
    assert {each: message for each, message in held.items() if not each.startswith("0:")} == dict(held_by_ranks(plan))
    assert any(each.startswith("0:") and "part 1 of 4 of dim 0" in message for each, message in held.items())


@in_a_browser
def test_an_address_names_an_operator(plan: sw.Plan, tmp_path: Path, chromium: browser.Browser) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([plan], explain=0))
    chromium.open(path)
    name = next(name for name in plan.decisions if name.startswith("blocks.1."))
    chromium.value(f"location.hash = {name!r}")
    assert chromium.value("new Promise(r => setTimeout(() => r(1), 50)); 1") == 1
    opened = chromium.value("[...document.querySelectorAll('.op[open]')].map(e => e.dataset.names)")
    assert len(opened) == 1 and name in opened[0].split()


@in_a_browser
def test_light_and_dark(plan: sw.Plan, tmp_path: Path, chromium: browser.Browser) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([plan], explain=0))
    contrasts = []
    for dark in (False, True):
        chromium.open(path, dark=dark)
        colours = [
            chromium.value(f"getComputedStyle(document.querySelector('{part}')).{what}")
            for part, what in (("body", "backgroundColor"), ("body", "color"), (".soft", "color"), ("td", "color"))
        ]
        back, fore, soft, cell = (luminance(colour) for colour in colours)
        assert (back < 0.1) is dark and (fore > 0.5) is dark
        contrasts += [contrast(back, each) for each in (fore, soft, cell)]
    assert min(contrasts) > 4.5, "text is legible: WCAG AA"


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


#: What does not fit: parts of tables and texts that lie outside of the screen, and their number of pixels.
CUT = """[...document.querySelectorAll('td, p, b, small, summary, .stats div, svg.memory text')]
  .filter(e => e.checkVisibility()).map(e => [e.textContent.slice(0, 40), e.getBoundingClientRect()])
  .filter(([_, box]) => box.right > innerWidth + 1 || box.left < -1)
  .map(([text, box]) => [text, box.left, box.right])"""
#: The least height of a line of text, in pixels of the screen.
LEAST = """Math.min(...[...document.querySelectorAll('svg.memory text, .drawn svg:not(.memory) text, td, p, small')]
  .filter(e => e.checkVisibility() && e.textContent.trim())
  .map(e => e.ownerSVGElement ? e.getBBox().height * e.getScreenCTM().a : parseFloat(getComputedStyle(e).fontSize)))"""


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_cut_off_and_all_text_is_legible(
    plan: sw.Plan, width: int, count: int, tmp_path: Path, chromium: browser.Browser
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([plan] * count, explain=0).replace("<details", "<details open"))
    chromium.open(path, width)
    assert chromium.value("innerWidth") == width >= chromium.value("document.documentElement.scrollWidth")
    assert chromium.value(LEAST) >= 9
    if width == 390 or count == 1:
        assert chromium.value(CUT) == []
    clipped = "[...document.querySelectorAll('.drawn')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert width == 390 or chromium.value(clipped) == 0, "timelines fit"


@in_a_browser
def test_the_search_stays_in_view(plan: sw.Plan, tmp_path: Path, chromium: browser.Browser) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([plan], explain=0))
    chromium.open(path)
    chromium.value("scrollTo(0, 1500)")
    assert 0 <= chromium.value("search.getBoundingClientRect().top") < 40 < chromium.value("scrollY")


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
    message = dict(re.findall(r"<title>rank (\d+): (.*?)</title>", html))
    assert sorted(map(int, message)) == list(range(8))
    for rank in range(8):
        held = enumerate(zip(layout.slice(shape, rank), layout.cuts))
        parts = [f"part {piece.start * cut // 8} of {cut} of dim {dim}" for dim, (piece, cut) in held if cut > 1]
        assert message[str(rank)] == (", ".join(parts) or "the whole tensor")
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
    assert "on 8 devices, dim 0 in 2 parts, of which rank r has number r // 4 % 2" in plan.operators[0]._repr_html_()
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


@pytest.mark.parametrize("piped", [False, True])
def test_values_of_a_plan_do_not_flood_a_prompt(piped: bool) -> None:
    """Price, timeline, graph, operators and their like have reprs of at most three lines, for any model."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(60)))
    x = torch.zeros(8, 16)
    if piped:
        for number, layer in enumerate(net):
            sw.set_stage(layer, number // 30)
        plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=4, pipeline={"stages": 2, "micro_batches": 4})
        values = [plan.simulation, plan.operators, plan.graph, plan.stages[0].plan.price, plan.stages[0].plan.timeline]
    else:
        plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=4)
        values = [plan.price, plan.timeline, plan.unscheduled, plan.graph, plan.operators, plan.program, plan.schedule]
        values += [plan.in_time, plan]
    for value in values:
        text = repr(value)
        assert len(text.splitlines()) <= 3 and len(text) <= 300 and text.startswith("<"), text[:300]
    assert repr(plan.operators).endswith(f" and {len(plan.operators) - 12} more>")
    assert plan.operators == tuple(plan.operators) and plan.operators[1:3] == tuple(plan.operators)[1:3]
    html = plan.operators._repr_html_()
    assert len(cells(html)) == 41 and f"and {len(plan.operators) - 40} more: plan.explain()" in html


def test_what_the_reprs_say() -> None:
    x = torch.zeros(8, 16)
    plan = sw.plan(nn.Linear(16, 16), (x,), nn.MSELoss(), x, devices=4)
    assert repr(plan.graph) == f"<Graph: {len(plan.graph.ops)} operators, 2 parameters, 2 inputs>"
    assert f"a step {plan.price.total * 1e3:.4g} ms: forward " in repr(plan.price)
    assert f"at most {format_bytes(plan.timeline.peak)} (inputs " in repr(plan.timeline)
