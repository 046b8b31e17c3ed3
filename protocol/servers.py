"""Where the server of a queue is: one kind of URL each for standalone, Sentinel and Cluster.

    redis://HOST[:PORT][/DB]   rediss://   unix://PATH       one server, as in redis-py
    redis+sentinel://HOST:PORT[,HOST:PORT…]/MASTER[/DB]      the present master of that name
    redis+cluster://HOST:PORT[,HOST:PORT…]                   the node that owns the queue's slot

USER:PASSWORD@ goes in front of the hosts, with / ? # @ written as %2F %3F %23 %40. `rediss…` uses
TLS, with redis-py's options such as `?ssl_ca_certs=PATH`. Sentinels with a password of their own
take `?sentinel_username=…&sentinel_password=…`.

All keys of a queue are in one slot, so a cluster is, for one queue, one server that can move. So
is a master behind Sentinel: both are looked up anew for every new connection, and an error that
says "not here" (`is_misplaced`) is answered by dropping the connections.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
)

from mlxq.protocol.scripts import PublishCommand
from mlxq.protocol.timeouts import ReplyTimeout

LOOKUP_S = 2.0
_URL = re.compile(
    r"(?P<base>rediss?)\+(?P<kind>sentinel|cluster)://(?P<user>[^@/]*@)?(?P<hosts>[^/?@]+)"
    r"(?:/(?P<path>[^?]*))?(?P<query>\?.*)?"
)
# A / ? or # in a password ends it for a URL parser: the rest would pass for a path, and what is
# in front of it for a host, which errors name.
_CUT_PASSWORD = re.compile(r"rediss?(\+\w+)?://[^/?#]*[/?#].*@")
_HOST = re.compile(r"(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d{1,5}))?")


class Address(NamedTuple):
    """One node."""

    host: str
    port: int


def publish_command(url: str) -> PublishCommand:
    """SPUBLISH in a cluster, where PUBLISH would be sent to all nodes."""
    match = _URL.fullmatch(url)
    return "SPUBLISH" if match and match["kind"] == "cluster" else "PUBLISH"


def is_misplaced(error: BaseException) -> bool:
    """Whether an error says that this node is not, or not yet, the place for the request."""
    kinds = (MovedError, AskError, ClusterDownError, MasterDownError, ReadOnlyError)
    return isinstance(error, kinds)


def connection_options(url: str, key: str) -> dict[str, Any]:
    """Arguments of a redis-py connection pool for the server of `key`.

    Raises ValueError, without a part of the URL that may be secret.
    """
    if _CUT_PASSWORD.match(url):
        raise ValueError("bad Redis URL: write / ? # @ in a password as %2F %3F %23 %40")
    match = _URL.fullmatch(url)
    if match is None:
        options = _parsed(url)
        _check(options)
        return options
    nodes = [_address(host) for host in match["hosts"].split(",")]
    path, _, database = (match["path"] or "").partition("/")
    base = f"{match['base']}://{match['user'] or ''}{nodes[0].host}/{database}"
    options = _parsed(base + (match["query"] or ""))
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    tls = match["base"] == "rediss"
    certificates = {name: value for name, value in options.items() if name.startswith("ssl_")}
    options["connection_class"] = LocatedSSLConnection if tls else LocatedConnection
    if match["kind"] == "sentinel":
        if not path:
            raise ValueError("bad Redis URL: expected the master's name behind the sentinels")
        login = {**own, "ssl": tls, **certificates}
        options["locator"] = SentinelLocator(nodes, login, unquote(path))
    else:
        if path or database:
            raise ValueError("bad Redis URL: a cluster has no databases")
        login = {name: options.get(name) for name in ("username", "password")}
        login |= {"ssl": tls, **certificates}
        options["locator"] = ClusterLocator(nodes, login, key_slot(key.encode()))
    _check(options)
    return options


@cache
def _driver() -> dict[str, Any]:
    """What a connection tells the server of redis-py, found out once for all of them.

    From 7.2 on each connection would look its version up in the package's files, some ms long.
    """
    try:
        from redis.driver_info import DriverInfo
    except ImportError:
        return {}
    return {"driver_info": DriverInfo()}


def _parsed(url: str) -> dict[str, Any]:
    # What urllib and redis-py say of a bad URL may quote it, password and all.
    try:
        return _driver() | dict(parse_url(url))
    except ValueError:
        raise ValueError(
            "bad Redis URL: expected redis://, rediss://, unix://, redis+sentinel:// or "
            "redis+cluster://"
        ) from None


def _check(options: dict[str, Any]) -> None:
    """Raises ValueError for what would fail at the first connection, and at every later one."""
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options and not Path(options[name]).is_file():
            raise ValueError(f"bad Redis URL: {name}: there is no file {options[name]}")
    pool_alone = ("connection_class", "max_connections")
    arguments = {name: value for name, value in options.items() if name not in pool_alone}
    try:
        options.get("connection_class", Connection)(**arguments)
    except (TypeError, RedisError):
        raise ValueError("bad Redis URL: an unknown option, or a bad value, behind the ?") from None


def _address(text: str) -> Address:
    match = _HOST.fullmatch(text.strip())
    if match is None:
        raise ValueError("bad Redis URL: expected HOST:PORT, separated by commas")
    return Address(match["host"].strip("[]"), int(match["port"] or 6379))


class Locator:
    """Asks known nodes, one after another, where the server is. Of one event loop."""

    def __init__(self, nodes: Sequence[Address], login: dict[str, Any]) -> None:
        self._nodes = list(nodes)
        self._login = login

    async def locate(self) -> Address:
        """The server's address now. Raises ConnectionError if no node knows it."""
        trouble, cause = "no node knows it", None
        for node in list(self._nodes):
            try:
                async with ReplyTimeout(LOOKUP_S):
                    found = await self._ask_node(node)
            except (RedisError, OSError, TimeoutError) as error:
                trouble, cause = f"{node.host}:{node.port}: {error or 'no answer'}", error
                # Asked last from now on: the caller's time may end before the list does.
                self._nodes.remove(node)
                self._nodes.append(node)
                continue
            if found is not None:
                self._prefer(node)
                return found
        raise ConnectionError(f"the Redis server cannot be found: {trouble}") from cause

    async def _ask_node(self, node: Address) -> Address | None:
        client = Redis(
            host=node.host,
            port=node.port,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # `locate` has the timeout
            socket_connect_timeout=None,
            **_driver(),
            **self._login,
        )
        try:
            return await self._ask(client, node)
        finally:
            await client.aclose()

    async def _ask(self, client: Redis, node: Address) -> Address | None:
        raise NotImplementedError

    def _prefer(self, node: Address) -> None:
        """The node that answered is asked first next time."""
        self._nodes.remove(node)
        self._nodes.insert(0, node)


class SentinelLocator(Locator):
    """Finds the master of one name."""

    def __init__(self, nodes: Sequence[Address], login: dict[str, Any], master: str) -> None:
        super().__init__(nodes, login)
        self._master = master

    async def _ask(self, client: Redis, node: Address) -> Address | None:
        found: Any = await client.execute_command(  # type: ignore[no-untyped-call]
            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master
        )
        return Address(_text(found[0]), int(found[1])) if found else None


class ClusterLocator(Locator):
    """Finds the node that owns one slot, and learns the other nodes on the way."""

    def __init__(self, nodes: Sequence[Address], login: dict[str, Any], slot: int) -> None:
        super().__init__(nodes, login)
        self._slot = slot

    async def _ask(self, client: Redis, node: Address) -> Address | None:
        # As one argument, so that redis-py does not read the reply in its own way.
        ranges: Any = await client.execute_command(  # type: ignore[no-untyped-call]
            "CLUSTER", "SLOTS"
        )
        owner = None
        for first, last, master, *_ in ranges:
            address = Address(_text(master[0]) or node.host, int(master[1]))
            if address not in self._nodes:
                self._nodes.append(address)
            if first <= self._slot <= last:
                owner = address
        return owner


class LocatedConnection(Connection):
    """A connection that asks where to before it connects."""

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        super().__init__(**options)
        self._locator = locator

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await self._locator.locate()
        await super().connect()  # type: ignore[no-untyped-call]


class LocatedSSLConnection(LocatedConnection, SSLConnection):
    """The same with TLS."""


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
