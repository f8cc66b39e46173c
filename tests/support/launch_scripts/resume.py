"""Trains with a state of its own, and dies: worker RANK in step STEP of the first attempts, as often as TIMES says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

rank, times, at = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = Path("state.json")
first, total = json.loads(state.read_text()) if state.exists() else (0, 0)
print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']} from step {first}", flush=True)
for step in range(first, 10):
    if rank == 1 and attempt < times and step == at * (attempt + 1):
        os.kill(os.getpid(), signal.SIGKILL)
    total += step * step
    if rank == 1:
        Path("part.json").write_text(json.dumps((step + 1, total)))
        os.replace("part.json", state)
    time.sleep(0.01)
while not state.exists() or json.loads(state.read_text())[0] < 10:
    time.sleep(0.05)  # as ranks do that wait for one another
print(f"total {json.loads(state.read_text())[1]}", flush=True)
