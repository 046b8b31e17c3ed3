"""structlog events: JSON lines in service, readable ones on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str = "info", **context: str) -> None:
    """Sets up logging to stderr once; `context` (worker, owner) is on every line of any thread."""
    numeric = getattr(logging, level.upper())
    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            lambda logger, method, event: {**event, **context},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
