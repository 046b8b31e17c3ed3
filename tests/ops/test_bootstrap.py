"""Setting up the virtual environment: what needs no network and no minutes."""

from __future__ import annotations

import io
import shutil
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


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("demo --help", 0, "usage: ops/demo [-h] [--plain] [--max-tokens N]"),
        ("demo --max-tokens 3", 2, "ops/demo: error: --max-tokens must be at least 48"),
        ("test --help", 0, "usage: ops/test [-h] [PYTEST ARGUMENT ...]"),
        ("model --help", 0, "usage: ops/model [-h]"),
        ("model bogus", 2, "ops/model: error: unrecognized arguments: bogus"),
    ],
)
def test_help_and_bad_arguments_install_nothing(
    tmp_path: Path, words: str, status: int, told: str
) -> None:
    """In a checkout that has nothing but what such an answer needs."""
    name, *arguments = words.split()
    for file in (name, "__init__.py", "lib/__init__.py", "lib/arguments.py", "lib/bootstrap.py"):
        copied = tmp_path / "ops" / file
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).parents[2] / "ops" / file, copied)
    command = [sys.executable, "-I", str(tmp_path / "ops" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert told in (done.stderr if status else done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["ops"]


PRINTS = "print('Collecting a'); print('Collecting b')"


def test_pip_is_quiet_unless_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    bootstrap.check([sys.executable, "-c", PRINTS], "hint")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit) as left:
        bootstrap.check([sys.executable, "-c", f"{PRINTS}; raise SystemExit(1)"], "hint")
    assert left.value.code == 2
    out, err = capfd.readouterr()
    assert (out, err.splitlines()[:2]) == ("", ["Collecting a", "Collecting b"])
    assert err.endswith("failed (hint)\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_of_it_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "12")
    bootstrap.check([sys.executable, "-c", PRINTS], "hint")
    assert terminal.getvalue() == "\r\x1b[KCollecting \r\x1b[KCollecting \r\x1b[K"
