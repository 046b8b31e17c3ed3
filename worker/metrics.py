"""Counters of one worker, served for Prometheus when a port is given."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Loop thread only; the HTTP server's thread reads. `tokens` counts all generated ids."""

    def __init__(self, slots: int) -> None:
        self.registry = CollectorRegistry()
        self.tokens = 0
        self._tokens = Counter(
            "mlxq_generation_tokens", "Token ids generated.", registry=self.registry
        )
        self._prompt_tokens = Counter(
            "mlxq_prompt_tokens", "Prompt token ids admitted.", registry=self.registry
        )
        self._running = Gauge(
            "mlxq_jobs_running", "Jobs that hold a slot of the batch.", registry=self.registry
        )
        self._ended = Counter(
            "mlxq_jobs_ended", "Jobs that left this worker.", ["how"], registry=self.registry
        )
        self._first_token = Histogram(
            "mlxq_time_to_first_token_seconds",
            "Admission to first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        slots_gauge = Gauge("mlxq_slots", "Slots of the batch.", registry=self.registry)
        slots_gauge.set(slots)

    def serve(self, port: int) -> int:
        """Starts the HTTP server on its own thread; returns the port it got."""
        server, _ = start_http_server(port, registry=self.registry)
        return int(server.server_port)

    def running(self, rows: int) -> None:
        self._running.set(rows)

    def admitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def generated(self, ids: int) -> None:
        self.tokens += ids
        self._tokens.inc(ids)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def ended(self, how: str) -> None:
        """`how`: done, failed, aborted, expired, fenced, superseded, broken or a release reason."""
        self._ended.labels(how).inc()
