"""A program: one model under mlx-lm's own `BatchGenerator`, without queue, text and threads.

Reads a `Workload` per line from stdin and writes its `Run` to stdout, after an empty line that says
that the model is loaded. Between two lines it sleeps.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model

from mlxq.protocol.jobs import Message
from mlxq.worker.chat import Tokenizer
from ops.lib.bench.workload import Run, Trace, Workload


class Raw:
    """The model and its tokenizer, run as mlx-lm would. Prompts are tokenised off the clock."""

    def __init__(self, model: str, batch: int, prefill_step: int) -> None:
        self._network: Any = load_model(Path(model))[0]
        self._tokenizer = Tokenizer.load(model)
        self._batch = batch
        self._prefill_step = prefill_step

    def run(self, workload: Workload) -> Run:
        prompts = [
            self._tokenizer.render([Message(role="user", content=prompt)])
            for prompt in workload.prompts
        ]
        traces = [Trace([], []) for _ in prompts]
        started_s = time.perf_counter()
        generator = BatchGenerator(
            self._network,
            completion_batch_size=self._batch,
            prefill_batch_size=self._batch,
            prefill_step_size=self._prefill_step,
        )
        rows = dict(
            zip(generator.insert(prompts, [workload.tokens] * len(prompts)), traces, strict=True)
        )
        while responses := generator.next_generated():
            at_s = time.perf_counter() - started_s
            for response in responses:
                rows[response.uid].ids.append(response.token)
                rows[response.uid].at_s.append(at_s)
        generator.close()
        return Run(traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prefill-step", type=int, required=True)
    arguments = parser.parse_args()
    raw = Raw(arguments.model, arguments.batch, arguments.prefill_step)
    print(flush=True)
    for line in sys.stdin:
        run = raw.run(msgspec.json.decode(line, type=Workload))
        print(msgspec.json.encode(run).decode(), flush=True)


if __name__ == "__main__":
    main()
