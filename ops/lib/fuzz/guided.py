"""One target under atheris: `python -m ops.lib.fuzz.guided TARGET FOLDER [libFuzzer options]`."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["mlxq"]):
    from ops.lib.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
