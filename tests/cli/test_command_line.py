"""The parts that all commands share: help with examples, completion, JSON, the exit codes, and the end by Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paths import ROOT
from pipeline_networks import Chain, setting
from torch import nn

import shardwright as sw
from shardwright import process_runtime as runtime_init
from shardwright.cli import library_imports, main
from shardwright.cli.command_line import Parser
from shardwright.operator_explanation import explained
from shardwright.runtime.profile_ranges import RangeNames

MODEL = """
import torch, torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def build():
    return dict(net=Net(), inputs=(torch.ones(64, 64),), loss_fn=nn.MSELoss(), targets=torch.ones(64, 64))
"""

SCRIPT = (
    MODEL
    + """
import shardwright as sw

sw.init()
model = sw.AutoParallel(Net(), loss_fn=nn.MSELoss(), parallel_mode="dynamic_programming")
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(64, 64), torch.ones(64, 64)).backward()
"""
)


def parsers(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    """A parser, and those of its commands."""
    assert isinstance(parser, Parser)
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


PARSERS = list(parsers(main.build_parser()))
EXAMPLES = list(dict.fromkeys(line for parser in PARSERS for line, _ in parser.examples))
#: Examples that start processes, or ask other machines: they are parsed, and not run.
PARSED = ("torchrun ", "shardwright calibrate", "shardwright run --worker_num")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which examples are true: a script, a model's file, two plans, a trace and a
    run's checkpoints."""
    made = tmp_path_factory.mktemp("examples")
    (made / "train.py").write_text(SCRIPT)
    (made / "model.py").write_text(MODEL)
    names: dict = {}
    exec(MODEL, names)
    given = names["build"]()
    plan = sw.plan(**given, devices=8, parallel_mode="dynamic_programming")
    plan.save(made / "plan.json")
    ranges = [f"sw::step rank 0 of 8, plan {plan.fingerprint}", f"sw::{RangeNames.of(plan).operator('linear')}"]
    each = [{"ph": "X", "cat": "user_annotation", "name": n, "pid": 1, "tid": 1, "ts": 5, "dur": 1} for n in ranges]
    (made / "trace.json").write_text(json.dumps({"traceEvents": each}))
    sw.plan(**given, devices=8, parallel_mode="data_parallel").save(made / "edited.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_init, "_current", [])
        sw.init(devices=4)
        net = names["build"]()["net"]
        model = sw.AutoParallel(net, loss_fn=nn.MSELoss(), parallel_mode="data_parallel")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model(torch.ones(64, 64), torch.ones(64, 64)).backward()
        for step in (3, 4):
            sw.save_checkpoint(model, optimizer, made / "runs" / "4", step=step, integrated_save=False)
    return made


@pytest.fixture
def inside(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `folder` as the current folder, in a process that commands may change."""
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "")
    monkeypatch.setattr(runtime_init, "_current", [])
    return tmp_path / "copy"


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_ends_with_two_examples(parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = parser.format_help()
    last = text.split("\nexamples:\n")[-1].splitlines()
    assert len(parser.examples) >= 2 and len(last) == 2 * len(parser.examples)
    assert max(map(len, text.splitlines())) <= 80
    assert parser.commands or "Exit code 0: " in " ".join(text.split())
    assert [one.dest for one in parser.arguments if not one.help] == []
    assert [line.strip() for line in last[::2]] == [line for line, _ in parser.examples]


@pytest.mark.parametrize("line", EXAMPLES, ids=lambda line: re.sub(r"\W+", "_", line))
def test_an_example_is_true(line: str, inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are taken, and where no processes are started it ends with a code that its help names. The doctor
    imports one library of ten: which of them fit is a fact of this machine."""
    program, *words = shlex.split(line.partition(" > ")[0])
    if program == "torchrun":
        words = words[words.index("shardwright") + 1 :]
    else:
        assert program == "shardwright"
    arguments, unknown = main.build_parser().parse_known_args(words)
    assert not unknown and arguments.func
    if line.startswith(PARSED):
        return
    if words[0] == "completion":
        pytest.importorskip("shtab")
    monkeypatch.setattr(library_imports, "IMPORTED", {"safetensors": "safetensors.torch"})
    assert main.main(words) in ((0, 1) if words[:2] == ["plan", "diff"] or words[0] == "doctor" else (0,))


def test_help_of_plan_diff(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["plan", "diff", "--help"])
    assert ended.value.code == 0 and "shardwright plan diff plan.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("explain plan.json --alternatives 1 up", {"plan": "plan.json", "operator": "up", "alternatives": 1}),
        ("explain --import my_rules plan.json --json", {"plan": "plan.json", "operator": None, "json": True}),
        ("report a.json --explain 0 b.json -o c.html", {"plans": ["a.json", "b.json"], "explain": 0}),
        ("plan --devices 4 train.py --lr 0.1", {"target": "train.py", "devices": 4, "script_args": ["--lr", "0.1"]}),
    ],
)
def test_options_stand_anywhere(line: str, found: dict[str, object]) -> None:
    """Also in front of an argument that may be left out."""
    assert vars(main.build_parser().parse_args(line.split())).items() >= found.items()


def test_a_misspelt_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["explian", "plan.json"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(
        "shardwright: error: there is no command 'explian'; did you mean explain? the commands are "
    )
    with pytest.raises(SystemExit):
        main.main(["checkpoint", "inf", "runs"])
    assert "did you mean info? the commands are info, verify, merge, transform (see" in capsys.readouterr().err


# -- completion --------------------------------------------------------------------------------------------------------


#: The words of a line whose last one is completed, and what it may become. The folder is that of the examples.
COMPLETED = [
    (["pl"], ("plan",)),
    (["checkpoint", "tr"], ("transform",)),
    (["explain", "pl"], ("plan.json",)),
    (["plan", "trai"], ("train.py",)),
    (["plan", "--cluster", "trai"], ("train.py",)),
    (["plan", "--pipeline", "2:4", "trai"], ("train.py",)),
    (["plan", "diff", "plan.json", "edi"], ("edited.json",)),
    (["report", "plan.json", "edi"], ("edited.json",)),
    (["run", "train.py", "edi"], ("edited.json",)),
    (["compare-trace", "plan.json", "trac"], ("trace.json",)),
    (["plan", "train.py", "--comm"], ("--comm-memory",)),
    (["verify", "train.py", "--step"], ("--steps",)),
    (["plan", "--hsdp", "level"], ("level1", "level2", "level3")),
    (["plan", "--mode", "dyn"], ("dynamic_programming",)),
    (["checkpoint", "info", "ru"], ("runs",)),
    (["completion", ""], ("bash", "zsh", "fish")),
]

#: The widget writes the words that zsh would add, and a mark: `compadd` adds words, unless it fills an array.
ZSH = """
fpath=($PWD $fpath); autoload -Uz compinit; compinit -D -u; cd {folder}; typeset -ga added
compadd () {{
  local word
  for word in "$@"; do case $word in -|--) break ;; -[OAD]*) builtin compadd "$@"; return ;; esac; done
  local -a some; builtin compadd -O some "$@"; added+=($some)
}}
finish () {{ added=(); _main_complete; print -rl -- $added '==' >> {found} }}
zle -C finish complete-word finish; bindkey '^I' finish; bindkey '^]' kill-whole-line
"""


def in_bash(lines: list[list[str]], script: Path, folder: Path) -> str:
    """The function of the script, called with the words of each line, as bash calls it."""
    each = "".join(
        f"COMP_WORDS=(shardwright {shlex.join(words)}); COMP_CWORD={len(words)}; COMPREPLY=()\n"
        "$function; printf '%s\\n' \"${COMPREPLY[@]}\" ==\n"
        for words in lines
    )
    begin = f"source {script}; function=$(complete -p shardwright | sed 's/.*-F \\([^ ]*\\) .*/\\1/')\n"
    return subprocess.run(["bash", "-c", begin + each], cwd=folder, capture_output=True, text=True, check=True).stdout


def in_zsh(lines: list[list[str]], script: Path, folder: Path) -> str:
    """Each line and a tab, typed into a zsh on a terminal, which has the script's folder in its ``fpath``; then a key
    that empties the line, and that means nothing to the terminal itself, which reads until zsh has begun."""
    found = script.parent / "found"
    (script.parent / "setup").write_text(ZSH.format(folder=shlex.quote(str(folder)), found=shlex.quote(str(found))))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(script.parent)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb"})
    typed = "".join(f"shardwright {' '.join(words)}\t\x1d" for words in lines)
    os.write(terminal, f"source ./setup\n{typed}exit\n".encode())
    with contextlib.suppress(OSError):  # the end of the shell
        while os.read(terminal, 4096):
            pass
    os.close(terminal)
    os.waitpid(child, 0)
    return found.read_text()


def in_fish(lines: list[list[str]], script: Path, folder: Path) -> str:
    """The words that fish lists for each line, each with a tab and its help behind it."""
    each = (f"complete -C {shlex.quote('shardwright ' + ' '.join(words))}; echo ==" for words in lines)
    command = ["fish", "--no-config", "-c", "; ".join((f"source {script}", *each))]
    home = {**os.environ, "HOME": str(script.parent), "XDG_CONFIG_HOME": str(script.parent)}
    done = subprocess.run(command, cwd=folder, env=home, capture_output=True, text=True, check=True)
    return "".join(row.split("\t")[0] + "\n" for row in done.stdout.splitlines())


@pytest.mark.parametrize(("shell", "complete"), [("bash", in_bash), ("zsh", in_zsh), ("fish", in_fish)])
def test_a_shell_completes(
    shell: str,
    complete: Callable[[list[list[str]], Path, Path], str],
    tmp_path: Path,
    folder: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """The last word of each line, as the shell itself completes it; zsh finds the script by its name."""
    shtab = pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    if shell not in shtab.SUPPORTED_SHELLS:
        pytest.skip(f"shtab {shtab.__version__} is from before {shell}")
    assert main.main(["completion", shell]) == 0
    script = tmp_path / "_shardwright"
    script.write_text(capsys.readouterr().out)
    parts = complete([words for words, _ in COMPLETED], script, folder).split("==\n")
    found = [{word.rstrip("/ ") for word in part.split()} for part in parts]
    assert {" ".join(words): made for (words, _), made in zip(COMPLETED, found)} == {
        " ".join(words): set(expected) for words, expected in COMPLETED
    }


def test_completion_needs_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main.main(["completion", "bash"]) == 1
    assert capsys.readouterr() == (
        "",
        "shardwright completion: error: there is no shtab: pip install 'shardwright[completion]'\n",
    )


# -- exit codes --------------------------------------------------------------------------------------------------------


def test_a_reader_that_ends_is_no_traceback(inside: Path) -> None:
    """The reader ends before the command prints, so that its first byte meets a broken pipe."""
    command = [sys.executable, "-m", "shardwright", "checkpoint", "info", "runs/4", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (141, "")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (["plan", "train.py"], "shardwright.cli.plan_command.planned"),
        (["verify", "train.py"], "shardwright.cli.verify_command.verify_script"),
        (["rehearse", "plan.json"], "shardwright.rehearsal.rehearse.rehearse"),
        (["checkpoint", "transform", "runs/4", "runs/one", "--to", "1"], "shardwright.checkpoint.transform.transform"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_ctrl_c_ends_a_command(
    words: list[str], target: str, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, interrupted)
    assert main.main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped by Ctrl-C; nothing more is written")


# -- --json ------------------------------------------------------------------------------------------------------------


def as_json(capsys: pytest.CaptureFixture, *words: str, code: int = 0) -> dict:
    """The one object that a command prints."""
    capsys.readouterr()
    assert (
        main.main([*words, "--json"] if words[0] not in ("plan", "verify") else [words[0], "--json", *words[1:]])
        == code
    )
    out: dict = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return out


def test_figures_of_a_plan_as_json(inside: Path, capsys: pytest.CaptureFixture) -> None:
    plan = sw.Plan.load("plan.json")
    found = as_json(capsys, "explain", "plan.json")
    assert isinstance(plan, sw.Plan)
    assert (found["cost"], found["bound"], found["gap"]) == (plan.cost, plan.bound, plan.gap)
    assert (found["elapsed"], found["peak"], found["sent"]) == (plan.price.elapsed, plan.peak, plan.sent)
    assert found["memory"] == plan.timeline.kinds and found["devices"] == 8
    assert sum(c["sent"] for c in found["collectives"]) == sum(c.sent for c in plan.collectives(0)) == plan.sent
    assert [o["name"] for o in found["operators"]] == list(plan.decisions)
    assert sum(o["seconds"] for o in found["operators"]) == pytest.approx(plan.cost, rel=0.05)
    again = as_json(capsys, "plan", "--devices", "8", "--mode", "dynamic_programming", "model.py:build")
    assert again.pop("output") == "plan.json" and again["cost"] == pytest.approx(found["cost"])


def test_figures_of_an_operator_as_json(inside: Path, capsys: pytest.CaptureFixture) -> None:
    plan = sw.Plan.load("plan.json")
    name = next(iter(plan.decisions))
    found, explanation = as_json(capsys, "explain", "plan.json", name), explained(plan, name)
    assert found["name"] == name and found["least"] == explanation.least and found["cost"] == explanation.cost
    assert [a["total"] for a in found["alternatives"]] == [a.total for a in explanation.alternatives] != []
    assert sum(part["own"] for part in found["parts"]) == pytest.approx(found["seconds"])


def test_a_step_a_difference_and_a_verification_as_json(inside: Path, capsys: pytest.CaptureFixture) -> None:
    plan = sw.Plan.load("plan.json")
    step = as_json(capsys, "simulate", "plan.json")
    assert step["seconds"] == pytest.approx(plan.cost) and step["bubble"] == pytest.approx(0)
    assert [group["ranks"] for group in step["groups"]] == [list(range(8))]
    assert step["groups"][0]["peak"] == pytest.approx(plan.peak)
    capsys.readouterr()
    assert main.main(["plan", "--json", "diff", "plan.json", "edited.json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"] and any("dynamic_programming -> data_parallel" in line for line in found["settings"])
    report = as_json(capsys, "verify", "--devices", "4", "model.py:build", "--cut")  # options before and behind it
    assert report["ok"] and report["steps"] == 3 and report["devices"] == 4
    assert report["dtypes"]["float64"]["losses"]["difference"] < 1e-12
    assert report["proved"] == (not report["unproved"])


def test_a_pipeline_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    how = {"pipeline": setting("1f1b", 4), "devices": 8, "parallel_mode": "data_parallel"}
    plan = sw.plan(Chain(), (torch.ones(32, 16),), nn.MSELoss(), torch.ones(32, 16), **how)
    plan.save(tmp_path / "staged.json")
    found = as_json(capsys, "explain", str(tmp_path / "staged.json"))
    assert found["bubble"] == plan.simulation.bubble and found["bound"] is None and found["peak"] == plan.peak
    assert {o["stage"] for o in found["operators"]} == {stage.number for stage in plan.stages}
    step = as_json(capsys, "simulate", str(tmp_path / "staged.json"))
    assert sorted(rank for group in step["groups"] for rank in group["ranks"]) == list(range(8))
    assert max(group["peak"] for group in step["groups"]) == pytest.approx(plan.peak)
    assert step["micro_batches"] == 4 and step["seconds"] == pytest.approx(plan.cost)


def test_the_page_of_commands_names_the_keys(inside: Path, capsys: pytest.CaptureFixture) -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition("## Output as JSON")[2].splitlines() if line.startswith("| `")]
    name = next(iter(sw.Plan.load("plan.json").decisions))
    calls = (
        ("explain", "plan.json"),
        ("explain", "plan.json", ""),
        ("explain", "plan.json", name),
        ("plan", "diff", "plan.json", "plan.json"),
        ("simulate", "plan.json"),
        ("verify", "--devices", "2", "model.py:build"),
    )
    for row, words in zip(rows, calls):
        if words[-1]:
            missing = [key for key in as_json(capsys, *words) if f"`{key}`" not in row]
            assert not missing, (words, missing)
