"""A tiny model folder and its facts, shared by the worker's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo
from tests.engine.tiny import END_ID, EOS_ID, VOCAB_SIZE, make_tiny_model
from tests.worker.harness import Submitter


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def info(tiny_model: Path) -> ModelInfo:
    """What a batch on the tiny model would say of itself."""
    return ModelInfo(
        name="tiny",
        path=str(tiny_model),
        fingerprint="tiny-1",
        vocab_size=VOCAB_SIZE,
        context_length=512,
        eos_ids=frozenset({EOS_ID, END_ID}),
    )


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(str(tiny_model))


@pytest.fixture
def submitter(client: Redis, queue: str) -> Submitter:
    return Submitter(client, queue)
