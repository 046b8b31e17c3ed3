"""A fault that a synthetic worker brings on itself, asked for in a job's prompt.

    ACTION@STAGE[:N][/ATTEMPT]      die@prefill   die@stored:5/1   hang@token:3   raise@token:0

Actions: die (SIGKILL, as a crash or a power cut), hang (the step never returns), raise (the engine
is broken). Stages in the order of a job's life:

    taken       TAKE has handed the job out, and its reply is not looked at      die
    prefill     the job is in the batch, before its first token                  die hang raise
    token:N     before the token of position N, counted over all attempts        die hang raise
    stored:N    N tokens are stored, and the worker does not know it yet         die
    finish      before FINISH is sent                                            die
    finished    FINISH is done, and the worker does not know it yet              die

Without ATTEMPT it happens in every attempt. `prefill:N` alone is no fault: a prompt that takes N
steps more to read.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.asyncio import Redis

from mlxq.protocol.scripts import Call, Take, Taken, run, run_all, script
from mlxq.worker import link, publisher

_FAULT = re.compile(
    rb"(?P<action>die|hang|raise)@(?P<stage>taken|prefill|token|stored|finish|finished)"
    rb"(?::(?P<number>\d+))?(?:/(?P<attempt>\d+))?(?![a-z:])"
)
_LONG = re.compile(rb"(?<!@)prefill:(?P<steps>\d+)")
_EMIT_FIELDS = 5


class Fault(NamedTuple):
    """What happens to whoever runs the job, and when."""

    action: str
    stage: str
    number: int = 0

    def act(self) -> None:
        """Does not return."""
        if self.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "raise":
            raise RuntimeError(f"the engine is told to fail: {self}")
        threading.Event().wait()


def fault_of(taken: Taken) -> Fault | None:
    """The fault that the prompt of a job asks for in this attempt."""
    match = _FAULT.search(taken.spec)
    if match is None or int(match["attempt"] or taken.attempt) != taken.attempt:
        return None
    return Fault(match["action"].decode(), match["stage"].decode(), int(match["number"] or 0))


def long_prefill(spec: bytes) -> int:
    """Steps that the prompt takes beyond those of its length."""
    match = _LONG.search(spec)
    return int(match["steps"]) if match else 0


class Faults:
    """The faults and long prefills of the jobs this process has taken, read from TAKE's replies.

    `install` puts it between the worker and the wire. The loop thread writes, the engine thread
    looks up.
    """

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._steps: dict[str, int] = {}
        self._emit, self._finish = script("emit").sha, script("finish").sha

    def install(self) -> None:
        """From now on every call of the worker's loop passes here."""

        async def observed(client: Redis, call: Call[Any]) -> Any:
            answer = await run(client, call)
            if isinstance(answer, Take):
                self._note(answer.jobs)
            return answer

        async def all_observed(client: Redis, calls: Sequence[Call[Any]]) -> list[Any]:
            if not self._faults:
                return await run_all(client, calls)
            self._reach("finish", calls)
            answers = await run_all(client, calls)
            self._reach("stored", calls)
            self._reach("finished", calls)
            return answers

        vars(link)["run"] = observed
        vars(publisher)["run_all"] = all_observed

    def in_engine(self, job_id: str, position: int, begun: bool) -> None:
        """Before the engine makes the token of `position`; `begun`: it is not the first here."""
        fault = self._faults.get(job_id)
        if fault is None:
            return
        if fault.stage == "prefill" and not begun:
            fault.act()
        if fault.stage == "token" and position >= fault.number:
            fault.act()

    def prefill_steps(self, job_id: str) -> int:
        return self._steps.get(job_id, 0)

    def _note(self, jobs: Sequence[Taken]) -> None:
        for taken in jobs:
            self._faults.pop(taken.id, None)
            if (fault := fault_of(taken)) is not None:
                self._faults[taken.id] = fault
                if fault.stage == "taken":
                    fault.act()
            if steps := long_prefill(taken.spec):
                self._steps[taken.id] = steps

    def _reach(self, stage: str, calls: Sequence[Call[Any]]) -> None:
        """Acts if one of these calls brings its job to `stage`. All of them were answered, or,
        for `finish`, are about to be sent."""
        for call in calls:
            if stage == "stored" and call.script.sha == self._emit:
                self._reach_stored(call.args[2:])
            elif stage != "stored" and call.script.sha == self._finish:
                self._act_at(stage, str(call.args[2]))

    def _reach_stored(self, items: Sequence[Any]) -> None:
        for start in range(0, len(items), _EMIT_FIELDS):
            job_id, _, _, tokens, _ = items[start : start + _EMIT_FIELDS]
            fault = self._faults.get(job_id)
            if fault is not None and fault.stage == "stored" and tokens >= max(1, fault.number):
                fault.act()

    def _act_at(self, stage: str, job_id: str) -> None:
        fault = self._faults.get(job_id)
        if fault is not None and fault.stage == stage:
            fault.act()
