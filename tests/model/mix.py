"""How often what goes wrong: one Mix describes one kind of schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Mix:
    """Chances per call, per step of an actor, or per job. All are 0 once the faults stop."""

    # Per call.
    lost_request: float = 0.0  # did not run
    lost_reply: float = 0.0  # ran, nobody knows
    late: float = 0.0  # runs some time after its sender gave it up

    # Per worker step.
    kill: float = 0.0  # forgets everything, comes back as another owner
    pause: float = 0.0  # sleeps past its lease, then goes on as if nothing had happened
    cut: float = 0.0  # its connections fail past the lease, the engine runs on
    drain: float = 0.0
    engine_dies: float = 0.0
    no_room: float = 0.0  # per admission

    # Per reader step.
    reader_cut: float = 0.0  # connection lost, re-subscribed
    reader_drop: float = 0.0  # one message lost without a trace
    reader_twice: float = 0.0  # one message seen twice
    reader_restart: float = 0.0  # a new reader with an older cursor

    # Per scheduler step: mistakes of an operator.
    group_lost: float = 0.0
    stray: float = 0.0  # an entry in a lane that no live job owns
    tampered: float = 0.0  # an event in a transcript that no script has written

    # Per job.
    bad: float = 0.0
    poison: float = 0.0
    abort: float = 0.0
    deadline: float = 0.0
    give_up: float = 0.0  # the submitter stops asking after an unanswered ENQUEUE

    cap: int = 0  # 0: none
    jobs: tuple[int, int] = (3, 10)
    length: tuple[int, int] = (1, 16)
    workers: tuple[int, int] = (2, 4)
    lease_ms: tuple[int, int] = (20, 40)
    fault_steps: int = 600


READERS = Mix(reader_cut=0.03, reader_drop=0.03, reader_twice=0.05, reader_restart=0.01)

CALLS = replace(
    READERS, lost_request=0.06, lost_reply=0.08, late=0.06, stray=0.003, bad=0.05, give_up=0.3
)
ZOMBIES = replace(
    READERS,
    lost_reply=0.04,
    late=0.06,
    pause=0.015,
    cut=0.008,
    kill=0.004,
    group_lost=0.003,
    lease_ms=(15, 60),
)
ABORTS = Mix(lost_reply=0.05, late=0.04, abort=0.8, deadline=0.3, pause=0.004, give_up=0.3, cap=4)
POISON = Mix(poison=0.35, bad=0.05, jobs=(3, 5), workers=(2, 3), lease_ms=(25, 40))
DRAINS = replace(
    READERS, lost_reply=0.05, late=0.05, drain=0.02, engine_dies=0.004, no_room=0.2, abort=0.4
)
STORM = replace(
    READERS,
    lost_request=0.03,
    lost_reply=0.05,
    late=0.05,
    kill=0.004,
    pause=0.006,
    cut=0.004,
    drain=0.006,
    engine_dies=0.002,
    no_room=0.05,
    group_lost=0.003,
    stray=0.003,
    tampered=0.002,
    bad=0.05,
    poison=0.06,
    abort=0.25,
    deadline=0.15,
    give_up=0.2,
)
MIXES = (CALLS, ZOMBIES, ABORTS, POISON, DRAINS, STORM)
