"""``python -m shardwright`` is the ``shardwright`` command."""

import sys

from shardwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
