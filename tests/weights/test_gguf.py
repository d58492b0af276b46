"""GGUF weights: against a safetensors twin, and the default model against the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config.checkpoint import resolve_model
from jaxllm.errors import WeightsError
from jaxllm.weights.gguf import GGUFSource
from jaxllm.weights.load import load_weights
from jaxllm.weights.spec import TensorSpec
from tests.weights import twins


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_load_02_a_llama_gguf_equals_its_safetensors_twin_with_fewer_kv_heads(tmp_path: Path, dtype: Any) -> None:
    tensors = twins.random_tensors(dtype=dtype)
    folder = twins.write_folder(tmp_path / "hf", tensors)
    file = twins.write_gguf(tmp_path / "m.gguf", tensors)
    from_folder = load_weights(folder, twins.specs(), twins.params())
    from_file = load_weights(file, twins.specs(), twins.params())
    twins.check_loaded(from_folder, twins.expected(tensors))
    twins.check_loaded(from_file, twins.expected(tensors))


def test_load_02_biases_of_q_and_k_are_reordered_too(tmp_path: Path) -> None:
    bias = np.arange(twins.KV, dtype=np.float32)
    extra = {"blk.0.attn_k.bias": twins.permute(bias, twins.K)}
    source = GGUFSource(twins.write_gguf(tmp_path / "m.gguf", twins.random_tensors(), extra=extra))
    found = source.rows("model.layers.0.self_attn.k_proj.bias", 3, 30)
    np.testing.assert_array_equal(found, bias[3:30])


def test_load_01_a_tied_gguf_has_no_output_matrix_and_an_untied_one_loads_it(tmp_path: Path) -> None:
    for tied in (True, False):
        tensors = twins.random_tensors(tied=tied)
        file = twins.write_gguf(tmp_path / f"{tied}.gguf", tensors)
        loaded = load_weights(file, twins.specs(tied=tied), twins.params(tied=tied))
        twins.check_loaded(loaded, twins.expected(tensors))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_files_load_as_the_gguf_package_dequantises_them(tmp_path: Path, kind: str) -> None:
    tensors = twins.random_tensors(tied=False)
    file = twins.write_gguf(tmp_path / "m.gguf", tensors, kind)
    block_type = gguf.GGMLQuantizationType[kind]
    # Quantising works along rows, so it does not see their order.
    rounded = {
        name: array if array.ndim == 1 else gguf.dequantize(gguf.quantize(array, block_type), block_type)
        for name, array in tensors.items()
    }
    loaded = load_weights(file, twins.specs(tied=False), twins.params(tied=False))
    twins.check_loaded(loaded, twins.expected(rounded))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_16_bit_parameters_are_rounded_once(tmp_path: Path, dtype: Any) -> None:
    tensors = twins.random_tensors()
    file = twins.write_gguf(tmp_path / "m.gguf", tensors)
    loaded = load_weights(file, twins.specs(), twins.params(dtype))
    twins.check_loaded(loaded, {k: v.astype(dtype) for k, v in twins.expected(tensors).items()})


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (5, 6), (17, 41), (63, 64)])
def test_any_slice_of_rows_is_the_slice_of_the_whole(tmp_path: Path, start: int, stop: int) -> None:
    tensors = twins.random_tensors()
    source = GGUFSource(twins.write_gguf(tmp_path / "m.gguf", tensors))
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(source.rows(name, start, stop), tensors[name][start:stop])


def test_a_block_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = [TensorSpec("model.norm.weight", (64,), "norm.weight")]
    with pytest.raises(WeightsError, match=r"m.gguf: tensor 'output_norm.weight': .* block type F64"):
        load_weights(path, tensors, {"norm.weight": jax.ShapeDtypeStruct((64,), np.float32)})


def test_heads_that_do_not_fit_the_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 5)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"'blk.0.attn_q.weight' has 64 rows, .* for 5 heads"):
        GGUFSource(path)


def unpermuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, half, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def test_tensors_of_the_default_model_are_those_the_gguf_package_gives() -> None:
    path = resolve_model(None)
    source = GGUFSource(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(source.tensors) == len(stored) == 272
    heads = {"attn_q": 9, "attn_k": 3}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm"}  # fmt: skip
    for layer in (0, 29):
        for theirs, ours in names.items():
            tensor = stored[f"blk.{layer}.{theirs}.weight"]
            wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
            if theirs in heads:
                wanted = unpermuted(wanted, heads[theirs])
            name = f"model.layers.{layer}.{ours}.weight"
            np.testing.assert_array_equal(source.rows(name, 0, len(wanted)), wanted, err_msg=name)
    embedding = stored["token_embd.weight"]
    wanted = gguf.dequantize(embedding.data[40000:40100], embedding.tensor_type)
    np.testing.assert_array_equal(source.rows("model.embed_tokens.weight", 40000, 40100), wanted)
