"""Runs scripts in turn in each worker, as each runs by itself: ``in_turn.py SCRIPT... -- ARGUMENT...``"""

import gc
import os
import runpy
import sys

gc.disable()  # each worker imports torch, and captures: all that lives would be walked again and again


def main() -> None:
    end = sys.argv.index("--")
    scripts, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    for script in scripts:
        sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
