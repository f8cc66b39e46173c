"""The demo: the same losses on eight devices as on one, with pictures of the plan and of memory."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import demo
import pytest
import torch
from gpt import GPT

from shardwright.cli.main import build_parser

PAGE = Path(demo.__file__).parent.parent / "docs" / "understand" / "examples.md"


@pytest.fixture(scope="module")
def printed() -> str:
    """The output of a short demo that is no terminal."""
    with pytest.MonkeyPatch.context() as patch:
        output = io.StringIO()
        patch.setattr(sys, "stdout", output)
        patch.setenv("COLUMNS", "80")
        assert demo.main(["--steps", "3"]) == 0
        return output.getvalue()


def test_it_ends_with_the_losses_the_bytes_and_the_peak(printed: str) -> None:
    found = re.search(r"same losses \((\S+) apart at most\), ([\d,]+) bytes sent", printed)
    assert found is not None and float(found[1]) < 1e-12 and int(found[2].replace(",", "")) > 1 << 20
    eight, one = map(float, re.findall(r"(\d+\.\d) MiB(?: a device \(|\))", printed))
    assert 0 < eight < one / 4
    assert re.search(r"step 3 of 3 \S+ loss (\d\.\d{8}) on one, \1 on eight", printed)


def test_its_bars_add_up_to_the_peak(printed: str) -> None:
    bars = re.findall(r"^ *(?:one device|each of 8)\s.*?([\d.]+) MiB *$", printed, re.MULTILINE)
    eight, one = re.findall(r"(\d+\.\d) MiB(?: a device \(|\))", printed)
    assert bars == [one, eight]


def test_the_next_commands_are_those_of_the_command_line(printed: str) -> None:
    """Each is parsed by its own command; the files that they name are there, or made by the first one."""
    listed = [
        line.split("shardwright ", 1)[1] for line in printed.split("Next:")[1].splitlines() if "shardwright " in line
    ]
    assert listed == [command.removeprefix("shardwright ") for command in demo.NEXT] and len(listed) == 3
    for command in listed:
        arguments = build_parser().parse_args(shlex.split(command))
        named = [word for word in shlex.split(command) if word.endswith(".py")]
        assert arguments.func and all((PAGE.parent.parent.parent / word).is_file() for word in named)


def test_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock: 40 steps by default, each model captured once, each step one call of each model."""
    calls: list[int] = []
    step = demo.Training.step
    monkeypatch.setattr(demo.Training, "step", lambda self, *batch: calls.append(1) or step(self, *batch))
    monkeypatch.setattr(demo, "BATCH", 8)
    with mock.patch.object(sys, "stdout", io.StringIO()):
        assert demo.main(["--steps", "2"]) == 0
    assert len(calls) == 4
    assert "default=40" in Path(demo.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("weight", "cut", "numbers"),
    [("up", "rows in 4", "01230123"), ("down", "columns in 4", "01230123"), ("norm", "whole on each", "00000000")],
)
def test_its_picture_shows_the_slice_of_each_device(printed: str, weight: str, cut: str, numbers: str) -> None:
    line = next(line for line in printed.splitlines() if line.split()[:1] == [weight])
    assert line.split()[2:10] == list(numbers) and line.rstrip().endswith(cut)


def test_it_fits_80_columns(printed: str) -> None:
    """But for commands, which begin with the path of the environment."""
    assert max(len(line) for line in printed.splitlines() if "/shardwright" not in line) <= 80


def test_it_fails_where_the_losses_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = GPT.forward

    def forward(self: GPT, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = plain(self, tokens)
        return made if torch.compiler.is_exporting() else made * (1 + 1e-6)  # another program on one device

    monkeypatch.setattr(GPT, "forward", forward)
    assert demo.main(["--steps", "1"]) == 1
    assert "The losses differ by up to" in capsys.readouterr().out


def without_memory(line: str) -> tuple[str, list[float]]:
    """A line without its amounts of memory, and these."""
    amounts = r"([\d.]+)(?= MiB)"
    return re.sub(amounts, "-", line.rstrip()), [float(found) for found in re.findall(amounts, line)]


def test_the_page_shows_what_it_prints(printed: str) -> None:
    """But for the losses of its last step, which is another one here, and amounts of memory: torch decides them too."""
    shown = PAGE.read_text(encoding="utf-8").split("What `make demo` prints:")[1].split("```text")[1].split("```")[0]
    for line in printed.splitlines():
        if not line.startswith(("step", "same losses", "  ")):
            words, amounts = without_memory(line)
            alike = [kept for text, kept in map(without_memory, shown.splitlines()) if text == words]
            assert any(amounts == pytest.approx(kept, rel=0.1) for kept in alike), line
