"""Python programs in processes that are forked from one which has imported torch and the package.

A fresh interpreter is busy for two to three seconds with imports before a program's own first line. `ForkedPython` is
`subprocess.Popen` for commands of Python, without them:

    ForkedPython([sys.executable, "train.py", "3"], cwd=folder, stdout=subprocess.PIPE)
    ForkedPython([sys.executable, "-m", "shardwright", "run", "train.py"], forks=True)     and its workers likewise
    ForkedPython(["ip", "netns", "exec", "host", sys.executable, "train.py"])              in a network namespace

The source of the processes is one process, started when it is first needed, that does nothing else: no test and no test
runner has been in it. A process that is forked from it has the command's arguments, environment, folder and streams, is
a child of the caller with a pid of its own, hears signals, and ends with the exit code of an interpreter. Other
commands, and all on other systems than Linux, are those of `subprocess.Popen`. The file is the program of the source,
too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

#: Modules that launchers and workers import, some of them in their first step.
MODULES = (
    "torch._dynamo",
    "torch.export._trace",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "shardwright.cli.main",
    "shardwright.launch.agent",
    "shardwright.parallel.auto_parallel",
    "shardwright.checkpoint.callback",
)

#: The most bytes of a request: arguments and environment.
REQUEST = 1 << 17

#: setns: a namespace of the network.
NETWORK = 0x40000000

#: prctl: children whose parent ends become this process's.
SUBREAPER = 36


class Source:
    """A process that forks others; used by its parent alone.

    Args:
        connection: to the process, which ends when it is closed.
        process: the process, where it is this one's child.
    """

    def __init__(self, connection: socket.socket, process: subprocess.Popen | None = None) -> None:
        self._connection, self._process = connection, process
        self._turn = threading.Lock()

    @classmethod
    def started(cls) -> Source:
        """A fresh one, of an interpreter."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen([sys.executable, os.path.abspath(__file__), str(number)], pass_fds=[number])
        return cls(ours, process)

    @classmethod
    def forked(cls) -> Source:
        """A copy of this process, which is one that a source has forked just now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            keep(theirs.fileno(), nothing := os.open(os.devnull, os.O_RDWR))
            for stream in range(3):
                os.dup2(nothing, stream)
            serve(theirs)
        theirs.close()
        return cls(ours)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Fork a process that does what is asked, with these as its standard streams; its pid."""
        message = pickle.dumps(request)
        assert len(message) < REQUEST
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._turn:
            prctl(SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [message], streams)
                spoken = self._connection.recv(REQUEST)
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)
        assert spoken, "the source of the tests' processes has died"
        return int(spoken)


_sources: dict[int, Source] = {}  # by the process that uses it


def _source() -> Source:
    if os.getpid() not in _sources:
        _sources.clear()
        _sources[os.getpid()] = Source.started()
    return _sources[os.getpid()]


class ForkedPython(subprocess.Popen):
    """`subprocess.Popen`, with a command of Python run in a forked process.

    Args:
        args: as `subprocess.Popen` takes them.
        forks: the program's own commands of Python are forked, too, as those of a launcher's workers.
        given: as `subprocess.Popen` takes them, but for ``preexec_fn``. The process hears Ctrl-C.
    """

    def __init__(self, args: Any, *rest: Any, forks: bool = False, **given: Any) -> None:
        self._forks = forks
        super().__init__(args, *rest, **given)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any,
                       gids: Any, uid: Any, umask: Any, start_new_session: bool, *group: Any) -> None:  # fmt: skip
        command = None if shell or preexec_fn or pass_fds or sys.platform != "linux" else python_command(args)
        if command is None:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, *group,
            )  # fmt: skip
            return
        streams = [own if own != -1 else n for n, own in enumerate((p2cread, c2pwrite, errwrite))]
        if command["one_stream"]:
            streams[2] = streams[1]
        self.pid = _source().fork(
            command
            | {
                "folder": os.fspath(cwd or os.getcwd()),
                "environment": dict(os.environ if env is None else env),
                "session": bool(start_new_session),
                "forks": self._forks,
            },
            streams,
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(arguments: Any, *, timeout: float | None = None, **given: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` by a `ForkedPython`, with text of both streams."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True} | given
    with ForkedPython(arguments, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fresh(code: str, *arguments: Any, **given: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of code in a fresh interpreter, with text of both streams.

    The interpreter's last collections of garbage walk nothing: with torch imported they take half a second.
    """
    given = {"capture_output": True, "text": True} | given
    begin = "import atexit, gc\natexit.register(gc.freeze)\n"
    return subprocess.run([sys.executable, "-c", begin + code, *arguments], **given)


def python_command(args: Any) -> dict[str, Any] | None:
    """The options of an interpreter's command; None for another command, or where an option is not known here.

    ``sh -c 'exec "$@" 2>&1' sh COMMAND`` is one, too: so the launcher starts workers. So is ``ip netns exec NAME``.
    """
    words = [os.fspath(word) for word in args]
    namespace = words[3] if words[:3] == ["ip", "netns", "exec"] else ""
    words = words[4:] if namespace else words
    one_stream = words[:4] == ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh"]
    words = words[4:] if one_stream else words
    if not words or words.pop(0) != sys.executable:
        return None
    at_once = words[:1] == ["-u"]
    words = words[1:] if at_once else words
    if words[:1] in (["-m"], ["-c"]):
        how, what, *rest = words
    elif words and not words[0].startswith("-"):
        how, what, *rest = "", *words
    else:
        return None
    return {"how": how, "what": what, "rest": rest, "at_once": at_once, "one_stream": one_stream} | {
        "namespace": namespace
    }


def let_others_finish() -> None:
    """Let a thread of this process that wakes up wait until a core is free, instead of taking one at once.

    Where ranks outnumber cores, Gloo's thread would take the core of the thread that has woken it and has a lock; it
    then asks for the lock until its time is over. That took up to a tenth of the processor time of ranks.
    """
    if hasattr(os, "SCHED_BATCH"):  # of Linux
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# -- in the source -----------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each request, until the connection is closed."""
    gc.collect()
    gc.freeze()  # or a collection in a child copies every page
    while True:
        message, streams, _, _ = socket.recv_fds(connection, REQUEST, 3)
        if not message:
            os._exit(0)
        came, going = os.pipe()
        between = os.fork()
        if between == 0:  # its end makes its child one of the process that asked
            parent = os.getpid()
            pid = os.fork()
            if pid:
                os.write(going, str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            become(pickle.loads(message), streams)
        for number in (going, *streams):
            os.close(number)
        os.waitpid(between, 0)
        connection.send(os.read(came, 64))
        os.close(came)


def keep(*numbers: int) -> None:
    """Close all files but the standard streams and these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in numbers:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))


def become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the program that is asked for, in this process, as an interpreter would."""
    keep(*streams)
    if request["namespace"]:
        with open(f"/run/netns/{request['namespace']}") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK) == 0, os.strerror(ctypes.get_errno())
    if request["session"]:
        os.setsid()
    if request["forks"]:
        _sources[os.getpid()] = Source.forked()
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedPython
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if request["at_once"] or os.environ.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True))
    elif os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)
    code = _code_of(request)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(request: dict[str, Any]) -> int:
    """The exit code of the program."""
    how, what, rest = request["how"], request["what"], request["rest"]
    try:
        sys.argv = [how if how else what, *rest]
        if how == "-m":
            sys.path[0] = os.getcwd()
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.path[0] = ""
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(what, main.__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(what))
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        step = error.__traceback__
        while step is not None and step.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            step = step.tb_next
        traceback.print_exception(type(error), error, step)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent's to obey
    for module in MODULES:
        import_module(module)
    let_others_finish()
    serve(socket.socket(fileno=int(sys.argv[1])))
