"""What a producer holds of one shard of its queue: names, scripts, connections, subscription."""

from __future__ import annotations

from mlxq.producer.connections import Connections
from mlxq.producer.hub import Hub
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import PublishCommand, Scripts


class Shard:
    """Of one event loop; connects when it is first needed. `name`: the queue, or QUEUE.NUMBER."""

    def __init__(
        self,
        url: str,
        name: str,
        publish: PublishCommand,
        *,
        max_connections: int,
        socket_timeout_s: float,
        buffer: int,
    ) -> None:
        self.keys = Keys(name)
        self.scripts = Scripts(self.keys, publish)
        self.connections = Connections(
            url, self.keys.bell, max_connections=max_connections, socket_timeout_s=socket_timeout_s
        )
        self.hub = Hub(
            self.connections.subscription,
            self.keys.keepalive,
            sharded=publish == "SPUBLISH",
            buffer=buffer,
        )

    async def aclose(self) -> None:
        """Ends the subscription and the connections. May be called again."""
        await self.hub.aclose()
        await self.connections.aclose()
