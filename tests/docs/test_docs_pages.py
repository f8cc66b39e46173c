"""The pages of the site: their code runs, their links lead somewhere, and the reference names everything."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doc_pages import PYTHON, RUN, anchors, broken_links, commands_of, links, recorded_differences, run, shown
from paths import DOCS, ROOT

import shardwright as sw
from shardwright import errors
from shardwright.cli.main import main as cli
from shardwright.planners.planning_problem import PLANNERS
from shardwright.rules import registry
from shardwright.runtime import profile_ranges

PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
#: Modules of other libraries' loops; they are not imported here, as each imports its library.
LIBRARIES = ("hugging_face", "accelerate", "lightning")
TAUGHT = [
    page for folder in ("learn", "how-to", "reference", "understand") for page in sorted((DOCS / folder).glob("*.md"))
]
STARTS = [ROOT / "README.md", DOCS / "index.md", DOCS / "what-is-there.md"]
#: The begin of a block that does not run.
BLOCK = re.compile(r"^ *```(?:py|sh|text|json|diff)\n", re.MULTILINE)

ELSEWHERE = "another library's code, beside ours"
PRINTED = "printed on another machine, or after a failure; a test of the command or the message has its form"
SHELL = "for a shell, a launcher or a scheduler; tests/launch and tests/cli run these"
#: The blocks that do not run, by page: their number, and the reason.
NOT_RUN = {
    "README.md": (4, "a pretrained model; a picture and a line that other tests compare; make"),
    "docs/how-to/cluster-file.md": (1, SHELL),
    "docs/how-to/doctor.md": (1, PRINTED),
    "docs/how-to/from-dtensor.md": (1, ELSEWHERE),
    "docs/how-to/from-fsdp2.md": (1, ELSEWHERE),
    "docs/how-to/from-jax.md": (1, ELSEWHERE),
    "docs/how-to/hugging-face.md": (4, "compared with what was recorded; a command that takes half a minute"),
    "docs/how-to/long-work.md": (3, PRINTED),
    "docs/how-to/read-a-profile.md": (4, PRINTED),
    "docs/how-to/rehearse.md": (1, PRINTED),
    "docs/how-to/resume-elsewhere.md": (1, "processes, which tests/docs/test_docs_launched.py starts"),
    "docs/how-to/slurm.md": (1, SHELL),
    "docs/learn/checkpoints.md": (1, PRINTED),
    "docs/learn/five-minutes.md": (3, SHELL),
    "docs/learn/many-hosts.md": (3, PRINTED),
    "docs/learn/pipelines.md": (1, "columns are left out of a table"),
    "docs/learn/search.md": (1, "a search of two minutes; tests/cli plans GPT-3"),
    "docs/reference/commands.md": (1, SHELL),
    "docs/reference/files.md": (2, "settings of an editor, and a file that test_schemas reads"),
    "docs/understand/examples.md": (3, "compared with what the examples print, in tests/examples"),
    "docs/understand/index.md": (1, "a picture"),
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes parts of pages."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    return importlib.import_module("generated")


@pytest.mark.parametrize(
    "page", [p for p in [*TAUGHT, *STARTS] if RUN.search(p.read_text(encoding="utf-8"))], ids=named
)
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page in a folder of its own; the rules and planners that it adds are gone after it."""
    if named(page) == "docs/learn/gpus.md" and torch.__version__ < "2.10":
        pytest.skip("the page says that torch 2.9 lacks an option")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(PLANNERS)
    try:
        assert run(page)
    finally:
        PLANNERS.clear()
        PLANNERS.update(before)


def test_blocks_that_do_not_run_are_listed_with_a_reason() -> None:
    counts = {named(page): len(BLOCK.findall(page.read_text(encoding="utf-8"))) for page in [*TAUGHT, *STARTS]}
    assert {name: count for name, count in counts.items() if count} == {name: n for name, (n, _) in NOT_RUN.items()}


def test_a_learn_page_has_code_that_runs() -> None:
    pages = [page for page in sorted((DOCS / "learn").glob("*.md")) if page.stem != "index"]
    assert [named(page) for page in pages if not PYTHON.search(page.read_text(encoding="utf-8"))] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=named)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `title`, here\n\n## Twice\n\n## Twice\n\n```\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-title-here) [b](there.md#twice-1) [c](gone.md) [d](there.md#no-title) [e](#none)\n")
    assert broken_links(page) == ["gone.md", "there.md#no-title", "#none"]
    assert anchors("# A `title`, here") == {"a-title-here"} and links("`[a](b.md)` [x](https://y.z)") == []


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("```python\n>>> 1 + 1\n3\n```", "Expected"),
        ("```python\nraise ValueError('wrong')\n```", "wrong"),
        ("```console\n$ shardwright checkpoint info nowhere\na step\n```", "nowhere"),
    ],
)
def test_a_block_that_is_wrong_is_found(block: str, found: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{block}\n")
    with pytest.raises((AssertionError, ValueError), match=found):
        run(page)


def test_commands_that_take_long_are_shown_as_they_were_recorded() -> None:
    pages = [page for page in PAGES if shown(page)]
    records = {page: DOCS / "recorded" / f"{page.stem}.txt" for page in pages}
    assert [named(page) for page, record in records.items() if not record.exists()] == []
    assert {
        named(page): found for page, record in records.items() if (found := recorded_differences(page, record))
    } == {}


def test_a_figure_that_was_not_recorded_is_found(tmp_path: Path) -> None:
    page, record = tmp_path / "page.md", tmp_path / "page.txt"
    page.write_text(
        "# Page\n\n```text\n$ shardwright plan a.py\n...\na step takes 2 ms\n$ shardwright explain b\n```\n"
    )
    record.write_text("$ shardwright plan a.py\nplan\na step takes 1 ms\n")
    assert recorded_differences(page, record) == ["shardwright plan a.py", "shardwright explain b"]
    record.write_text("$ shardwright plan a.py\nplan\na step takes 2 ms\n$ shardwright explain b\n")
    assert recorded_differences(page, record) == []


@pytest.mark.long
def test_the_large_model_of_a_page_is_planned_as_it_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's own code with two layers: its parameters are bfloat16, and its plan costs what the record says. Where
    it does not, all figures of the page are to be recorded again (docs/recorded)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    text = (DOCS / "how-to" / "hugging-face.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# file: llama8b.py\n(.*?)```", text, re.DOTALL)
    assert "num_hidden_layers=32" in code
    Path("llama2.py").write_text(code.replace("num_hidden_layers=32", "num_hidden_layers=2"))
    with torch.device("meta"):
        net = importlib.import_module("llama2").build()["net"]
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    words = ["llama2.py:build", "--devices", "8", "--cluster", "h100x8", "--hsdp", "level3"]
    assert cli(["plan", *words]) == 0
    (step,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a step takes")]
    known = dict(commands_of((DOCS / "recorded" / "hugging-face.txt").read_text(encoding="utf-8")))
    assert step in known[" ".join(["shardwright", "plan", *words])]


@pytest.mark.parametrize("emit", ["emit_nvtx", "emit_itt"])
def test_the_lines_for_nsys_make_ranges_with_names(emit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own lines, behind its first program; torch has the same for VTune, which needs no GPU."""
    if emit == "emit_nvtx" and not torch.cuda.is_available():
        pytest.skip("emit_nvtx needs a build of torch with CUDA, and a GPU")
    if emit == "emit_itt" and not torch.profiler.itt.is_available():
        pytest.skip("a build of torch without ITT")
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "how-to" / "read-a-profile.md").read_text(encoding="utf-8")
    names: dict = {"__name__": "page"}
    exec(PYTHON.findall(text)[0][1], names)
    (lines,) = re.findall(r"```py\n(with torch\.autograd\.profiler\.emit_nvtx.*?)```", text, re.DOTALL)
    texts, made = list[str](), profile_ranges.record_function
    monkeypatch.setattr(profile_ranges, "record_function", lambda text: texts.append(text) or made(text))
    exec(lines.replace("emit_nvtx", emit), names)
    steps = [text for text in texts if text.startswith("sw::step")]
    assert {"sw::layers.0.up linear", "sw::layers.0.up linear backward"} < set(texts) and len(steps) == 3


def test_every_page_is_in_a_list_of_contents() -> None:
    """Each list stands in a block ``{toctree}``, of names without .md."""
    listed = {DOCS / "index"}
    for page in PAGES:
        for block in page.read_text(encoding="utf-8").split("```{toctree}")[1:]:
            entries = [line for line in block.split("```")[0].splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / entry.strip()).resolve() for entry in entries}
    pages = {page.with_suffix("") for page in (*PAGES, *NOTEBOOKS)}
    assert sorted(map(named, pages - listed)) == []
    assert sorted(str(page) for page in listed - pages) == []


# -- reference ---------------------------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name(generated: ModuleType) -> None:
    documented = [name for page in PAGES for name in generated.listed_names(page)]
    others = set()
    for module in LIBRARIES:
        text = (ROOT / "shardwright" / "integrations" / f"{module}.py").read_text(encoding="utf-8")
        listed = ast.literal_eval(text.split("\n__all__ = ")[1].split("\n")[0])
        others |= {f"shardwright.integrations.{module}.{name}" for name in listed}
    others.remove("shardwright.integrations.hugging_face.Accelerator")  # that of the module accelerate
    assert sorted(documented) == sorted({*sw.__all__, *others} - {"__version__"})


def test_the_reference_has_every_error() -> None:
    """With a heading of its own, a cause and a cure."""
    text = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    parts = {part.split("\n")[0].strip("` "): part for part in text.split("\n## ")[1:]}
    known = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert known | {"InfeasibleMemoryError", "RecaptureWarning"} <= set(parts)
    assert [name for name, part in parts.items() if "**Cause.**" not in part or "**Cure.**" not in part] == []


def test_commands_are_those_of_the_parsers(generated: ModuleType) -> None:
    text = generated.filled("<!-- made: commands -->")
    for command in (
        "run",
        "plan",
        "explain",
        "simulate",
        "verify",
        "rehearse",
        "compare-trace",
        "checkpoint transform",
        "calibrate",
    ):
        assert f"## shardwright {command}\n" in text
    assert "--comm-memory SIZE" in text and max(map(len, text.splitlines())) <= 160


def test_operators_are_those_of_the_registry(generated: ModuleType) -> None:
    text = generated.filled("<!-- made: operators -->")
    assert "| `aten.linear` | default |" in text and "`shardwright." not in text
    assert "CrossMapLRN2d` | a `torch.autograd.Function` |" in text


def test_indented_code_of_a_docstring_is_marked(generated: ModuleType) -> None:
    lines = ["Text.", "", "    code()", "", "    more()", "", "Args:", "    a: it."]
    assert generated.marked(lines) == ["Text.", "", "::", "", *lines[2:]]


def test_pictures_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    made = importlib.import_module("pictures").made()
    assert {path for path, text in made.items() if path.read_text(encoding="utf-8") != text} == set(), (
        "python docs/pictures.py"
    )


def test_pictures_of_reports_show_the_page_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of each page is that of its picture; another torch may plan otherwise."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    pictures = importlib.import_module("pictures")
    known = json.loads((pictures.REPORTS / "reports.json").read_text(encoding="utf-8"))
    shown = pictures.reports()
    assert set(known["pages"]) == set(shown) == {path.stem for path in pictures.REPORTS.glob("report*.png")}
    if known["torch"] == torch.__version__.partition("+")[0]:
        assert known["pages"] == pictures.digests(shown), "python docs/pictures.py --report"
    changed = {name: each._replace(text=f"{each.text} ") for name, each in shown.items()}
    assert not set(pictures.digests(changed).values()) & set(pictures.digests(shown).values())


def test_optimizers_of_the_readme_and_the_examples_are_fused() -> None:
    """An optimizer that is not fused takes several kernels for each parameter."""
    found = {
        (path.name, call)
        for path in [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
        for call in re.findall(r"torch\.optim\.[A-Z]\w+\(.*", path.read_text(encoding="utf-8"))
    }
    assert len(found) > 10 and [call for call in found if "fused=True" not in call[1]] == []
