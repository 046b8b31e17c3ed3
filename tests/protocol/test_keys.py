"""Names of keys, and the names that are refused because they could reach another key."""

from __future__ import annotations

import pytest

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.keys import Keys, check_job_id


def test_names() -> None:
    keys = Keys("prod.0")
    assert keys.bell == "{mlxq:prod.0}:bell"
    assert keys.dead == "{mlxq:prod.0}:dead"
    assert keys.meta == "{mlxq:prod.0}:meta"
    assert keys.keepalive == "{mlxq:prod.0}:live:."
    assert keys.lane("high") == "{mlxq:prod.0}:jobs:high"
    assert keys.job("a") == "{mlxq:prod.0}:job:a"
    assert keys.events("a") == "{mlxq:prod.0}:events:a"
    assert keys.live("a") == "{mlxq:prod.0}:live:a"
    assert keys.abort("a") == "{mlxq:prod.0}:abort:a"
    assert keys.worker("mac1") == "{mlxq:prod.0}:worker:mac1"
    assert keys.workers == "{mlxq:prod.0}:workers"


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a:b", "a}", "é", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(BadRequest, match="bad queue name"):
        Keys(name)
    with pytest.raises(BadRequest, match="bad job id"):
        check_job_id(name)


def test_a_dot_is_for_queues_alone() -> None:
    assert Keys("a.b").queue == "a.b"
    with pytest.raises(BadRequest):
        check_job_id(".")
    assert check_job_id("A-z_9") == "A-z_9"
