"""The layers of the package (`[tool.importlinter]` in pyproject.toml), and what else holds for every file of its
tree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest
from forked_python import fresh
from paths import ROOT

PACKAGE = ROOT / "shardwright"
FILES = sorted(PACKAGE.rglob("*.py"))
#: Where `torch.distributed` may be imported: what runs on ranks, and what starts, joins or stores for them.
ON_RANKS = (
    "runtime/",
    "checkpoint/",
    "launch/",
    "integrations/",
    "rehearsal/",
    "parallel/",
    "cli/",
    "process_runtime.py",
    "ops.py",
    "torch_private/",
    "pipeline/schedules.py",
)  # takes the orders of torch's own schedules; needs no process group
#: Files that read or set variables of the environment. `launch.environment` says what they mean.
OF_ENVIRONMENT = {
    "capture/observed/stand_ins.py",  # records what the forward of a model reads and sets
    "launch/run.py",
    "launch/agent.py",
    "launch/device_choice.py",
    "process_runtime.py",
    "launch/progress.py",
    "cli/doctor_command.py",
    "cli/forked_ranks.py",
    "cli/command_line.py",
    "runtime/distributed/shared_memory.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports from other packages, those inside of functions too."""
    nodes = nodes_of(tree_of(path))
    found = {alias.name for node in nodes[ast.Import] for alias in node.names}
    for node in nodes[ast.ImportFrom]:
        if not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def attributes(path: Path) -> set[str]:
    """The names that stand behind a dot in a file."""
    return {node.attr for node in nodes_of(tree_of(path))[ast.Attribute]}


@cache
def nodes_of(tree: ast.AST) -> defaultdict[type[ast.AST], list]:
    """The nodes of a tree by their kind, each kind in the order of `ast.walk`."""
    nodes: defaultdict[type[ast.AST], list] = defaultdict(list)
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
    return nodes


#: In a process of its own: import-linter disables the loggers of the process that calls it.
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"


def broken_contracts(config: Path, folder: Path) -> str:
    """The report of import-linter on the package in `folder`; empty where all contracts are kept."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", LINT, config], env=environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_imports_run_downwards_and_in_no_circle() -> None:
    assert broken_contracts(ROOT / "pyproject.toml", ROOT) == ""


def test_an_import_upwards_is_found(tmp_path: Path) -> None:
    """The contract fails on a package of two layers whose lower one imports the higher one."""
    package = tmp_path / "upside"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "high.py").write_text("")
    (package / "low.py").write_text("def late():\n    from . import high\n")
    (tmp_path / "contract.toml").write_text(
        '[tool.importlinter]\nroot_package = "upside"\n[[tool.importlinter.contracts]]\nname = "layers"\n'
        'type = "layers"\n'
        'containers = ["upside"]\nlayers = ["high", "low"]\n'
    )
    assert "upside.low -> upside.high" in broken_contracts(tmp_path / "contract.toml", tmp_path)


def test_planning_does_not_know_torch_distributed():
    found = {
        str(path.relative_to(PACKAGE)): sorted(names)
        for path in FILES
        if not str(path.relative_to(PACKAGE)).startswith(ON_RANKS)
        and (names := {name for name in imported(path) if name.startswith("torch.distributed")})
    }
    assert found == {}


def test_variables_of_the_environment_are_read_in_few_files():
    found = {str(path.relative_to(PACKAGE)) for path in FILES if not attributes(path).isdisjoint(("environ", "getenv"))}
    assert found == OF_ENVIRONMENT


#: Functions of Python that run text as code.
OF_TEXT = {"eval", "exec", "compile"}


def runs_text(tree: ast.Module) -> list[int]:
    """The lines that name a function which runs text. Methods of these names are others (``net.eval()``), and so are
    parameters (``compile=True``)."""
    nodes = nodes_of(tree)
    names = OF_TEXT - {node.arg for node in nodes[ast.arg]}
    return [
        *(node.lineno for node in nodes[ast.Name] if node.id in names),
        *(n.lineno for n in nodes[ast.Attribute] if n.attr in OF_TEXT and ast.unparse(n.value) == "builtins"),
        *(node.lineno for node in nodes[ast.ImportFrom] if node.module == "builtins"),
    ]


def test_no_file_runs_text_as_code():
    assert {str(path.relative_to(PACKAGE)): lines for path in FILES if (lines := runs_text(tree_of(path)))} == {}


@pytest.mark.parametrize("line", ["eval('1')", "run = exec", "builtins.compile('1')", "from builtins import eval as f"])
def test_text_that_is_run_is_found(line: str) -> None:
    assert runs_text(ast.parse(f"x = 1\n{line}\nnet.eval(); re.compile('a'); torch.compile(net)")) == [2]


#: What loads a pickle runs code of its writer. The one file writes torch's own format, and reads none.
WITH_PICKLE = {"checkpoint/tensor_files.py"}


def test_ranks_exchange_no_pickles():
    """Messages of ranks are JSON (`rank_messages`): neither pickle nor the collectives of torch that use it."""
    objects = {"all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"}
    objects |= {"send_object_list", "recv_object_list"}
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve") for name in imported(path))
        or not attributes(path).isdisjoint(objects)
    }
    assert found == WITH_PICKLE


def test_no_file_is_above_700_lines():
    files = [
        path for folder in ("shardwright", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > 700} == {}


#: Words that begin a clause, where a docstring begins with its noun, or with an imperative.
CLAUSES = frozenset("What Whether Of Who That Which How Where When As It They In".split())


def documented(node: ast.AST) -> list:
    """A module, class or function, and those inside of it: they are statements, and stand in no expression."""
    inside = (
        one
        for field in ("body", "orelse", "finalbody", "handlers", "cases")
        if isinstance(found := getattr(node, field, []), list)
        for one in found
    )
    below = [one for child in inside for one in documented(child)]
    return [node, *below] if isinstance(node, WITH_DOCSTRINGS) else below


WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def clauses(tree: ast.Module) -> list[str]:
    """The first words of the docstrings that begin with one of `CLAUSES`, with the line of each."""
    return [
        f"{node.body[0].lineno}: {doc[:60]}"
        for node in documented(tree)
        if (doc := ast.get_docstring(node)) and re.split(r"\W", doc, maxsplit=1)[0] in CLAUSES
    ]


@pytest.mark.parametrize("folder", ["shardwright", "tests", "benchmarks", "examples", "docs"])
def test_docstrings_begin_with_a_noun_or_an_imperative(folder: str) -> None:
    found = {str(path.relative_to(ROOT)): clauses(tree_of(path)) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert {name: begins for name, begins in found.items() if begins} == {}


def test_docstrings_that_begin_with_a_clause_are_found() -> None:
    tree = ast.parse('"""In it."""\nclass A:\n    """Area."""\n    def f(self):\n        """What it is."""\n')
    assert clauses(tree) == ["1: In it.", "5: What it is."]


def comment_clauses(text: str) -> list[str]:
    """The lines of a file's comments that begin with one of `CLAUSES`, where a comment begins."""
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if re.match(rf"\s*#:? ({'|'.join(sorted(CLAUSES - BEGINNINGS))}) ", line)
        and (number == 1 or not lines[number - 2].strip().startswith("#"))
    ]


#: Words of `CLAUSES` with which a comment between lines of code may begin: a condition or a place before the rule.
BEGINNINGS = frozenset("Where When How In Which As".split())


def test_comments_begin_with_a_noun_or_an_imperative() -> None:
    found = {str(path.relative_to(PACKAGE)): comment_clauses(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: begins for name, begins in found.items() if begins} == {}


def test_comments_that_begin_with_a_clause_are_found() -> None:
    text = "#: What it is.\nx = 1\n# Of it.\n# They go on.\ny = 2  # Of all\n# Where x is 1.\n"
    assert comment_clauses(text) == ["1: #: What it is.", "3: # Of it."]


def test_no_folder_has_more_than_20_files():
    folders = Counter(path.parent for path in FILES)
    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_base_names_stand_once():
    names = Counter(path.name for path in FILES)
    assert {name for name, count in names.items() if count > 1} == {"__init__.py"}


def test_public_classes_have_one_meaning_each():
    names = Counter(
        node.name
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()


#: Names that the field has no use for, and the names that stand for what was meant by them.
RETIRED = {
    "asks": "consumer_costs, input_layout",
    "carries": "batch_dims",
    "conversion": "redistribution",
    "fed": "inputs, input_placement",
    "footprint": "cost",
    "given": "the noun of the value: setting, arguments, entries",
    "gone": "the noun of what is no longer there",
    "handed": "the noun of the value",
    "lets_go": "reshards_after_forward",
    "maker": "producer",
    "makers": "producers",
    "own_part": "per_rank_batch",
    "remade": "recompute_set",
    "resent": "kept_collective_output",
    "said": "text, reason, message",
    "told": "announced",
    "twin": "counterpart",
    "twins": "counterparts",
    "unkept": "regathered",
    "wants": "input_layouts, needs_",
    "who": "the noun: operators, ranks",
}


#: The same as `RETIRED` for the files of the package; in tests, benchmarks and examples these names still stand.
RETIRED_IN_PACKAGE = {
    "again": "recomputed, regathered",
    "held": "stored, allocations, content, sharding: the noun of the thing",
    "here": "a condition by its name: on_one_rank",
    "inner": "the noun of the level: ranks_of_host",
    "instance": "placed, placed_value",
    "kept": "saved, needed_later: the noun of the thing",
    "left": "remaining, exceptions",
    "others": "the noun of the rest: metrics, alternatives",
    "own": "node_costs, internal, per_rank, part_size: the noun of the thing",
    "router": "partitioner",
    "there": "the noun of the place",
    "words": "encoded, text",
}

#: Names of `RETIRED_IN_PACKAGE` that users have, or that the field has for another thing -> the files that have them.
FIELDS_OWN_NAMES = {
    "again": {  # `Collective.again`
        "cost/communication_schedule.py",
        "report/report_content.py",
        "report/table_elements.py",
        "parallel/value_and_grad.py",  # pickles of optimizers name the function
        "runtime/distributed/scheduled_collectives.py",
    },
    "inner": {"rules/matmul.py"},  # torch.inner
    "kept": {  # `OptimizerParallel.kept`
        "partition/parameter_sharding.py",
        "planners/limited_alternatives.py",
        "report/description.py",
        "report/plan_diff.py",
    },
    "left": {  # beside right
        "report/html_elements.py",
        "report/timeline.py",
        "rules/linear_algebra.py",
        "rules/matmul.py",
        "runtime/local/matrix_products.py",
    },
    "own": {  # `Plan.own`, the programs of hybrid_parallel, and `Share.own`
        "operator_explanation.py",
        "parallel/call_planning.py",
        "planfile/document_writer.py",
        "planfile/plan_document.py",
        "planning.py",
        "rehearsal/rehearse.py",
        "report/description.py",
        "report/explanations.py",
        "report/plan_figures.py",
        "report/report_content.py",
        "runtime/distributed/agreement.py",
        "runtime/distributed/shared_memory.py",
        "runtime/distributed/sliced_tensors.py",
        "runtime/local/local_executor.py",
        "runtime/step_program.py",
        "sharded_plan.py",
        "verification/verify_report.py",
    },
    "words": {  # machine words of random numbers; `Axis.words` in reports
        "report/description.py",
        "report/html_elements.py",
        "rules/random_numbers/counter_rng.py",
        "rules/random_numbers/traced_numbers.py",
        "rules/random_numbers/word_arithmetic.py",
        "runtime/slice_initialization.py",
    },
}


#: A comment or a string.
PROSE = "|".join(
    (
        r"#[^\n]*",
        *(rf"{q}(?:\\[\s\S]|[^\\])*?{q}" for q in ('"""', "'''")),
        *(rf"{q}(?:\\[\s\S]|[^\\{q}])*{q}" for q in "\"'"),
    )
)


@cache
def names_in_code(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"{PROSE}|\b(_*(?:{'|'.join(names)}))\b", re.IGNORECASE)


def retired(text: str, names: Collection[str] = tuple(RETIRED)) -> list[str]:
    """The names of a file that are among `names`, each with its line; leading underscores do not count."""
    found = (one for one in names_in_code(tuple(names)).finditer(text) if one[1])
    return [f"{1 + text[: one.start()].count(chr(10))}: {one[1]}" for one in found]


#: Names that a folder may have, though the package may not: `given` is hypothesis's decorator, and the value of a case.
ALLOWED = {"tests": {"given"}}


@pytest.mark.parametrize("folder", ["shardwright", "benchmarks", "examples", "docs", "tests"])
def test_names_are_those_of_the_field(folder: str) -> None:
    allowed = tuple(f": {name}" for name in ALLOWED.get(folder, ()))
    found = {
        str(path.relative_to(ROOT)): [
            line
            for line in retired(path.read_text(encoding="utf-8"))
            if not (allowed and line.lower().endswith(allowed))
        ]
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_names_of_the_package_are_those_of_the_field() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in FILES}
    found: dict[str, set[str]] = {}
    wrong: dict[str, list[str]] = {}
    for name, text in texts.items():
        for line in retired(text, RETIRED_IN_PACKAGE):
            word = line.partition(": ")[2].lstrip("_").lower()
            if name in FIELDS_OWN_NAMES.get(word, ()):
                found.setdefault(word, set()).add(name)
            else:
                wrong.setdefault(name, []).append(line)
    assert wrong == {}
    assert found == FIELDS_OWN_NAMES  # a file without the name leaves the list


def retired_in_prose(text: str) -> list[str]:
    """The code in backticks, on one line, that has a name of `RETIRED`."""
    return [
        code
        for code in re.findall(r"`([^`\n]+)`", text)
        if {word.lstrip("_").lower() for word in re.findall(r"\w+", code)} & RETIRED.keys()
    ]


#: Code of a page that keeps a retired name: the field of a pipeline's file, which earlier files have.
KEPT = {"docs/reference/files.md": ["fed"]}


def test_pages_name_no_retired_name() -> None:
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = {str(page.relative_to(ROOT)): retired_in_prose(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: names for page, names in found.items() if names} == KEPT


def test_a_retired_name_is_found() -> None:
    assert retired("given = 1\nclass Fed:\n    _told = 'said'  # said\n") == ["1: given", "2: Fed", "3: _told"]
    assert retired_in_prose("It is said by `plan.fed(x)`, ``_Told`` and `layout`.") == ["plan.fed(x)", "_Told"]


#: Where tables may be keyed by ``id()``. Elsewhere the key is the object itself, an index or a name, or the table is of
#: `identity_tables`: an id belongs to the next object once its owner has been freed.
BY_ID = {
    "identity_tables.py": "its tables own what they key",
    "verification/verify.py": "the memo of `copy.deepcopy`",
    "parallel/model_copies.py": "likewise",
    "runtime/distributed/gradient_tensors.py": "likewise",
    "runtime/replaced_parameters.py": "likewise",
    "autocast.py": "tells the tensors of one call apart, which all live",
    "capture/annotations.py": "the memo of `copy.deepcopy`",
    "capture/module_calls.py": "likewise",
    "capture/side_effects.py": "a text that tells one stream of the user from another",
    "capture/observed/places.py": "keys of places, whose tables hold the places and so their owners",
    "capture/observed/named_reads.py": "code of functions, which lives as long: hashing reads its whole content",
}


def of_id(tree: ast.Module) -> list[int]:
    """The lines that name the function `id`."""
    return sorted(n.lineno for n in nodes_of(tree)[ast.Name] if n.id == "id" and isinstance(n.ctx, ast.Load))


def test_tables_are_keyed_by_objects() -> None:
    files = [str(path.relative_to(PACKAGE)) for path in FILES if of_id(tree_of(path))]
    assert set(files) == set(BY_ID)


def test_a_table_by_ids_is_found() -> None:
    assert of_id(ast.parse("x.id = 1\nknown[id(x)] = 2\nkeys = map(id, xs)")) == [2, 3]


BROAD = re.compile(r"^ *except (?:Base)?Exception\b[^#\n]*$", re.MULTILINE)


def test_a_broad_except_has_its_reason() -> None:
    """A comment says what raises anything, and where the error goes."""
    found = {str(path.relative_to(PACKAGE)): BROAD.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert BROAD.findall("    except Exception as e:\nexcept Exception:  # why\n") == ["    except Exception as e:"]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} - {PACKAGE}), ids=lambda p: p.name)
def test_a_folder_says_what_its_files_hold(folder):
    """The docstring of the folder names each of its modules."""
    doc = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    assert [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__" and not re.search(rf"\b{path.stem}\b", doc)
    ] == []


STARTS = {
    "shardwright.AutoParallel": ("torch.distributed.tensor", "sympy", "rich", "highspy", "numpy.testing"),
    "shardwright.cli.main.main": ("torch", "rich", "numpy"),
    "shardwright.launch.run": ("torch", "rich", "numpy"),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_start_does_not_load(name: str) -> None:
    """Each of these takes a quarter of a second to two seconds to import, and is loaded where it is needed."""
    code = f"import sys; from {name.rsplit('.', 1)[0]} import {name.rsplit('.', 1)[1]}; print(*sys.modules)"
    done = fresh(code, cwd=ROOT, check=True)
    assert [module for module in STARTS[name] if module in done.stdout.split()] == []
