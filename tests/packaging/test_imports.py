"""Imports run one way, producer -> protocol <- worker -> engine, and the base stays light."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import PARTS, ROOT, module_name, sources

LIGHT = {"redis", "msgspec"}
CLI = {"typer", "rich"}
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


def reached(start: set[Path]) -> set[Path]:
    """The modules of ours that importing `start` can load."""
    by_name = {module_name(source): source for source in sources()}
    found: set[Path] = set()
    while start:
        found |= start
        start = {by_name[name] for path in start for name in imported(path) & by_name.keys()}
        start -= found
    return found


def test_base_needs_redis_and_msgspec_alone() -> None:
    """Base is what `from mlxq.producer import Producer` can reach, and all of protocol.

    The rest of producer is the command line, which may use what the cli extra brings.
    """
    base = reached({Path("producer/__init__.py"), *names("protocol")})
    allowed = dict.fromkeys(names("producer"), LIGHT | CLI) | dict.fromkeys(base, LIGHT)
    wrong = {
        f"{path} imports {extra}"
        for path, modules in allowed.items()
        if (extra := third_party(path) - modules)
    }
    assert not wrong
    assert Path("producer/client.py") in base


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
