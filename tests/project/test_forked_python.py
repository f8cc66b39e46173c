"""Programs in forked processes end, speak and listen as those of an interpreter do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import ForkedPython, python_command, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

TELLS = "import os, sys\nprint(os.getpid(), os.getppid(), os.getcwd(), sys.argv, sys.path[0], os.environ['SAID'])\n"


@pytest.mark.parametrize("how", ["script", "code", "workers"])
def test_what_a_program_is_told(how: str, tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    command = {
        "script": [sys.executable, "tells.py", "a b", "-c"],
        "code": [sys.executable, "-c", TELLS, "a b", "-c"],
        "workers": ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-u", str(script), "a b", "-c"],
    }[how]
    environment = os.environ | {"SAID": "yes"}
    process = ForkedPython(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    first = {"script": "tells.py", "code": "-c", "workers": str(script)}[how]
    folder = "" if how == "code" else tmp_path
    assert out == f"{process.pid} {os.getpid()} {tmp_path} {[first, 'a b', '-c']} {folder} yes\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "ends", "err"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('v')", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
         "ValueError: v\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)  # fmt: skip
def test_how_it_ends(code: str, ends: int, err: str) -> None:
    done = run([sys.executable, "-c", code], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (ends, "", err)


def test_ctrl_c_is_heard() -> None:
    waits = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ForkedPython([sys.executable, "-c", waits], text=True, **streams) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


def test_commands_of_its_own_are_forked_where_that_is_asked_for() -> None:
    """The launcher's workers are such commands: torch is there before a worker has imported anything."""
    worker = "import sys; print('torch' in sys.modules, flush=True)"
    launcher = (
        "import sys\nfrom torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler\n"
        f"subprocess_handler.Popen([sys.executable, '-c', {worker!r}]).wait()"
    )
    command = [sys.executable, "-c", launcher]
    assert [run(command, forks=forks, timeout=60).stdout for forks in (True, False)] == ["True\n", "False\n"]


@pytest.mark.parametrize("command", [["true"], [sys.executable], [sys.executable, "-I", "x.py"], ["sh", "-c", "true"]])
def test_other_commands_are_left_to_popen(command: list[str]) -> None:
    assert python_command(command) is None


def test_a_command_of_a_network_namespace_is_one_of_python() -> None:
    """The tests of two hosts start such commands, where namespaces can be made."""
    command = [sys.executable, "-m", "json.tool"]
    assert python_command(["ip", "netns", "exec", "host", *command]) == python_command(command) | {"namespace": "host"}
    assert python_command(["ip", "netns", "exec", "host", "true"]) is None
