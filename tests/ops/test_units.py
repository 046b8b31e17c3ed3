"""The operator's files: what launchd, systemd and Grafana are given is what the worker knows."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import plistlib
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from mlxq.worker import cli
from mlxq.worker.config import Config
from mlxq.worker.metrics import Metrics
from ops.lib.bootstrap import ROOT

OPS = ROOT / "ops"
ENVIRONMENT = OPS / "worker.env"
PLIST = OPS / "launchd" / "com.mlxq.worker.plist"
UNIT = OPS / "systemd" / "mlxq-worker.service"
DASHBOARD = OPS / "grafana" / "mlxq.json"
VARIABLE = re.compile(r"MLXQ_[A-Z_]+")


def known() -> dict[str, Any]:
    """The variables that `mlxq worker` reads, each with the default of its flag."""
    found = {}
    for parameter in inspect.signature(cli.worker, eval_str=True).parameters.values():
        [option] = parameter.annotation.__metadata__
        if isinstance(getattr(option, "envvar", None), str):
            found[option.envvar] = parameter.default
    return found


@pytest.fixture(scope="module")
def plist() -> dict[str, Any]:
    found: dict[str, Any] = plistlib.loads(PLIST.read_bytes())
    return found


def unit() -> dict[str, str]:
    """The settings of the service; the last of each name."""
    pairs = (line.partition("=") for line in UNIT.read_text().splitlines() if line[:1] != "#")
    return {name: value for name, equals, value in pairs if equals}


@pytest.mark.parametrize("path", [ENVIRONMENT, PLIST, UNIT], ids=lambda path: path.name)
def test_every_variable_exists(path: Path) -> None:
    named = set(VARIABLE.findall(path.read_text()))
    assert named and named <= known().keys()


def sourced(text: str, tmp_path: Path) -> dict[str, str]:
    """What a shell makes of an environment file."""
    path = tmp_path / "worker.env"
    path.write_text(text)
    shell = ["sh", "-c", f"set -a; . {path}; env -0"]
    done = subprocess.run(shell, env={}, capture_output=True, check=True, timeout=30)
    pairs = (entry.partition("=") for entry in done.stdout.decode().split("\0"))
    return {name: value for name, _, value in pairs if VARIABLE.fullmatch(name) or name == "MODEL"}


def test_the_environment_file_shows_the_defaults(tmp_path: Path) -> None:
    text = ENVIRONMENT.read_text()
    given = sourced(text, tmp_path)
    assert given.keys() == {"MODEL", "MLXQ_REDIS_URL", "MLXQ_METRICS_PORT"}
    shown = sourced(re.sub(r"^#(?=MLXQ_)", "", text, flags=re.MULTILINE), tmp_path)
    assert shown.keys() == {"MODEL", *known()}
    for name in shown.keys() - given.keys():
        assert shown[name] == str(known()[name]), name
    Config(model=given["MODEL"], redis_url=given["MLXQ_REDIS_URL"])


def test_launchd_keeps_it_running(plist: dict[str, Any]) -> None:
    assert plist["KeepAlive"] is True and plist["RunAtLoad"] is True
    assert plist["ThrottleInterval"] >= 10
    assert plist["ExitTimeOut"] > float(plist["EnvironmentVariables"]["MLXQ_DRAIN_TIMEOUT_S"])
    assert plist["Label"] == PLIST.stem
    assert plist["ProcessType"] == "Interactive"
    assert plist["StandardOutPath"] == plist["StandardErrorPath"]


def test_no_secret_is_where_all_may_read_it(plist: dict[str, Any]) -> None:
    assert "MLXQ_REDIS_URL" not in plist["EnvironmentVariables"]
    assert "--redis" not in PLIST.read_text() + UNIT.read_text()
    assert "PASSWORD" not in PLIST.read_text() + UNIT.read_text()


STUB = """#!/bin/sh
trap 'echo drained; exit 0' TERM
echo "worker $$ $* $MLXQ_QUEUE $MLXQ_REDIS_URL $MLXQ_LOG_LEVEL"
while :; do sleep 0.05; done
"""
CAFFEINATE = '#!/bin/sh\necho "caffeinate $*"\n'


async def test_what_launchd_runs(plist: dict[str, Any], tmp_path: Path) -> None:
    """The command itself, with stand-ins: the worker has the pid that caffeinate watches and
    that launchd signals."""
    for name, text in (("mlxq", STUB), ("caffeinate", CAFFEINATE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = "MODEL='/a model'\nMLXQ_QUEUE=q1\nMLXQ_REDIS_URL='redis://u:p@h?a=1&b=2'\n"
    (tmp_path / "worker.env").write_text(settings)
    program = list(plist["ProgramArguments"])
    for real, stand_in in (
        ("/usr/local/mlxq/worker.env", "worker.env"),
        ("/usr/bin/caffeinate", "caffeinate"),
        ("/usr/local/mlxq/venv/bin/mlxq", "mlxq"),
    ):
        assert real in program[2]
        program[2] = program[2].replace(real, str(tmp_path / stand_in))
    process = await asyncio.create_subprocess_exec(
        *program,
        env={"PATH": os.environ["PATH"], **plist["EnvironmentVariables"]},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        lines = sorted([await process.stdout.readline() for _ in range(2)])
        assert [line.decode().strip() for line in lines] == [
            f"caffeinate -i -s -w {process.pid}",
            f"worker {process.pid} worker /a model q1 redis://u:p@h?a=1&b=2 info",
        ]
        process.send_signal(signal.SIGTERM)
        assert await process.stdout.read() == b"drained\n"
        assert await process.wait() == 0


def test_systemd_keeps_it_running() -> None:
    settings = unit()
    assert settings["Restart"] == "always" and int(settings["RestartSec"]) >= 5
    assert settings["StartLimitIntervalSec"] == "0"
    assert float(settings["TimeoutStopSec"]) > Config(model="m").drain_timeout_s
    assert settings["KillMode"] == "mixed"
    assert settings["EnvironmentFile"].endswith(ENVIRONMENT.name)
    assert settings["ExecStart"].endswith("mlxq worker ${MODEL}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert "/opt/mlxq/bin/mlxq" in text
    path = tmp_path / UNIT.name
    path.write_text(text.replace("/opt/mlxq/bin/mlxq", "/bin/true"))  # it must exist
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def exposed() -> set[str]:
    """The names of all samples that a worker shows, once something has happened."""
    metrics = Metrics(4, lambda: 0)
    metrics.ended("done")
    text = generate_latest(metrics.registry).decode()
    return set(re.findall(r"^(mlxq:\w+)", text, re.MULTILINE))


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expr in expressions for name in re.findall(r"mlxq:\w+", expr)}
    assert asked and asked <= exposed()
    for expr in expressions:
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
        assert set(re.findall(r"by \((\w+)\)", expr)) <= {"le", "how", "instance"}
        for function, name in re.findall(r"(rate|sum|max|count)\((mlxq:\w+)", expr):
            assert (function == "rate") is name.endswith(("_total", "_bucket", "_sum", "_count"))


def test_the_dashboard_has_a_place_for_each_panel() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
