"""Random schedules of submitters, workers, readers and faults against the real scripts.

MLXQ_MODEL_SCHEDULES=N runs N of them, MLXQ_MODEL_SEED=S begins at seed S: with N=1 a failed one
is run again. A seed fixes every choice, but the server's clock is real: a schedule repeats as far
as the timing does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.model.mix import MIXES
from tests.model.schedule import Counts, run_schedule
from tests.server import Server

SCHEDULES = int(os.environ.get("MLXQ_MODEL_SCHEDULES", "300"))
FIRST_SEED = int(os.environ.get("MLXQ_MODEL_SEED", "0"))
CHUNKS = 10
HANG_S = 120 + 2 * SCHEDULES

# What 30 schedules meet many times: without it they would prove less than they seem to.
FAULTS = {"request lost", "reply lost", "late", "kill", "pause", "cut", "drain", "engine_dies"}
FAULTS |= {"group_lost", "reader_cut", "reader_drop", "reader_twice", "reader_restart"}
ENDS = {"length", "aborted", "worker_lost"}


@pytest.fixture
def blocking(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_holds(
    blocking: redis.Redis, queue: str, chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counts()
    for number in range(chunk * SCHEDULES // CHUNKS, (chunk + 1) * SCHEDULES // CHUNKS):
        seed = FIRST_SEED + number
        mix = MIXES[seed % len(MIXES)]
        run_schedule(blocking, f"{queue}-{number}", seed, mix, counts=counts)
    if counts.schedules >= 30:
        assert FAULTS <= set(+counts.faults)
        assert ENDS <= set(counts.ends)
        assert counts.attempts > counts.jobs
    with capsys.disabled():
        print(f"\n{counts}" if SCHEDULES > 300 else "", end="")
