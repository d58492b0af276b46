"""How much a model in this process gets done when everything is asked at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.tables import Row
from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.profile import ProfileSummary
from jaxllm.types.sampling import OutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputArgs:
    """Raises: ConfigError: a value has the wrong type or is out of range."""

    n: int = setting(1, "sequences a prompt")
    num_warmups: int = setting(0, "requests before those that count; their prompts come from behind them")
    disable_detokenize: bool = setting(False, "make no text of the tokens")
    profile: bool = setting(False, "say where the time of a step goes")

    def __post_init__(self) -> None:
        check_settings(self)
        for name, low in (("n", 1), ("num_warmups", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {low}")


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    elapsed_s: float
    cpu_s: float  # of the whole process
    num_requests: int
    num_failed: int
    num_input_tokens: int
    num_cached_tokens: int  # of them, found in the prefix cache
    num_output_tokens: int
    finished: tuple[tuple[float, int], ...]  # (seconds from the start, output tokens of the request)
    profile: ProfileSummary | None

    @property
    def num_tokens(self) -> int:
        return self.num_input_tokens + self.num_output_tokens

    def rows(self) -> list[Row]:
        return [
            ("requests", f"{self.num_requests}"),
            ("failed requests", f"{self.num_failed}"),
            ("duration", f"{self.elapsed_s:.2f} s"),
            ("CPU time", f"{self.cpu_s:.2f} s"),
            ("input tokens", f"{self.num_input_tokens}"),
            ("  of them cached", f"{self.num_cached_tokens}"),
            ("output tokens", f"{self.num_output_tokens}"),
            ("request throughput", f"{self.num_requests / self.elapsed_s:.3f} requests/s"),
            ("output throughput", f"{self.num_output_tokens / self.elapsed_s:.2f} tokens/s"),
            ("total throughput", f"{self.num_tokens / self.elapsed_s:.2f} tokens/s"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """vLLM's keys, and ours beside them."""
        return {
            "elapsed_time": self.elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_tokens,
            "requests_per_second": self.num_requests / self.elapsed_s,
            "tokens_per_second": self.num_tokens / self.elapsed_s,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed_s,
            "input_tokens": self.num_input_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "failed": self.num_failed,
            "cpu_s": self.cpu_s,
            **({} if self.profile is None else {"profile": self.profile.as_dict()}),
        }


def run_throughput(
    llm: LLM,
    args: ThroughputArgs,
    requests: Sequence[BenchRequest],
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> ThroughputResult:
    """Run the last `num_warmups` of `requests`, then all others at once; each runs to its full length.

    Raises:
        RequestError: a prompt and its answer do not fit into the model's context; nothing was run.
    """
    num_counted = len(requests) - args.num_warmups
    if args.num_warmups:
        _generate(llm, args, requests[num_counted:], None)
    finished: list[tuple[float, int]] = []
    llm.step_profiles()
    start_s, cpu_s = time.perf_counter(), time.process_time()

    def on_update(output: RequestOutput) -> None:
        if output.finished:
            finished.append((time.perf_counter() - start_s, output.num_generated_tokens))
            if progress is not None:
                progress("requests", len(finished), num_counted)

    outputs = _generate(llm, args, requests[:num_counted], on_update)
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    done = [output for output in outputs if output.error is None]
    return ThroughputResult(
        elapsed_s=elapsed_s,
        cpu_s=cpu_s,
        num_requests=len(done),
        num_failed=len(outputs) - len(done),
        num_input_tokens=sum(output.usage.prompt_tokens for output in done),
        num_cached_tokens=sum(output.usage.cached_tokens for output in done),
        num_output_tokens=sum(output.usage.completion_tokens for output in done),
        finished=tuple(finished),
        profile=ProfileSummary.of(llm.step_profiles()) if args.profile else None,
    )


def _generate(
    llm: LLM,
    args: ThroughputArgs,
    requests: Sequence[BenchRequest],
    on_update: Callable[[RequestOutput], None] | None,
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            n=args.n,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=not args.disable_detokenize,
            output_kind=OutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    return llm.generate([request.prompt for request in requests], params, on_update=on_update)
