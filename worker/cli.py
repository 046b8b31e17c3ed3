"""`mlxq worker MODEL`: flags and environment become one Config; its run becomes an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from mlxq.worker.amounts import parse_bytes, parse_share
from mlxq.worker.config import EXIT_BAD_CONFIG, BadConfig, Config, default_name

Amount = TypeVar("Amount", int, float)


def worker(
    model: Annotated[str, typer.Argument(help="Local model folder or hub name.")],
    adapter: Annotated[
        str, typer.Option(envvar="MLXQ_ADAPTER", help="LoRA weights: a folder or hub name.")
    ] = "",
    revision: Annotated[
        str, typer.Option(envvar="MLXQ_REVISION", help="Branch, tag or commit on the hub.")
    ] = "",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    redis: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_REDIS_URL",
            metavar="URL",
            help="redis://HOST, rediss:// (TLS), unix://, redis+sentinel://HOST,HOST/MASTER or "
            "redis+cluster://HOST,HOST.",
        ),
    ] = "redis://localhost:6379",
    queue: Annotated[str, typer.Option(envvar="MLXQ_QUEUE", help="Queue to serve.")] = "default",
    shards: Annotated[
        int, typer.Option(envvar="MLXQ_SHARDS", help="Parts the queue is split into.")
    ] = 1,
    name: Annotated[
        str, typer.Option(envvar="MLXQ_NAME", help="Name in events, status and logs.")
    ] = "",
    max_batch: Annotated[
        int, typer.Option(envvar="MLXQ_MAX_BATCH", help="Rows that decode together.")
    ] = 32,
    lease_s: Annotated[
        float,
        typer.Option(envvar="MLXQ_LEASE_S", help="A worker silent for so long loses its jobs."),
    ] = 15.0,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            envvar="MLXQ_DRAIN_TIMEOUT_S", help="How long SIGTERM lets running jobs finish."
        ),
    ] = 30.0,
    stall_timeout_s: Annotated[
        float,
        typer.Option(
            envvar="MLXQ_STALL_TIMEOUT_S", help="An engine without progress for so long is hung."
        ),
    ] = 60.0,
    prefill_step: Annotated[
        int, typer.Option(envvar="MLXQ_PREFILL_STEP", help="Most prompt tokens read per step.")
    ] = 2048,
    default_max_tokens: Annotated[
        int,
        typer.Option(envvar="MLXQ_DEFAULT_MAX_TOKENS", help="For jobs that do not say max_tokens."),
    ] = 1024,
    memory_budget: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_MEMORY_BUDGET",
            metavar="SIZE",
            help="Memory of the process, 24GB or a share of what the device recommends.",
        ),
    ] = "0.85",
    prefix_cache: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_PREFIX_CACHE",
            metavar="SIZE",
            help="Of that for prompt prefixes, 4GB or a share of it; 0: none are kept.",
        ),
    ] = "0.1",
    prefix_disk: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_PREFIX_DISK",
            metavar="FOLDER",
            help="Keep prefixes on disk too. All that is read is written there, once.",
        ),
    ] = "",
    prefix_disk_size: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_PREFIX_DISK_SIZE", metavar="SIZE", help="Most that the folder holds."
        ),
    ] = "20GB",
    kv_bits: Annotated[
        int,
        typer.Option(envvar="MLXQ_KV_BITS", help="4 or 8: quantise keys and values; 0: off."),
    ] = 0,
    max_kv_size: Annotated[
        int,
        typer.Option(
            envvar="MLXQ_MAX_KV_SIZE",
            help="Positions that attention looks back over; worse output beyond. 0: all.",
        ),
    ] = 0,
    metrics_host: Annotated[
        str,
        typer.Option(
            envvar="MLXQ_METRICS_HOST", help="Address for metrics; 0.0.0.0: all, no password."
        ),
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int | None,
        typer.Option(envvar="MLXQ_METRICS_PORT", help="Serve Prometheus metrics on this port."),
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar="MLXQ_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Serve a queue with MODEL until SIGTERM.

    Exit codes: 0 drained, 2 bad config, 3 engine died.
    """
    try:
        config = Config(
            model=model,
            redis_url=redis,
            queue=queue,
            shards=shards,
            name=name or default_name(),
            max_batch=max_batch,
            lease_s=lease_s,
            drain_timeout_s=drain_timeout_s,
            stall_timeout_s=stall_timeout_s,
            prefill_step=prefill_step,
            default_max_tokens=default_max_tokens,
            metrics_host=metrics_host,
            metrics_port=metrics_port,
            adapter=adapter,
            revision=revision,
            trust_remote_code=trust_remote_code,
            memory_budget=_amount("--memory-budget", memory_budget, parse_share),
            prefix_cache=_amount("--prefix-cache", prefix_cache, parse_share),
            prefix_disk=prefix_disk,
            prefix_disk_bytes=_amount("--prefix-disk-size", prefix_disk_size, parse_bytes),
            kv_bits=kv_bits,
            max_kv_size=max_kv_size,
        )
        if log_level not in ("debug", "info", "warning", "error"):
            raise BadConfig("--log-level must be debug, info, warning or error")
    except BadConfig as error:
        typer.echo(f"mlxq worker: {error}", err=True)
        raise typer.Exit(EXIT_BAD_CONFIG) from None
    raise typer.Exit(_run(config, log_level))


def _amount(flag: str, text: str, parse: Callable[[str], Amount]) -> Amount:
    try:
        return parse(text)
    except ValueError as error:
        raise BadConfig(f"{flag}: {error}") from None


def _run(config: Config, log_level: str) -> int:
    # Imported late: --help and a bad flag need no MLX, and no second to load it.
    from mlxq.worker.chat import Tokenizer
    from mlxq.worker.engine.load import load_batch
    from mlxq.worker.engine.models import Source
    from mlxq.worker.log import configure
    from mlxq.worker.orders import Orders
    from mlxq.worker.service import serve

    disk = Path(config.prefix_disk).expanduser() if config.prefix_disk else None

    async def main() -> int:
        orders = Orders()
        trust = config.trust_remote_code
        source = Source(config.model, config.adapter, config.revision, trust)
        load = partial(
            load_batch,
            source,
            max_batch=config.max_batch,
            prefill_step=config.prefill_step,
            memory_budget=config.memory_budget,
            prefix_cache=config.prefix_cache,
            prefix_disk=disk,
            prefix_disk_bytes=config.prefix_disk_bytes,
            kv_bits=config.kv_bits or None,
            max_kv_size=config.max_kv_size or None,
        )
        load_tokenizer = partial(Tokenizer.load, trust_remote_code=trust)
        with orders.listening():
            return await serve(config, load, orders, load_tokenizer)

    configure(log_level, worker=config.name, owner=config.owner)
    return asyncio.run(main())
