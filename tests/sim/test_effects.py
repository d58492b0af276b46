"""Effects that are published, seen in the simulator, with a size that is asserted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.sim.cost_spec import make_cost
from jaxllm.sim.fleet import FleetSetup, Pool, Transfer, run_fleet
from jaxllm.sim.metrics import Slo, Summary, summarise
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.simulator import Run, simulate
from jaxllm.sim.workload_spec import make_workload

COST = make_cost({"kind": "roofline", "device": "h100", "model": "llama-3-8b"}, "test: cost")
KV_BYTES = 131_072.0  # a token of Llama-3-8B in bfloat16


def setup(num_pages: int = 20_000, page_size: int = 16, **scheduler: Any) -> EngineSetup:
    config = SchedulerConfig(
        **{"max_num_seqs": 128, "max_num_batched_tokens": 512, "max_model_len": 20_000, **scheduler}
    )
    return EngineSetup(scheduler=config, cache=CacheConfig(page_size=page_size, num_pages=num_pages), host_s=0.001)


def run(engine: EngineSetup, spec: Mapping[str, Any], seed: int = 0) -> Run:
    return simulate(engine, COST, make_workload(spec, seed, "test: workload"))


def figures(found: Run, slo: Slo | None = None) -> Summary:
    return summarise(found, slo, "fcfs", 0)


def test_prompts_in_pieces_bound_the_stalls_of_those_who_decode() -> None:
    """Sarathi-Serve (Agrawal et al., 2024): without pieces a long prompt stops everybody for as long as it takes."""
    chats = {"kind": "poisson", "rate": 4, "num_requests": 120, "prompt": 200, "output": 200}
    chats["classes"] = [{"weight": 19}, {"weight": 1, "prompt": 16_000, "output": 200}]
    pieces = run(setup(), chats)
    whole = run(setup(enable_chunked_prefill=False, max_num_batched_tokens=20_000), chats)
    stalls = [max(s.longest_gap_s for s in found.served) for found in (pieces, whole)]
    median_gap = float(np.median([(s.last_s - s.first_s) / (s.num_output - 1) for s in pieces.served]))  # type: ignore[operator]
    assert stalls[0] < 10 * median_gap
    assert stalls[1] > 10 * stalls[0]


def test_pages_serve_more_than_memory_reserved_for_the_longest() -> None:
    """PagedAttention (Kwon et al., 2023): two to four times the throughput in the same memory."""
    lengths = {"prompt": {"kind": "lognormal", "median": 160, "sigma": 0.9, "max": 1000}}
    lengths["output"] = {"kind": "lognormal", "median": 200, "sigma": 0.8, "max": 1000}
    load = {"kind": "at_once", "num_requests": 300, **lengths}
    num_slots = 40_960  # tokens of KV memory
    paged = run(setup(1 + num_slots // 16, 16, max_model_len=2048), load)
    reserved = run(setup(1 + num_slots // 2048, 2048, max_model_len=2048), load)
    speedup = reserved.duration_s / paged.duration_s
    assert 2.0 < speedup < 8.0


SHARED = {
    **{
        "kind": "poisson",
        "num_requests": 600,
        "prompt": 100,
        "output": {"kind": "exponential", "mean": 60, "max": 300},
    },
    "prefixes": {"count": 24, "tokens": 2048, "skew": 0.5},
}


def test_the_longest_cached_prefix_first_finds_more_than_first_come() -> None:
    """RadixAttention (Zheng et al., 2024): under load, the order decides how much of a small cache is found."""
    first, aware = (
        run(setup(1200, policy=policy, max_num_seqs=8, policy_options=options), {**SHARED, "rate": 40})
        for policy, options in (("fcfs", {}), ("cache_aware", {"window": 400, "patience_s": 1000.0}))
    )
    rates = [found.prefix_hits / found.prefix_queries for found in (first, aware)]
    assert rates[1] > rates[0] + 0.1
    assert aware.duration_s < 0.9 * first.duration_s


def test_a_router_that_keeps_prefixes_together_finds_more_than_one_that_takes_turns() -> None:
    """SGLang 0.4: hit rates of 20 % and 75 %, and almost twice the throughput."""

    def served(router: str) -> Run:
        pool = Pool(name="all", setup=setup(1200, max_num_seqs=32), cost=COST, num_replicas=8, router=router)
        return run_fleet(FleetSetup(pools=(pool,)), make_workload({**SHARED, "rate": 200}, 0, "test: workload"))

    turns, prefix = served("round_robin"), served("prefix_hash")
    rates = [found.prefix_hits / found.prefix_queries for found in (turns, prefix)]
    assert rates[1] > 1.5 * rates[0]
    assert figures(prefix).ttft_s.mean < 0.7 * figures(turns).ttft_s.mean


def test_under_overload_priority_keeps_its_promise_to_the_few() -> None:
    load = {"kind": "poisson", "rate": 60, "num_requests": 500, "prompt": 500, "output": 200}
    load["classes"] = [{"weight": 1, "tenant": "few", "priority": -5}, {"weight": 9, "tenant": "many"}]

    def p99_of_few(policy: str) -> float:
        served = [
            s for s in run(setup(policy=policy, max_num_seqs=32), load).served if s.arrival.service.tenant == "few"
        ]
        return float(np.quantile([s.first_s - s.arrival.at_s for s in served], 0.99))  # type: ignore[operator]

    assert p99_of_few("fcfs") > 10 * p99_of_few("priority")


@pytest.mark.parametrize(("prompt", "output", "rate", "helps"), [(6000, 100, 3.0, True), (300, 600, 20.0, False)])
def test_prefill_and_decode_apart_help_long_prompts_and_hurt_long_answers(
    prompt: int, output: int, rate: float, helps: bool
) -> None:
    """DistServe (Zhong et al., 2024): apart meets more targets where prompts disturb decodes; else one half idles."""
    load = {"kind": "poisson", "rate": rate, "num_requests": 200, "prompt": prompt, "output": output}
    slo = Slo(ttft_s=1.5, tpot_s=0.009)
    engine = setup(max_num_batched_tokens=2048)
    decode = replace(engine, scheduler=replace(engine.scheduler, max_num_batched_tokens=20_000))
    together = (Pool(name="all", setup=engine, cost=COST, num_replicas=2),)
    apart = (
        Pool(name="p", setup=engine, cost=COST, num_replicas=1, role="prefill"),
        Pool(name="d", setup=decode, cost=COST, num_replicas=1, role="decode"),
    )
    transfer = Transfer(bytes_per_token=KV_BYTES, bytes_per_s=50e9, latency_s=0.001)
    shares = [
        figures(
            run_fleet(
                FleetSetup(pools=pools, transfer=transfer, report_s=0.01), make_workload(load, 0, "test: workload")
            ),
            slo,
        ).slo_share
        for pools in (together, apart)
    ]
    assert (shares[1] > shares[0] + 0.1) if helps else (shares[1] < shares[0] - 0.1)
