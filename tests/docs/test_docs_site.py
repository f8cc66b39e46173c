"""The site is built without a warning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from paths import DOCS, ROOT

GENERATOR = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in GENERATOR if importlib.util.find_spec(name) is None]


def built(source: Path, folder: Path) -> subprocess.CompletedProcess:
    """Build the pages of a folder as ``make docs`` does."""
    words = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", folder / "doctrees"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *words, source, folder / "html"], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"the extra docs is not installed: {', '.join(MISSING)}")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = built(DOCS, tmp_path)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    names = (tmp_path / "html" / "reference" / "names.html").read_text(encoding="utf-8")
    assert 'id="shardwright.AutoParallel.hsdp"' in names and 'id="shardwright.plan"' in names
    assert "--comm-memory" in (tmp_path / "html" / "reference" / "commands.html").read_text(encoding="utf-8")
    # Pages need no network: styles, scripts and pictures are in the folder.
    for page in (tmp_path / "html").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert '<script src="http' not in text and 'rel="stylesheet" type="text/css" href="http' not in text, page.name


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"the extra docs is not installed: {', '.join(MISSING)}")
def test_a_warning_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (tmp_path / "source" / "index.md").write_text("# Page\n\n[gone](gone.md)\n")
    done = built(tmp_path / "source", tmp_path)
    assert done.returncode and "gone.md" in done.stderr
