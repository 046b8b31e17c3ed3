"""Types of options that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of that range."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise ValueError(text)
        return value

    number.__name__ = f"{least} or more" if most is None else f"{least} to {most}"
    return number
