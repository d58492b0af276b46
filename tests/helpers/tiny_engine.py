"""A real engine on a tiny random Llama with one token a byte: every program of a big one, in seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxllm.config.engine import CacheConfig, LogprobsConfig, SchedulerConfig
from jaxllm.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.parts import CoreParts, EngineParts
from jaxllm.engine.trace import Header, trace_path
from jaxllm.engine.trace_file import FileRecorder
from jaxllm.memory.manager import KVManager
from jaxllm.runner.runner import Runner
from jaxllm.runner.start import StartOptions, start_runner
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.types.processors import LogitsProcessor

TOKENIZER = ByteLevelTokenizer()
EOS_IDS = frozenset({TOKENIZER.eos_id, 17})
TINY_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=64,
    layers=(LayerSpec(AttentionSpec(4, 2, 16, 0.25), MLPSpec(96)),) * 2,
    norm_eps=1e-5,
    tied_embeddings=False,
    max_positions=256,
)

PROCESSORS = (
    LogitsProcessor("scale", lambda logits, by: logits * by[:, None]),
    LogitsProcessor("favour_low_ids", lambda logits, by: logits.at[:, :32].add(by[:, None])),
)


class TinyEngine:
    """An `Engine` over `num_devices` copies of the model; `cores` are open for inspection."""

    def __init__(
        self,
        *,
        num_pages: int = 400,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        num_devices: int = 1,
        enable_prefix_caching: bool = True,
        max_logprobs: int = 8,
        processors: Sequence[LogitsProcessor] = (),
        async_scheduling: bool = True,
        record_trace: Path | None = None,
    ) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            async_scheduling=async_scheduling,
        )
        cache = CacheConfig(page_size=8, num_pages=num_pages, enable_prefix_caching=enable_prefix_caching)
        start = partial(
            start_runner,
            TINY_LLAMA,
            None,
            cache=cache,
            scheduler=scheduler,
            dtype="float32",
            logprobs=LogprobsConfig(max_logprobs=max_logprobs),
            processors=processors,
        )
        devices = jax.devices()[:num_devices]
        assert len(devices) == num_devices
        options = [StartOptions(eos_ids=sorted(EOS_IDS), device=d, num_devices=num_devices) for d in devices]
        self.runners = [start(options=each) for each in options]
        paths = [None if record_trace is None else trace_path(record_trace, i) for i in range(num_devices)]
        pairs = zip(self.runners, paths, strict=True)
        self.cores = [_core(runner, scheduler, cache, path) for runner, path in pairs]
        first, *others = self.cores
        self.engine = Engine(
            EngineParts(
                executor=first.executor,
                scheduler=first.scheduler,
                kv=first.kv,
                trace=first.trace,
                async_scheduling=async_scheduling,
                more_cores=tuple(others),
                tokenizer=TOKENIZER,
                max_model_len=max_model_len,
                vocab_size=TINY_LLAMA.vocab_size,
                model_name="tiny",
                eos_ids=EOS_IDS,
                max_logprobs=max_logprobs,
                processor_names=tuple(p.name for p in processors),
            )
        )

    @property
    def num_preemptions(self) -> int:
        return sum(core.scheduler.num_preemptions for core in self.cores)

    @property
    def prefix_hits(self) -> int:
        return sum(core.scheduler.prefix_hits for core in self.cores)

    def forget_prefixes(self) -> None:
        self.wait_until_idle()
        assert all(core.kv.reset_prefix_cache() for core in self.cores)

    def wait_until_idle(self) -> None:
        """The step that was in flight when the last answer ended has yet to give its pages back."""
        deadline = time.monotonic() + 30
        while any(core.scheduler.has_unfinished or core.kv.usage > 0 for core in self.cores):
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.001)

    def check_everything_is_back(self) -> None:
        """No page held, no request known, nothing compiled since start."""
        self.wait_until_idle()
        for core in self.cores:
            core.kv.check()
            assert core.kv.num_free_pages == core.kv.num_pages - 1
            assert (core.scheduler.num_running, core.scheduler.num_waiting, core.scheduler.requests) == (0, 0, {})
        assert [runner.compilations_after_ready for runner in self.runners] == [0] * len(self.runners)

    def __enter__(self) -> TinyEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.close()


def _core(runner: Runner, config: SchedulerConfig, cache: CacheConfig, path: Path | None) -> CoreParts:
    kv = KVManager(runner.kv_plan, enable_prefix_caching=cache.enable_prefix_caching)
    scheduler = Scheduler(config, kv, create_policy("fcfs"), StopRules(EOS_IDS, config.max_model_len))
    header = Header(config, cache, runner.kv_plan, tuple(sorted(EOS_IDS)))
    trace = None if path is None else FileRecorder(path, header)
    return CoreParts(executor=runner, scheduler=scheduler, kv=kv, trace=trace)
