"""KV memory that is allocated and holds nothing: pages against contiguous reservation, on one trace.

Lengths are lognormal, as those of shared chats (about 250 tokens in, 144 out); the real scheduler hands out the pages.

    python -m scripts.bench.kv_waste [--requests 2000] [--page-sizes 8 16 32 64 128] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxllm.config.engine import SchedulerConfig
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from scripts.bench.modelled import Modelled

_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of allocated slots without a token, over all steps of a run, 0 to 1."""

    page_size: int
    paged: float
    reserved_exactly: float  # prompt and the output that it will have, set aside at once
    reserved_whole: float  # max_model_len for each


def lengths(num: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(5.0, 1.0, num), 4, _LONGEST // 2).astype(int)
    outputs = np.clip(rng.lognormal(4.6, 0.9, num), 2, _LONGEST // 2).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def measure(sizes: Sequence[tuple[int, int]], page_size: int, per_s: float = 4.0) -> Waste:
    """Run the trace; what is reserved contiguously is counted for the same requests at the same steps."""
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=_LONGEST)
    device = Modelled(config, 1 + 64 * _LONGEST // page_size, page_size)
    arrivals: list[tuple[float, Callable[[float], Request]]] = [
        (number / per_s, partial(_request, number, *size)) for number, size in enumerate(sizes)
    ]
    used = allocated = exactly = whole = 0
    for requests in device.run(arrivals):
        running = [request for request in requests if request.pages]
        used += sum(request.num_computed for request in running)
        allocated += sum(len(request.pages[0]) for request in running) * page_size
        exactly += sum(request.num_prompt_tokens + (request.params.max_tokens or 0) for request in running)
        whole += len(running) * _LONGEST
    return Waste(page_size, *(1.0 - used / slots for slots in (allocated, exactly, whole)))


def draw(found: Sequence[Waste], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"pages of {waste.page_size}" for waste in found] + ["prompt + output", f"{_LONGEST} each"]
    shares = [waste.paged for waste in found] + [found[0].reserved_exactly, found[0].reserved_whole]
    bars = axes.barh(names[::-1], [100 * share for share in shares[::-1]])
    axes.bar_label(bars, fmt="%.1f %%", padding=3)
    axes.set(xlabel="allocated KV slots without a token, %", xlim=(0, 105))
    figure.savefig(path, dpi=110)


def _request(number: int, num_prompt: int, num_output: int, at_s: float) -> Request:
    prompt = tuple(range(number * _LONGEST, number * _LONGEST + num_prompt))
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=num_output, ignore_eos=True), at_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = [measure(lengths(args.requests), page_size) for page_size in args.page_sizes]
    for waste in found:
        print(f"pages of {waste.page_size:4} tokens: {waste.paged:6.1%} of the allocated slots hold nothing")
    print(f"prompt and output reserved: {found[0].reserved_exactly:6.1%}")
    print(f"{_LONGEST} reserved for each: {found[0].reserved_whole:6.1%}")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
