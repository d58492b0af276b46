"""Rows split over devices give what one device gives; and the programs lower for accelerators."""

from __future__ import annotations

from functools import partial

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec, logprobs_of
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.state import NUM_COLUMNS, unpack
from jaxllm.sampling.tables import Tables, record, table_shapes
from tests.sampling.drawing import empty_tables, pack, place
from tests.sampling.test_shaping import PROCESSORS, VOCAB, random_rows

Outputs = tuple[jax.Array, DeviceLogprobs, DeviceLogprobs, Tables]


def step(logits: jax.Array, packed: jax.Array, tables: Tables, *, greedy: bool = False) -> Outputs:
    """What the sample program does after the logits: tokens, both kinds of log probabilities, the history."""
    rows = unpack(packed)
    spec = LogprobsSpec(20, "processed_logprobs")
    tokens, processed = sample(logits, rows, tables, greedy=greedy, logprobs=spec, processors=PROCESSORS)
    assert processed is not None
    raw = logprobs_of(logits, tokens, LogprobsSpec(20), tables.logprob_ids[rows.slots])
    return tokens, processed, raw, record(tables, rows, tokens)


def test_rows_over_two_devices_equal_one_device_bit_for_bit() -> None:
    """Tokens, log probabilities and the history, of requests that ask for everything."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("one CPU device")
    mesh = Mesh(np.array(devices[:2]), ("data",))
    by_row, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    for seed in range(4):
        rows, slots = random_rows(8, 500 + seed), list(range(8))
        tables = empty_tables(VOCAB)
        for row, slot in zip(rows, slots, strict=True):
            tables = place(tables, row, slot, VOCAB)
        arguments = (np.stack([r.logits for r in rows]), pack(rows, slots, [p.name for p in PROCESSORS]), tables)
        one = jax.jit(step)(*arguments)
        shardings = (by_row, by_row, everywhere)
        placed = tuple(map(jax.device_put, arguments, shardings))
        split = jax.jit(step)(*placed)
        assert len(split[0].sharding.device_set) == 2
        jax.tree.map(np.testing.assert_array_equal, split, one)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_sampler_lowers_for_accelerators(platform: str, greedy: bool) -> None:
    vocab_size = 4096
    arguments = (
        jax.ShapeDtypeStruct((8, vocab_size), np.float32),
        jax.ShapeDtypeStruct((8, NUM_COLUMNS), np.int32),
        table_shapes(9, vocab_size, 256),
    )

    exported = jax.export.export(jax.jit(partial(step, greedy=greedy)), platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)
    assert [a.shape for a in exported.out_avals][:3] == [(8,), (8,), (8,)]
