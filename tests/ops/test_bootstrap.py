"""Setting up the virtual environment: what needs no network and no minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops.lib import bootstrap


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout with a virtual environment that nothing was installed into."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("version = 3.11.7\n")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    return tmp_path


def stamped(checkout: Path, extra: str) -> None:
    (checkout / ".venv" / f"mlxq-{extra}.stamp").write_text(bootstrap.stamp())


def test_a_stamp_means_installed(checkout: Path) -> None:
    assert not bootstrap.installed("demo")
    stamped(checkout, "demo")
    assert bootstrap.installed("demo")
    assert not bootstrap.installed("dev")


def test_dev_holds_demo(checkout: Path) -> None:
    stamped(checkout, "dev")
    assert bootstrap.installed("demo")


@pytest.mark.parametrize("file", ["pyproject.toml", ".venv/pyvenv.cfg"])
def test_other_dependencies_or_python_install_again(checkout: Path, file: str) -> None:
    stamped(checkout, "demo")
    (checkout / file).write_text("something else\n")
    assert not bootstrap.installed("demo")


def test_a_python_that_is_gone_installs_again(checkout: Path) -> None:
    stamped(checkout, "demo")
    (checkout / ".venv" / "bin" / "python").unlink()
    assert not bootstrap.installed("demo")


def test_openblas_does_not_replace_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "OPENBLAS", ("/nowhere/*.so", __file__))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert bootstrap.environment() == {"LD_PRELOAD": __file__}
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert bootstrap.environment() == {}


def test_no_openblas_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "OPENBLAS", ("/nowhere/*.so",))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert bootstrap.environment() == {}


def test_old_python_says_so_in_one_line() -> None:
    script = "import sys; sys.version_info = (3, 9, 18); sys.argv = ['ops/demo']\n"
    script += "from ops.lib.bootstrap import enter; enter('demo')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("demo: Python 3.11 or newer is needed; this is 3.9")
