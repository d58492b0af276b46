"""A prompt of 50,000 tokens among 32 chats: how long a chat waits for its next token.

The real scheduler on a device of which only the time of a step is modelled (10 ms and 0.1 ms a token), so the
figures are those of the plans, not of a machine.

    python -m scripts.bench.long_prompt [--prompt 50000] [--chats 32] [--budget 512] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jaxllm.config.engine import SchedulerConfig
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from scripts.bench.modelled import Modelled

_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Gaps:
    """Between two tokens of a chat, from the arrival of the prompt until it has its first token."""

    name: str
    most_steps: int
    most_s: float
    median_step_s: float
    num_steps: int
    first_token_s: float  # of the long prompt, after its arrival
    token_times: tuple[tuple[float, ...], ...]  # of each chat, seconds after that arrival


def measure(name: str, config: SchedulerConfig, num_prompt: int, num_chats: int) -> Gaps:
    """Let the chats decode, then send the prompt, and watch the chats until it has its first token."""
    num_pages = 2 + (num_prompt + num_chats * 4096) // _PAGE_SIZE
    device = Modelled(config, num_pages, _PAGE_SIZE)
    chats = [_request(f"chat{i}", (i + 2,) * 20, 4000) for i in range(num_chats)]
    for chat in chats:
        device.scheduler.add(chat)
    while any(not chat.output_ids for chat in chats):
        device.step()
    start_s = device.now_s
    long = _request("long", tuple(range(num_prompt)), 1)
    device.scheduler.add(long)
    times, steps, lengths = [[0.0] for _ in chats], [[0] for _ in chats], list[float]()
    while not long.output_ids:
        before_s, counts = device.now_s, [len(chat.output_ids) for chat in chats]
        device.step()
        lengths.append(device.now_s - before_s)
        for i, chat in enumerate(chats):
            if len(chat.output_ids) > counts[i]:
                times[i].append(device.now_s - start_s)
                steps[i].append(len(lengths))
    most_s = max(later - sooner for each in times for sooner, later in pairwise(each))
    most_steps = max(later - sooner for each in steps for sooner, later in pairwise(each))
    median_s = statistics.median(lengths)
    times_of_all = tuple(map(tuple, times))
    return Gaps(name, most_steps, most_s, median_s, len(lengths), device.now_s - start_s, times_of_all)


def compare(num_prompt: int, num_chats: int, budget: int) -> list[Gaps]:
    """In pieces; in pieces with a cap and a share for chats; and whole."""
    length = {"max_model_len": num_prompt + 4096, "max_num_seqs": num_chats + 1}
    whole = SchedulerConfig(max_num_batched_tokens=num_prompt + 4096, enable_chunked_prefill=False, **length)
    capped = SchedulerConfig(max_num_batched_tokens=budget, long_prefill_token_threshold=budget // 4, **length)
    share = SchedulerConfig(max_num_batched_tokens=budget, decode_budget_share=0.5, **length)
    pieces = SchedulerConfig(max_num_batched_tokens=budget, **length)
    named = {
        f"pieces, budget {budget}": pieces,
        f"long_prefill_token_threshold {budget // 4}": capped,
        "decode_budget_share 0.5": share,
        "whole": whole,
    }
    return [measure(name, config, num_prompt, num_chats) for name, config in named.items()]


def draw(found: Sequence[Gaps], path: Path) -> None:
    """Gaps of all chats over time, a panel each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.2 * len(found)), layout="constrained")
    for axes, gaps in zip(figure.subplots(len(found), squeeze=False, sharex=True)[:, 0], found, strict=True):
        points = {(later, later - sooner) for each in gaps.token_times for sooner, later in pairwise(each)}
        axes.plot(*zip(*sorted(points), strict=True), ".", markersize=3)
        axes.set(title=f"{gaps.name}: longest {gaps.most_s:.3f} s", ylabel="gap, s", yscale="log", ylim=(0.01, 10))
    figure.supxlabel("seconds after the long prompt came (modelled)")
    figure.savefig(path, dpi=110)


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=50_000, help="tokens of the long prompt")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = compare(args.prompt, args.chats, args.budget)
    step_s = found[0].median_step_s  # of a full one at the budget
    print(f"{'':38}longest gap: steps  seconds  in median steps of {args.budget}  first token s  steps")
    for gaps in found:
        print(
            f"{gaps.name:38}{gaps.most_steps:18}{gaps.most_s:9.3f}{gaps.most_s / step_s:24.2f}"
            f"{gaps.first_token_s:15.1f}{gaps.num_steps:7}"
        )
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
