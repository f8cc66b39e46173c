"""Sphinx's settings. ``make docs`` builds the pages of this folder into build/docs, without a network."""

from __future__ import annotations

import gc
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import MockFinder

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import generated  # noqa: E402  found by the path above

# A site is a forest of nodes that all live to the end: the walks of it had a third of the time of a build.
gc.set_threshold(50_000, 20, 100)

project = "Shardwright"
copyright = "the authors of Shardwright"
version = release = metadata.version("shardwright")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # notebooks become pages by notebooks.py
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Shardwright {release}"
html_copy_source = False
html_show_sphinx = False

# Anchors are those of GitHub, so that a link holds here and there.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
# Pages include README files that begin at a lower heading, and blocks of consoles that no highlighter knows.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

default_role = "py:obj"  # `name` in a docstring: a link where the name is public, else plain code
autodoc_typehints = "signature"  # signatures hold them
autodoc_member_order = "bysource"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # of the classes for their loops
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 72  # longer ones have a line for each argument: they fit beside the contents
python_use_unqualified_type_names = True
autodoc_typehints_format = "short"
html_static_path = ["static"]
html_css_files = ["wide.css"]


def setup(app: Any) -> None:
    """Connect the parts of pages that are made at build time."""
    # For the whole build: Sphinx looks for the source of each class above one that it documents, and so would import
    # the libraries after all.
    sys.meta_path.insert(0, MockFinder(autodoc_mock_imports))
    app.connect("source-read", generated.on_source_read)
    app.connect("autodoc-process-docstring", generated.on_docstring, priority=100)  # before napoleon
