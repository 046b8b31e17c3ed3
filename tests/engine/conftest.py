"""One tiny model for all engine tests of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxq.worker.engine.models import LoadedModel, load_model
from tests.engine.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> LoadedModel:
    """The tiny model, loaded on the tests' own thread."""
    return load_model(str(tiny))
