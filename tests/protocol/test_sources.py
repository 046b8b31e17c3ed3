"""The complete script sources: written out for other languages, and sound with a guard cut out."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxq.protocol.scripts import NAMES, main, script
from tests.protocol.wire import Wire

GUARDS = {
    "fence": {"take", "enqueue", "emit", "finish", "beat", "release", "abort", "sweep"},
    "gate": {"take", "enqueue", "emit", "finish", "beat", "release", "abort", "sweep"},
    "own_entry": {"take", "enqueue", "emit", "finish", "beat", "release", "abort", "sweep"},
    "receipt": {"take"},
    "lease": {"take"},
    "terminal_check": {"take"},
    "sequence": {"emit"},
    "finish_once": {"finish"},
    "dup": {"enqueue"},
}


def block(guard: str) -> re.Pattern[str]:
    return re.compile(rf"^ *-- guard {guard}\n(.*?)^ *-- end guard\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
async def test_the_server_names_the_script_as_we_do(wire: Wire, name: str) -> None:
    source = script(name)
    assert await wire.command("SCRIPT", "LOAD", source.source) == source.sha.encode()
    folder = Path(__file__).parents[2] / "protocol" / "lua"
    plain = (folder / "lib.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    assert source.sha == hashlib.sha1(plain).hexdigest()


@pytest.mark.parametrize("guard", GUARDS)
async def test_each_guard_can_be_cut_out(wire: Wire, guard: str) -> None:
    held = {name for name in NAMES if block(guard).search(script(name).source)}
    assert held == GUARDS[guard]
    for name in held:
        source, cuts = block(guard).subn("", script(name).source)
        assert cuts == 1
        assert await wire.command("SCRIPT", "LOAD", source) != script(name).sha.encode()


def test_the_sources_are_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "lua"
    assert main([str(folder)]) == 0
    paths = [folder / f"{name}.lua" for name in NAMES]
    assert capsys.readouterr().out.split() == [str(path) for path in paths]
    assert [path.read_text("utf-8") for path in paths] == [script(name).source for name in NAMES]


def test_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlxq.protocol.scripts"]
    subprocess.run([*command, str(tmp_path)], check=True, capture_output=True, timeout=60)
    assert len(list(tmp_path.glob("*.lua"))) == 8
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (failed.returncode, failed.stderr) == (
        2,
        "usage: python -m mlxq.protocol.scripts DIR\n",
    )
