"""A TCP proxy that can cut or half-close connections, hold back or lose replies, stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

CHUNK = 65_536


@dataclass
class Loss:
    """What is to happen to the next request that contains `pattern`."""

    pattern: bytes
    what: Literal["request", "reply"]
    how: Literal["cut", "silence"]


class Proxy:
    """Stands between clients and `port` on loopback, in the event loop of the test.

    delay_s     every reply is held back so long
    down        new connections are closed at once
    reading     cleared: nothing is read from the server any more, as by a client that is stuck
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._losses: list[Loss] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._links: set[Link] = set()
        self.delay_s = 0.0
        self.down = False
        self.reading = asyncio.Event()
        self.reading.set()

    @property
    def url(self) -> str:
        host, port = self._listener.sockets[0].getsockname()
        return f"redis://{host}:{port}"

    @property
    def pending_losses(self) -> int:
        return len(self._losses)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()

    def half_close(self) -> None:
        """Ends the replies of all connections; requests still reach the server."""
        for link in self._links:
            link.lost = "silence"
            link.writer.write_eof()

    def lose_reply(self, pattern: bytes, how: Literal["cut", "silence"] = "cut") -> None:
        """The next request that contains `pattern` reaches the server; its reply does not come.

        cut: the connection is closed instead. silence: it stays open and nothing more arrives.
        """
        self._losses.append(Loss(pattern, "reply", how))

    def lose_request(self, pattern: bytes) -> None:
        """The connection of the next request that contains `pattern` is closed before it."""
        self._losses.append(Loss(pattern, "request", "cut"))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                if self.down:
                    return
                back_reader, back_writer = await self._connect()
                writers.add(back_writer)
                self._writers.add(back_writer)
                await self._forward(Link(reader, writer, back_reader, back_writer))
        finally:
            for each in writers:
                each.close()
            self._writers -= writers

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # Small buffers: the server soon feels that nothing is read.
        back = socket.socket()
        back.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        back.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(back, ("127.0.0.1", self._port))
        except OSError:
            back.close()
            raise
        return await asyncio.open_connection(sock=back, limit=CHUNK)

    async def _forward(self, link: Link) -> None:
        """Both directions, until either ends."""
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._requests(link)),
            asyncio.create_task(self._replies(link)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, link: Link) -> None:
        while chunk := await link.reader.read(CHUNK):
            loss = next((loss for loss in self._losses if loss.pattern in chunk), None)
            if loss is not None:
                self._losses.remove(loss)
                if loss.what == "request":
                    return
                link.lost = loss.how
            link.back_writer.write(chunk)
            await link.back_writer.drain()

    async def _replies(self, link: Link) -> None:
        while True:
            await self.reading.wait()
            chunk = await link.back_reader.read(CHUNK)
            if not chunk or link.lost == "cut":
                return
            if link.lost == "silence":
                continue
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            link.writer.write(chunk)
            await link.writer.drain()


@dataclass(eq=False)
class Link:
    """One client connection with the server connection behind it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    back_reader: asyncio.StreamReader
    back_writer: asyncio.StreamWriter
    lost: Literal["cut", "silence"] | None = None
