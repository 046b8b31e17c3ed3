"""What a connection needs to know of itself."""

from __future__ import annotations

import importlib.metadata

import pytest
from redis.asyncio import ConnectionPool

from mlxq.protocol.servers import connection_options

URLS = ["redis://host", "rediss+sentinel://host/master", "redis+cluster://host"]


@pytest.mark.parametrize("url", URLS)
def test_no_connection_reads_the_files_of_a_package(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without `_driver`: from 7.2 on, redis-py looks its own version up for each."""
    connection_options(url, "key")
    monkeypatch.setattr(importlib.metadata, "version", pytest.fail)
    ConnectionPool(**connection_options(url, "key")).make_connection()  # type: ignore[no-untyped-call]
