"""Amounts of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of `8GB` (10^9 each), `8GiB` (2^30) or `8000000000`. Raises ValueError."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is no size: write 8GB, 512MB or a number of bytes")
    return round(float(found[1]) * unit)


def parse_share(text: str) -> float:
    """As `parse_bytes`; or, without a unit and up to 1, a share of something: `0.5`."""
    try:
        share = float(text)
    except ValueError:
        return float(parse_bytes(text))
    if 0.0 <= share <= 1.0:
        return share
    return float(parse_bytes(text))
