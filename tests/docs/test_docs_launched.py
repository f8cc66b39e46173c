"""Scripts of pages under ``shardwright run``: what each process prints is what the page shows."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import forked_python
import pytest
from doc_pages import PYTHON, commands_of
from paths import DOCS, ROOT
from ranks import PATIENCE

#: Pages with a script ``# file: train.py``, and a block ```` ```text ```` of commands that start it.
PAGES = ("learn/five-minutes.md", "how-to/resume-elsewhere.md")


#: Lines of other builds of torch: of Gloo in torch 2.9, and a warning of a build for GPUs on a machine without one.
OTHER_BUILDS = re.compile(
    r"^(\[Gloo\] .*|.*RuntimeWarning: the ranks compute on the CPU.*\n  return .*)\n", re.MULTILINE
)


def launched(words: list[str], folder: Path) -> None:
    """Run a command ``shardwright run ...`` in a folder."""
    command = [sys.executable, "-m", "shardwright", *words]
    done = forked_python.run(command, forks=True, timeout=PATIENCE, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_a_script_prints_what_its_page_shows(page: str, tmp_path: Path) -> None:
    """The run of two processes; that of the second page goes on in four."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n# file: train.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (block,) = re.findall(r"```text\n(\$ shardwright run .*?)```", text, re.DOTALL)
    commands = commands_of(block)
    assert len(commands) > 1
    for command, shown in commands:
        program, *words = shlex.split(command)
        if program == "shardwright":
            launched(words, tmp_path)
        else:
            printed = (tmp_path / words[0]).read_text(encoding="utf-8")
            assert program == "cat" and re.sub(OTHER_BUILDS, "", printed) == shown


@pytest.mark.long
@pytest.mark.parametrize(("page", "ranks"), [("README.md", 8), ("docs/index.md", 2)])
def test_the_first_code_of_a_page_runs_in_processes(page: str, ranks: int, tmp_path: Path) -> None:
    """The README says that one script runs in one process and in several: ranks start from equal values."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(PYTHON.findall(text)[0][1], encoding="utf-8")
    launched(["run", f"--worker_num={ranks}", "train.py"], tmp_path)
