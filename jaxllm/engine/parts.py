"""What a composition root hands over to make an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config.engine import LogprobsMode
from jaxllm.engine.executor import Executor
from jaxllm.engine.kv_events import KVEventPublisher
from jaxllm.engine.profiler import NoProfiler, Profiler
from jaxllm.engine.trace import TraceRecorder
from jaxllm.engine.watchdog import DEFAULT_WATCHDOG_S
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """One core: a device and what decides for it."""

    executor: Executor
    scheduler: Scheduler
    kv: KVManager  # the scheduler's own, for statistics
    trace: TraceRecorder | None = None
    kv_events: KVEventPublisher | None = None  # then `kv` keeps events


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    executor: Executor
    scheduler: Scheduler
    kv: KVManager  # the scheduler's own, for statistics
    trace: TraceRecorder | None = None
    kv_events: KVEventPublisher | None = None  # then `kv` keeps events
    more_cores: tuple[CoreParts, ...] = ()  # further copies of the model, each with requests of its own
    tokenizer: Tokenizer
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # ids the model knows; prompts may hold no others
    model_name: str  # label of the metrics
    eos_ids: frozenset[int] = frozenset()  # the ids that end a sequence, as the scheduler knows them
    default_params: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the model's own sampling defaults
    max_logprobs: int = 20  # most log probabilities a request may ask for; -1: the whole vocabulary
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of what kind they are
    processor_names: tuple[str, ...] = ()  # logits processors that extra_args may name
    seed: int = 0  # of the generator that seeds requests without a seed
    async_scheduling: bool = True
    watchdog_s: float = DEFAULT_WATCHDOG_S  # longest silence inside one executor call
    metrics_prefix: str = "jaxllm:"  # colon included
    profiler: Profiler = field(default_factory=NoProfiler)  # takes traces of the device
    compilations_after_ready: Callable[[], int] | None = None
