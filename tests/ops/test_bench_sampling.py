"""The benchmark of the draw: a short run of every kind."""

from __future__ import annotations

import argparse
import json

from ops.lib.bench.sampling import KINDS, add_options, measure


def test_every_kind_is_drawn_and_reported() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    found = measure(parser.parse_args("--rows 3 --vocab 128 --steps 2 --rounds 2".split()))
    numbers = json.loads(found.line())
    assert numbers["benchmark"] == "sampling"
    for kind in ("argmax", *KINDS):
        assert 0 < numbers[kind]["host_ms"]["min"] <= numbers[kind]["ms"]["max"]
