"""The producer: submits jobs to a queue and attaches to them."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from redis.asyncio import Redis

from mlxq.producer.dead import DeadLetters
from mlxq.producer.hub import Feed
from mlxq.producer.job import JobHandle
from mlxq.producer.shard import Shard
from mlxq.producer.status import Status, merge, read_status
from mlxq.protocol.errors import BadRequest, MlxqError, QueueFull, ServerUnreachable, TooLarge
from mlxq.protocol.jobs import Job, Message, encode_job
from mlxq.protocol.keys import LANES, Lane, check_job_id, shard_names, shard_of
from mlxq.protocol.scripts import Call, Enqueued, PublishCommand, run
from mlxq.protocol.servers import publish_command
from mlxq.protocol.timeouts import ReplyTimeout

log = logging.getLogger("mlxq.producer")

# How long closing waits for jobs of uncertain submits to be withdrawn.
CLOSE_S = 5.0
# How long a withdrawal is tried at least. What a cut connection still holds may arrive late.
WITHDRAW_S = 60.0


class Producer:
    """Submits jobs to one queue and reads them; one subscription serves all its jobs.

    Belongs to the event loop it is used in, and connects when it is first needed. Use it as an
    async context manager, or end with `aclose`; what is read from it then raises MlxqError.

    url             of one server, of Sentinels or of a cluster: see protocol/servers.py
    shards          over how many names the queue is split; the same for all of a deployment
    publish         SPUBLISH for sharded channels; None: as the URL asks for
    cap             most jobs, queued and running, that a shard may hold; 0: no limit
    retention_s     how long a finished job is kept; replay_s: how long its transcript is
    max_bytes       largest encoded job
    submit_timeout_s  how long a submit or an abort is tried before ServerUnreachable
    max_connections most connections for commands a shard; its subscription has one of its own
    socket_timeout_s  how long one command waits for its reply, from when it has a connection
    buffer          most live messages held for one reader; beyond, it rereads the transcript
    """

    def __init__(
        self,
        url: str,
        queue: str = "default",
        *,
        shards: int = 1,
        publish: PublishCommand | None = None,
        cap: int = 10_000,
        retention_s: float = 3_600.0,
        replay_s: float = 300.0,
        max_bytes: int = 8 * 2**20,
        submit_timeout_s: float = 30.0,
        max_connections: int = 16,
        socket_timeout_s: float = 5.0,
        buffer: int = 1_024,
    ) -> None:
        if shards < 1:
            raise BadRequest(f"shards must be at least 1, not {shards}")
        self._queue = queue
        self._shards = [
            Shard(
                url,
                name,
                publish or publish_command(url),
                max_connections=max_connections,
                socket_timeout_s=socket_timeout_s,
                buffer=buffer,
            )
            for name in shard_names(queue, shards)
        ]
        self._cap = cap
        self._retention_ms = _milliseconds("retention_s", retention_s)
        self._replay_ms = _milliseconds("replay_s", replay_s)
        self._max_bytes = max_bytes
        self._timeout_s = submit_timeout_s
        self._withdrawals: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Producer(queue={self._queue!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections; jobs go on. May be called again."""
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=CLOSE_S)
        for shard in self._shards:
            await shard.aclose()

    async def submit(
        self,
        *,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        repetition_context_size: int = 0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        cache_salt: str = "",
        job_id: str | None = None,
        priority: Lane = "normal",
        deadline_s: float | None = None,
    ) -> JobHandle:
        """Puts a job on the queue. When this returns, the job is stored and will end.

        Give one of `messages`, `prompt` (raw text, no template) and `prompt_token_ids`. The
        fields up to `cache_salt` are those of `Job`. A `job_id` that was submitted before
        gives the handle of that job. `deadline_s`: seconds from now until the job fails with
        deadline_exceeded.

        Raises BadRequest, TooLarge, QueueFull or ServerUnreachable. In the last case, and if
        the submit is cancelled, the job with this id is aborted, for it may have arrived.
        """
        job = Job(
            messages=None if messages is None else cast(list[Message], list(messages)),
            prompt=prompt,
            prompt_token_ids=None if prompt_token_ids is None else list(prompt_token_ids),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            repetition_context_size=repetition_context_size,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=cast(dict[int, float], dict(logit_bias or {})),
            seed=seed,
            stop=stop if isinstance(stop, str) else list(stop),
            stop_token_ids=list(stop_token_ids),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            cache_salt=cache_salt,
        )
        if priority not in LANES:
            raise BadRequest(f"priority must be high, normal or low, not {priority!r}")
        job_id = uuid.uuid4().hex if job_id is None else check_job_id(job_id)
        shard = self._shard(job_id)
        call = shard.scripts.enqueue(
            job_id,
            self._encode(job),
            lane=priority,
            deadline_ms=0 if deadline_s is None else _milliseconds("deadline_s", deadline_s),
            cap=self._cap,
            retention_ms=self._retention_ms,
            replay_ms=self._replay_ms,
            max_bytes=self._max_bytes,
        )
        feed = shard.hub.join(shard.keys.live(job_id))
        try:
            await self._enqueue(shard, job_id, call, feed)
        except BaseException:
            shard.hub.leave(feed)
            raise
        return self._handle(job_id, feed)

    def attach(self, job_id: str) -> JobHandle:
        """The handle of a job submitted elsewhere or earlier. Raises BadRequest for a bad id.

        Whether the job is known shows when it is read.
        """
        return self._handle(check_job_id(job_id))

    async def ping(self) -> None:
        """Raises ServerUnreachable if Redis does not answer within `submit_timeout_s`."""

        async def ping(client: Redis) -> None:
            await client.ping()

        for shard in self._shards:
            await shard.connections.ask(ping, allowed_s=self._timeout_s)

    async def status(self) -> Status:
        """The workers of the queue and how many jobs it holds. Raises ServerUnreachable."""
        found = [
            await shard.connections.ask(
                partial(read_status, keys=shard.keys), allowed_s=self._timeout_s
            )
            for shard in self._shards
        ]
        return merge(self._queue, found)

    @property
    def dead(self) -> DeadLetters:
        """The jobs that were given up."""
        return DeadLetters(self._shards, timeout_s=self._timeout_s)

    def _shard(self, job_id: str) -> Shard:
        return self._shards[shard_of(job_id, len(self._shards))]

    def _handle(
        self, job_id: str, feed: Feed | None = None, *, timeout_s: float | None = None
    ) -> JobHandle:
        return JobHandle(
            job_id,
            self._shard(job_id),
            timeout_s=timeout_s or self._timeout_s,
            feed=feed,
        )

    def _encode(self, job: Job) -> bytes:
        spec = encode_job(job)
        if len(spec) > self._max_bytes:
            raise TooLarge(f"the job has {len(spec):,} bytes; {self._max_bytes:,} are allowed")
        return spec

    async def _enqueue(self, shard: Shard, job_id: str, call: Call[Enqueued], feed: Feed) -> None:
        """Subscribed and acknowledged first, so that no event can be missed, then ENQUEUE."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._timeout_s
        try:
            async with ReplyTimeout(self._timeout_s):
                await feed.subscribed()
        except TimeoutError:
            raise ServerUnreachable(f"not subscribed in time: {shard.hub.trouble}") from None
        tries = 0

        async def enqueue(client: Redis) -> Enqueued:
            nonlocal tries
            tries += 1
            return await run(client, call)

        try:
            reply = await shard.connections.ask(enqueue, allowed_s=deadline - now())
        except (ServerUnreachable, asyncio.CancelledError):
            self._withdraw(job_id)
            raise
        if reply.status == "full":
            if tries > 1:
                self._withdraw(job_id)
            raise QueueFull(int(reply.detail))
        if reply.status == "too_large":
            raise TooLarge("the server refused the job as too large")
        if reply.status == "bad_id":
            raise BadRequest(f"the server refused the job id {job_id!r}")

    def _withdraw(self, job_id: str) -> None:
        """Aborts a job that may have been enqueued, or may be yet, without being waited for."""
        task = asyncio.create_task(self._abort(job_id), name=f"mlxq withdraw {job_id}")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _abort(self, job_id: str) -> None:
        try:
            await self._handle(job_id, timeout_s=max(WITHDRAW_S, self._timeout_s)).abort()
        except MlxqError as error:
            log.warning("%s may have been enqueued and could not be aborted: %s", job_id, error)


def _milliseconds(name: str, seconds: float) -> int:
    if not 0 < seconds < 1e9:  # false for NaN too
        raise BadRequest(f"{name} must be above 0 seconds, not {seconds!r}")
    return math.ceil(seconds * 1_000)
