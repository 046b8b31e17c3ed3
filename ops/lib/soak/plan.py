"""What one round does: a pure function of the seed and the round's number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mlxq.protocol.keys import LANES, Lane
from ops.lib.synthetic import answer_text

ENDLESS = 900_000  # tokens: only an abort or a deadline ends such a job
SCRIPTS = ("enqueue", "take", "emit", "finish", "beat", "release", "abort", "sweep")

# Kinds of faults with their weights. A round uses a random part of them: some bugs show only
# where others do not get in the way.
WEIGHTS = {
    "kill": 6,
    "freeze": 4,
    "drain": 3,
    "release": 2,
    "clock": 1,
    "cut": 5,
    "hold": 3,
    "delay": 3,
    "down": 2,
    "lose": 8,
    "client_kill": 3,
    "pubsub_kill": 3,
    "script_flush": 2,
    "group_lost": 2,
    "restart": 1,
    "server_freeze": 1,
    "full": 2,
}
# Those that a job brings on the worker that runs it.
JOB_FAULTS = ("die", "raise", "hang", "poison")


@dataclass(frozen=True)
class ReaderPlan:
    """One reader of a job.

    after_s     joins so long after the submit; 0: the submitter's own handle, the first reader
    pause_s     rests so long after each event
    leaves      number of events after which it leaves, and comes back with its cursor elsewhere
    """

    producer: int
    after_s: float = 0.0
    pause_s: float = 0.0
    leaves: int = 0


@dataclass(frozen=True)
class JobPlan:
    """One job. `abort_s`: seconds after the submit; `stop`: a string that ends its answer."""

    id: str
    at_s: float
    producer: int
    tokens: int
    prompt: str
    lane: Lane
    readers: tuple[ReaderPlan, ...]
    deadline_s: float | None = None
    abort_s: float | None = None
    bare_key: bool = False
    again: int | None = None
    stop: str | None = None
    fault: str = ""

    @property
    def text(self) -> str:
        """The whole answer."""
        text = answer_text(self.id, min(self.tokens, 2_000))
        return text.partition(self.stop)[0] if self.stop else text


@dataclass(frozen=True)
class FaultPlan:
    """`target` is a number, to be taken modulo how many there are; `choice` likewise."""

    at_s: float
    kind: str
    target: int
    length_s: float
    choice: int


@dataclass(frozen=True)
class RoundPlan:
    number: int
    jobs: tuple[JobPlan, ...]
    faults: tuple[FaultPlan, ...]


@dataclass(frozen=True)
class Shape:
    """How much a round does. Times in seconds."""

    jobs: int = 240
    seconds: float = 14.0
    faults: int = 22
    lease_s: float = 0.8
    producers: int = 3


def plan_round(seed: int, number: int, shape: Shape) -> RoundPlan:
    rng = random.Random(f"{seed}/{number}")
    kinds = [kind for kind in WEIGHTS if rng.random() < 0.6] or ["kill"]
    job_faults = [kind for kind in JOB_FAULTS if rng.random() < 0.5]
    jobs = [_job(rng, f"r{number}-{index}", shape) for index in range(shape.jobs)]
    for kind in job_faults:
        for _ in range({"die": 5, "raise": 2, "hang": 1, "poison": 2}[kind]):
            index = rng.randrange(len(jobs))
            jobs[index] = _harmful(rng, jobs[index], kind)
    weights = [WEIGHTS[kind] for kind in kinds]
    faults = [
        FaultPlan(
            # Some come when most is done: then nothing else stirs who has to clear up.
            at_s=rng.uniform(0.3, shape.seconds * rng.choice((1, 1, 1, 1, 1.7))),
            kind=rng.choices(kinds, weights)[0],
            target=rng.randrange(1_000),
            length_s=shape.lease_s * rng.choice((0.3, 0.8, 1.5, 3.0)),
            choice=rng.randrange(1_000),
        )
        for _ in range(rng.randint(shape.faults // 3, shape.faults))
    ]
    faults.sort(key=lambda fault: fault.at_s)
    return RoundPlan(number, tuple(jobs), tuple(faults))


def _job(rng: random.Random, job_id: str, shape: Shape) -> JobPlan:
    tokens = rng.choice((rng.randint(1, 4), rng.randint(1, 60), rng.randint(40, 400)))
    deadline_s = rng.choice((0.4, 2.0, 6.0)) if rng.random() < 0.08 else None
    abort_s = rng.uniform(0.0, 5.0) if rng.random() < 0.12 else None
    if (deadline_s or abort_s) and rng.random() < 0.3:
        tokens = ENDLESS
    stop = None
    if tokens < ENDLESS and rng.random() < 0.15:
        words = answer_text(job_id, tokens).split(" ")[1:]
        stop = rng.choice((f" {rng.choice(words)}", rng.choice(words)[1:], "never there"))
    prompt = "x" * rng.choice((1, 20, 3_000))
    if rng.random() < 0.1:
        prompt += f" prefill:{rng.randint(5, 60)}"
    return JobPlan(
        id=job_id,
        at_s=shape.seconds * 0.85 * rng.random(),
        producer=rng.randrange(shape.producers),
        tokens=tokens,
        prompt=prompt,
        lane=rng.choice(LANES),
        readers=tuple(_readers(rng, shape.producers)),
        deadline_s=deadline_s,
        abort_s=abort_s,
        bare_key=rng.random() < 0.5,
        again=rng.randrange(shape.producers) if rng.random() < 0.1 else None,
        stop=stop,
    )


def _readers(rng: random.Random, producers: int) -> list[ReaderPlan]:
    readers = [ReaderPlan(0, leaves=rng.choice((0, 0, 3, 20)))]
    for _ in range(rng.choice((0, 0, 1, 2))):
        readers.append(
            ReaderPlan(
                producer=rng.randrange(producers),
                after_s=rng.uniform(0.01, 6.0),
                pause_s=rng.choice((0.0, 0.0, 0.002, 0.05)),
                leaves=rng.choice((0, 0, 1, 7, 40)),
            )
        )
    return readers


def _harmful(rng: random.Random, job: JobPlan, kind: str) -> JobPlan:
    """The job with a fault; of these only poison acts in every attempt."""
    stage = f"token:{rng.randint(0, 12)}"
    if kind == "poison":
        text = f"{rng.choice(('die', 'raise'))}@{rng.choice(('prefill', 'token:0'))}"
    elif kind == "die":
        stored = f"stored:{rng.randint(1, 9)}"
        text = f"die@{rng.choice(('taken', 'prefill', stage, stored, 'finish', 'finished'))}/1"
    else:
        text = f"{kind}@{rng.choice(('prefill', stage))}/1"
    return JobPlan(**{**vars(job), "prompt": f"{text} {job.prompt}", "stop": None, "fault": kind})
