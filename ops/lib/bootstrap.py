"""Gives the commands in `ops/` their virtual environment. Standard library only.

A command calls `enter` first. In a bare Python that makes `.venv` at the repository's root,
installs mlxq into it and starts the command again inside, where it returns at once. A stamp (hash
of pyproject.toml and of what made the environment) tells whether there is anything to install.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 11)
NEWER = ("python3.14", "python3.13", "python3.12", "python3.11")
# MLX's Linux wheel bundles a reference BLAS, 10 to 100 times slower than OpenBLAS. Debian's first;
# without it, the one that opencv brings (mlx-vlm depends on it) has the same plain symbols.
OPENBLAS = (
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    f"{VENV}/lib/python3*/site-packages/opencv_python*.libs/libopenblas*.so*",
)
STARTED = "MLXQ_OPS_STARTED"  # guards against starting ourselves again and again


def enter(extra: str) -> None:
    """Returns in a Python that has `mlxq[extra]`; `extra` is demo or dev (which holds demo).

    Leaves the process with one clear line on stderr if that cannot be had.
    """
    started = os.environ.pop(STARTED, None)
    if started == "venv":
        return
    if sys.version_info < OLDEST:
        start_again_newer(started)
    if not installed(extra):
        install(extra)
    os.environ.update(environment())
    os.environ[STARTED] = "venv"
    os.execv(PYTHON, [str(PYTHON), *sys.argv])


def environment() -> dict[str, str]:
    """What commands need in their environment: OpenBLAS, where it exists and nothing is set."""
    found = [path for pattern in OPENBLAS for path in sorted(glob.glob(pattern))]
    return {"LD_PRELOAD": found[0]} if found and "LD_PRELOAD" not in os.environ else {}


def start_again_newer(started: str | None) -> NoReturn:
    """Starts this command under the newest Python on PATH, since the current one is too old."""
    mine = ".".join(map(str, sys.version_info[:2]))
    for name in NEWER if started is None else ():
        python = shutil.which(name)
        if python and runs(python, f"import sys; sys.exit(sys.version_info < {OLDEST})"):
            os.environ[STARTED] = "newer"
            os.execv(python, [python, *sys.argv])
    leave(f"Python 3.11 or newer is needed; this is {mine}, and PATH has no newer one")


def installed(extra: str) -> bool:
    """Whether the virtual environment holds this version of `extra`, by stamp alone."""
    current = stamp()
    names = {extra, "dev"} if PYTHON.exists() else set()
    return any(read(VENV / f"mlxq-{name}.stamp") == current for name in names)


def stamp() -> str:
    """Names what an installation depends on: pyproject.toml, the Python, the checkout's place."""
    text = read(ROOT / "pyproject.toml") + read(VENV / "pyvenv.cfg") + str(ROOT)
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def install(extra: str) -> None:
    """Makes the virtual environment and installs into it; a second call at the same time waits."""
    try:
        lock = open(ROOT / ".venv.lock", "w")
    except OSError as error:
        leave(f"cannot write to {ROOT}: {error.strerror}")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command that installs")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if installed(extra):
            return
        started = time.monotonic()
        if not runs(str(PYTHON), f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"):
            say(f"making {VENV}")
            shutil.rmtree(VENV, ignore_errors=True)
            check(
                [sys.executable, "-m", "venv", str(VENV)], "on Debian: apt-get install python3-venv"
            )
        say(f"installing mlxq[{extra}] into it (about 1.1 GB the first time, some minutes)")
        command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", "--editable", f"{ROOT}[{extra}]"]
        check(command, "is the package index reachable?")
        (VENV / f"mlxq-{extra}.stamp").write_text(stamp(), encoding="utf-8")
        say(f"installed in {time.monotonic() - started:.0f} s")


def check(command: list[str], hint: str) -> None:
    """Runs `command`; leaves with what it printed and `hint` if it fails.

    On a terminal, the last line it printed is shown meanwhile.
    """
    lines = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                show(line.strip())
        except KeyboardInterrupt:
            show("")
            leave("stopped; the next call begins again where it must")
    show("")
    if process.returncode != 0:
        print("".join(lines), end="", file=sys.stderr)
        leave(f"`{' '.join(command)}` failed ({hint})")


def show(line: str) -> None:
    """Puts `line` in place of the one shown before, on a terminal; an empty one takes it away."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)


def runs(python: str, code: str) -> bool:
    """Whether `python` exists, starts and runs `code` with status 0."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, stdin=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


def say(line: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr, flush=True)


def leave(line: str) -> NoReturn:
    say(line)
    sys.exit(2)
