"""Every key and channel name of one queue; the only place where names are built."""

from __future__ import annotations

import re
import zlib
from typing import Final, Literal, get_args

from mlxq.protocol.errors import BadRequest

Lane = Literal["high", "normal", "low"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)
GROUP: Final = "workers"

_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_job_id(job_id: str) -> str:
    """Returns `job_id`, or raises BadRequest: an id is 1-64 of `A-Z a-z 0-9 _ -`."""
    if not (isinstance(job_id, str) and _JOB_ID.fullmatch(job_id)):
        raise BadRequest(f"bad job id {job_id!r:.80}: 1 to 64 of A-Z a-z 0-9 _ - are allowed")
    return job_id


def shard_names(queue: str, shards: int) -> list[str]:
    """The names of a queue's shards: itself, or QUEUE.0 … QUEUE.N-1."""
    return [queue] if shards == 1 else [f"{queue}.{number}" for number in range(shards)]


def shard_of(job_id: str, shards: int) -> int:
    """Which shard a job is in. `shards` must not change while jobs live."""
    return zlib.crc32(job_id.encode()) % shards


class Keys:
    """Names of one queue. All share the hash tag `{mlxq:QUEUE}`, hence one cluster slot.

    Raises BadRequest for a queue name outside 1-64 of `A-Z a-z 0-9 _ . -`.
    """

    def __init__(self, queue: str) -> None:
        if not (isinstance(queue, str) and _QUEUE.fullmatch(queue)):
            raise BadRequest(f"bad queue name {queue!r:.80}: 1 to 64 of A-Z a-z 0-9 _ . -")
        self.queue = queue
        self.tag = f"{{mlxq:{queue}}}"
        self.bell = f"{self.tag}:bell"
        self.dead = f"{self.tag}:dead"
        self.meta = f"{self.tag}:meta"
        self.workers = f"{self.tag}:workers"
        # A channel that no job can have: it keeps a subscription open.
        self.keepalive = f"{self.tag}:live:."

    def lane(self, lane: Lane) -> str:
        return f"{self.tag}:jobs:{lane}"

    def job(self, job_id: str) -> str:
        return f"{self.tag}:job:{job_id}"

    def events(self, job_id: str) -> str:
        return f"{self.tag}:events:{job_id}"

    def live(self, job_id: str) -> str:
        return f"{self.tag}:live:{job_id}"

    def abort(self, job_id: str) -> str:
        return f"{self.tag}:abort:{job_id}"

    def worker(self, owner: str) -> str:
        return f"{self.tag}:worker:{owner}"
