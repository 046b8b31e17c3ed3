"""How a worker lets a job in: from the start, or behind what earlier attempts have stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import redis

from mlxq.protocol.events import Resumed, Started
from mlxq.protocol.scripts import Taken
from tests.model.plan import emitted
from tests.model.row import Row
from tests.model.transcript import Stored, read_page, token_ids, token_text

if TYPE_CHECKING:
    from tests.model.world import World

MODEL = "deterministic"
PAGE = 4


def admit(world: World, who: str, owner: str, row: Row) -> None:
    """Admits `row`, or freezes its failed end. Raises Lost if the transcript did not come."""
    attempt = row.taken.attempt
    if row.plan.kind == "bad":
        row.fail(world.scripts, owner, "bad_request", "refused")
    elif row.taken.seq == 0:
        row.admit(Started(attempt=attempt, worker=owner, model=MODEL, prompt_tokens=1), [])
    else:
        past = _before(world, who, row.taken)
        ids, text = token_ids(past), token_text(past)
        if len(past) != row.taken.seq or len(ids) != row.taken.tokens or text != emitted(ids):
            row.fail(world.scripts, owner, "internal", "the transcript does not add up")
        else:
            opening = Resumed(attempt=attempt, worker=owner, model=MODEL, tokens=len(ids))
            row.admit(opening, ids)


def _before(world: World, who: str, taken: Taken) -> list[Stored]:
    """All events before this attempt; those of a later one, if we are a zombie, end it too."""
    past: list[Stored] = []
    key = world.keys.events(taken.id)
    while True:
        after = str(past[-1].id) if past else "0-0"

        def read(client: redis.Redis, after: str = after) -> list[Stored]:
            return read_page(client, key, after, PAGE)

        page = world.net.read(who, read)
        past += [event for event in page if event.id.attempt < taken.attempt]
        if len(page) < PAGE or page[-1].id.attempt >= taken.attempt:
            return past
