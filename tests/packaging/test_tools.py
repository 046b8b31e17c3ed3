"""The checkers see every file once, although mlxq/ shows the folders a second time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT, copy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check(tree: Path, *command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "flawed" in line]


def test_each_error_is_reported_once(tmp_path: Path) -> None:
    tree = copy(tmp_path / "tree")
    if (ROOT / ".mypy_cache").is_dir():  # mypy believes no entry whose source has changed
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    (tree / "protocol" / "flawed.py").write_text("import os\n\nnumber: int = 'text'\n")
    [unused] = check(tree, "ruff", "check", "--output-format", "concise", ".")
    assert unused.startswith("protocol/flawed.py:1:8: F401")
    [misfit] = check(tree, "mypy", "mlxq")
    assert misfit.startswith("mlxq/protocol/flawed.py:3: error: Incompatible types in assignment")
