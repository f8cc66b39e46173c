"""The description of the package: README.md without its links to files, which a package registry does not have."""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
RELATIVE = re.compile(r"\[([^\]]*)\]\((?!https?:|#)[^()\s]*\)")

setup(long_description=RELATIVE.sub(r"`\1`", README), long_description_content_type="text/markdown")
