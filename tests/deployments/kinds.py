"""Every kind of server a deployment may have, started for one test."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from tests.server import Server, binary, free_port

START_S = 40.0
CLUSTER_NODES = 3
SLOTS = 16_384
SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor mlxq 127.0.0.1 {master} 1
sentinel down-after-milliseconds mlxq 500
sentinel failover-timeout mlxq 3000
"""


class Deployment(NamedTuple):
    """`url` leads to it; `servers` are its data nodes; `shards`: how its queue is to be split."""

    url: str
    servers: list[Server]
    shards: int


@contextmanager
def standalone(path: str | None) -> Iterator[Deployment]:
    """One server of this binary; None: the one the tests run on."""
    server = Server(path=path).start()
    try:
        yield Deployment(server.url, [server], 1)
    finally:
        server.stop()


@contextmanager
def cluster() -> Iterator[Deployment]:
    """Three masters, and a queue in three shards, so that more than one of them is used."""
    with ExitStack() as stack:
        nodes = []
        for _ in range(CLUSTER_NODES):
            nodes.append(Server("--cluster-enabled", "yes").start())
            stack.callback(nodes[-1].stop)
        share = SLOTS // CLUSTER_NODES + 1
        for number, node in enumerate(nodes):
            last = min(SLOTS, (number + 1) * share) - 1
            _tell(node, "CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
            _tell(node, "CLUSTER", "MEET", "127.0.0.1", str(nodes[0].port))
        for node in nodes:
            _until(lambda node=node: "cluster_state:ok" in _tell(node, "CLUSTER", "INFO"))  # type: ignore[misc]
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes[1:])
        yield Deployment(f"redis+cluster://{hosts}", nodes, CLUSTER_NODES)


@contextmanager
def sentinel(folder: Path) -> Iterator[Deployment]:
    """A master, a replica that has caught up, and a Sentinel that knows both."""
    with ExitStack() as stack:
        master = Server("--repl-diskless-sync-delay", "0").start()
        stack.callback(master.stop)
        replica = Server("--replicaof", f"127.0.0.1 {master.port}").start()
        stack.callback(replica.stop)
        port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(SENTINEL.format(port=port, folder=folder, master=master.port))
        command = [binary() or "redis-server", str(config), "--sentinel"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        _until(lambda: "'master_link_status': 'up'" in _tell(replica, "INFO", "replication"))
        _until(lambda: str(replica.port) in _ask(port, "SENTINEL", "REPLICAS", "mlxq"))
        yield Deployment(f"redis+sentinel://127.0.0.1:{port}/mlxq", [master, replica], 1)


def redis_server() -> str | None:
    """The system's redis-server, if there is one."""
    return shutil.which("redis-server")


def _tell(server: Server, *words: str) -> str:
    return _ask(server.port, *words)


def _ask(port: int, *words: str) -> str:
    """The reply to one command as text; empty as long as nobody listens."""
    try:
        with redis.Redis(port=port) as client:
            reply: Any = client.execute_command(*words)
            return reply.decode() if isinstance(reply, bytes) else str(reply)
    except redis.RedisError:
        return ""


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("the deployment did not come up")
        time.sleep(0.05)
