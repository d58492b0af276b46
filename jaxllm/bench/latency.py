"""How long one batch takes: equal prompt lengths, equal answer lengths, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.bench.distribution import Distribution, percent_name
from jaxllm.bench.tables import Row
from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError
from jaxllm.types.profile import ProfileSummary
from jaxllm.types.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
OnIteration = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyArgs:
    """Raises: ConfigError: a value has the wrong type or is out of range."""

    input_len: int = setting(32, "tokens of each prompt", human=True)
    output_len: int = setting(128, "tokens of each answer", human=True)
    batch_size: int = setting(8, "prompts at once", human=True)
    n: int = setting(1, "sequences a prompt")
    num_iters_warmup: int = setting(10, "batches that do not count")
    num_iters: int = setting(30, "batches that count")
    disable_detokenize: bool = setting(False, "make no text of the tokens")
    profile: bool = setting(False, "say where the time of a step goes")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 1")
        if self.num_iters_warmup < 0:
            raise ConfigError(f"num_iters_warmup={self.num_iters_warmup}; accepted: at least 0")


@dataclass(frozen=True, slots=True)
class LatencyResult:
    latencies_s: tuple[float, ...]  # wall, one a batch
    cpu_s: tuple[float, ...]  # of the whole process
    num_output_tokens: int  # of one batch
    output_len: int
    profile: ProfileSummary | None

    @property
    def latency(self) -> Distribution:
        return Distribution.of(self.latencies_s, PERCENTILES)

    def rows(self) -> list[Row]:
        latency, cpu = self.latency, Distribution.of(self.cpu_s)
        return [
            ("batches", f"{latency.count}"),
            ("average latency", f"{latency.mean:.4f} s"),
            ("median (lowest to highest)", f"{latency.median:.4f} s ({latency.smallest:.4f} to {latency.largest:.4f})"),
            *((f"p{percent_name(percent)}", f"{value:.4f} s") for percent, value in latency.percentiles),
            ("CPU time, median", f"{cpu.median:.4f} s a batch"),
            ("latency of a token, median", f"{latency.median * 1e3 / self.output_len:.3f} ms"),
            ("output throughput, median", f"{self.num_output_tokens / latency.median:.2f} tokens/s"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """vLLM's keys, and ours beside them."""
        latency = self.latency
        return {
            "avg_latency": latency.mean,
            "latencies": list(self.latencies_s),
            "percentiles": {percent_name(percent): value for percent, value in latency.percentiles},
            "median_latency": latency.median,
            "cpu_s": list(self.cpu_s),
            "output_tokens_per_batch": self.num_output_tokens,
            **({} if self.profile is None else {"profile": self.profile.as_dict()}),
        }


def run_latency(llm: LLM, args: LatencyArgs, *, seed: int = 0, progress: OnIteration | None = None) -> LatencyResult:
    """Random token ids in, exactly `output_len` tokens out of each sequence.

    Raises:
        RequestError: prompt and answer do not fit into the model's context.
    """
    prompts = random_ids(llm, args.batch_size, args.input_len, seed)
    params = SamplingParams(
        n=args.n,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )
    walls, cpus = list[float](), list[float]()
    total = args.num_iters_warmup + args.num_iters
    for index in range(total):
        if index == args.num_iters_warmup:
            llm.step_profiles()  # those of the warm-up are not wanted
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.process_time() - cpu_s)
        if progress is not None:
            progress("batches", index + 1, total)
    return LatencyResult(
        latencies_s=tuple(walls[args.num_iters_warmup :]),
        cpu_s=tuple(cpus[args.num_iters_warmup :]),
        num_output_tokens=args.batch_size * args.n * args.output_len,
        output_len=args.output_len,
        profile=ProfileSummary.of(llm.step_profiles()) if args.profile else None,
    )


def random_ids(llm: LLM, count: int, length: int, seed: int) -> Sequence[dict[str, Any]]:
    """Prompts of ids that stand for text."""
    draw, tokenizer = random.Random(seed), llm.tokenizer
    special = tokenizer.special_ids
    ids = [i for i in range(tokenizer.vocab_size) if i not in special and tokenizer.token(i) is not None]
    return [{"prompt_token_ids": [ids[int(draw.random() * len(ids))] for _ in range(length)]} for _ in range(count)]
