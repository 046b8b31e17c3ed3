"""What one worker counts, served for Prometheus when a port is given. Names follow vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EVENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(Collector):
    """Written by the loop thread; the HTTP server's thread reads.

    What changes with every token is a plain number, collected when asked for: a Prometheus
    counter would cost more than the token's own way through the worker.
    """

    def __init__(self, slots: int, kv_bytes: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.slots = slots
        self.running = 0
        self.waiting: dict[str, int] = {}  # by shard
        self.tokens = 0
        self.jobs = 0
        self.prompt_tokens = 0
        self._kv_bytes = kv_bytes
        self.registry.register(self)
        self._ended = Counter(
            "mlxq:jobs_ended", "Jobs that left this worker.", ["how"], registry=self.registry
        )
        self._resumed = Counter(
            "mlxq:jobs_resumed", "Jobs taken over from another attempt.", registry=self.registry
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
            "mlxq:num_jobs_running": ("Jobs that hold a slot of the batch.", self.running),
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
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)

    def serve(self, port: int) -> int:
        """Starts the HTTP server on its own thread; returns the port it got."""
        server, _ = start_http_server(port, registry=self.registry)
        return int(server.server_port)

    def admitted(self, prompt_tokens: int, *, resumed: bool) -> None:
        self.prompt_tokens += prompt_tokens
        if resumed:
            self._resumed.inc()

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
