"""The users of ops/redis/users.acl, as an operator makes them."""

from __future__ import annotations

import re
import secrets
import subprocess
from typing import Any, NamedTuple

from redis.asyncio import Redis

from ops.lib.bootstrap import ROOT

FOLDER = ROOT / "ops" / "redis"
TEMPLATE = FOLDER / "users.acl"
ROLES = ("submitter", "worker", "observer")


class User(NamedTuple):
    """One user on one server. `name` may differ from the role's: see `grant`."""

    name: str
    password: str
    port: int

    @property
    def url(self) -> str:
        return f"redis://{self.name}:{self.password}@127.0.0.1:{self.port}"


def documented_commands() -> str:
    """The shell lines in the template's comment that make the file for Redis."""
    lines = re.findall(r"^#   (.*)$", TEMPLATE.read_text(), re.MULTILINE)
    return "\n".join(lines)


def rules(queue: str) -> dict[str, list[str]]:
    """By user, the rules that the documented awk line makes for `queue`."""
    awk = documented_commands().partition(" > ")[0].replace("queue=default", f"queue={queue}")
    made = subprocess.run(
        ["sh", "-c", awk], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=30
    )
    # A selector is one argument of ACL SETUSER, however many words it has.
    words = [re.findall(r"\([^)]*\)|\S+", line) for line in made.stdout.splitlines()]
    return {name: rest for keyword, name, *rest in words if keyword == "user"}


async def grant(client: Redis, port: int, queue: str) -> dict[str, User]:
    """Makes the three users of one queue on a shared server, under names of their own."""
    users = {}
    for role, granted in rules(queue).items():
        if role not in ROLES:
            continue
        user = User(f"{queue}-{role}", secrets.token_hex(8), port)
        rights = [rule for rule in granted if not rule.startswith("#")]
        await command(client, "ACL", "SETUSER", user.name, "reset", f">{user.password}", *rights)
        users[role] = user
    return users


async def command(client: Redis, *words: str | bytes | int) -> Any:
    """One command as it is written, with the reply as it comes."""
    return await client.execute_command(*words)  # type: ignore[no-untyped-call]
