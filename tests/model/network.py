"""The way between the actors and the server: it loses requests and replies, and runs calls late."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError

from mlxq.protocol.scripts import Call, Script, run_blocking, script
from tests.model.ledger import Ledger, Violation
from tests.model.mix import Mix

T = TypeVar("T")

NAMES = ("enqueue", "take", "emit", "finish", "beat", "release", "abort", "sweep")
REMEMBERED = 40


class Lost(Exception):
    """No reply came: the call may have run, may run later, or never."""


class ScriptFailed(Violation):
    """A script answered with an error."""


class Network:
    """Runs calls for the actors of one schedule. Single thread; one connection."""

    def __init__(
        self,
        client: redis.Redis,
        rng: random.Random,
        ledger: Ledger,
        faults: Counter[str],
        patched: Mapping[str, Script],
    ) -> None:
        self.client = client
        self.rng = rng
        self.ledger = ledger
        self.faults = faults
        self.names = {script(name).sha: name for name in NAMES}
        self.patched = patched
        self.mix = Mix()
        self.late: list[tuple[str, Call[Any]]] = []
        self.cut_until: dict[str, float] = {}
        self.actions: deque[tuple[Any, ...]] = deque(maxlen=REMEMBERED)
        self.calls = 0

    def call(self, who: str, call: Call[T]) -> T:
        """Runs `call` unless it gets lost. Raises Lost where the actor would see no reply."""
        fate = self._fate(who)
        if fate == "late":
            self.late.append((who, call))
        if fate in ("request lost", "late"):
            self.note(who, self.names[call.script.sha], *call.args[1:], f"=> {fate}")
            raise Lost
        reply = self._run(who, call, fate)
        if fate == "reply lost":
            raise Lost
        return reply

    def read(self, who: str, read: Callable[[redis.Redis], T]) -> T:
        """A read outside the scripts; it can be lost like a call."""
        if self._fate(who) != "":
            raise Lost
        return read(self.client)

    def run_late(self) -> bool:
        """Runs one call whose sender gave it up some time ago; False if there is none."""
        if not self.late:
            return False
        who, call = self.late.pop(self.rng.randrange(len(self.late)))
        self._run(who, call, "late")
        return True

    def cut(self, who: str, seconds: float) -> None:
        """Nothing of `who` arrives for this time."""
        self.cut_until[who] = time.monotonic() + seconds

    def is_cut(self, who: str) -> bool:
        return self.cut_until.get(who, 0.0) > time.monotonic()

    def note(self, *action: Any) -> None:
        self.actions.append(action)

    def _fate(self, who: str) -> str:
        if self.is_cut(who):
            return "request lost"
        dice, mix = self.rng.random(), self.mix
        for fate, chance in (
            ("request lost", mix.lost_request),
            ("reply lost", mix.lost_reply),
            ("late", mix.late),
        ):
            if dice < chance:
                self.faults[fate] += 1
                return fate
            dice -= chance
        return ""

    def _run(self, who: str, call: Call[T], fate: str) -> T:
        name = self.names[call.script.sha]
        before = time.monotonic()
        self.calls += 1
        try:
            reply = run_blocking(self.client, self._patch(name, call))
        except ResponseError as error:
            self.note(who, name, *call.args[1:], "=>", error)
            if "NOGROUP" in str(error):
                raise Lost from None
            raise ScriptFailed(f"{name} failed: {error}") from None
        self.note(who, name, *call.args[1:], "=>", reply, fate)
        self.ledger.saw(name, call, reply, before)
        return reply

    def _patch(self, name: str, call: Call[T]) -> Call[T]:
        return replace(call, script=self.patched[name]) if name in self.patched else call
