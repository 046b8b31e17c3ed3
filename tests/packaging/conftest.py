"""Built once for all test processes: a copy of the checkout, its wheel, sdist and zip."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.checkout import copy, zip_without_symlinks


@dataclass(frozen=True)
class Built:
    """Where the artifacts lie. `tree` is the copy they were built from."""

    tree: Path
    wheel: Path
    sdist: Path
    zip: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Built:
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "packaging"
    shared.mkdir(exist_ok=True)
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            build(shared)
            (shared / "done").touch()
    [wheel], [sdist] = shared.glob("dist/*.whl"), shared.glob("dist/*.tar.gz")
    return Built(shared / "tree", wheel, sdist, shared / "mlxq-main.zip")


def build(folder: Path) -> None:
    """The wheel is built from the sdist, so a file that the sdist lacks is missed too."""
    tree = copy(folder / "tree")
    zip_without_symlinks(tree, folder / "mlxq-main.zip")
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
