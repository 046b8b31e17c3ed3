"""The first answer of the server, without which a worker serves nobody."""

from __future__ import annotations

import asyncio

from mlxq.protocol.errors import MlxqError
from mlxq.protocol.keys import Keys, shard_names
from mlxq.worker.config import Config
from mlxq.worker.link import UNANSWERED, Backoff, Link
from mlxq.worker.trouble import describe, is_refusal


class CannotServe(MlxqError):
    """Trying again cannot help: other flags are needed. The message is one line."""


async def first_answer(config: Config) -> None:
    """Returns once the servers of all shards have answered, however long that takes.

    What is in the way is logged now and then. Raises CannotServe if one refuses the credentials.
    """
    names = shard_names(config.queue, config.shards)
    await asyncio.gather(*(_answer_of(config, Keys(name).bell) for name in names))


async def _answer_of(config: Config, key: str) -> None:
    link = Link(
        config.redis_url, key, timeout_s=config.answer_timeout_s, on_back=lambda down_s: None
    )
    backoff = Backoff()
    try:
        while True:
            try:
                await link.once(link.client.ping)
                return
            except UNANSWERED as error:
                if is_refusal(error):
                    raise CannotServe(describe(error)) from None
                await backoff.pause()
    finally:
        await link.close()
