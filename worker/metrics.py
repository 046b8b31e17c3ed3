"""What one worker counts, served for Prometheus when a port is given. Names follow vLLM's."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EVENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(Collector):
    """Written by the loop thread; the HTTP server's thread reads.

    What changes with every token is a plain number, collected when asked for: a Prometheus
    counter would cost more than the token's own way through the worker.

    slots       0 until the model is loaded
    running     jobs held, of which `beyond` have no slot: see `Slots`
    cached_tokens, looked_up_tokens     ids that the prefix cache had, of those it was asked for
    """

    def __init__(self, slots: int, kv_bytes: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.slots = slots
        self.running = 0
        self.beyond = 0
        self.waiting: dict[str, int] = {}  # by shard
        self.tokens = 0
        self.jobs = 0
        self.prompt_tokens = 0
        self.looked_up_tokens = 0
        self.cached_tokens = 0
        self._server: WSGIServer | None = None
        self._kv_bytes = kv_bytes
        self.registry.register(self)
        self._ended = Counter(
            "mlxq:jobs_ended", "Jobs that left this worker.", ["how"], registry=self.registry
        )
        self._resumed = Counter(
            "mlxq:jobs_resumed", "Jobs taken over from another attempt.", registry=self.registry
        )
        self._preempted = Counter(
            "mlxq:num_preemptions",
            "Jobs given back because a job of a higher lane needed their KV memory.",
            registry=self.registry,
        )
        self._queue_time = self._histogram(
            "mlxq:job_queue_time_seconds", "Submit to the first TAKE.", _SECONDS
        )
        self._first_token = self._histogram(
            "mlxq:time_to_first_token_seconds", "Admission to the first token.", _SECONDS
        )
        self._inter_token = self._histogram(
            "mlxq:inter_token_latency_seconds",
            "Time between two steps that gave tokens, observed once a step.",
            _SECONDS,
        )
        self._flush = self._histogram(
            "mlxq:publish_batch_events", "Events stored by one flush.", _EVENTS
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def collect(self) -> Iterable[Metric]:
        """The plain numbers; called on the HTTP server's thread."""
        gauges = {
            "mlxq:num_jobs_running": (
                "Jobs that hold a slot of the batch.",
                self.running - self.beyond,
            ),
            "mlxq:num_jobs_parked": (
                "Jobs beyond the slots: a job of a higher lane has the slot.",
                self.beyond,
            ),
            "mlxq:num_jobs_waiting": (
                "Jobs on the queue that nobody holds.",
                sum(self.waiting.values()),
            ),
            "mlxq:num_slots": ("Slots of the batch.", self.slots),
            "mlxq:kv_cache_bytes": ("KV cache of the running rows.", self._kv_bytes()),
        }
        counters = {
            "mlxq:generation_tokens": ("Token ids generated.", self.tokens),
            "mlxq:prompt_tokens": ("Prompt token ids admitted.", self.prompt_tokens),
            "mlxq:prefix_cache_queries": (
                "Token ids that the prefix cache was asked for.",
                self.looked_up_tokens,
            ),
            "mlxq:prefix_cache_hits": (
                "Token ids that the prefix cache had.",
                self.cached_tokens,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)

    def serve(self, host: str, port: int) -> int:
        """Starts the HTTP server on its own thread; returns the port it got.

        Raises OSError if it cannot have the port.
        """
        # Some Pythons let the HTTP server share a port with another.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
        self._server, _ = start_http_server(port, host, registry=self.registry)
        return int(self._server.server_port)

    def close(self) -> None:
        """Ends the HTTP server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def admitted(self, prompt_tokens: int, *, resumed: bool) -> None:
        self.prompt_tokens += prompt_tokens
        if resumed:
            self._resumed.inc()

    def looked_up(self, tokens: int, cached_tokens: int) -> None:
        self.looked_up_tokens += tokens
        self.cached_tokens += cached_tokens

    def preempted(self) -> None:
        self._preempted.inc()

    def queued(self, seconds: float) -> None:
        self._queue_time.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def stepped(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def flushed(self, events: int) -> None:
        self._flush.observe(events)

    def ended(self, how: str) -> None:
        """`how`: done, failed, aborted, expired, fenced, superseded, broken, gap, or why the job
        was released."""
        self._ended.labels(how).inc()
        self.jobs += how in ("done", "failed", "aborted", "expired")
