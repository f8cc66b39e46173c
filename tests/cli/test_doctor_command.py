"""`shardwright doctor`: each check on this machine, and each bad case, made by replacing what the check asks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.cli import doctor_command, library_imports, main
from shardwright.cli.doctor_command import Finding, within

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, and a folder of its own."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MS_", "GLOO_", "SHARDWRIGHT_", "MASTER_")) or name.endswith(
            ("RANK", "WORLD_SIZE", "_VISIBLE_DEVICES", "RANK_TABLE_FILE")
        ):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def only(found: Iterable[Finding], check: str) -> Finding:
    """The finding of one check."""
    (one,) = [finding for finding in found if finding.check == check]
    return one


def usage(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 << 30, 0, free))


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*given: Any, **named: Any) -> Any:
        raise error

    return fail


# -- the command -------------------------------------------------------------------------------------------------------


def test_text_fits_80_columns_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--quick"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    for check in ("Python", "torch", "accelerators", "environment"):
        assert check in text
    assert "backends" not in text and "0 problems" in text
    assert str(Path.cwd()) not in text and (len(socket.gethostname()) < 4 or socket.gethostname() not in text)


def test_json_is_one_object_with_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--quick", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["ok"] is True and reported["problems"] == 0
    names = {(row["area"], row["check"]) for row in reported["findings"]}
    assert {("versions", "torch"), ("devices", "this process"), ("host", "ports"), ("host", "clock")} <= names
    assert not [row for row in reported["findings"] if (row["state"] == "ok") and row["mend"]]


@pytest.mark.parametrize("json_too", [False, True])
def test_a_problem_is_exit_code_1_and_a_warning_is_not(
    json_too: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Finding("host", "a", "ok", "[red]x"), Finding("host", "b", "warning", "y", "do z")]
    monkeypatch.setattr(doctor_command, "findings", lambda quick: iter(rows))
    words = ["doctor", "--json"] if json_too else ["doctor"]
    assert main.main(words) == 0
    first = capsys.readouterr().out
    rows.append(Finding("host", "c", "problem", "w", "mend w"))
    assert main.main(words) == 1
    second = capsys.readouterr().out
    if json_too:
        assert json.loads(first)["warnings"] == 1 and json.loads(second)["ok"] is False
    else:
        assert "[red]x" in first and "to mend: do z" in first and "1 problem, 1 warning" in second


def test_a_check_that_fails_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", raises(ValueError("no limits here")))
    found = list(doctor_command.findings(quick=True))
    assert only(found, "open files").state == "problem" and "no limits here" in only(found, "open files").found
    assert only(found, "ports").state == "ok"


def test_a_terminal_has_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    doctor_command.show([Finding("host", "a", "problem", "x", "y")])
    assert "\x1b[1;31mproblem" in capsys.readouterr().out


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "asked", "held"),
    [
        ("2.9.0", ">=2.9,<3", True),
        ("2.13.0+cu128", "<3,>=2.9", True),
        ("2.8.1", ">=2.9,<3", False),
        ("3.0", ">=2.9,<3", False),
        ("2.10", ">2.9.0", True),
        ("1.0", "!=1", False),
        ("0.4", "==0.4.0", True),
        ("7", "", True),
    ],
)
def test_ranges_of_versions(version: str, asked: str, held: bool) -> None:
    assert within(version, asked) is held


@pytest.mark.parametrize("version", ["2.8.0", "3.1.0+cpu"])
def test_a_torch_outside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = only(doctor_command.versions(), "torch")
    assert found.state == "problem" and version in found.found and "pip install 'torch" in found.mend


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = list(doctor_command.findings(quick=True))
    assert only(found, "torch").state == "problem" and not [one for one in found if one.area == "devices"]
    assert only(found, "ports").state == "ok"
    assert list(doctor_command.collectives()) == []


def a_library(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed library of one file."""
    (folder / f"{name}.py").write_text(text)
    (folder / f"{name}-1.2.dist-info").mkdir()
    (folder / f"{name}-1.2.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(folder))


def test_libraries_are_imported_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_library(tmp_path, "fits_here", "import torch", monkeypatch)
    wrapped = "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
    wrapped += "except RuntimeError as e:\n    raise ImportError('Could not import') from e"
    a_library(tmp_path, "wraps_it", wrapped, monkeypatch)
    ends = "import faulthandler, os, signal\nfaulthandler.disable()  # the run of the tests shows no trace of it\n"
    a_library(tmp_path, "ends_it", ends + "os.kill(os.getpid(), signal.SIGSEGV)", monkeypatch)
    names = {name: name for name in ("fits_here", "wraps_it", "ends_it")}
    monkeypatch.setattr(library_imports, "IMPORTED", names | {"not_there": "not_there"})
    found = list(doctor_command.imports())
    assert only(found, "imports").found == "fits_here" and only(found, "imports").state == "ok"
    wraps, ended = only(found, "import wraps_it"), only(found, "import ends_it")
    assert wraps.state == ended.state == "warning"
    assert "operator torchvision::nms does not exist" in wraps.found and "another torch" in wraps.mend
    assert (
        "install both from one index" in wraps.mend and "SIGSEGV" in ended.found and "uninstall ends_it" in ended.mend
    )
    assert not set(names) & set(sys.modules), "nothing is imported here"


def test_quick_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "imports", raises(AssertionError("imports")))
    assert only(doctor_command.findings(quick=True), "torch").state == "ok"


@pytest.mark.parametrize(("mine", "state"), [("3.9.2", "problem"), ("3.10.1", "ok"), ("3.99.0", "warning")])
def test_versions_of_python(mine: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command.platform, "python_version", lambda: mine)
    found = only(doctor_command.versions(), "Python")
    assert found.state == state and bool(found.mend) == (state != "ok")


def test_libraries_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    before = metadata.version

    def version(name: str) -> str:
        if name in ("highspy", "lightning"):
            raise metadata.PackageNotFoundError(name)
        return {"transformers": "4.1", "numpy": "1.2"}.get(name) or before(name)

    monkeypatch.setattr(metadata, "version", version)
    found = list(doctor_command.versions())
    needed, optional = only(found, "libraries"), only(found, "optional")
    assert needed.state == "problem" and "'numpy>=1.24'" in needed.mend and "highspy>=1.7" in needed.mend
    assert optional.state == "warning" and "transformers>=5" in optional.mend and "missing: lightning" in optional.found
    assert "lightning" not in optional.mend


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "metadata", raises(metadata.PackageNotFoundError("shardwright")))
    (found,) = doctor_command.versions()
    assert found.state == "warning" and "not installed" in found.found


def test_a_driver_without_a_torch_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "DRIVERS", {"/": "CUDA"})
    monkeypatch.setattr(doctor_command, "torch_build", lambda torch: "CPU")
    assert only(doctor_command.versions(), "torch's build").state == "warning"
    monkeypatch.setattr(doctor_command, "torch_build", lambda torch: "CUDA 12.8")
    assert [found.check for found in doctor_command.versions() if found.check == "torch's build"] == []
    assert only(doctor_command.devices(), "accelerators").state == "warning"


def test_the_build_of_torch() -> None:
    version = SimpleNamespace(hip=None, cuda="12.8", xpu=None)
    assert doctor_command.torch_build(SimpleNamespace(version=version)) == "CUDA 12.8"
    assert doctor_command.torch_build(SimpleNamespace(version=SimpleNamespace(hip="6.4", cuda=None))) == "HIP 6.4"
    assert doctor_command.torch_build(SimpleNamespace(version=SimpleNamespace(hip=None, cuda=None))) == "CPU"


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accelerators of 64 GB, the second with little free, in forked processes too."""
    module = SimpleNamespace(
        get_device_name=lambda index: f"Chip {index}",
        mem_get_info=lambda device: ((60 << 30, 1 << 30)[device.index], 64 << 30),
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *given: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)


def test_accelerators_and_the_memory_that_others_hold(two_accelerators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(doctor_command.devices())
    first, second = only(found, "xpu:0"), only(found, "xpu:1")
    assert first.state == "ok" and first.found == "Chip 0, 64.0 GiB, 60.0 GiB free"
    assert second.state == "warning" and "1.0 GiB free" in second.found and second.mend
    assert "one of 2 accelerators" in only(found, "this process").found


def test_the_accelerator_that_a_rank_takes(two_accelerators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=1, size=2)
    assert "would take xpu:1" in only(doctor_command.devices(), "this process").found
    launched(monkeypatch, rank=1, size=3)
    found = only(doctor_command.devices(), "this process")
    assert found.state == "problem" and "3 processes" in found.found and "2 processes" in found.mend


def test_accelerators_that_a_variable_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = only(doctor_command.devices(), "accelerators")
    assert found.state == "warning" and "CUDA_VISIBLE_DEVICES=''" in found.found and "unset" in found.mend


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: time.sleep(600))
    monkeypatch.setattr(doctor_command, "SECONDS", 0.3)
    (found,) = doctor_command.devices()
    assert found.state == "problem" and "no answer within 0.3 s" in found.found and found.mend


def test_this_process_touches_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no forked process could use it."""
    mine = os.getpid()

    def asked(*given: Any) -> bool:
        assert os.getpid() != mine
        return False

    for name in ("is_available", "device_count", "current_accelerator"):
        monkeypatch.setattr(torch.accelerator, name, asked)
    monkeypatch.setattr(
        doctor_command, "two_ranks", lambda backend, interface: Finding("collectives", backend, "ok", "")
    )
    monkeypatch.setattr(library_imports, "IMPORTED", {"safetensors": "safetensors.torch"})
    assert not [
        one for one in doctor_command.findings() if one.area in ("devices", "collectives") and one.state != "ok"
    ]


# -- the launcher ------------------------------------------------------------------------------------------------------


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """The variables of torchrun."""
    given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    for name, value in (given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29612}).items():
        monkeypatch.setenv(name, str(value))


def test_the_place_that_a_launcher_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor_command.launcher(), "environment").found == "no launcher: one process plays all devices"
    launched(monkeypatch, rank=3, size=8)
    found = only(doctor_command.launcher(), "environment")
    assert found.state == "ok" and found.found.startswith("torchrun: rank 3 of 8") and "no token" in found.found


@pytest.mark.parametrize(
    ("variables", "check", "state", "reported"),
    [
        ({"RANK": "1"}, "environment", "problem", "WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "environment", "problem", "RANK=x"),
        ({"PMIX_RANK": "3"}, "environment", "problem", "PMIX_RANK=3"),
        ({"PMIX_RANK": "0"}, "leftovers", "warning", "PMIX_RANK=0"),
        ({"SHARDWRIGHT_RUN_TOKEN": "abc"}, "environment", "problem", "3 characters"),
        ({"SHARDWRIGHT_DEVICES": "many"}, "SHARDWRIGHT_DEVICES", "problem", "many"),
        ({"GLOO_SOCKET_IFNAME": "nowhere9"}, "GLOO_SOCKET_IFNAME", "problem", "nowhere9"),
    ],
)
def test_variables_that_mislead(
    variables: dict[str, str], check: str, state: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = only(doctor_command.launcher(), check)
    assert found.state == state and reported in found.found and found.mend


# -- collectives -------------------------------------------------------------------------------------------------------


def test_two_ranks_communicate_over_gloo() -> None:
    found = list(doctor_command.collectives())
    assert "gloo" in only(found, "backends").found
    tested = [one for one in found if one.check.startswith("gloo on ")]
    assert tested and not [one for one in tested if one.state != "ok"]
    for one in tested:
        rows = {(row["operation"], row["bytes"]) for row in one.figures}
        assert rows == {(name, n) for name in ("all_reduce", "all_gather", "send") for n in (4, 8 << 20)}
        assert all(row["milliseconds"] > 0 and row["gigabytes_per_second"] > 0 for row in one.figures)
        assert "all_reduce" in one.found


def test_a_backend_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "SECONDS", 1.0)
    monkeypatch.setattr(doctor_command, "played", lambda *given: time.sleep(600))
    found = doctor_command.two_ranks("gloo", "lo")
    assert found.state == "problem" and "rank 1: no answer within 1 s" in found.found and "firewall" in found.mend


def test_a_wrong_result_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.fill_(7))
    found = doctor_command.two_ranks("gloo", doctor_command.interfaces()[0])
    assert found.state == "problem" and "the result of all_reduce is wrong" in found.found


def test_a_rank_that_dies_ends_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(backend: str, interface: str, rank: int, *given: object) -> None:
        time.sleep(600) if rank else os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(doctor_command, "played", part)
    found = doctor_command.two_ranks("gloo", "lo")
    assert "rank 0: the process ended with SIGKILL; rank 1: ended, since another" in found.found


def test_no_port_for_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "bound", raises(OSError(98, "Address already in use")))
    assert doctor_command.two_ranks("gloo", "lo").state == "problem"
    found = only(doctor_command.ports(), "ports")
    assert found.state == "problem" and "Address already in use" in found.found and found.mend


def test_accelerators_and_their_backend(two_accelerators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_command, "two_ranks", lambda backend, interface: Finding("collectives", backend, "ok", "fine")
    )
    monkeypatch.setattr(doctor_command, "interfaces", lambda: ["lo"])
    assert only(doctor_command.collectives(), "xccl").state == "problem"  # this torch is built without it
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert only(doctor_command.collectives(), "xccl").found == "fine"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert "two accelerators are needed" in only(doctor_command.collectives(), "xccl").found


def test_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    (found,) = doctor_command.collectives()
    assert found.state == "warning" and "torch.distributed" in found.found


def test_the_interface_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_command, "leading_to", lambda address, port: {"127.0.0.1": "lo", "192.0.2.1": "eth9"}[address]
    )
    assert doctor_command.interfaces() == ["lo", "eth9"]
    launched(monkeypatch, rank=0, size=2)
    assert doctor_command.interfaces() == ["lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert doctor_command.interfaces() == ["lo", "ib0"]


# -- this host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "state"), [(1 << 20, "problem"), (40 << 20, "warning"), (8 << 30, "ok")])
def test_shared_memory(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage(monkeypatch, free)
    (found,) = doctor_command.shared_memory()
    assert found.state == state and ("--shm-size" in found.mend) == (state != "ok")


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "SHARED", "/nowhere")
    (found,) = doctor_command.shared_memory()
    assert found.state == "warning" and "/nowhere" in found.found


@pytest.mark.parametrize(
    ("soft", "state"), [(100, "problem"), (512, "warning"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(soft: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, resource.RLIM_INFINITY))
    (found,) = doctor_command.open_files()
    assert found.state == state and ("ulimit" in found.mend) == (state != "ok")


@pytest.mark.parametrize(("free", "state"), [(50 << 20, "problem"), (500 << 20, "warning"), (2 << 30, "ok")])
def test_disks(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage(monkeypatch, free)
    assert [found.state for found in doctor_command.disks()] == [state, state]


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", raises(PermissionError(13, "Permission denied")))
    assert [(found.state, found.found) for found in doctor_command.disks()] == [
        ("problem", "cannot be written to: Permission denied")
    ] * 2
    monkeypatch.setattr(tempfile, "gettempdir", raises(FileNotFoundError("no usable temporary directory")))
    assert only(doctor_command.disks(), "temporary files").state == "problem"


def test_a_clock_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_command, "time", SimpleNamespace(time=lambda: 5.0, monotonic=time.monotonic, sleep=time.sleep)
    )
    assert [found.state for found in doctor_command.clock()] == ["problem"]
    walls = iter([2e10, 2e10 + 9, 2e10 + 9])
    monkeypatch.setattr(doctor_command.time, "time", lambda: next(walls))
    (found,) = doctor_command.clock()
    assert found.state == "warning" and "drift apart" in found.found


def test_a_host_name_that_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", raises(socket.gaierror(-2, "Name or service not known")))
    (found,) = doctor_command.host_name()
    assert found.state == "warning" and "Name or service not known" in found.found and "/etc/hosts" in found.mend
    for address, reported in (("127.0.1.1", "loopback"), ("10.0.0.7", "resolves to an address")):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: [(2, 1, 6, "", (address, 0))])
        (found,) = doctor_command.host_name()
        assert found.state == "ok" and reported in found.found and address not in found.found


def test_rank_0s_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor_command, "PORT", port)
        assert only(doctor_command.ports(), "ports").state == "warning"
        launched(monkeypatch, rank=0, size=2)
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = only(doctor_command.ports(), "ports")
        assert found.state == "problem" and str(port) in found.found and "MASTER_PORT=" in found.mend
        monkeypatch.setenv("RANK", "1")
        assert only(doctor_command.ports(), "ports").state == "ok"
