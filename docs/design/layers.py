"""Print the layers of the package as a picture, from `[tool.importlinter]` in pyproject.toml.

python docs/design/layers.py            print the picture
python docs/design/layers.py --write    put the picture into architecture.md, between its two markers
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest installs tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "architecture.md"
BEGIN, END = "<!-- layers: begin -->\n", "<!-- layers: end -->"
WIDTH = 40


def layers() -> list[list[str]]:
    """The layers of the contract, the highest first; modules of one layer are independent of one another."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [layer.split(" | ") for layer in contract["layers"]]


def path_of(module: str) -> str:
    """A folder ends with a slash, a file with .py."""
    return f"{module}/" if (ROOT / "shardwright" / module).is_dir() else f"{module}.py"


def picture() -> str:
    """One box a layer; an import goes from a box to a box below it."""
    rows = [f"│ {'   '.join(map(path_of, layer)):<{WIDTH}} │" for layer in layers()]
    edge = "─" * (WIDTH + 2)
    arrow = {1: "  imports", 2: "     │", len(rows) - 2: "     ▼"}
    lines = [f"┌{edge}┐"]
    for i, row in enumerate(rows):
        lines.append(row + arrow.get(i, "     │" if 2 < i < len(rows) - 2 else ""))
    return "\n".join([*lines, f"└{edge}┘"]) + "\n"


def block() -> str:
    """The picture as it stands between the markers of the page."""
    return f"```text\n{picture()}```\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        PAGE.write_text(before + block() + after, encoding="utf-8")
    else:
        print(picture(), end="")
