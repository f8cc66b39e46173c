"""The four tutorial networks as their page shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tutorials

PAGE = Path(tutorials.__file__).parent.parent / "docs" / "understand" / "examples.md"


@pytest.mark.long
def test_the_page_shows_what_the_tutorials_print(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the seconds with the width of their column, and for the last digits of a difference of rounding."""
    assert not tutorials.main()
    printed = capsys.readouterr().out
    shown = (
        PAGE.read_text(encoding="utf-8").split("What `make tutorials` prints:")[1].split("```text")[1].split("```")[0]
    )
    unsaid = [
        [re.sub(r"\d\.\de-1\d|\d+\.\d / \d+\.\d|─+", "", line).split() for line in text.strip().splitlines()]
        for text in (printed, shown)
    ]
    assert unsaid[0] == unsaid[1]
    assert len(re.findall(r"\d\.\d{10}  \d\.\d{10}", printed)) == 4 * len(tutorials.SHOWN)
    assert float(re.search(r"(\S+) apart at most", printed)[1]) < 1e-12
