"""``shardwright doctor``: check this machine for a run, and say how to mend what is wrong.

Each check yields findings (`Finding`): ok, warning or problem. Areas, in the order of the output:

    versions      Python, torch and libraries, beside the ranges of the package's own metadata
    devices       accelerators that a process sees, and the one that it would take
    launcher      rank and size as `launch.environment` reads them; variables that contradict them
    collectives   two ranks of this machine communicate over each backend, on the loopback and on the run's interface
    host          shared memory, open files, disks, clock, host name, ports

Checks that import libraries, ask drivers, name servers or other processes run in forked processes (`forked_ranks`),
which are killed after `SECONDS`: a driver that does not answer is a finding. This process itself touches no
accelerator, since a process that has touched one can fork no process that uses it.

The output names no host and no folder, but for what a variable of a launcher holds.

Example: with ``SHARDWRIGHT_DEVICES=0`` the area ``launcher`` has a problem, which is mended by "a whole number of at
least 1". The exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

from ..errors import SettingError
from ..json_files.json_reader import JsonObject
from ..launch.environment import LOOPBACK, PORT, RankInRun, find, leading_to, remark, token_of
from ..launch.run_settings import bound, check_port
from .command_line import add_json_option, print_json
from .forked_ranks import LONG, SHORT, error_text, in_children, played
from .library_imports import library_imports

__all__ = ["Finding", "add_doctor_parser", "doctor", "findings"]

OK, WARNING, PROBLEM = "ok", "warning", "problem"

#: Seconds that a test in other processes may take.
SECONDS = 20.0

#: Libraries that are used where they are there: integrations, checkpoints, kernels.
OPTIONAL = ("transformers", "accelerate", "lightning", "peft", "safetensors", "torchao", "triton", "tensorboard")

#: Variables that hide accelerators from a process.
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

#: A file of each driver -> the build of torch that uses it.
DRIVERS = {"/dev/nvidiactl": "CUDA", "/dev/kfd": "HIP", "/dev/davinci_manager": "NPU"}

SHARED = "/dev/shm"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """One row of the output.

    Args:
        area: the area of the check.
        check: the name of the check.
        state: "ok", "warning" or "problem".
        found: the fact.
        mend: how to mend it; "" where there is nothing to mend.
        figures: measurements: operation, bytes, milliseconds, GB/s.
    """

    area: str
    check: str
    state: str
    found: str
    mend: str = ""
    figures: list[dict[str, object]] = field(default_factory=list)


_version, _device, _variable = (partial(Finding, area) for area in ("versions", "devices", "launcher"))
_collective, _host = partial(Finding, "collectives"), partial(Finding, "host")


def add_doctor_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the commands."""
    parser = subparsers.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check this machine: versions, devices, launcher, collectives, shared memory, disks",
        description="Check what this machine has for a run, and say how to mend what is wrong. The output can be "
        "pasted into a report: it names no host and no folder, but for what variables of launchers hold. Exit code "
        "0: no problem, 1: a problem.",
        examples=(
            ("shardwright doctor", "every check, two ranks that communicate among them"),
            ("shardwright doctor --quick --json", "what takes a second, as JSON"),
        ),
    )
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="leave out imports, and the two ranks that communicate")
    parser.set_defaults(func=doctor, parser=parser)


def doctor(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code: 1 where there is a problem, else 0."""
    found = list(findings(arguments.quick))
    problems = sum(finding.state == PROBLEM for finding in found)
    if arguments.json:
        print_json(
            {
                "ok": not problems,
                "problems": problems,
                "warnings": sum(finding.state == WARNING for finding in found),
                "findings": [asdict(finding) for finding in found],
            }
        )
    else:
        show(found)
    return 1 if problems else 0


def findings(quick: bool = False) -> Iterator[Finding]:
    """The findings of all checks.

    Args:
        quick: True: without the imports of libraries and the two ranks that communicate.
    """
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", versions),
        *([] if quick else [("versions", imports)]),
        ("devices", devices),
        ("launcher", launcher),
        *([] if quick else [("collectives", collectives)]),
        ("host", shared_memory),
        ("host", open_files),
        ("host", disks),
        ("host", clock),
        ("host", host_name),
        ("host", ports),
    ]
    for area, check in checks:
        try:
            yield from check()
        except Exception as error:  # a check meets whatever is wrong with a machine; the others run all the same
            yield Finding(
                area, check.__name__.replace("_", " "), PROBLEM, f"the check failed: {error_text(error)}", "report it"
            )


def show(found: Sequence[Finding]) -> None:
    """Print findings as a table of at most 100 columns, with colours on a terminal."""
    from rich import box  # noqa: PLC0415  for the table alone
    from rich.console import Console  # noqa: PLC0415  for the table alone
    from rich.table import Table  # noqa: PLC0415  for the table alone
    from rich.text import Text  # noqa: PLC0415  for the table alone

    console = Console(highlight=False)
    console.width = min(console.width, 100) if console.is_terminal else 80
    colours = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in ("", "check", "found"):
        made.add_column(name, overflow="fold")
    area = ""
    for finding in found:
        if finding.area != area:
            made.add_section()
        area = finding.area
        text = Text(finding.found)
        if finding.mend:
            text.append(f"\nto mend: {finding.mend}", style="italic")
        made.add_row(Text(finding.state, style=colours[finding.state]), Text(finding.check), text)
    console.print(made)
    counts = [sum(finding.state == state for finding in found) for state in (PROBLEM, WARNING)]
    console.print(
        Text(", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in zip(counts, (PROBLEM, WARNING))))
    )


# -- versions ----------------------------------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    """Versions of Python, the package, torch and libraries, beside the ranges of the package's metadata."""
    import shardwright  # noqa: PLC0415  looks its own version up

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    try:
        about, required = metadata.metadata("shardwright"), metadata.requires("shardwright") or []
    except metadata.PackageNotFoundError:
        yield _version("shardwright", WARNING, f"{system}; not installed, so no ranges are known", "pip install -e .")
        return
    yield _version("shardwright", OK, f"{shardwright.__version__} on {system}")
    yield _python((about.get_all("Requires-Python") or [""])[0], about.get_all("Classifier") or [])
    ranges: dict[str, tuple[str, bool]] = {}
    for line in required:
        read = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*)?", line)
        if read is not None:
            ranges.setdefault(read[1].lower(), (read[2].strip(" ()"), "extra" in (read[3] or "")))
    yield from _torch(ranges.get("torch", ("", False))[0])
    yield _libraries(
        "libraries", [name for name, (_, extra) in ranges.items() if not extra and name != "torch"], ranges
    )
    yield _libraries("optional", OPTIONAL, ranges)


def _python(asked: str, classifiers: Sequence[str]) -> Finding:
    mine = platform.python_version()
    tested = [(int(m[1]), int(m[2])) for c in classifiers if (m := re.fullmatch(r".* :: (\d+)\.(\d+)", c))]
    if not within(mine, asked):
        return _version("Python", PROBLEM, f"{mine}, outside {asked}", f"a Python {asked}")
    if tested and release(mine)[:2] > max(tested):
        newest = ".".join(map(str, max(tested)))
        return _version("Python", WARNING, f"{mine}, newer than {newest}, the newest tested", f"Python {newest}")
    return _version("Python", OK, f"{mine} ({asked})")


def _torch(asked: str) -> Iterator[Finding]:
    try:
        import torch  # noqa: PLC0415  takes seconds, and may be what is broken
    except Exception as error:  # a library of torch that cannot be loaded is an OSError, and others
        yield _version("torch", PROBLEM, f"cannot be imported: {error_text(error)}", f"pip install 'torch{asked}'")
        return
    build = torch_build(torch)
    text = f"{torch.__version__}, {build} build ({asked})"
    if within(torch.__version__, asked):
        yield _version("torch", OK, text)
    else:
        yield _version("torch", PROBLEM, f"{text}: outside", f"pip install 'torch{asked}'")
    driver = driver_kind()
    if driver and build == "CPU" and not (driver == "NPU" and hasattr(torch, "npu")):
        yield _version(
            "torch's build",
            WARNING,
            f"this machine has a driver for {driver}, torch is built for CPUs alone",
            f"a torch for {driver}: https://pytorch.org/get-started/locally",
        )


def driver_kind() -> str:
    """The kind of accelerator for which this machine has a driver; "" for none."""
    return next((kind for path, kind in DRIVERS.items() if os.path.exists(path)), "")


def torch_build(torch: Any) -> str:
    """The kind of accelerator that torch is built for, such as "CUDA 12.8", or "CPU"."""
    for name in ("hip", "cuda", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name.upper()} {version}"
    return "CPU"


def _libraries(check: str, names: Iterable[str], ranges: dict[str, tuple[str, bool]]) -> Finding:
    """One finding on several libraries. A missing one is a problem, but for optional ones."""
    installed, missing, outside = [], [], []
    for name in names:
        asked = ranges.get(name, ("", True))[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        installed.append(f"{name} {version}")
        if not within(version, asked):
            outside.append(f"{name}{asked}")
    text = ", ".join(installed) or "none"
    if missing:
        text += f"; missing: {', '.join(missing)}"
    if outside:
        text += f"; outside the range: {', '.join(outside)}"
    optional = check == "optional"
    lacking = outside if optional else [*outside, *(f"{name}{ranges[name][0]}" for name in missing)]
    mend = f"pip install {' '.join(repr(part) for part in lacking)}" if lacking else ""
    return _version(check, (WARNING if optional else PROBLEM) if lacking else OK, text, mend)


def imports() -> Iterator[Finding]:
    """The optional libraries that are installed, each imported in a process of its own."""
    try:
        import torch  # noqa: PLC0415  takes seconds; the forked processes need not import it again
    except Exception:  # `versions` has said so
        return
    answers = library_imports()
    fit = [name for name, error in answers.items() if not error]
    yield _version("imports", OK, ", ".join(fit) or "no optional library is installed")
    for name, error in answers.items():
        if not error:
            continue
        mend = f"pip install --force-reinstall {name}, or pip uninstall {name} where no model needs it"
        if "torchvision::" in error:  # its own operators are not there: it was built for another torch
            build = "cpu" if torch_build(torch) == "CPU" else "of the same accelerator"
            mend = (
                f"torchvision {metadata.version('torchvision')} was built for another torch than {torch.__version__}: "
                f"install both from one index (build: {build}; https://pytorch.org/get-started/locally), or pip "
                "uninstall torchvision where no model needs it"
            )
        yield _version(f"import {name}", WARNING, f"it cannot be imported: {error}", mend)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found is not None else ()


def within(version: str, asked: str) -> bool:
    """True where a version is in a range such as ">=2.9,<3"."""
    for sign, bound_ in re.findall(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", asked):
        mine, other = release(version), release(bound_)
        width = max(len(mine), len(other))
        mine, other = mine + (0,) * (width - len(mine)), other + (0,) * (width - len(other))
        meets = {">=": mine >= other, "<=": mine <= other, "==": mine == other, "!=": mine != other}
        if not (meets | {">": mine > other, "<": mine < other})[sign]:
            return False
    return True


# -- devices -----------------------------------------------------------------------------------------------------------


def devices() -> Iterator[Finding]:
    """Accelerators that a process sees, and the device that a process of this environment would take."""
    try:
        import torch  # noqa: PLC0415  takes seconds
    except Exception:  # `versions` has said so
        return
    hidden = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    text = ", ".join(f"{name}={value!r}" for name, value in hidden.items())
    (seen,) = in_children([seen_accelerators], SECONDS)
    build = torch_build(torch)
    if seen.error:
        yield _device(
            "accelerators",
            PROBLEM,
            f"torch cannot tell: {seen.error}" + (f"; {text}" if text else ""),
            "the driver's own tool (nvidia-smi, rocm-smi, npu-smi info) has to answer; then the driver's version "
            f"against torch's {build}",
        )
        return
    rows: list[JsonObject] = seen.value
    if not rows:
        lost = build != "CPU" and bool(driver_kind())
        mend = f"unset {' '.join(hidden)}, or name accelerators that are there" if hidden else ""
        if lost:
            mend = f"{mend}; " * bool(mend) + f"compare the driver's version with torch's {build}; rights on /dev"
        yield _device(
            "accelerators",
            WARNING if hidden or lost else OK,
            "none" + f" is seen by torch, whose build is {build}" * lost + f"; {text}" * bool(text),
            mend,
        )
    for row in rows:
        busy = row["free"] is not None and row["free"] < row["total"] / 2
        memory = f"{row['total'] / GIB:.1f} GiB"
        if row["free"] is not None:
            memory += f", {row['free'] / GIB:.1f} GiB free"
        yield _device(
            row["device"],
            WARNING if busy else OK,
            f"{row['name']}, {memory}",
            "end the processes that hold its memory" if busy else "",
        )
    if rows and text:
        yield _device("visible", OK, text)
    (mine,) = in_children([taken_device], SECONDS)
    if mine.error:
        yield _device("this process", PROBLEM, mine.error, mine.mend)
    else:
        yield _device("this process", OK, f"would take {mine.value}")


def seen_accelerators() -> list[dict[str, object]]:
    """Name and memory of each accelerator that torch sees; touches them all."""
    import torch  # noqa: PLC0415  takes seconds

    from ..accelerators import module_of, total_memory  # noqa: PLC0415  imports torch
    from ..launch.device_choice import accelerator_count  # noqa: PLC0415  imports torch

    kind = torch.accelerator.current_accelerator() if accelerator_count() else None
    if kind is None:
        return []
    rows = []
    for index in range(accelerator_count()):
        device = torch.device(kind.type, index)
        module = module_of(device)
        name, free = getattr(module, "get_device_name", None), getattr(module, "mem_get_info", None)
        rows.append(
            {
                "device": str(device),
                "name": name(index) if name is not None else kind.type,
                "total": total_memory(device),
                "free": int(free(device)[0]) if free is not None else None,
            }
        )
    return rows


def taken_device() -> str:
    """The device that a process with this environment would take."""
    from ..launch.device_choice import accelerator_count, device_of_rank  # noqa: PLC0415  imports torch

    try:
        place = find(os.environ)
    except SettingError:
        return "none: see the launcher's variables below"
    if place is not None:
        return str(device_of_rank(place))
    seen = accelerator_count()
    return "the device of its model" + (f", the CPU or one of {seen} accelerators" if seen else ", the CPU")


# -- the launcher's environment ----------------------------------------------------------------------------------------


def launcher() -> Iterator[Finding]:
    """The place in the run that variables give this process, and variables that mislead."""
    try:
        place = find(os.environ)
        token = token_of(os.environ)
    except SettingError as error:
        yield _variable("environment", PROBLEM, error.message, error.legal or "")
    else:
        yield _variable("environment", OK, _told_place(place, bool(token)))
        warning = remark(os.environ) if place is None else None
        if warning is not None:
            found, _, mend = warning.rpartition(". ")
            yield _variable("leftovers", WARNING, found, mend)
    asked = os.environ.get("SHARDWRIGHT_DEVICES")
    if asked and not (asked.isdecimal() and int(asked)):
        yield _variable("SHARDWRIGHT_DEVICES", PROBLEM, f"SHARDWRIGHT_DEVICES={asked}", "a whole number of at least 1")
    interfaces = [name for _, name in socket.if_nameindex()]
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    lost = [name for name in named if name not in interfaces]
    if lost:
        yield _variable(
            "GLOO_SOCKET_IFNAME",
            PROBLEM,
            f"names {', '.join(lost)}, which this host does not have",
            f"unset it, or one of {', '.join(interfaces)}",
        )


def _told_place(place: RankInRun | None, token: bool) -> str:
    if place is None:
        asked = os.environ.get("SHARDWRIGHT_DEVICES")
        return f"no launcher: one process plays {asked or 'all'} devices"
    return (
        f"{place.launcher}: rank {place.rank} of {place.size}, number {place.device} on its host; "
        f"{'an agent' if place.agent else 'rank 0'} listens at {place.master_addr}:{place.master_port}; "
        f"{'a' if token else 'no'} token keeps others out"
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def collectives() -> Iterator[Finding]:
    """The backends of torch.distributed, and two ranks that communicate over each usable one."""
    try:
        import torch.distributed as dist  # noqa: PLC0415  takes seconds
    except Exception:  # `versions` has said so
        return
    if not dist.is_available():
        yield _collective(
            "backends",
            WARNING,
            "torch is built without torch.distributed: one process plays all devices",
            "a torch with it, for several processes",
        )
        return
    backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    backends = [name for name in backends if dist.is_backend_available(name)]
    yield _collective("backends", OK, ", ".join(backends) or "none")
    (counted,) = in_children([default_backend], SECONDS)
    backend, count = counted.value or ("gloo", 0)
    if "gloo" in backends:
        for interface in interfaces():
            yield two_ranks("gloo", interface)
    if backend != "gloo":
        if backend not in backends:
            yield _collective(backend, PROBLEM, "torch has accelerators, not this backend", "another build of torch")
        elif count < 2:
            yield _collective(backend, OK, f"not tested: two accelerators are needed, {count} is there")
        else:
            yield two_ranks(backend, interfaces()[-1])


def default_backend() -> tuple[str, int]:
    """The backend of this machine's accelerators, "gloo" without one, and the number of accelerators."""
    import torch  # noqa: PLC0415  takes seconds
    import torch.distributed as dist  # noqa: PLC0415  takes seconds

    from ..launch.device_choice import accelerator_count  # noqa: PLC0415  imports torch

    kind = torch.accelerator.current_accelerator() if accelerator_count() else None
    return ("gloo", 0) if kind is None else (dist.get_default_backend_for_device(kind), accelerator_count())


def interfaces() -> list[str]:
    """The loopback interface, and the one that a run of several hosts would take, where it is known."""
    place = None
    with contextlib.suppress(SettingError):
        place = find(os.environ)
    # 192.0.2.1 is an address of documentation (RFC 5737): the route to it is that to the outer world. Nothing is sent.
    targets = [place.master_addr] if place is not None else []
    targets += [os.environ.get("MASTER_ADDR", ""), "192.0.2.1"]
    taken = os.environ.get("GLOO_SOCKET_IFNAME") or next(
        (name for target in targets if target and (name := leading_to(target, PORT))), None
    )
    loopback = leading_to(LOOPBACK, PORT) or "lo"
    return [loopback] if taken in (None, loopback) else [loopback, str(taken)]


def two_ranks(backend: str, interface: str) -> Finding:
    """The finding of two ranks that communicate on this machine.

    Args:
        backend: the backend of the process group.
        interface: the network interface of its connections.
    """
    check = f"{backend} on {interface}"
    mend = (
        f"{backend.upper()}_SOCKET_IFNAME={interface} may name another interface; a firewall must let processes of one "
        "host connect; TORCH_DISTRIBUTED_DEBUG=DETAIL says more"
    )
    if backend == "nccl":
        mend += "; NCCL_DEBUG=INFO too; NCCL_P2P_DISABLE=1 where the GPUs cannot reach one another"
    try:
        with contextlib.closing(bound(LOOPBACK, 0, False)) as listener:
            port = listener.getsockname()[1]
    except OSError as error:
        return _collective(check, PROBLEM, f"no free port: {error.strerror or error}", "see ports")
    done = in_children([partial(played, backend, interface, rank, port, SECONDS) for rank in range(2)], SECONDS)
    failed = [f"rank {rank}: {answer.error}" for rank, answer in enumerate(done) if answer.error]
    if failed:
        return _collective(check, PROBLEM, "; ".join(failed), mend)
    figures: list[dict[str, object]] = done[0].value
    lines = [f"of {4 * SHORT} bytes, of {4 * LONG // MIB} MiB:"]
    for name in dict.fromkeys(row["operation"] for row in figures):
        short, long = (row for row in figures if row["operation"] == name)
        lines.append(f"{name} {short['milliseconds']:.3g} ms, {long['gigabytes_per_second']:.3g} GB/s")
    return _collective(check, OK, "\n".join(lines), figures=figures)


# -- this host ---------------------------------------------------------------------------------------------------------


def shared_memory() -> Iterator[Finding]:
    """Size of the shared memory that ranks of one host use."""
    if not os.path.isdir(SHARED):
        yield _host(
            "shared memory",
            WARNING,
            f"no {SHARED}: ranks of one host communicate over sockets, which is slower",
            f"mount -t tmpfs tmpfs {SHARED}",
        )
        return
    usage, needed = shutil.disk_usage(SHARED), 64 * MIB  # a DataLoader's workers need as much, however few they are
    ranks = max(2, len(os.sched_getaffinity(0)))
    with contextlib.suppress(ImportError):
        from ..runtime.distributed.shared_memory import group_bytes  # noqa: PLC0415  imports torch

        needed = max(needed, 2 * group_bytes(ranks))
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    mend = f"docker run --shm-size=8g or --ipc=host; mount -o remount,size=8G {SHARED}; remove files left in it"
    if not os.access(SHARED, os.W_OK):
        yield _host("shared memory", WARNING, f"{text}, not writable", f"chmod 1777 {SHARED}")
    elif usage.free < 16 * MIB:
        yield _host("shared memory", PROBLEM, f"{text}: DataLoader workers and NCCL fail", mend)
    elif usage.free < needed:
        yield _host("shared memory", WARNING, f"{text}, {needed / GIB:.2f} GiB are needed by {ranks} ranks", mend)
    else:
        off = os.environ.get("SHARDWRIGHT_SHARED_MEMORY") == "0"
        yield _host("shared memory", OK, text + ("; not used: SHARDWRIGHT_SHARED_MEMORY=0" if off else ""))


def open_files() -> Iterator[Finding]:
    """The limit of open files of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield _host("open files", OK, "no limit")
        return
    state = PROBLEM if soft < 256 else WARNING if soft < 1024 else OK
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    yield _host(
        "open files",
        state,
        f"{soft:,} a process, at most {most}",
        "" if state == OK else "ulimit -n 65536; in a container --ulimit nofile=65536",
    )


def disks() -> Iterator[Finding]:
    """Free space of the current folder and of the folder of temporary files."""
    for check, folder_of, mend in (
        ("current folder", os.getcwd, "free some, or start in another folder"),
        ("temporary files", tempfile.gettempdir, "free some, or TMPDIR=/another/folder"),
    ):
        try:
            folder = folder_of()
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"\0")
            free = shutil.disk_usage(folder).free
        except OSError as error:
            yield _host(check, PROBLEM, f"cannot be written to: {error.strerror or 'no such folder'}", mend)
            continue
        state = PROBLEM if free < 100 * MIB else WARNING if free < GIB else OK
        yield _host(check, state, f"{free / GIB:.2f} GiB free", "" if state == OK else mend)


def clock() -> Iterator[Finding]:
    """The wall clock against the monotonic clock, and against the age of the package's files."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(0.05)
    apart = abs((time.time() - wall) - (time.monotonic() - monotonic))
    mend = "a time service: timedatectl set-ntp true"
    if time.time() < os.stat(__file__).st_mtime - 86400:
        yield _host("clock", PROBLEM, "the wall clock is before the installation of this package", mend)
    elif apart > 0.02:
        yield _host("clock", WARNING, f"wall and monotonic clock drift apart: {apart * 1e3:.0f} ms within 50 ms", mend)
    else:
        yield _host("clock", OK, "wall and monotonic clock agree; other hosts' clocks are not checked")


def host_name() -> Iterator[Finding]:
    """The addresses of this host's name."""
    (found,) = in_children([addresses_of_host], SECONDS)
    mend = "a line of /etc/hosts with this host's address and name; or MASTER_ADDR as an address, not a name"
    if found.error:
        yield _host("host name", WARNING, f"is not resolved: {found.error}", mend)
    elif all(ipaddress.ip_address(address).is_loopback for address in found.value):
        yield _host("host name", OK, "resolves to a loopback address, which other hosts cannot reach")
    else:
        yield _host("host name", OK, "resolves to an address")


def addresses_of_host() -> list[str]:
    """The addresses of this host's name. Name servers may take long to answer."""
    rows = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return [str(row[4][0]).partition("%")[0] for row in rows]


def ports() -> Iterator[Finding]:
    """A free port, and the port at which rank 0 would listen."""
    try:
        bound(LOOPBACK, 0, False).close()
    except OSError as error:
        yield _host(
            "ports",
            PROBLEM,
            f"none can be bound: {error.strerror or error}",
            "a sandbox or container has to allow sockets; sysctl net.ipv4.ip_local_port_range",
        )
        return
    place = None
    with contextlib.suppress(SettingError):
        place = find(os.environ)
    address, port = (place.master_addr, place.master_port) if place is not None else (LOOPBACK, PORT)
    if place is not None and (place.rank or place.agent):
        yield _host("ports", OK, "can be bound; this process need not listen itself")
        return
    try:
        check_port(address, port, place is not None, "rank 0's", "MASTER_PORT can name another")
    except SettingError as error:
        state = WARNING if place is None else PROBLEM
        yield _host("ports", state, error.message, "MASTER_PORT=29501, on all ranks alike")
    else:
        yield _host("ports", OK, f"can be bound, and {port}, at which rank 0 listens, is free")
