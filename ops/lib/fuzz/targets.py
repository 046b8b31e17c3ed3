"""The targets: each decodes bytes, and raises only if something escapes that is not documented."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec
from redis.exceptions import InvalidResponse
from rich.console import Console

from mlxq.producer.dead import DeadJob, DeadLetters
from mlxq.producer.status import WorkerStatus, read_status
from mlxq.producer.status_view import render
from mlxq.producer.stream import START, Stream
from mlxq.protocol.errors import BadCursor, BadRequest, MlxqError
from mlxq.protocol.events import (
    EventId,
    Unknown,
    decode_event,
    decode_result,
    encode_event,
    encode_result,
)
from mlxq.protocol.jobs import decode_job, encode_job
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Call, Scripts, Taken, look, run
from mlxq.worker.chat import Tokenizer
from mlxq.worker.output import OutputStage
from mlxq.worker.resume import CannotResume, read_transcript, rebuild
from ops.lib.fuzz.draw import Draw
from ops.lib.synthetic import INFO, Vocabulary

T = TypeVar("T")

KEYS: Final = Keys("fuzz")
SCRIPTS: Final = Scripts(KEYS)
TOKENIZER: Final = Tokenizer(Vocabulary())
MOST_STEPS: Final = 60


def job(data: bytes) -> None:
    try:
        found = decode_job(data)
    except BadRequest:
        return
    assert decode_job(encode_job(found)) == found


def event(data: bytes) -> None:
    try:
        found = decode_event(data)
    except msgspec.MsgspecError:
        return
    if not isinstance(found, Unknown):
        assert decode_event(encode_event(found)) == found


def result(data: bytes) -> None:
    try:
        found = decode_result(data)
    except msgspec.MsgspecError:
        return
    assert decode_result(encode_result(found)) == found


def event_id(data: bytes) -> None:
    for text in (data, data.decode("latin-1"), data.decode("utf-8", "replace")):
        try:
            found = EventId.parse(text)
        except BadCursor:
            continue
        assert EventId.parse(str(found)) == found


def reply(data: bytes) -> None:
    """What the eight scripts answer."""
    draw = Draw(data)
    calls: list[Call[Any]] = [
        SCRIPTS.enqueue("a", b"{}"),
        SCRIPTS.take("w.1", 1, lease_ms=1),
        SCRIPTS.emit("w.1", [look("a", 1), look("b", 1)]),
        SCRIPTS.finish("w.1", "a", 1, seq=1, tokens=0, state="done", result=b"", events=[b"{}"]),
        SCRIPTS.beat("w.1", [("a", 1)]),
        SCRIPTS.release("w.1", "drain", [("a", 1)]),
        SCRIPTS.abort("a"),
        SCRIPTS.sweep(),
    ]
    client = Client(draw)
    try:
        finish(run(client, calls[draw.below(len(calls))]))  # type: ignore[arg-type]
    except InvalidResponse:
        pass


def transcript(data: bytes) -> None:
    """A worker takes up a job from what the stream and the hash say."""
    draw = Draw(data)
    taken = Taken("a", 1 + draw.below(4), draw.below(8), draw.below(8), False, b"{}")
    stage = OutputStage(TOKENIZER, ["ab", "baba"] if draw.below(2) else [])
    try:
        found = finish(read_transcript(Client(draw), KEYS.events("a"), taken))  # type: ignore[arg-type]
        rebuild(found, stage, TOKENIZER, INFO.fingerprint)
    except CannotResume:
        pass


def stream(data: bytes) -> None:
    """A reader: whatever it is shown, it delivers in order and without a gap, or says why not."""
    draw = Draw(data)
    after = EventId(draw.below(3), draw.below(4)) if draw.below(2) else START
    reader = Stream("a", KEYS, Connections(draw), Feed(draw), after)  # type: ignore[arg-type]
    last = after
    try:
        for _ in range(MOST_STEPS):
            for found in finish(reader.next()):
                at = EventId.parse(found.id)
                assert at > last, (at, last)
                last = at
            if reader.ended:
                break
    except MlxqError:
        pass


def status(data: bytes) -> None:
    found = finish(read_status(Client(Draw(data)), KEYS))  # type: ignore[arg-type]
    shown = io.StringIO()
    Console(file=shown, width=200).print(render(found))
    assert "\x1b" not in shown.getvalue()
    msgspec.json.encode(found)


def dead(data: bytes) -> None:
    for found in finish(DeadLetters([Shard(Draw(data))], timeout_s=1).all()):  # type: ignore[list-item]
        msgspec.json.encode(found)


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target
    for target in (job, event, result, event_id, reply, transcript, stream, status, dead)
}


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never has to wait, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("it waits for something")


class Client:
    """A server that says whatever is drawn, in the shapes that redis-py gives."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    async def evalsha(self, *words: Any) -> Any:
        return self._draw.reply()

    async def time(self) -> tuple[int, int]:
        return 1_700_000_000, 0

    async def xlen(self, key: str) -> int:
        return self._draw.below(256)

    async def hgetall(self, key: str) -> dict[bytes, bytes]:
        return self._draw.fields(WorkerStatus.__struct_fields__)

    async def zrange(self, *words: Any) -> list[bytes]:
        return [self._draw.text() for _ in range(self._draw.below(4))]

    async def xinfo_groups(self, key: str) -> list[dict[str, Any]]:
        name = b"workers" if self._draw.below(2) else self._draw.text()
        return [{"name": name, "pending": self._draw.below(256), "last-delivered-id": b"1-1"}]

    async def xrange(self, *words: Any, **options: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
        if words[0] == KEYS.dead:
            return self._draw.entries(8, DeadJob.__struct_fields__)
        return self._draw.entries(8)

    def pipeline(self, transaction: bool) -> Pipeline:
        return Pipeline(self._draw)


class Pipeline:
    """One look of a reader: three fields of the job hash, and a page of the transcript."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def hmget(self, *words: Any) -> None:
        pass

    def xrange(self, *words: Any) -> None:
        pass

    async def execute(self) -> list[Any]:
        values = [self._draw.text() if self._draw.below(4) else None for _ in range(3)]
        return [values, self._draw.entries(6)]


class Connections:
    def __init__(self, draw: Draw) -> None:
        self._client = Client(draw)

    async def ask(self, action: Callable[[Any], Awaitable[T]], **limits: Any) -> T:
        return await action(self._client)


class Shard:
    def __init__(self, draw: Draw) -> None:
        self.keys = KEYS
        self.scripts = SCRIPTS
        self.connections = Connections(draw)


class Feed:
    """Live messages, in any order and of any kind."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def take_dirty(self) -> bool:
        return self._draw.below(4) == 1

    def pop(self) -> bytes | None:
        return self._draw.text() if self._draw.below(3) else None

    async def wait(self, timeout_s: float) -> bool:
        return bool(self._draw.below(2))
