"""Random weights: the same for a seed, of the asked shape and dtype, at a scale a model can run with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxllm.weights.dummy import dummy_weights
from tests.weights import twins


def test_the_seed_alone_decides() -> None:
    params = twins.params()
    first, again, other = (dummy_weights(params, seed) for seed in (1, 1, 2))
    name = "runs.0.attention.qkv.weight"
    np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])
    alone = dummy_weights({name: params[name]}, 1)
    np.testing.assert_array_equal(first[name], alone[name])


def test_shapes_dtypes_and_scale() -> None:
    params = twins.params(ml_dtypes.bfloat16)
    loaded = dummy_weights(params, 0)
    for name, param in params.items():
        assert (loaded[name].shape, loaded[name].dtype) == (param.shape, param.dtype)
    assert np.all(np.asarray(loaded["norm.weight"]) == 1)
    down = np.asarray(loaded["runs.0.mlp.down.weight"], np.float32)
    assert abs(down.std() * np.sqrt(twins.F) - 1) < 0.05 and abs(down.mean()) < 0.01
