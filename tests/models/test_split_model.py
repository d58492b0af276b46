"""The split model without any checkpoint: leaves, coverage, ragged batches, and what XLA makes of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from jaxllm.errors import UnsupportedModel
from jaxllm.layers.batch import Bucket
from jaxllm.layers.linear import has_native_matmul
from jaxllm.memory.spec import FullKV
from jaxllm.models.base import Matrices, SplitModel, split_model
from tests.helpers.oracle import LoadedModel, make_batch

LAYER = LayerSpec(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25), MLPSpec(intermediate_size=128))
CONFIG = ModelConfig("LlamaForCausalLM", 320, 64, (LAYER,) * 3, 1e-5, tied_embeddings=False, max_positions=256)


def drawn_weights(params: dict[str, jax.ShapeDtypeStruct], seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=p.shape) * 0.15, p.dtype) for name, p in params.items()}


def loaded(split: SplitModel, weights: dict[str, jax.Array] | None = None) -> LoadedModel:
    weights = drawn_weights(split.params) if weights is None else weights
    return LoadedModel(split, weights, jax.jit(split.forward, donate_argnums=1), jax.jit(split.logits))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded(split_model(CONFIG, "float32"))


def test_stacked_leaves_have_the_agreed_names_and_shapes() -> None:
    split = split_model(CONFIG, "bfloat16", matrices="scanned")
    assert {name: p.shape for name, p in split.params.items()} == {
        "embed.weight": (320, 64),
        "norm.weight": (64,),
        "lm_head.weight": (320, 64),
        "runs.0.attention_norm.weight": (3, 64),
        "runs.0.attention.qkv.weight": (3, 64, (4 + 2 * 2) * 16),
        "runs.0.attention.out.weight": (3, 64, 64),
        "runs.0.mlp_norm.weight": (3, 64),
        "runs.0.mlp.gate_up.weight": (3, 64, 256),
        "runs.0.mlp.down.weight": (3, 128, 64),
    }
    assert {p.dtype for p in split.params.values()} == {jnp.dtype("bfloat16")}
    assert split.names == tuple(split.params)
    assert split.head_names == ("lm_head.weight",)
    assert split_model(replace(CONFIG, tied_embeddings=True), "float32").head_names == ("embed.weight",)


def test_on_cpu_a_matrix_is_a_leaf_a_layer() -> None:
    split = split_model(CONFIG, "float32", matrices="apart")
    assert split.params["runs.0.mlp.down.weight.2"].shape == (128, 64)
    assert split.params["runs.0.mlp_norm.weight"].shape == (3, 64)
    assert "runs.0.mlp.down.weight" not in split.params


BIASED = replace(
    CONFIG,
    layers=(LayerSpec(replace(LAYER.attention, qkv_bias=True, out_bias=True), replace(LAYER.mlp, bias=True)), LAYER),
)


@pytest.mark.parametrize("matrices", ["scanned", "apart", "whole"])
@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["one_run", "two_runs_with_biases"])
def test_tensors_cover_every_element_of_every_parameter_once(config: ModelConfig, matrices: Matrices) -> None:
    split = split_model(config, "float32", matrices=matrices)
    counts = {name: np.zeros(p.shape, int) for name, p in split.params.items()}
    for spec in split.tensors:
        target = counts[spec.target] if spec.layer is None else counts[spec.target][spec.layer]
        shape = spec.shape[::-1] if spec.transpose else spec.shape
        target[..., spec.offset : spec.offset + shape[-1]] += np.ones(shape, int)
    assert all((count == 1).all() for count in counts.values())
    assert len({spec.name for spec in split.tensors}) == len(split.tensors)


def test_kv_is_described_per_layer_and_allocated_per_run() -> None:
    window = LayerSpec(replace(LAYER.attention, window=9), LAYER.mlp)
    split = split_model(replace(CONFIG, layers=(LAYER, LAYER, window)), "float32")
    assert split.kv_specs(8, "bfloat16") == (FullKV(8, 2, 16, "bfloat16"),) * 3
    shapes = split.kv_shapes(5, 8, "bfloat16")
    assert [s.shape[:2] for s in shapes] == [(2, 5), (1, 5)]
    num_bytes = sum(s.size * s.dtype.itemsize for s in shapes)
    assert num_bytes == 5 * sum(spec.bytes_per_page for spec in split.kv_specs(8, "bfloat16"))


def test_ungated_mlp_is_refused() -> None:
    ungated = LayerSpec(LAYER.attention, replace(LAYER.mlp, gated=False))
    with pytest.raises(UnsupportedModel, match="gated=False"):
        split_model(replace(CONFIG, layers=(ungated,)), "float32")


def test_logits_are_hidden_times_the_head(model: LoadedModel) -> None:
    hidden = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    expected = hidden.astype(np.float64) @ np.asarray(model.weights["lm_head.weight"]).T
    np.testing.assert_allclose(model.logits(model.head, jnp.asarray(hidden)), expected, atol=1e-5)


BUCKET = Bucket(num_tokens=24, num_requests=6, pages_per_request=5)  # of all steps below: one program a model
PAGE_SIZE = 4


def empty_pages(model: LoadedModel) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(s.shape, s.dtype) for s in model.split.kv_shapes(21, PAGE_SIZE, "float32"))


def last_logits_alone(model: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """Of a whole prompt in one step without neighbours."""
    batch = make_batch([(token_ids, 0, [4, 2, 5, 1, 3])], bucket=BUCKET)
    hidden, _ = model.forward(model.leaves, empty_pages(model), batch)
    return np.asarray(model.logits(model.head, hidden))[len(token_ids) - 1]


def test_runs_of_equal_layers_are_one_model_however_they_are_cut(model: LoadedModel) -> None:
    """A window wider than the prompt changes nothing but the specs, so it cuts the layers into three runs."""
    wide = LayerSpec(replace(LAYER.attention, window=200), LAYER.mlp)
    split = split_model(replace(CONFIG, layers=(LAYER, wide, LAYER)), "float32")
    assert len(split.runs) == 3

    def piece(name: str) -> jax.Array:
        if not (match := re.fullmatch(r"runs\.(\d)\.(.*)", name)):
            return model.weights[name]
        layer, path = int(match[1]), match[2]
        stack = model.weights.get(f"runs.0.{path}")
        return model.weights[f"runs.0.{path}.{layer}"][None] if stack is None else stack[layer : layer + 1]

    cut = loaded(split, {name: piece(name) for name in split.names})
    token_ids = list(range(3, 20))
    np.testing.assert_allclose(
        last_logits_alone(cut, token_ids), last_logits_alone(model, token_ids), atol=1e-5, rtol=1e-5
    )


def test_rows_of_a_ragged_step_do_not_see_each_other(model: LoadedModel) -> None:
    """Two decodes, a prompt and a second chunk in one step, each as it is alone; padding gives finite rows."""
    rng = np.random.default_rng(0)
    lengths = [9, 17, 6, 15]  # tokens of each sequence at the end of the step
    in_step = [1, 1, 6, 10]
    sequences = [rng.integers(0, 320, n).tolist() for n in lengths]
    pages = [list(range(1 + 5 * i, 6 + 5 * i)) for i in range(4)]
    whole = list(zip(sequences, lengths, in_step, pages, strict=True))
    kv = empty_pages(model)
    for ids, length, new, own_pages in whole:
        if length > new:
            _, kv = model.forward(model.leaves, kv, make_batch([(ids[:-new], 0, own_pages)], bucket=BUCKET))
    step = [(ids[-new:], length - new, own_pages) for ids, length, new, own_pages in whole]
    hidden, kv = model.forward(model.leaves, kv, make_batch(step, bucket=BUCKET, num_decode=2))
    logits = np.asarray(model.logits(model.head, hidden))
    assert np.isfinite(logits).all()
    for end, ids in zip(np.cumsum(in_step) - 1, sequences, strict=True):
        np.testing.assert_allclose(logits[end], last_logits_alone(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("matrices", ["scanned", "apart", "whole"])
@pytest.mark.parametrize("bucket", [Bucket(4, 4, 8), Bucket(64, 4, 8)], ids=["decode", "mixed"])
def test_kv_is_updated_in_place(bucket: Bucket, matrices: Matrices) -> None:
    """The compiled step aliases all pages, copies none, and needs less than one layer's pages beside them."""
    split = split_model(CONFIG, "float32", matrices=matrices)
    kv = split.kv_shapes(num_pages=512, page_size=16, dtype="float32")
    leaves = tuple(split.params[name] for name in split.names)
    batch: Any = jax.eval_shape(lambda: make_batch([], bucket=bucket))
    compiled = jax.jit(split.forward, donate_argnums=1).lower(leaves, kv, batch).compile()
    memory = compiled.memory_analysis()
    kv_bytes = sum(a.size * a.dtype.itemsize for a in kv)
    assert memory.alias_size_in_bytes == kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes // CONFIG.num_layers
    shape = ",".join(map(str, kv[0].shape))
    assert re.findall(rf"f32\[{shape}\]\S* copy(?:-start)?\(.*", compiled.as_text()) == []


@pytest.mark.parametrize("matrices", ["apart", "whole"])
def test_matrices_on_a_cpu_are_read_in_place(matrices: Matrices) -> None:
    """No temporary as large as a matrix: a scan over a stack would copy each slice before its matmul."""
    wide = replace(CONFIG, hidden_size=256, layers=(LayerSpec(LAYER.attention, MLPSpec(1024)),) * 3)
    if matrices == "whole" and not has_native_matmul(jnp.dtype("float32")):
        pytest.skip("XLA reads a slice of a stack through a copy; without a C++ compiler matrices stay apart")
    split = split_model(wide, "float32", matrices=matrices)
    leaves = tuple(split.params[name] for name in split.names)
    batch: Any = jax.eval_shape(lambda: make_batch([], bucket=Bucket(2, 2, 2)))
    compiled = jax.jit(split.forward, donate_argnums=1).lower(leaves, split.kv_shapes(8, 4, "float32"), batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 256 * 1024
