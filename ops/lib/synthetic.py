"""A worker without a model: `python -m ops.lib.synthetic`, for chaos, soak and load tests.

All of the worker is the real one but the batch and the vocabulary. It starts in half a second,
runs hundreds of rows at thousands of tokens a second, and its answers are known in advance: token
k of a job depends on its id and k alone, so a resumed job goes on exactly, and `answer_text` tells
any reader what it must have read. Every job ends at max_tokens. SIGUSR1 and SIGUSR2 make its
clocks jump. For benchmarks, `--stamp` makes every id the time at which it was chosen.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_BAD_CONFIG, BadConfig, Config
from mlxq.worker.engine.request import Admit, ModelInfo, Output, RowKey
from mlxq.worker.log import configure
from mlxq.worker.orders import Orders
from mlxq.worker.service import serve
from ops.lib.fault import Faults

STAMPS = 2**31
BYTES = 256
WORDS = 3_840
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
_WORDS = [a + b for a, b in itertools.islice(itertools.product(_SYLLABLES, repeat=2), WORDS)]

INFO = ModelInfo(
    name="synthetic",
    path="",
    fingerprint="synthetic-1",
    vocab_size=BYTES + WORDS,
    context_length=1_000_000,
    eos_ids=frozenset(),
)


def answer(job_id: str, tokens: int) -> list[int]:
    """The first token ids of every output of this job."""
    seed = zlib.crc32(job_id.encode())
    return [_token(seed, position) for position in range(tokens)]


def answer_text(job_id: str, tokens: int) -> str:
    """The text of `answer`: words, a space before each."""
    return "".join(f" {_WORDS[token - BYTES]}" for token in answer(job_id, tokens))


def _token(seed: int, position: int) -> int:
    return BYTES + ((seed ^ (position * 0x9E3779B1)) >> 8) % WORDS


def stamp(seed: int, position: int) -> int:
    """The microseconds of this machine's monotonic clock, cut to fit an id; it has no text."""
    return time.monotonic_ns() // 1_000 % STAMPS


class Vocabulary:
    """What `Tokenizer` asks of a tokenizer of transformers, which takes seconds to import.

    A prompt becomes one id for each byte, an answer one for each word.
    """

    def __init__(self) -> None:
        letters = sorted(ByteLevel.alphabet())
        pieces = letters + [f"Ġ{word}" for word in _WORDS]
        vocab = {piece: number for number, piece in enumerate(pieces)}
        self.backend_tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
        self.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend_tokenizer.decoder = ByteLevelDecoder()
        self._size = len(vocab)

    def __len__(self) -> int:
        return self._size

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocab

    def encode(self, text: str, **options: bool) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        text: str = self.backend_tokenizer.decode(list(ids))
        return text

    def get_chat_template(self) -> str:
        return "synthetic"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: bool) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


class SyntheticRow:
    """`reading`: steps until the prompt is read; the last of them gives the first token."""

    __slots__ = ("key", "priority", "seed", "start", "position", "end", "reading", "begun")

    def __init__(self, request: Admit, reading: int) -> None:
        self.key = request.key
        self.priority = request.priority
        self.begun = False
        self.seed = zlib.crc32(request.key.job_id.encode())
        self.start = self.position = len(request.generated)
        self.end = request.max_tokens
        self.reading = reading


class SyntheticBatch:
    """A `Batch`: one token per step and row with a slot. Engine thread only.

    Slots go to the highest priority, and among equals to who came first; the others are parked.

    max_batch       rows with a slot
    step_s          time from one step to the next, as far as the machine keeps up
    prefill_step    prompt ids that one row reads per step
    parks           False: no memory for parked rows; one that loses its slot is preempted
    choose          the id of a row's seed and position
    """

    def __init__(
        self,
        faults: Faults,
        *,
        max_batch: int,
        step_s: float,
        prefill_step: int,
        parks: bool = True,
        choose: Callable[[int, int], int] = _token,
    ) -> None:
        self.info = INFO
        self._max_batch = max_batch
        self._parks = parks
        self._faults = faults
        self._step_s = step_s
        self._prefill_step = prefill_step
        self._choose = choose
        self._rows: dict[RowKey, SyntheticRow] = {}
        self._due_s = 0.0

    @property
    def kv_bytes(self) -> int:
        return sum(row.position for row in self._rows.values())

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def admit(self, request: Admit) -> None:
        ids = len(request.prompt) + len(request.generated)
        reading = -(-ids // self._prefill_step) + self._faults.prefill_steps(request.key.job_id)
        self._rows[request.key] = SyntheticRow(request, reading)

    def cancel(self, key: RowKey) -> None:
        self._rows.pop(key, None)

    def step(self) -> list[Output]:
        self._pace()
        running, outputs = self._share_out()
        for row in running:
            key, position = row.key, row.position
            self._faults.in_engine(key.job_id, position, position > row.start)
            if not row.begun:
                row.begun = True
                outputs.append(Output(key, [], cached=0))
            if row.reading > 1:
                row.reading -= 1
                continue
            row.position = position + 1
            token = self._choose(row.seed, position)
            if row.position < row.end:
                outputs.append(Output(key, [token]))
            else:
                outputs.append(Output(key, [token], "length"))
                del self._rows[key]
        return outputs

    def _share_out(self) -> tuple[list[SyntheticRow], list[Output]]:
        """The rows with a slot, and what becomes of the others."""
        rows = list(self._rows.values())
        if len(rows) <= self._max_batch:
            return rows, []
        rows.sort(key=lambda row: row.priority)  # stable: the order of coming among equals
        if self._parks:
            return rows[: self._max_batch], []
        outputs = []
        for row in rows[self._max_batch :]:
            if row.begun:
                del self._rows[row.key]
                outputs.append(Output(row.key, [], "preempted"))
        return rows[: self._max_batch], outputs

    def _pace(self) -> None:
        now_s = time.monotonic()
        self._due_s = max(self._due_s + self._step_s, now_s)
        time.sleep(self._due_s - now_s)  # of 0 as well: the loop thread gets its turn

    def close(self) -> None:
        self._rows.clear()


class Clocks:
    """Makes this process see its clocks jump by `jump_s`.

    SIGUSR1: the time of day, as when it is corrected. SIGUSR2: the clock that counts sleep, as
    when the machine wakes; CLOCK_MONOTONIC of Linux stands still meanwhile, and jumps never.
    """

    def __init__(self, jump_s: float) -> None:
        self._jump_s = jump_s
        self._ahead_s = {signal.SIGUSR1: 0.0, signal.SIGUSR2: 0.0}

    def install(self) -> None:
        time_of_day, gettime = time.time, time.clock_gettime
        ahead_s = self._ahead_s
        time.time = lambda: time_of_day() + ahead_s[signal.SIGUSR1]
        time.clock_gettime = lambda clock: gettime(clock) + ahead_s[signal.SIGUSR2]
        for number in ahead_s:
            signal.signal(number, lambda number, frame: self._jump(signal.Signals(number)))

    def _jump(self, number: signal.Signals) -> None:
        self._ahead_s[number] += self._jump_s


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM; exit codes as of `mlxq worker`."""
    parser = argparse.ArgumentParser(prog="python -m ops.lib.synthetic", description=__doc__)
    parser.add_argument("--redis", default="redis://localhost:6379")
    parser.add_argument("--queue", default="default")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--name", default="synthetic")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--lease-s", type=float, default=15.0)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    parser.add_argument("--stall-timeout-s", type=float, default=60.0)
    parser.add_argument("--prefill-step", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=2.0, help="time from step to step")
    parser.add_argument("--no-parking", action="store_true", help="rows without a slot go back")
    parser.add_argument("--stamp", action="store_true", help="ids are the time they are chosen")
    parser.add_argument("--jump-s", type=float, default=3600.0, help="on SIGUSR1 and SIGUSR2")
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments)
    try:
        config = Config(
            model="synthetic",
            redis_url=options.redis,
            queue=options.queue,
            shards=options.shards,
            name=options.name,
            max_batch=options.max_batch,
            lease_s=options.lease_s,
            drain_timeout_s=options.drain_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            prefill_step=options.prefill_step,
            metrics_port=options.metrics_port,
        )
    except BadConfig as error:
        print(f"synthetic: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    faults = Faults()
    faults.install()
    Clocks(options.jump_s).install()

    def load() -> SyntheticBatch:
        return SyntheticBatch(
            faults,
            max_batch=config.max_batch,
            step_s=options.step_ms / 1000,
            prefill_step=config.prefill_step,
            parks=not options.no_parking,
            choose=stamp if options.stamp else _token,
        )

    async def run() -> int:
        orders = Orders()
        with orders.listening():
            return await serve(config, load, orders, lambda path: Tokenizer(Vocabulary()))

    configure(options.log_level, worker=config.name, owner=config.owner)
    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
