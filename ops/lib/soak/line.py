"""The TCP line between one client and the server, with every fault a network has."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

CHUNK = 65_536
Loss = Literal["request", "reply", "silence"]


class Line:
    """Listens on a free loopback port and forwards to `port`, in the event loop that opened it.

    delay_s     every reply comes so much later
    open        cleared: nothing passes in either direction, and no connection breaks
    down        new connections are closed at once

    `lose` takes out one request or reply; `silence` leaves that connection open and dead, for
    its client to find out.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._losses: list[tuple[bytes, Loss]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s = 0.0
        self.down = False
        self.open = asyncio.Event()
        self.open.set()
        self.lost = 0

    async def start(self) -> Line:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    @property
    def url(self) -> str:
        host, port = self._listener.sockets[0].getsockname()
        return f"redis://{host}:{port}"

    def cut(self) -> None:
        """Closes all connections."""
        for writer in self._writers:
            writer.close()

    def lose(self, pattern: bytes, what: Loss) -> None:
        """Loses the next request that holds `pattern`, or its reply."""
        self._losses.append((pattern, what))

    def heal(self) -> None:
        """A good line again. What is broken by now stays broken."""
        self._losses.clear()
        self.delay_s = 0.0
        self.down = False
        self.open.set()

    async def close(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

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
                back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._port)
                writers.add(back_writer)
                self._writers.add(back_writer)
                await self._forward(Pair(self, reader, writer, back_reader, back_writer))
        finally:
            for each in writers:
                each.close()
            self._writers -= writers

    async def _forward(self, pair: Pair) -> None:
        """Both directions, until either ends."""
        pumps = [asyncio.create_task(pair.requests()), asyncio.create_task(pair.replies())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def loss_in(self, chunk: bytes) -> Loss | None:
        """Whether something is to be lost here; each loss happens once."""
        for loss in self._losses:
            if loss[0] in chunk:
                self._losses.remove(loss)
                self.lost += 1
                return loss[1]
        return None


class Pair:
    """One connection of a client and the one to the server behind it."""

    def __init__(
        self,
        line: Line,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        back_reader: asyncio.StreamReader,
        back_writer: asyncio.StreamWriter,
    ) -> None:
        self._line = line
        self._reader, self._writer = reader, writer
        self._back_reader, self._back_writer = back_reader, back_writer
        self._loss: Loss | None = None

    async def requests(self) -> None:
        while chunk := await self._reader.read(CHUNK):
            await self._line.open.wait()
            self._loss = self._line.loss_in(chunk) or self._loss
            if self._loss == "request":
                return
            self._back_writer.write(chunk)
            await self._back_writer.drain()

    async def replies(self) -> None:
        while chunk := await self._back_reader.read(CHUNK):
            await self._line.open.wait()
            if self._loss == "reply":
                return
            if self._loss == "silence":
                continue
            if self._line.delay_s:
                await asyncio.sleep(self._line.delay_s)
            self._writer.write(chunk)
            await self._writer.drain()
