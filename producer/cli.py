"""The `mlxq` command. Its commands are in commands.py, which needs the cli extra."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: one clear line and exit code 2 where the command line is not installed."""
    try:
        from mlxq.producer.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mlxq"):
            raise
        print('mlxq: the command line needs: pip install "mlxq[cli]"', file=sys.stderr)
        raise SystemExit(2) from None
    app()


if __name__ == "__main__":
    main()
