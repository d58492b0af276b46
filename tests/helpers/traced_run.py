"""A core that is given everything at random, from one seed, while a trace of it is written.

As a program it prints the hash of the plans for each policy, one a line: `python -m tests.helpers.traced_run FOLDER`.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.engine.clock import ManualClock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.engine.replay import replay
from jaxllm.engine.trace import Header
from jaxllm.engine.trace_file import FileRecorder
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.registry import BUILT_IN, create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.testing.scripted import Script
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import ServiceParams
from tests.helpers.scripted_engine import EOS, scripted

PREFIXES = tuple(tuple((7 * k + 3 * i) % 90 + 32 for i in range(20)) for k in range(3))


@dataclass(frozen=True)
class Traced:
    num_steps: int
    num_arrived: int
    num_preemptions: int


def traced_run(
    path: Path, *, policy: str = "fcfs", async_scheduling: bool = True, seed: int = 0, num_turns: int = 150
) -> Traced:
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=96,
        policy=policy,
        long_prefill_token_threshold=12,
        async_scheduling=async_scheduling,
        max_num_queued_reqs=40,
    )
    header = Header(config, CacheConfig(page_size=4), KVCachePlan((KVGroup((0,), FullKV(4, 1, 8)),), 33, 4), (EOS,))
    kv = KVManager(header.kv_plan, enable_prefix_caching=True)
    made = create_policy(policy)
    scheduler = Scheduler(config, kv, made, StopRules(frozenset({EOS}), config.max_model_len))
    clock = ManualClock(1000.1)
    executor = scripted(default=Script(token_ids=tuple(range(40, 70))))
    recorder = FileRecorder(path, header)
    core = EngineCore(executor, scheduler, kv, clock, async_scheduling=async_scheduling, trace=recorder)
    rng, num_arrived, open_ids = random.Random(seed), 0, list[str]()
    for turn in range(10_000):
        if turn >= num_turns and not core.has_work:
            break
        clock.advance(rng.choice((0.01, 0.013, 0.2)))
        for message in _arrivals(rng, num_arrived, clock.now_s()) if turn < num_turns and rng.random() < 0.4 else ():
            num_arrived += 1
            open_ids.append(message.request_id)
            core.add(message)
        if open_ids and rng.random() < 0.05:
            core.abort(AbortRequests((rng.choice(open_ids), "nobody")))
        if core.has_work:
            core.step()
        if rng.random() < 0.02:
            core.reset_prefix_cache()
    assert not core.has_work
    core.close()
    return Traced(core.stats().num_steps, num_arrived, core.stats().num_preemptions)


def _arrivals(rng: random.Random, number: int, now_s: float) -> list[AddRequest]:
    """A request, or the siblings of one; some come again with the prompt's beginning of another."""
    prompt = rng.choice(PREFIXES)[: rng.choice((0, 7, 16, 20))] + tuple(
        rng.choices(range(32, 120), k=rng.randrange(1, 30))
    )
    params = SamplingParams(
        max_tokens=rng.choice((None, 3, 12, 40)),
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
        ignore_eos=rng.random() < 0.2,
    )
    service = ServiceParams(
        tenant=rng.choice((None, "a", "b", "c")),
        deadline_s=rng.choice((None, None, 1.5)),
        retention_priority=rng.choice((0, 35, 80)),
        predicted_tokens=rng.choice((None, 5, 50)),
        ttft_target_s=rng.choice((None, 0.3)),
    )
    salt, priority = rng.choice((None, None, "salt")), rng.randrange(3)
    family = rng.choice((1, 1, 1, 3))
    ids = [f"r#{number}" if i == 0 else f"r#{number}/{i}" for i in range(family)]
    if rng.random() < 0.03:
        prompt = prompt * 10  # refused
        ids = ids[:1]
    return [
        AddRequest(
            request_id,
            prompt,
            params if i == 0 else SamplingParams(max_tokens=params.max_tokens),
            now_s,
            seed=rng.randrange(2**31),
            priority=priority,
            cache_salt=salt,
            fork_of=ids[0] if i else None,
            service=service,
        )
        for i, request_id in enumerate(ids)
    ]


def main(folder: Path) -> None:
    for policy in BUILT_IN:
        path = folder / f"{policy}.jsonl"
        traced_run(path, policy=policy, num_turns=60)
        print(policy, replay(path).plan_hash)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
