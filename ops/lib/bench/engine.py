"""The engine against mlx-lm's raw BatchGenerator, in four parts.

redis: the whole path through Redis, each side in a process of its own. steps: how long a decode
step takes. joins: what long prompts and bursts do to others. prefix: what the prefix cache saves.
Sides take turns in every part, since a machine's speed drifts: only ratios of neighbours count.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Group, RenderableType

from ops.lib.bench import joins, prefix, steps, through_redis
from ops.lib.bench.batches import Makers, OwnSide, RawSide
from ops.lib.bench.measure import Report, machine, tell
from ops.lib.bench.options import at_least
from ops.lib.bench.workload import MOST_JOBS
from ops.lib.model import demo_model
from ops.lib.random_model import Shape, vocab_of, write_random_llama

HELP = "speed and latency against mlx-lm's raw BatchGenerator"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="may be repeated; default: all"
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="default: the demo model of ops/model"
    )
    parser.add_argument(
        "--random-1b", action="store_true", help="a llama of 1.2e9 random weights instead"
    )
    number = partial(parser.add_argument, type=at_least(1), metavar="N")
    number("--rounds", default=3)
    redis = parser.add_argument_group("redis")
    redis.add_argument("--jobs", type=at_least(1, MOST_JOBS), default=32, metavar="N")
    redis.add_argument("--tokens", type=at_least(2), default=64, metavar="N", help="per job")
    redis.add_argument("--batch", type=at_least(1), default=16, metavar="N", help="slots")
    redis.add_argument(
        "--low-load-jobs",
        type=at_least(1, MOST_JOBS),
        default=8,
        metavar="N",
        help="jobs per round that run one at a time",
    )
    number = partial(parser.add_argument_group("steps").add_argument, type=at_least(1), metavar="N")
    number("--batches", nargs="+", default=[1, 8, 32], help="numbers of rows")
    number("--steps", default=12, help="timed ones per round")
    number("--prompt", default=32, help="ids per row")
    number = partial(parser.add_argument_group("joins").add_argument, type=at_least(1), metavar="N")
    number("--running", default=8, help="rows that decode")
    number("--joiners", default=2, help="long prompts")
    number("--long", default=512, help="ids of a long prompt")
    number("--burst", default=16, help="short prompts at once")
    number = partial(
        parser.add_argument_group("prefix").add_argument, type=at_least(1), metavar="N"
    )
    number("--shared", default=512, help="ids that the prompts have in common")
    number("--turns", default=4, help="prompts per round")


def measure(options: argparse.Namespace) -> Report:
    """Runs the parts that were asked for, one after the other."""
    about = machine()
    with tempfile.TemporaryDirectory(prefix="mlxq-bench-") as folder:
        model = _model(options, Path(folder))
        tables: list[RenderableType] = []
        parts: dict[str, Any] = {}
        for name in options.part or PARTS:
            tell(f"part {name}")
            report = PARTS[name](model, options)
            tables.append(report.table)
            parts[name] = report.data
    about |= {"model": model.name, "device": mx.device_info().get("device_name", "cpu")}
    data = {"benchmark": "engine", "rounds": options.rounds, "parts": parts, "machine": about}
    return Report(Group(*tables), data)


def _model(options: argparse.Namespace, folder: Path) -> Path:
    if options.random_1b:
        return write_random_llama(folder / "random-llama-1b", Shape())
    if options.model is None:
        return demo_model()
    if not (options.model / "config.json").is_file():
        raise RuntimeError(f"{options.model} is no model folder: it has no config.json")
    return Path(options.model.resolve())


def _makers(model: Path) -> Makers:
    return {"raw": partial(RawSide, model), "own": partial(OwnSide, model)}


def _steps(model: Path, options: argparse.Namespace) -> Report:
    plan = steps.Plan(
        batches=options.batches,
        rounds=options.rounds,
        steps=options.steps,
        prompt=options.prompt,
        vocab=vocab_of(model),
    )
    found = steps.data(steps.run(_makers(model), plan))
    return Report(steps.table(found), {"prompt": options.prompt, **found})


def _joins(model: Path, options: argparse.Namespace) -> Report:
    plan = joins.Plan(
        running=options.running,
        joiners=options.joiners,
        long=options.long,
        burst=options.burst,
        rounds=options.rounds,
        vocab=vocab_of(model),
    )
    found = joins.data(joins.run(_makers(model), plan))
    asked = {name: getattr(plan, name) for name in ("running", "joiners", "long", "burst")}
    return Report(joins.table(found), {**asked, **found})


PARTS: dict[str, Callable[[Path, argparse.Namespace], Report]] = {
    "redis": through_redis.measure,
    "steps": _steps,
    "joins": _joins,
    "prefix": prefix.measure,
}
