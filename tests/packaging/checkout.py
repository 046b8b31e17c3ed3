"""The checkout as a packager sees it: its modules, copies of it, and empty environments."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("protocol", "producer", "worker")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def sources(root: Path = ROOT) -> list[Path]:
    """Every Python file of the three installed folders, relative to `root`."""
    found = (path for part in PARTS for path in (root / part).rglob("*.py"))
    return sorted(path.relative_to(root) for path in found)


def package_data(root: Path = ROOT) -> list[Path]:
    """What must be installed beside the Python files, relative to `root`."""
    scripts = (path.relative_to(root) for path in (root / "protocol").rglob("*.lua"))
    return sorted([*scripts, Path("protocol/README.md")])


def module_name(source: Path) -> str:
    """`worker/engine/batch.py` is `mlxq.worker.engine.batch`."""
    parts = source.with_suffix("").parts
    return ".".join(["mlxq", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def copy(target: Path) -> Path:
    """A copy of the working tree, symlinks kept, so that a build leaves nothing behind here."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=NOT_SOURCE)
    return target


def zip_without_symlinks(tree: Path, target: Path) -> Path:
    """An archive as GitHub serves it and pip unpacks it: a symlink is a text file with its goal."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(tree.rglob("*")):
            name = Path("mlxq-main") / path.relative_to(tree)
            if path.is_symlink():
                archive.writestr(str(name), str(path.readlink()))
            elif path.is_file():
                archive.write(path, name)
    return target


class Environment:
    """An empty virtual environment, without even pip in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        self.python = folder / "bin" / "python"

    def install(self, *what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        quiet = ["--disable-pip-version-check", "--quiet", "--no-compile"]
        done = subprocess.run([*pip, "install", *quiet, *what], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of this environment, in its own folder, away from the checkout."""
        path = self.folder / "bin" / command[0]
        clean = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}
        return subprocess.run(
            [str(path), *command[1:]], cwd=self.folder, env=clean, capture_output=True, text=True
        )

    def evaluate(self, code: str) -> str:
        """What `code` prints; fails with its traceback if it raises."""
        done = self.run("python", "-W", "error", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
