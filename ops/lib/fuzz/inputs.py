"""Inputs for the targets: raw bytes, and valid ones with a few bytes changed."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from ops.lib.fuzz.draw import KNOWN

JOBS: Final = (
    b'{"prompt":"Hi"}',
    b'{"prompt_token_ids":[1,2,3],"max_tokens":5,"seed":1,"ignore_eos":true}',
    b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"text",'
    b'"text":"b"}],"name":"n"}],"temperature":0.5,"top_p":1,"top_k":3,"min_p":0.1}',
    b'{"prompt":"\\u00e9\\ud83d\\ude00","stop":["a","b"],"logit_bias":{"1":-100,"2":0.5},'
    b'"repetition_penalty":1.1,"presence_penalty":-2,"frequency_penalty":2}',
)
RESULTS: Final = (
    b'{"text":"a","token_ids":[1],"finish_reason":"stop"}',
    b'{"text":"","token_ids":[],"finish_reason":"length","usage":{"prompt_tokens":1,'
    b'"completion_tokens":2},"timings":{"first_token_s":0.1,"total_s":1e300}}',
)
EVENTS: Final = tuple(text for text in KNOWN if text.startswith(b'{"'))
IDS: Final = (b"1-1", b"18446744073709551615-0", b"00-9")
SEEDS: Final = {"job": JOBS, "event": EVENTS, "result": RESULTS, "event_id": IDS}


def inputs(target: str) -> st.SearchStrategy[bytes]:
    """For `target`; those that read a `Draw` need no valid input to begin with."""
    raw = st.binary(max_size=256)
    seeds = SEEDS.get(target)
    return raw if seeds is None else raw | st.sampled_from(seeds).flatmap(_changed)


def _changed(seed: bytes) -> st.SearchStrategy[bytes]:
    places = st.integers(0, len(seed))
    change = st.tuples(places, st.integers(0, 3), st.binary(max_size=3) | st.sampled_from(KNOWN))
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _apply(seed, changes))


def _apply(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, cut, put in changes:
        seed = seed[:place] + put + seed[place + cut :]
    return seed
