"""Folders of the repository."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, BENCHMARKS, DOCS = ROOT / "examples", ROOT / "benchmarks", ROOT / "docs"

#: Modules that several tests share.
SUPPORT = ROOT / "tests" / "support"

#: Scripts that tests start in processes of their own.
SCRIPTS = SUPPORT / "launch_scripts"

#: The folder of facts about other systems, not part of the repository: beside it, or named by SHARDWRIGHT_SHARED.
SHARED = Path(os.environ.get("SHARDWRIGHT_SHARED") or ROOT.parent / "shared").resolve()

#: The reason of a test that is skipped without that folder.
WITHOUT_SHARED = "the folder of goldens is not part of the repository; SHARDWRIGHT_SHARED names it"
