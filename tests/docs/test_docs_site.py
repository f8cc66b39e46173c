"""The site is built without a warning."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest
from paths import DOCS, ROOT

sys.path.insert(0, str(DOCS))
import browser

GENERATOR = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in GENERATOR if importlib.util.find_spec(name) is None]


def built(source: Path, folder: Path) -> subprocess.CompletedProcess:
    """Build the pages of a folder as ``make docs`` does."""
    words = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", folder / "doctrees"]
    return forked_python.run([sys.executable, "-m", "sphinx", *words, source, folder / "html"], cwd=ROOT)


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason=f"the extra docs is not installed: {', '.join(MISSING)}")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = built(DOCS, tmp_path)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    names = (tmp_path / "html" / "reference" / "names.html").read_text(encoding="utf-8")
    assert 'id="shardwright.AutoParallel.hsdp"' in names and 'id="shardwright.plan"' in names
    signature = re.sub("<[^>]*>", "", names.split('id="shardwright.init"')[1].split("</dt>")[0])
    assert "timeout: float | None = None" in " ".join(html.unescape(signature).split()), "signatures have types"
    start = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert "report.png" in start and "toctree-l2" not in start.split("<article")[1], "a picture, and its links once"
    if browser.found is not None:
        with browser.Browser() as opened:
            opened.open(tmp_path / "html" / "reference" / "names.html", 1300)
            wide = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
            assert opened.value(wide) == 0, "code is as wide as the column"
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
