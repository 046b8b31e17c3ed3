"""Imports run one way, producer -> protocol <- worker -> engine, and the base stays light."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import PARTS, ROOT, module_name, sources

LIGHT = {"redis", "msgspec"}
# The commands of `mlxq`; they may need what the cli extra brings, and nothing else needs them.
COMMANDS = {Path("producer/commands.py"): {"typer", "rich"}}
MLX = {"mlx", "mlx_lm", "mlx_vlm"}


def imported(source: Path) -> set[str]:
    """Full names of all modules that a file imports, at its top or anywhere inside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import; write mlxq.…"
            assert node.module is not None
            # `from mlxq import worker` names a module too.
            found |= {f"mlxq.{alias.name}" for alias in node.names if node.module == "mlxq"}
            found.add(node.module)
    return found


def area(module: str) -> str:
    """protocol, producer, worker or worker.engine for a module of ours; "" for any other."""
    top, part, inner, *_ = [*module.split("."), "", ""]
    if top != "mlxq" or part not in PARTS:
        return ""
    return "worker.engine" if (part, inner) == ("worker", "engine") else part


ALLOWED = {
    "protocol": {"protocol"},
    "producer": {"producer", "protocol"},
    "worker": {"worker", "worker.engine", "protocol"},
    "worker.engine": {"worker.engine"},
}
# The codes of the error tree, which both sides of the engine boundary speak.
SHARED = {"mlxq.protocol.errors"}


def names(of: str) -> list[Path]:
    return [source for source in sources() if area(module_name(source)) == of]


@pytest.mark.parametrize("here", ALLOWED)
def test_imports_run_one_way(here: str) -> None:
    assert names(here), f"no module found in {here}"
    wrong = {
        f"{source} imports {module}"
        for source in names(here)
        for module in imported(source) - SHARED
        if area(module) not in {"", *ALLOWED[here]}
    }
    assert not wrong


def third_party(source: Path) -> set[str]:
    tops = {module.partition(".")[0] for module in imported(source)}
    return tops - sys.stdlib_module_names - {"mlxq"}


def test_base_needs_redis_and_msgspec_alone() -> None:
    wrong = {
        f"{path} imports {extra}"
        for path in [*names("protocol"), *names("producer")]
        if (extra := third_party(path) - LIGHT - COMMANDS.get(path, set()))
    }
    assert not wrong
    users = {path for path in sources() if imported(path) & set(map(module_name, COMMANDS))}
    assert users <= {Path("producer/cli.py"), *COMMANDS}


def test_asyncio_side_knows_no_mlx() -> None:
    wrong = {f"{path}: {found}" for path in names("worker") if (found := third_party(path) & MLX)}
    assert not wrong


def test_engine_knows_no_redis_and_no_event_loop() -> None:
    for path in names("worker.engine"):
        tops = {module.partition(".")[0] for module in imported(path)}
        assert not tops & {"redis", "asyncio"}, path


def test_our_folders_are_never_imported_by_their_bare_names() -> None:
    """`import worker` from the checkout would load a second copy of everything in it."""
    files = [*sources(), *(path.relative_to(ROOT) for path in (ROOT / "ops").rglob("*.py"))]
    for path in files:
        tops = {module.partition(".")[0] for module in imported(path)}
        assert not tops & {"worker", "protocol", "producer"}, path
