"""Fit a cost model to a recorded run: `python -m scripts.calibrate_cost TRACE.jsonl --out cost.json`.

TRACE is a file of `jaxllm serve --record-trace`, of a run that takes steps of all the sizes that matter.
What it writes is `cost: {kind: linear, file: cost.json}` of a simulation (`table` with `--kind table`).

With `--padding` a linear fit pads steps to the shapes that the recorded engine compiled: for a device on
which a step costs what its shape costs, not what is in it. Compare the errors of steps that were left out
of the fit with and without it. To predict an engine of other limits then, say them: the prices stay, the
shapes become those of that engine.

Exit code 2 if a file or a flag is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.sim.calibrate import MeasuredStep, Recorded, error_of, fit_linear, fit_table, held_out_error, read_steps
from jaxllm.sim.linear import Linear, Padding
from jaxllm.sim.table_cost import Table


def main(argv: list[str]) -> int:
    flags = _parser().parse_args(argv)
    try:
        recorded = read_steps(flags.trace, timing=flags.timing)
        cost = _fit(recorded, flags)
        _write(cost, flags.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.calibrate_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("linear", "table"), default="linear")
    parser.add_argument(
        "--timing", choices=("step", "device"), default="step", help="all that a step takes, or what the device reports"
    )
    parser.add_argument("--padding", action="store_true", help="fit to compiled shapes, not to what is in a step")
    parser.add_argument("--max-num-seqs", type=int, help="of the engine that is to be predicted, with --padding")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, help="of the engine that is to be predicted, with --padding"
    )
    return parser


def _fit(recorded: Recorded, flags: argparse.Namespace) -> Linear | Table:
    source = f"{flags.trace.name}, {len(recorded.steps)} steps, {flags.timing} times"
    limits = recorded.header.scheduler
    padding = None
    if flags.kind == "linear" and flags.padding:
        padding = _padding(limits.max_num_seqs, limits.max_num_batched_tokens)

    def fit(steps: Sequence[MeasuredStep]) -> Linear | Table:
        if flags.kind == "table":
            return fit_table(steps, source=source)
        return fit_linear(steps, padding=padding, source=source)

    cost = fit(recorded.steps)
    print(f"fit, {error_of(cost, recorded.steps)}")
    print(f"left out, {held_out_error(fit, recorded.steps)}")
    print(f"{recorded.num_untimed} steps are not timed: the engine idled after them")
    if padding is None or not isinstance(cost, Linear):
        return cost
    num_seqs = flags.max_num_seqs or limits.max_num_seqs
    return cost.padded(_padding(num_seqs, flags.max_num_batched_tokens or limits.max_num_batched_tokens))


def _padding(max_num_seqs: int, max_num_batched_tokens: int) -> Padding:
    """The shapes that an engine of these limits compiles."""
    from jaxllm.runner.buckets import build_buckets  # of the body: brings jax

    buckets = build_buckets(max_num_seqs, max_num_batched_tokens, 1)
    return Padding(
        decode=tuple(bucket.num_requests for bucket in buckets.decode),
        mixed=tuple((bucket.num_tokens, bucket.num_requests) for bucket in buckets.mixed),
        samples=buckets.sample_sizes,
    )


def _write(cost: Linear | Table, path: Path) -> None:
    try:
        cost.save(path)
    except OSError as error:
        raise ConfigError(f"out={str(path)!r} cannot be written: {error.strerror}") from None
    if isinstance(cost, Linear):
        print(", ".join(f"{name} {value:.4g}" for name, value in cost.coefficients.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
