"""The one configuration of a worker: built once, checked once, never changed."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass, field

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.keys import Keys, shard_names
from mlxq.protocol.servers import connection_options

EXIT_DRAINED = 0
EXIT_BAD_CONFIG = 2
EXIT_ENGINE_DIED = 3

LOOK_INTERVAL_S = 0.25  # how soon an abort or a fence reaches a row that has nothing to publish
SWEEP_INTERVAL_S = 1.0
SWEEP_CHUNK = 100
PRESENCE_INTERVAL_S = 2.0


class BadConfig(Exception):
    """A value that the worker cannot start with; the message names the flag."""


def default_name() -> str:
    """The machine's short host name, reduced to characters an owner name may have."""
    short = socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", short)[:40] or "worker"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one worker process. Raises BadConfig for a value it cannot run with.

    lease_s            a worker silent for this long loses its jobs to others
    drain_timeout_s    how long a drain lets running jobs finish before it releases them
    stall_timeout_s    an engine with work and no progress for this long is taken for hung
    prefill_step       most prompt tokens per prefill chunk; how many is chosen by their speed
    shards             over how many names the queue is split; the same for all of a deployment
    adapter            LoRA weights on top of the model, a folder or hub name; "": none
    revision           branch, tag or commit of the model on the hub; "": the newest
    trust_remote_code  whether code that comes with the model may run
    memory_budget      of the process: bytes, or up to 1 a share of what the device recommends
    prefix_cache       of that for prompt prefixes: bytes, or up to 1 a share; 0: none are kept
    prefix_disk        folder where prefixes outlive the process; "": none
    prefix_disk_bytes  most that the folder holds
    kv_bits            4 or 8: keys and values of rows that decode are quantised; 0: they are not
    max_kv_size        positions attention looks back over at most; 0: all, as the model was made
    metrics_host    the address that metrics are served on, to anybody who reaches it
    """

    model: str
    redis_url: str = field(default="redis://localhost:6379", repr=False)  # may hold a password
    queue: str = "default"
    shards: int = 1
    name: str = field(default_factory=default_name)
    max_batch: int = 32
    lease_s: float = 15.0
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    prefill_step: int = 2048
    default_max_tokens: int = 1024
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    adapter: str = ""
    revision: str = ""
    trust_remote_code: bool = False
    memory_budget: float = 0.85
    prefix_cache: float = 0.1
    prefix_disk: str = ""
    prefix_disk_bytes: int = 20 * 10**9
    kv_bits: int = 0
    max_kv_size: int = 0
    owner: str = ""

    def __post_init__(self) -> None:
        _require(bool(self.model), "MODEL is empty: give a local folder or a hub name")
        _require(1 <= self.shards <= 256, "--shards must be 1 to 256")
        _require(1 <= self.max_batch <= 1024, "--max-batch must be 1 to 1024")
        _require(0.2 <= self.lease_s <= 3600, "--lease-s must be 0.2 to 3600 seconds")
        _require(0 <= self.drain_timeout_s <= 86_400, "--drain-timeout-s must be 0 to 86400")
        _require(self.stall_timeout_s > 0, "--stall-timeout-s must be positive")
        _require(self.prefill_step >= 1, "--prefill-step must be at least 1")
        _require(self.default_max_tokens >= 1, "--default-max-tokens must be at least 1")
        _require(self.memory_budget > 0, "--memory-budget must be positive")
        _require(self.prefix_cache >= 0, "--prefix-cache must not be negative")
        _require(self.prefix_disk_bytes >= 0, "--prefix-disk-size must not be negative")
        _require(self.kv_bits in (0, 4, 8), "--kv-bits must be 4 or 8, or 0 for off")
        _require(self.max_kv_size >= 0, "--max-kv-size must not be negative")
        _require(
            not (self.kv_bits and self.max_kv_size),
            "--kv-bits and --max-kv-size exclude each other: what is bounded is not quantised",
        )
        _require(bool(self.metrics_host), "--metrics-host is empty: 0.0.0.0 is all addresses")
        port = self.metrics_port
        _require(port is None or 0 <= port <= 65535, "--metrics-port must be 0 to 65535")
        _require(
            re.fullmatch(r"[A-Za-z0-9_-]{1,40}", self.name) is not None,
            "--name must be 1 to 40 of A-Z a-z 0-9 _ -",
        )
        try:
            Keys(shard_names(self.queue, self.shards)[-1])
        except BadRequest as error:
            raise BadConfig(f"--queue: {error}") from None
        try:
            connection_options(self.redis_url, self.queue)
        except ValueError as error:
            raise BadConfig(f"--redis: {error}") from None
        # An owner name must never be used twice: it is half of the fence.
        object.__setattr__(self, "owner", f"{self.name}.{secrets.token_hex(6)}")

    @property
    def answer_timeout_s(self) -> float:
        """How long a request to Redis may take."""
        return max(1.0, self.lease_s / 3)

    @property
    def lease_ms(self) -> int:
        return round(self.lease_s * 1000)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadConfig(message)
