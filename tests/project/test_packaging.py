"""The wheel: what is in it, what it says of itself, and its page in a package registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from paths import ROOT
from readme_renderer import markdown
from timeline_text import drawn

import shardwright as sw

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, for a build leaves folders in its source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            folder,
            source,
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert not built.returncode, built.stdout + built.stderr
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


def output(wheel: zipfile.ZipFile) -> bytes:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return wheel.read(name)


@pytest.mark.long
def test_what_is_in_it(wheel: zipfile.ZipFile) -> None:
    held = {n for n in wheel.namelist() if ".dist-info/" not in n}
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "shardwright").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert held == there and "shardwright/py.typed" in held
    assert not [n for n in wheel.namelist() if "test" in n.split("/")[0]]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert Path(wheel.filename).name == f"shardwright-{version}-py3-none-any.whl"


@pytest.mark.long
def test_what_it_says_of_itself(wheel: zipfile.ZipFile) -> None:
    read = Metadata.from_email(output(wheel), validate=True)
    assert read.name == "shardwright" and str(read.requires_python) == ">=3.10"
    assert {f"Programming Language :: Python :: {v}" for v in PYTHONS} | {"Typing :: Typed"} <= set(read.classifiers)
    needed = {r.name: r for r in read.requires_dist if r.marker is None}
    assert set(needed) == {"torch", "numpy", "highspy", "rich", "xxhash"}
    for version, inside in (("2.8.0", False), ("2.9.0", True), ("2.13.0", True), ("2.15.0", True), ("3.0", False)):
        assert needed["torch"].specifier.contains(version) is inside
    # A registry takes no others.
    assert all(re.match("https?://[^/]", url) for url in (read.project_urls or {}).values())


@pytest.mark.long
def test_its_page_in_a_registry(wheel: zipfile.ZipFile) -> None:
    """With the renderer of PyPI, which drops pictures that are not at an address of their own."""
    message = message_from_bytes(output(wheel))
    assert message["Description-Content-Type"] == "text/markdown"
    page = markdown.render(message.get_payload(decode=True).decode())
    assert page is not None and "<h1" in page
    for source in re.findall(r'<(?:img|source)[^>]*?src(?:set)?="([^"]*)"', page):
        assert source.startswith("https://"), source
    for target in re.findall(r'<a href="([^"]*)"', page):
        assert target.startswith(("https://", "#")), target
    shown = [re.sub("<[^>]*>", "", block) for block in re.findall(r"<pre.*?</pre>", page, re.S)]
    text = message.get_payload(decode=True).decode()
    assert "`docs/models.md`" in text and "(docs/models.md)" not in text, "links to files are plain code there"
    assert "[docs/models.md](docs/models.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    picture = drawn((ROOT / "docs" / "pipeline.svg").read_text())
    assert picture.count("▓") > 100 and any(picture in block for block in shown)


def test_the_version() -> None:
    """One place says it, pyproject.toml: a package that is not installed cannot know it."""
    try:
        assert sw.__version__ == metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        assert sw.__version__ == "0+unknown"
    assert "__version__" in dir(sw) and (ROOT / "shardwright" / "py.typed").is_file()


def test_the_version_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    assert sw.__version__ == "0+unknown"


def test_the_demands_of_tests_leave_torch_alone() -> None:
    """Each torch has an environment, and what is installed after torch is held to that torch. The variables of the
    make that runs the tests are not handed on."""
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "TORCH")}
    asked = {
        torch: subprocess.run(
            ["make", "-n", "-B", "venv", *torch], cwd=ROOT, env=own, capture_output=True, text=True, check=True
        ).stdout
        for torch in ((), ("TORCH=torch",), ("TORCH=torch==2.9.0",), ("TORCH=torch>=2.10,<2.12",))
    }
    for torch, folder in zip(asked, (".venv", ".venv-torch", ".venv-torch-2.9.0", ".venv-torch-2.10-2.12")):
        assert f"-m venv {folder}\n" in asked[torch]
        assert f"--constraint {folder}/torch.txt --editable '.[test,examples]'" in asked[torch]
        assert subprocess.run(["git", "check-ignore", "-q", f"{folder}/x"], cwd=ROOT).returncode in (
            0,
            128,
        )  # 128: no git


@pytest.mark.long
def test_an_environment_imports_a_torchvision_that_does_not_fit(tmp_path: Path) -> None:
    """The lines of `make venv` that come after the installation, run on an environment of its own which sees the
    packages of this one."""
    own = {n: v for n, v in os.environ.items() if n not in ("MAKEFLAGS", "MAKEOVERRIDES", "TORCH", "PYTHONPATH")}
    output = subprocess.run(["make", "-n", "-B", "venv"], cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    rule = (
        ".venv/bin/python -c 'import torchvision'"
        + output.stdout.split(".venv/bin/python -c 'import torchvision'", 1)[1]
    )
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    ask = [venv / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    quick_end = "import atexit, gc; atexit.register(gc.freeze)"  # the collection at the end takes half a second
    (packages / "seen.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n{quick_end}\n")
    (venv / "torch.txt").write_text("torch==0")
    plain = [venv / "bin" / "python", "-c", "import torchvision"]
    fits = subprocess.run(plain, env=own, capture_output=True).returncode == 0
    command = rule.partition("touch ")[0].replace(".venv/", f"{venv}/")
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=own, capture_output=True, text=True)
    # The line is written where the import has worked at last.
    assert ("its own operators (nms) have names here, and do not run" in done.stdout) is not fits, done
    assert (packages / "torchvision_operators.pth").exists() is not fits
