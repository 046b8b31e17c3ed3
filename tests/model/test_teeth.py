"""The schedules bite: without any one guard of the scripts they find a broken promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.model.guards import guards, without
from tests.model.ledger import Violation
from tests.model.mix import ABORTS, CALLS, STORM, ZOMBIES, Mix
from tests.model.network import ScriptFailed
from tests.model.schedule import run_schedule
from tests.server import Server

pytestmark = pytest.mark.any_server

# The kind of schedule in which each guard is missed soonest.
BITES: dict[str, Mix] = {
    "dup": CALLS,
    "fence": CALLS,
    "finish_once": CALLS,
    "gate": ABORTS,
    "lease": ZOMBIES,
    "own_entry": CALLS,
    "receipt": ZOMBIES,
    "sequence": CALLS,
    "terminal_check": STORM,
}
MOST_SCHEDULES = 200


@pytest.fixture
def blocking(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


def test_every_guard_is_tried() -> None:
    assert set(BITES) == guards()


@pytest.mark.parametrize("guard", sorted(BITES))
def test_a_missing_guard_is_noticed(blocking: redis.Redis, queue: str, guard: str) -> None:
    patched = without(guard)
    assert patched
    for seed in range(MOST_SCHEDULES):
        try:
            run_schedule(blocking, f"{queue}-{seed}", seed, BITES[guard], patched)
        except ScriptFailed:
            continue  # a script stopped at what the guard keeps out: no promise is broken by that
        except Violation:
            return
    pytest.fail(f"nobody missed the guard {guard} in {MOST_SCHEDULES} schedules")
