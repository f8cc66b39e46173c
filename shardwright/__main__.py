"""``python -m shardwright`` runs the ``shardwright`` command."""

from __future__ import annotations

import sys

from shardwright.cli.main import main  # absolute: torchrun's engine starts this file by its path

if __name__ == "__main__":
    sys.exit(main())
