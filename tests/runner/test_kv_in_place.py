"""KV memory is never copied: what the compiler says of the steps of real models, without running them."""

from __future__ import annotations

import re

import jax
import pytest

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, RopeSpec
from jaxllm.layers.batch import Bucket
from jaxllm.models.base import split_model
from jaxllm.runner.batch_builder import BatchBuilder
from jaxllm.runner.buckets import Buckets, build_buckets
from jaxllm.runner.executable_store import Program
from jaxllm.runner.kv_buffers import DeviceShapes, HeadShape
from jaxllm.runner.step import forward_spec

HLO_TYPES = {"float32": "f32", "bfloat16": "bf16"}
TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    layers=(LayerSpec(AttentionSpec(4, 2, 16, 0.25), MLPSpec(96)),) * 3,
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=512,
)
SMOLLM2_135M = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    layers=(LayerSpec(AttentionSpec(9, 3, 64, 0.125, rope=RopeSpec(theta=100_000.0)), MLPSpec(1536)),) * 30,
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=8192,
)


def check_in_place(
    model: ModelConfig, dtype: str, scheduler: SchedulerConfig, cache: CacheConfig, buckets: list[Bucket]
) -> None:
    split = split_model(model, dtype)
    assert cache.num_pages is not None
    every = all_buckets(scheduler, cache)
    shapes = DeviceShapes.of(
        split,
        HeadShape(model.hidden_size, model.vocab_size, dtype),
        num_pages=cache.num_pages,
        page_size=cache.page_size,
        kv_dtype=cache.dtype,
        num_slots=scheduler.max_num_seqs,
        pages_per_request=buckets[0].pages_per_request,
        max_model_len=scheduler.max_model_len,
        max_num_tokens=every.max_num_tokens,
    )
    builder = BatchBuilder(every, cache.page_size, scheduler.max_num_seqs)
    for bucket in buckets:
        spec = forward_spec(split, builder.layouts[bucket], shapes, cache.page_size)
        program = spec.trace(jax.devices()[0]).lower().compile()
        assert program.memory_analysis().alias_size_in_bytes >= shapes.kv_bytes, f"{bucket}: pages are not aliased"
        assert Program.of(program).temporary_bytes < shapes.kv_bytes / model.num_layers, (
            f"{bucket}: a layer's pages are copied"
        )
        for array in shapes.kv:
            shape = ",".join(map(str, array.shape))
            copies = re.findall(rf"= {HLO_TYPES[cache.dtype]}\[{shape}\]\S* copy(?:-start)?\(.*", program.as_text())
            assert not copies, f"{bucket}: {copies}"


def all_buckets(scheduler: SchedulerConfig, cache: CacheConfig) -> Buckets:
    pages = -(-scheduler.max_model_len // cache.page_size)
    return build_buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, pages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # of weights; a CPU's pages are float32
def test_steps_of_a_tiny_llama_update_pages_in_place(dtype: str) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=512)
    cache = CacheConfig(page_size=16, num_pages=1025)
    buckets = all_buckets(scheduler, cache)
    some = [buckets.decode[-1], buckets.mixed[-1]] if dtype == "float32" else [buckets.decode[-1]]
    check_in_place(TINY, dtype, scheduler, cache, some)


@pytest.mark.slow
def test_every_step_of_the_default_model_updates_pages_in_place() -> None:
    scheduler, cache = SchedulerConfig(), CacheConfig(page_size=16, num_pages=5120)
    check_in_place(SMOLLM2_135M, "float32", scheduler, cache, list(all_buckets(scheduler, cache).forward))
