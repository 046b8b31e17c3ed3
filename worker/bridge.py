"""Between rows and engine: requests go in, outputs come back as text, rows are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.events import Resumed, Started
from mlxq.protocol.keys import shard_of
from mlxq.protocol.scripts import ReleaseReason, Scripts, Taken
from mlxq.worker.admission import Admission, Admitted
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import Config
from mlxq.worker.engine.request import Admit, ModelInfo, Output
from mlxq.worker.engine.thread import EngineThread
from mlxq.worker.link import Link
from mlxq.worker.logprobs import written
from mlxq.worker.metrics import Metrics
from mlxq.worker.output import OutputStage
from mlxq.worker.publisher import Publisher
from mlxq.worker.resume import CannotResume, read_transcript, rebuild
from mlxq.worker.rows import Row, Rows, log_key
from mlxq.worker.slots import Slots

_log = structlog.get_logger()


class Bridge:
    """Begins rows, turns engine outputs into text, releases rows. Loop thread only.

    Invariant: a row is in the engine only while it is in `rows` and not ending; every other way
    out of the table cancels it there.
    """

    def __init__(
        self,
        config: Config,
        shard: int,
        info: ModelInfo,
        engine: EngineThread,
        tokenizer: Tokenizer,
        link: Link,
        scripts: Scripts,
        rows: Rows,
        slots: Slots,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._shard = shard
        self._info = info
        self._engine = engine
        self._tokenizer = tokenizer
        self._link = link
        self._scripts = scripts
        self._rows = rows
        self._slots = slots
        self._publisher = publisher
        self._metrics = metrics
        self._admission = Admission(tokenizer, info, default_max_tokens=config.default_max_tokens)
        self._preempted: asyncio.Queue[Row] = asyncio.Queue()

    async def run(self) -> None:
        """Gives back the jobs whose KV memory the engine needed for others."""
        while True:
            rows = [await self._preempted.get()]
            while not self._preempted.empty():
                rows.append(self._preempted.get_nowait())
            self._slots.give_back(len(rows))
            await self.release(rows, "preempt")

    async def begin(self, taken: Taken) -> None:
        """Admits a job that was just taken, or fails it. Its row is in the table from here on."""
        if (old := self._rows.of_job(taken.id)) is not None:
            self.drop(old, "superseded")
        row = Row(taken)
        self._rows.add(row)
        try:
            self._check_place(taken.id)
            admitted = self._admission.admit(taken.spec, taken.id)
            generated = await self._restore(row, taken, admitted)
        except BadRequest as error:
            row.fail(error.code, str(error))
            self._rows.ended(row)
        except CannotResume as error:
            row.fail("internal", str(error), retryable=True)
            self._rows.ended(row)
        else:
            self._enter(row, admitted, generated)
        self._publisher.notify()

    def _check_place(self, job_id: str) -> None:
        """Raises BadRequest for a job in the wrong shard: elsewhere it could be a second row."""
        right = shard_of(job_id, self._config.shards)
        if right != self._shard:
            raise BadRequest(f"this job id belongs to shard {right}, not {self._shard}")

    async def _restore(self, row: Row, taken: Taken, admitted: Admitted) -> list[int]:
        """Gives the row its output stage and first event. Returns the ids generated so far."""
        stage = OutputStage(self._tokenizer, admitted.stops, admitted.sampling.min_tokens)
        name, model, prompt_tokens = self._config.name, self._info.fingerprint, len(admitted.prompt)
        if taken.seq == 0:
            started = Started(
                attempt=taken.attempt, worker=name, model=model, prompt_tokens=prompt_tokens
            )
            row.begin(started, stage, prompt_tokens)
            return []
        key = self._scripts.keys.events(taken.id)
        transcript = await self._link.insist(lambda: read_transcript(self._link.client, key, taken))
        ids, skip = rebuild(transcript, stage, self._tokenizer, model)
        if ids and max(ids) >= self._info.vocab_size:
            raise CannotResume("the transcript has ids that are not in the vocabulary")
        resumed = Resumed(attempt=taken.attempt, worker=name, model=model, tokens=taken.tokens)
        row.begin(resumed, stage, prompt_tokens, skip=skip, logprobs=transcript.logprobs)
        return ids

    def _enter(self, row: Row, admitted: Admitted, generated: list[int]) -> None:
        """Hands the request to the engine, unless the row was lost or is complete already."""
        if self._rows.get(row.key) is None:
            return
        _log.info("admitted", **log_key(row), prompt=len(admitted.prompt), resumed=len(generated))
        self._metrics.admitted(len(admitted.prompt), resumed=row.resumed)
        self._slots.admitted(row, admitted.kv_bytes)
        if len(generated) >= admitted.max_tokens:
            self._end(row, "length")
            return
        self._engine.admit(
            Admit(
                row.key,
                admitted.prompt,
                generated,
                admitted.max_tokens,
                admitted.sampling,
                admitted.stop_ids,
                row.priority,
                admitted.job.cache_salt,
            )
        )

    def apply(self, outputs: Sequence[Output]) -> None:
        """The outputs of one step: ids become text, and ends become terminal events."""
        for output in outputs:
            row = self._rows.get(output.key)
            if row is not None and row.key is output.key and row.decoding:
                self._advance(row, output)
        self._publisher.notify()

    def _advance(self, row: Row, output: Output) -> None:
        if row.open(output.cached or 0) and output.cached is not None:
            self._metrics.looked_up(row.length, output.cached)
        if output.ids:
            stopped = self._take_in(row, output)
            if stopped:
                self._engine.cancel(row.key)
                self._end(row, "stop")
                return
        if output.finish == "preempted":
            self._metrics.preempted()
            self._preempted.put_nowait(row)
        elif output.finish == "error":
            _log.error("row_failed", **log_key(row), error=output.error)
            row.fail("internal", output.error, retryable=True)
            self._rows.ended(row)
        elif output.finish is not None:
            self._end(row, output.finish)

    def _take_in(self, row: Row, output: Output) -> bool:
        """The new ids become text. Whether that ends the output."""
        assert row.stage is not None
        text, taken, stopped = row.stage.feed(output.ids)
        ids, logprobs = output.ids[:taken], (output.logprobs or [])[:taken]
        row.add(text, ids, written(self._tokenizer, ids, logprobs) if logprobs else ())
        self._metrics.tokens += taken
        return stopped

    def _end(self, row: Row, reason: str) -> None:
        """A natural end: what the output stage held back goes out with the terminal event."""
        assert row.stage is not None
        if held_back := row.stage.flush():
            row.add(held_back, [])
        row.finish("stop" if reason == "stop" else "length")
        self._rows.ended(row)

    def drop(self, row: Row, why: str) -> None:
        """This worker no longer holds the row: fenced, aborted, expired, superseded."""
        if self._rows.remove(row):
            self.gone(row, why)

    def gone(self, row: Row, why: str) -> None:
        """The row has left the table; nothing of it stays in the engine."""
        if row.decoding:
            self._engine.cancel(row.key)
        self._metrics.ended(why)
        if row.first_token_s is not None:
            self._metrics.first_token(row.first_token_s)
        tokens = len(row.stage.ids) if row.stage else row.tokens
        _log.info("ended", **log_key(row), how=why, tokens=tokens)

    async def release(self, rows: Sequence[Row], reason: ReleaseReason) -> None:
        """Gives jobs back, with all that they have produced stored, to resume elsewhere."""
        for row in rows:
            self._engine.cancel(row.key)
            row.open()  # not begun yet: who waits for the job is told so much at least
        await self._publisher.flush()
        giving = [row for row in rows if row.decoding and self._rows.get(row.key) is row]
        if not giving:
            return
        call = self._scripts.release(self._config.owner, reason, [row.key for row in giving])
        await self._link.call(call)
        for row in giving:
            if self._rows.remove(row):
                self._metrics.ended(reason)
                _log.info("released", **log_key(row), reason=reason, tokens=row.tokens)
