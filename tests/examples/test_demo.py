"""The demo as the README shows it."""

from __future__ import annotations

import re
from pathlib import Path

import demo
import pytest

README = Path(demo.__file__).parent.parent / "README.md"


@pytest.mark.long
def test_the_readme_shows_what_the_demo_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the seconds with the width of their column, and for the last digits of a difference of rounding."""
    assert not demo.main()
    printed = capsys.readouterr().out
    shown = README.read_text().split("What `make demo` prints:")[1].split("```")[1]
    unsaid = [
        [re.sub(r"\d\.\de-1\d|\d+\.\d / \d+\.\d|─+", "", line).split() for line in text.strip().splitlines()]
        for text in (printed, shown)
    ]
    assert unsaid[0] == unsaid[1]
    assert len(re.findall(r"\d\.\d{10}  \d\.\d{10}", printed)) == 4 * len(demo.SHOWN)
    assert float(re.search(r"(\S+) apart at most", printed)[1]) < 1e-12
