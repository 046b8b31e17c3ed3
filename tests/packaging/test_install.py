"""mlxq installs from wheel, sdist, zip and editable, whole, under one name."""

from __future__ import annotations

import asyncio
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from ops.lib.stack import Stack
from ops.lib.synthetic import answer_text
from tests.packaging.checkout import ROOT, Environment, copy, module_name, package_data, sources
from tests.packaging.conftest import Built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BASE = {"mlxq", "msgspec", "redis", "hiredis"}
BACKPORTS = {"async-timeout"}  # redis-py asks for it below Python 3.11.3


def check_whole(environment: Environment) -> None:
    """Every module and data file is found by its mlxq name, and the three parts import."""
    code = f"""
import importlib.util, importlib.resources
import mlxq, mlxq.protocol.scripts, mlxq.producer, mlxq.worker
from mlxq.producer import Producer
names = {[module_name(source) for source in sources()]!r}
missing = [name for name in names if importlib.util.find_spec(name) is None]
for path in {[str(path) for path in package_data()] + ["py.typed"]!r}:
    if not importlib.resources.files("mlxq").joinpath(path).is_file():
        package, _, name = path.partition("/")
        if not name or not importlib.resources.files("mlxq." + package).joinpath(name).is_file():
            missing.append(path)
print(missing)
"""
    assert environment.evaluate(code) == "[]"


def test_wheel_holds_every_file_and_nothing_else(built: Built) -> None:
    expected = {f"mlxq/{path}" for path in [*sources(), *package_data()]}
    expected |= {"mlxq/__init__.py", "mlxq/py.typed"}
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_licence_goes_with_it(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        [info] = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert "License-Expression: Apache-2.0" in archive.read(f"{info}/METADATA").decode()
        assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")


def test_sdist_holds_what_a_checkout_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tools = {"pyproject.toml", "README.md", "mlxq/py.typed", ".ci/run", "ops/test", "ops/demo"}
    assert {*tools, *map(str, sources()), *map(str, package_data())} <= names


def test_wheel_without_extras_brings_the_producer_alone(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(str(built.wheel))
    installed = json.loads(
        environment.evaluate(
            "import importlib.metadata as m, json\n"
            "print(json.dumps([d.metadata['Name'].lower() for d in m.distributions()]))"
        )
    )
    assert set(installed) - BACKPORTS == BASE
    check_whole(environment)
    blocked = "mlx mlx_lm mlx_vlm typer rich structlog transformers".split()
    code = f"import importlib.util as u; print([n for n in {blocked!r} if u.find_spec(n)])"
    assert environment.evaluate(code) == "[]"

    bare = environment.run("mlxq", "--help")
    assert bare.returncode == 2
    assert bare.stdout == ""
    [line] = bare.stderr.splitlines()
    assert "mlxq[cli]" in line


STREAM = """
import asyncio, sys
from mlxq.producer import Producer

async def main():
    async with Producer(sys.argv[1], queue=sys.argv[2]) as producer:
        question = {"role": "user", "content": "What is the capital of France?"}
        job = await producer.submit(messages=[question], max_tokens=32, job_id="first")
        print("".join([text async for text in job]))

asyncio.run(main())
"""


async def test_wheel_without_extras_streams_from_a_worker(
    built: Built, tmp_path: Path, queue: str
) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(str(built.wheel))
    with Stack(None, queue) as stack:
        stack.start_worker("mac")
        await stack.serving("mac")
        done = await asyncio.to_thread(
            environment.run, "python", "-W", "error", "-c", STREAM, stack.url, queue
        )
    assert (done.stdout, done.stderr) == (answer_text("first", 32) + "\n", "")


def test_cli_extra_gives_the_command(built: Built, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(f"{built.wheel}[cli]")
    done = environment.run("mlxq", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("submit", "follow", "abort", "status"):
        assert command in done.stdout


@pytest.mark.parametrize("kind", ["sdist", "zip"])
def test_source_archives_install(built: Built, kind: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.install(str(getattr(built, kind)))
    check_whole(environment)


def test_editable_install_sees_new_modules(built: Built, tmp_path: Path) -> None:
    tree = copy(tmp_path / "tree")
    environment = Environment(tmp_path / "venv")
    environment.install("--editable", str(tree))
    check_whole(environment)
    (tree / "worker" / "brand_new.py").write_text("answer = 42\n")
    assert environment.evaluate("import mlxq.worker.brand_new as n; print(n.answer)") == "42"
    origin = environment.evaluate("import mlxq.worker; print(mlxq.worker.__file__)")
    assert Path(origin).samefile(tree / "worker" / "__init__.py")


def test_the_copy_is_the_checkout(built: Built) -> None:
    """Guards the tests above against looking at an incomplete copy."""
    assert sources(built.tree) == sources(ROOT)
    assert (built.tree / "mlxq" / "worker").is_symlink()
