"""The server of the tests is the one of `ops/`: see ops/lib/server.py."""

from __future__ import annotations

from ops.lib.server import Server, binary, free_port

__all__ = ["Server", "binary", "free_port"]
