"""The places of test files, which mirror the package.

The tests of `shardwright/<folder>/<module>.py` stand in `tests/<folder>/test_<module>.py`. Where they are more than
one file, the others are `tests/<folder>/test_<module>_<aspect>.py`. Tests of a whole folder, or of several of its
modules together, are `tests/<folder>/test_<folder>[_<aspect>].py`. Modules at the top of the package have their tests
at the top of `tests/`. Folders in `CROSS_CUTTING` have no counterpart in the package.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from conftest import LONGEST, QUICK
from paths import ROOT

PACKAGE, TESTS = ROOT / "shardwright", ROOT / "tests"
#: Folders of `tests/` whose files name no module of the package, each with its reason.
CROSS_CUTTING = {
    "benchmarks": "short runs of the scripts in benchmarks/",
    "docs": "the pages in docs/, the docstrings, the notebooks and the schemas of files",
    "examples": "the scripts in examples/",
    "goldens": "numbers recorded from another system, one file for each mode or setting",
    "project": "the repository: layers, packaging, types, these places; and the helpers in tests/support/",
    "support": "helpers that several tests share; no tests",
    "zoo": "models of libraries, from the capture to the training, and the page that lists them",
}
#: Folders whose Python files may be other files than tests.
WITH_HELPERS = {"support", "zoo"}


def misplaced(tests: Path, package: Path) -> list[str]:
    """The files below `tests` that stand at no legal place, each with the folder whose modules it may name."""
    wrong = []
    for path in sorted(tests.rglob("*.py")):
        place = path.relative_to(tests)
        top = place.parts[0]
        if top in CROSS_CUTTING:
            if not path.name.startswith("test_") and top not in WITH_HELPERS:
                wrong.append(f"{place}: a helper belongs to support/")
        elif path.name.startswith("test_"):
            folder = package / place.parent
            names = [module.stem for module in folder.glob("*.py") if module.stem != "__init__"]
            names += [place.parent.name] if folder != package else []
            if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
                wrong.append(f"{place}: begins with test_ and no module of {folder.relative_to(package.parent)}/")
        elif path.name != "conftest.py":
            wrong.append(f"{place}: a helper belongs to support/")
    return wrong


def test_every_file_names_the_module_that_it_tests() -> None:
    assert misplaced(TESTS, PACKAGE) == []


def test_misplaced_files_are_found(tmp_path: Path) -> None:
    for name in ("layout.py", "rules/__init__.py", "rules/shape.py", "rules/random_numbers/word_arithmetic.py"):
        (tmp_path / "pkg" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pkg" / name).touch()
    legal = "conftest.py test_layout.py test_layout_digits.py rules/test_shape.py rules/test_rules_every.py"
    legal += " rules/random_numbers/test_word_arithmetic.py docs/test_pages.py support/ranks.py zoo/models.py"
    wrong = "test_shape.py test_layouts.py helper.py rules/test_layout.py rules/test_word_arithmetic.py rules/helper.py"
    wrong += " rule/test_shape.py docs/helper.py"
    for name in [*legal.split(), *wrong.split()]:
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    found = misplaced(tmp_path / "tests", tmp_path / "pkg")
    assert sorted(line.split(":")[0] for line in found) == sorted(wrong.split())


def test_folders_without_a_counterpart_are_there() -> None:
    """A folder of the package is no such folder."""
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("*.py"))}
    assert folders - {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(CROSS_CUTTING)


def test_base_names_stand_once() -> None:
    """Tests take networks and helpers from one another by the base name (`conftest.py`)."""
    names = Counter(path.name for path in TESTS.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_the_lists_of_long_and_quick_files_name_files() -> None:
    files = {path.stem for path in TESTS.rglob("test_*.py")}
    assert {f"test_{name}" for name in (*LONGEST, *QUICK)} <= files
