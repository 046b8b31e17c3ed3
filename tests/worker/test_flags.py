"""What is asked for on the command line reaches those who load the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mlxq.worker import cli, log, service
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.models import Source

Loaders = tuple[partial[Any], partial[Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Loaders]:
    """Of every worker that would have run: how it loads its model and its tokenizer."""
    found: list[Loaders] = []

    async def serve(config: Any, load: Any, orders: Any, load_tokenizer: Any) -> int:
        found.append((load, load_tokenizer))
        return 0

    monkeypatch.setattr(service, "serve", serve)
    monkeypatch.setattr(log, "configure", lambda *level, **context: None)
    return found


def run(*arguments: str, **environment: str) -> None:
    app = typer.Typer()
    app.command()(cli.worker)
    result = CliRunner().invoke(app, list(arguments), env=environment)
    assert result.exit_code == 0, result.output


def test_the_model_and_how_to_load_it(asked: list[Loaders]) -> None:
    run("hub/model", "--adapter", "hub/lora", "--revision", "v2", "--trust-remote-code")
    (load, load_tokenizer) = asked.pop()
    assert load.func is load_batch
    assert load.args == (Source("hub/model", "hub/lora", "v2", True),)
    assert load_tokenizer.func == Tokenizer.load
    assert load_tokenizer.keywords == {"trust_remote_code": True}


def test_by_default_the_newest_without_its_code(asked: list[Loaders]) -> None:
    run("hub/model", MLXQ_TRUST_REMOTE_CODE="1")
    (load, load_tokenizer) = asked.pop()
    assert load.args == (Source("hub/model", "", "", False),)
    assert load_tokenizer.keywords == {"trust_remote_code": False}


def test_variables_stand_in_for_flags(asked: list[Loaders]) -> None:
    run("hub/model", MLXQ_ADAPTER="hub/lora", MLXQ_REVISION="v2")
    assert asked.pop()[0].args == (Source("hub/model", "hub/lora", "v2", False),)
