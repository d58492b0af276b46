"""Engine settings: what is accepted, what is refused by name, and what None becomes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from jaxllm.config.engine import EngineArgs, ServerConfig, to_parts
from jaxllm.config.fields import parse_count, settings_of
from jaxllm.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig
from jaxllm.errors import ConfigError

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=320,
    hidden_size=64,
    layers=(LayerSpec(AttentionSpec(4, 2, 16, 0.25), MLPSpec(128)),),
    norm_eps=1e-5,
    tied_embeddings=True,
    max_positions=1000,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("1k", 1000), ("1K", 1024), ("2m", 2_000_000), ("2M", 2 * 2**20), ("1G", 2**30), ("1.5k", 1500)],
)
def test_counts_are_read_as_vllm_reads_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "-1", "1kk", "0x10", "1e3", "1.0001k"])
def test_other_texts_are_no_counts(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a count; accepted: an integer"):
        parse_count(text)


def test_defaults_are_accepted_and_every_flag_has_help() -> None:
    EngineArgs()
    ServerConfig()
    for item in [*settings_of(EngineArgs), *settings_of(ServerConfig)]:
        assert item.help, item.name


def test_aliases_are_the_names_of_the_contract() -> None:
    aliases = {alias: item.name for item in settings_of(EngineArgs) for alias in item.aliases}
    assert aliases["block-size"] == "page_size"
    assert aliases["num-gpu-blocks-override"] == "num_pages"
    assert aliases["memory-utilization"] == "gpu_memory_utilization"
    assert aliases["tp"] == "tensor_parallel_size" and aliases["dp"] == "data_parallel_size"


def test_sizes_may_be_written_with_a_suffix() -> None:
    args = EngineArgs(max_model_len="8k", kv_cache_memory_bytes="1G")  # type: ignore[arg-type]
    assert (args.max_model_len, args.kv_cache_memory_bytes) == (8000, 2**30)


def test_one_served_name_may_be_given_as_text() -> None:
    assert EngineArgs(served_model_name="tiny").served_model_name == ("tiny",)  # type: ignore[arg-type]
    assert EngineArgs(served_model_name=["a", "b"]).served_model_name == ("a", "b")  # type: ignore[arg-type]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 0}, "max_num_seqs=0 is out of range; accepted: at least 1"),
    ({"max_num_seqs": 2**31}, "max_num_seqs=2147483648 .* at most 2147483647"),
    ({"max_num_batched_tokens": 10**12}, "max_num_batched_tokens=1000000000000 .* at most"),
    ({"num_pages": 10**12}, "num_pages=1000000000000 .* at most"),
    ({"max_num_seqs": True}, "max_num_seqs=True has the wrong type; accepted: an integer"),
    ({"max_num_seqs": 1.5}, "max_num_seqs=1.5 has the wrong type"),
    ({"max_model_len": "long"}, "max_model_len: 'long' is not a count"),
    ({"max_model_len": -1}, "max_model_len=-1 .* not served yet"),
    ({"page_size": 0}, "page_size=0 .* 1 to 1024"),
    ({"num_pages": 1}, "num_pages=1 .* one is the null page"),
    ({"dtype": "int8"}, "dtype='int8' .* 'auto', 'float32'"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"load_format": "tensorizer"}, "load_format='tensorizer'"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0.0 .* above 0, at most 1"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
    ({"watchdog_s": 0}, "watchdog_s=0.0"),
    ({"seed": -1}, "seed=-1"),
    ({"executor": "robot"}, "executor='robot' is unknown; accepted: device, scripted:FILE.json"),
    ({"executor": "scripted:"}, "names no file"),
    ({"served_model_name": [1]}, "served_model_name=.* a list of texts"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes' .* true or false"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 2},
        {"quantization": "int8"},
        {"enable_lora": True},
        {"lora_modules": ["a=b"]},
        {"speculative_config": "{}"},
        {"tool_call_parser": "hermes"},
        {"reasoning_parser": "qwen3"},
    ],
)
def test_what_is_not_served_is_refused_and_its_neutral_value_is_not(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name}=.* is not served yet; accepted: "):
        EngineArgs(**given)
    neutral = next(f.default for f in fields(EngineArgs) if f.name == name)
    EngineArgs(**{name: neutral})


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        replace(EngineArgs(), max_num_seqs=0)


def test_defaults_follow_the_backend() -> None:
    cpu, gpu, tpu = (to_parts(EngineArgs(), MODEL, backend) for backend in ("cpu", "gpu", "tpu"))
    assert (cpu.cache.page_size, gpu.cache.page_size, tpu.cache.page_size) == (16, 64, 128)
    assert (cpu.scheduler.max_num_batched_tokens, cpu.scheduler.max_num_seqs) == (512, 64)
    assert (cpu.dtype, gpu.dtype, tpu.dtype) == ("float32", "bfloat16", "bfloat16")
    assert cpu.cache.dtype == "float32" and gpu.cache.dtype == "bfloat16"
    assert cpu.scheduler.max_model_len == MODEL.max_positions


def test_dtype_auto_takes_the_checkpoints_16_bit_type_where_the_device_has_it() -> None:
    half = replace(MODEL, dtype="float16")
    assert [to_parts(EngineArgs(), half, b).dtype for b in ("cpu", "gpu", "tpu")] == ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtype_has_vllms_spellings(name: Any, dtype: str) -> None:
    parts = to_parts(EngineArgs(dtype=name), MODEL, "gpu")
    assert (parts.dtype, parts.cache.dtype) == (dtype, dtype)


def test_a_cpu_keeps_kv_in_float32_unless_told_otherwise() -> None:
    assert to_parts(EngineArgs(dtype="bfloat16"), MODEL, "cpu").cache.dtype == "bfloat16"
    assert to_parts(EngineArgs(dtype="float16"), MODEL, "cpu").cache.dtype == "float32"
    asked = EngineArgs(dtype="bfloat16", kv_cache_dtype="float32")
    assert to_parts(asked, MODEL, "cpu").cache.dtype == "float32"


def test_what_the_user_set_is_kept() -> None:
    args = EngineArgs(
        max_model_len=100, max_num_seqs=3, max_num_batched_tokens=9, page_size=4, num_pages=50,
        kv_cache_dtype="float16", kv_cache_memory_bytes=10**6, enable_prefix_caching=False,
        async_scheduling=False, max_num_queued_reqs=7,
    )  # fmt: skip
    parts = to_parts(args, MODEL, "cpu")
    assert (parts.scheduler.max_model_len, parts.scheduler.max_num_seqs) == (100, 3)
    assert (parts.scheduler.max_num_batched_tokens, parts.scheduler.max_num_queued_reqs) == (9, 7)
    assert (parts.cache.page_size, parts.cache.num_pages, parts.cache.dtype) == (4, 50, "float16")
    assert (parts.cache.memory_bytes, parts.cache.enable_prefix_caching) == (10**6, False)
    assert parts.scheduler.async_scheduling is False


def test_a_length_above_the_models_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_model_len=1001 is above what the model was made for; accepted: 1 to 1000"
    ):
        to_parts(EngineArgs(max_model_len=1001), MODEL, "cpu")


def test_the_token_budget_covers_every_running_request() -> None:
    assert to_parts(EngineArgs(max_num_batched_tokens=8), MODEL, "cpu").scheduler.max_num_seqs == 8
    assert to_parts(EngineArgs(max_num_seqs=1000), MODEL, "cpu").scheduler.max_num_batched_tokens == 1000
    with pytest.raises(ConfigError, match="max_num_batched_tokens=8 is below max_num_seqs=9"):
        to_parts(EngineArgs(max_num_batched_tokens=8, max_num_seqs=9), MODEL, "cpu")


def test_without_chunked_prefill_a_step_takes_the_longest_prompt() -> None:
    whole = to_parts(EngineArgs(enable_chunked_prefill=False), MODEL, "cpu").scheduler
    assert whole.max_num_batched_tokens == 1000
    with pytest.raises(ConfigError, match="below max_model_len=1000 with enable_chunked_prefill=False"):
        to_parts(EngineArgs(enable_chunked_prefill=False, max_num_batched_tokens=999), MODEL, "cpu")


def test_a_scripted_executor_needs_no_model() -> None:
    args = EngineArgs(executor="scripted:script.json")
    assert args.scripted_file == "script.json" and EngineArgs().scripted_file is None
    assert to_parts(args, None, "cpu").scheduler.max_model_len == 8192


@pytest.mark.parametrize("given", [{"port": 70000}, {"port": -1}, {"shutdown_timeout_s": -1}, {"max_body_bytes": 0}])
def test_server_settings_are_checked(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name}=.* is out of range"):
        ServerConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level='loud' .* 'warning', 'info'"),
        ({"api_keys": [""]}, "api_keys holds an empty key"),
        ({"api_keys": ["good", ""]}, "api_keys holds an empty key"),
    ],
)
def test_a_server_setting_that_would_fail_or_open_the_door_later_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**given)
