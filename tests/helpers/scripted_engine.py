"""A whole engine but for the device: real scheduler and memory, byte tokenizer, scripted executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine import SchedulerConfig
from jaxllm.engine.executor import Executor
from jaxllm.engine.parts import EngineParts
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.faults import Fault
from jaxllm.testing.scripted import Script, ScriptedExecutor

TOKENIZER = ByteLevelTokenizer()
EOS = TOKENIZER.eos_id


@dataclass(frozen=True, kw_only=True)
class Settings:
    num_pages: int = 65
    page_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 128
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    watchdog_s: float = 30.0


def script(text: str | bytes = "", **conditions: Any) -> Script:
    ids = tuple(text.encode() if isinstance(text, str) else text)
    return Script(token_ids=ids, **conditions)


def scripted(*responses: Script, faults: Sequence[Fault] = (), step_s: float = 0.0, **more: Any) -> ScriptedExecutor:
    return ScriptedExecutor(
        responses,
        eos_id=EOS,
        faults=faults,
        step_s=step_s,
        decode=TOKENIZER.decode,
        **{"default": script("Hello"), **more},
    )


def make_parts(executor: Executor, settings: Settings | None = None, **overrides: Any) -> EngineParts:
    """Parts of an engine on `executor`; `overrides` are fields of `EngineParts`."""
    s = settings or Settings()
    spec = FullKV(page_size=s.page_size, num_kv_heads=1, head_dim=8)
    plan = KVCachePlan((KVGroup((0,), spec),), s.num_pages, s.page_size)
    kv = KVManager(plan, enable_prefix_caching=s.enable_prefix_caching, events="kv_events" in overrides)
    config = SchedulerConfig(
        max_num_seqs=s.max_num_seqs,
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_model_len=s.max_model_len,
        async_scheduling=s.async_scheduling,
        max_num_queued_reqs=s.max_num_queued_reqs,
    )
    stop = StopRules(frozenset({EOS}), s.max_model_len)
    fields: dict[str, Any] = {
        "executor": executor,
        "scheduler": Scheduler(config, kv, create_policy("fcfs"), stop),
        "kv": kv,
        "tokenizer": TOKENIZER,
        "max_model_len": s.max_model_len,
        "vocab_size": TOKENIZER.vocab_size,
        "model_name": "scripted",
        "eos_ids": frozenset({EOS}),
        "async_scheduling": s.async_scheduling,
        "watchdog_s": s.watchdog_s,
    }
    return EngineParts(**{**fields, **overrides})
