"""A worker without torch: says who it is, then does what its first argument says.

``say ...``               ends
``fail RANK HOW``         that worker dies, the others sleep: ``HOW`` is raise, exit (7), os_exit (3) or kill
``sleep``                 sleeps until it is ended
``stubborn``              the same, deaf to Ctrl-C and SIGTERM
"""

import json
import os
import signal
import sys
import time

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "SHARDWRIGHT_DEVICES",
    "SHARDWRIGHT_RUN_TOKEN",
)


def main() -> None:
    action, *rest = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    if action == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "argv": sys.argv,
                "path": sys.path[0],
                "env": {name: os.environ[name] for name in NAMES if name in os.environ},
            }
        )
    )
    print("to the error stream", file=sys.stderr)
    print("to the output stream")
    if action == "fail" and rank == rest[0]:
        time.sleep(0.2)
        for line in range(30):
            print(f"line {line}")
        if rest[1] == "raise":
            raise ValueError("the worker's [own] error")
        if rest[1] == "exit":
            sys.exit(7)
        if rest[1] == "os_exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if action != "say":
        time.sleep(600)


if __name__ == "__main__":
    main()
