"""The engine's settings: what users set (`EngineArgs`, flat, vLLM's names) and the parts rooms receive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from jaxllm.config.fields import check_settings, setting
from jaxllm.config.kv_events import KVEventsConfig
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, shown

Backend = Literal["cpu", "gpu", "tpu"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
_INT32_MAX = 2**31 - 1  # what the device counts with


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory."""

    page_size: int = 16  # tokens
    num_pages: int | None = None  # fixed number of pages, the null page included; tests need it
    memory_bytes: int | None = None  # KV budget; None: from the memory plan
    memory_utilization: float = 0.92  # of an accelerator's memory, for everything
    enable_prefix_caching: bool = True
    enable_partial_page_reuse: bool = True
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # requests running at once = slots
    max_num_batched_tokens: int = 512  # token budget of a step
    max_model_len: int = 8192
    policy: str = "fcfs"
    policy_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most tokens of one prompt in a step beside others; 0: no such limit
    max_num_partial_prefills: int | None = None  # prompts that may be half computed at once
    max_long_partial_prefills: int | None = None  # of those, longer than the threshold
    decode_budget_share: float = 0.0  # of a step's budget, kept from prompts while anything decodes
    in_batch_prefix_sharing: bool = True  # wait for a prefix that another request is computing
    async_scheduling: bool = True  # plan the next step while one is in flight
    num_speculative_tokens: int = 0  # most draft tokens of a request in a step; above 0, none is planned ahead
    max_num_queued_reqs: int | None = None  # waiting and running sequences together
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting sequences together
    default_deadline_s: float | None = None  # of a request that names none


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front end.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    api_keys: tuple[str, ...] = setting((), "keys of which a request must carry one; none: open", "api-key")
    served_model_names: tuple[str, ...] = setting((), "names the model answers to", "served-model-name")
    chat_template: str | None = setting(None, "Jinja chat template, a file or the text itself")
    metrics_need_key: bool = setting(False, "ask for an API key at /metrics too")
    trust_request_chat_template: bool = setting(False, "let requests bring a chat template of their own")
    default_chat_template_kwargs: str | None = setting(None, "variables of the chat template, JSON; a request's win")
    allowed_origins: tuple[str, ...] = setting((), "origins that browsers may call from; * for any; none: no CORS")
    allowed_methods: tuple[str, ...] = setting(("*",), "methods that browsers may use from there")
    allowed_headers: tuple[str, ...] = setting(("*",), "headers that browsers may send from there")
    allow_credentials: bool = setting(False, "let browsers send cookies and HTTP authentication from there")
    ssl_keyfile: str | None = setting(None, "TLS: private key, a PEM file")
    ssl_certfile: str | None = setting(None, "TLS: certificate chain, a PEM file")
    ssl_ca_certs: str | None = setting(None, "TLS: authorities of client certificates, a PEM file")
    ssl_cert_reqs: Literal["none", "optional", "required"] = setting("none", "TLS: whether clients need a certificate")
    uds: str | None = setting(None, "Unix socket to listen on, a path; host and port then mean nothing")
    root_path: str = setting("", "path under which a proxy serves this server")
    shutdown_timeout_s: float = setting(30.0, "seconds running requests get to end", "shutdown-timeout")
    engine_dead_grace_s: float = setting(10.0, "seconds a server whose engine died answers 503 before it exits")
    max_body_bytes: int = setting(32 * 2**20, "largest request body", human=True)
    metrics_prefix: str = setting("jaxllm", "first part of every metric's name; vllm for existing dashboards")
    profiler_dir: str | None = setting(None, "folder of traces that POST /start_profile takes; none: no such route")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = setting(
        "info", "log level of the HTTP server"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _in_range(self, "port", 0, 65535)
        _in_range(self, "shutdown_timeout_s", 0)
        _in_range(self, "engine_dead_grace_s", 0)
        _in_range(self, "max_body_bytes", 1)
        if not all(self.api_keys):  # a request with an empty key would be let in
            raise ConfigError("api_keys holds an empty key; accepted: keys of at least one character")
        _check_cors(self)
        _check_tls(self)
        _check_paths(self)
        _check_template_kwargs(self.default_chat_template_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Every engine setting, under the name of its flag (`max_model_len` is `--max-model-len`).

    None means: chosen for the model and the device by `to_parts`.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or is not served yet.
    """

    model: str | None = setting(None, "folder, .gguf file, Hub id or alias; default smollm2-135m")
    tokenizer: str | None = setting(None, "folder or .gguf file of the tokenizer; default: the model's")
    served_model_name: tuple[str, ...] = setting((), "names the model answers to in the API", "served-model-names")
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = setting(
        "auto", "of weights and activations; auto: float32 on CPU, else the checkpoint's 16-bit type"
    )
    load_format: Literal["auto", "dummy"] = setting("auto", "dummy: random weights, for measurements")
    seed: int = setting(0, "of everything that is drawn")
    generation_config: str = setting(
        "auto", "sampling defaults: auto (the checkpoint's), vllm (none), or a folder with generation_config.json"
    )
    chat_template: str | None = setting(None, "Jinja chat template, a file or the text itself")

    max_model_len: int | None = setting(None, "longest prompt and output together, tokens", human=True)
    max_num_seqs: int | None = setting(None, "requests running at once", human=True)
    max_num_batched_tokens: int | None = setting(None, "tokens computed in one step", human=True)
    enable_chunked_prefill: bool = setting(True, "compute long prompts piece by piece")
    scheduling_policy: str = setting(
        "fcfs", "who runs first: fcfs, priority, shortest_first, cache_aware, fair, slo, or package.module:Class"
    )
    scheduling_policy_options: str | None = setting(None, "options of the policy, a JSON object")
    long_prefill_token_threshold: int = setting(
        0, "most tokens of one prompt in a step that others share; 0: as many as fit", human=True
    )
    max_num_partial_prefills: int | None = setting(None, "prompts that may be half computed at once")
    max_long_partial_prefills: int | None = setting(None, "of those, prompts longer than long_prefill_token_threshold")
    decode_budget_share: float = setting(
        0.0, "share of a step's tokens that prompts may not take while anything decodes, 0 to below 1"
    )
    in_batch_prefix_sharing: bool = setting(True, "wait for a prompt beginning that another request is computing")
    async_scheduling: bool = setting(True, "plan the next step while one runs")
    max_num_queued_reqs: int | None = setting(
        None, "refuse requests while this many sequences wait or run (a request counts n)", human=True
    )

    max_num_queued_tokens: int | None = setting(
        None, "refuse requests while waiting prompts hold this many tokens", human=True
    )
    default_deadline_s: float | None = setting(
        None, "seconds after which a request that names no deadline ends, whatever it has", "default-deadline"
    )
    record_trace: str | None = setting(
        None, "file to write arrivals, decisions and tokens to, step by step; what it held is lost"
    )

    page_size: int | None = setting(None, "tokens in a page of KV memory", "block-size")
    num_pages: int | None = setting(
        None, "fixed number of KV pages, the null page included", "num-gpu-blocks-override", human=True
    )
    kv_cache_memory_bytes: int | None = setting(None, "bytes of KV memory on a device", human=True)
    gpu_memory_utilization: float = setting(
        0.92, "share of an accelerator's memory for everything", "memory-utilization"
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "auto: as dtype, but float32 for float16 on CPU"
    )
    enable_prefix_caching: bool = setting(True, "find computed pages of equal prompt beginnings again")
    enable_partial_page_reuse: bool = setting(True, "copy the beginning of a cached page that ends differently")
    kv_events_config: str | None = setting(
        None, 'publish what enters and leaves the prefix cache, JSON such as {"enable_kv_cache_events": true}'
    )

    attention_implementation: str | None = setting(None, "attention kernel; default: the best that runs here")
    executor: str = setting("device", "device, or scripted:FILE.json for a stand-in without a model")
    compilation_cache_dir: str | None = setting(None, "compiled programs; default under the cache folder")
    watchdog_s: float = setting(120.0, "a step longer than this ends the engine, seconds", "watchdog")

    max_logprobs: int = setting(20, "most log probabilities a request may ask for; -1: the whole vocabulary")
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = setting(
        "raw_logprobs", "of the model's own logits (raw), or after penalties, masks and temperature (processed)"
    )
    quantization: str | None = setting(None, "quantise weights at load", served=False)
    tensor_parallel_size: int = setting(1, "devices one model is split over", "tp", served=False)
    data_parallel_size: int = setting(1, "devices that each hold the model and run requests of their own", "dp")
    enable_lora: bool = setting(False, "serve LoRA adapters", served=False)
    lora_modules: tuple[str, ...] = setting((), "adapters, NAME=FOLDER", served=False)
    speculative_config: str | None = setting(None, "draft tokens, JSON", served=False)
    tool_call_parser: str | None = setting(None, "dialect of tool calls", served=False)
    reasoning_parser: str | None = setting(None, "dialect of reasoning", served=False)

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "kv_cache_memory_bytes", "data_parallel_size"):
            _in_range(self, name, 1)
        for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
            _in_range(self, name, 1)
        _in_range(self, "long_prefill_token_threshold", 0, _INT32_MAX)
        json_object("scheduling_policy_options", self.scheduling_policy_options)
        _check_kv_events(self)
        _in_range(self, "max_logprobs", -1, _INT32_MAX)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _in_range(self, name, 1, _INT32_MAX)
        _in_range(self, "max_model_len", 1, _INT32_MAX, hint="; fitting it to the memory (auto, -1) is not served yet")
        _in_range(self, "num_pages", 2, _INT32_MAX, hint=": one is the null page")
        _in_range(self, "seed", 0, 2**63 - 1)
        _check_page_size(self.page_size)
        _check_shares(self)
        _check_executor(self.executor)

    @property
    def scripted_file(self) -> str | None:
        """The script of the stand-in executor; None when a model runs."""
        return self.executor.removeprefix("scripted:") if self.executor.startswith("scripted:") else None

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How KV events are published; None where they are not.

        Raises:
            ConfigError: `kv_events_config` is wrong.
        """
        config = KVEventsConfig.of(json_object("kv_events_config", self.kv_events_config))
        return config if config.is_on else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsConfig:
    """What programs give beside tokens."""

    max_logprobs: int = 20  # most entries of a position; -1: the whole vocabulary
    mode: LogprobsMode = "raw_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigParts:
    """What the rooms receive, all choices made."""

    dtype: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    logprobs: LogprobsConfig


@dataclass(frozen=True, slots=True)
class _Defaults:
    page_size: int  # tokens; what the backend's attention kernel reads best
    num_batched_tokens: int
    num_seqs: int


_DEFAULTS: dict[str, _Defaults] = {
    "cpu": _Defaults(page_size=16, num_batched_tokens=512, num_seqs=64),
    "gpu": _Defaults(page_size=64, num_batched_tokens=8192, num_seqs=256),
    "tpu": _Defaults(page_size=128, num_batched_tokens=2048, num_seqs=256),
}
_LONGEST_WITHOUT_MODEL = 8192  # a scripted executor has no model to ask


def to_parts(args: EngineArgs, model: ModelConfig | None, backend: Backend) -> ConfigParts:
    """Resolve each None and "auto" for a model and a backend. `model` is None for a scripted executor.

    Raises:
        ConfigError: two settings, or a setting and the model, contradict each other.
    """
    dtype = resolve_dtype(args, model, backend)
    return ConfigParts(
        dtype=dtype,
        cache=resolve_cache(args, dtype, backend),
        scheduler=resolve_scheduler(args, model, backend),
        logprobs=LogprobsConfig(max_logprobs=args.max_logprobs, mode=args.logprobs_mode),
    )


def resolve_dtype(args: EngineArgs, model: ModelConfig | None, backend: Backend) -> str:
    """Type of weights and activations.

    A CPU computes 16-bit types slower than float32. An accelerator takes the checkpoint's 16-bit
    type, and bfloat16 for a float32 checkpoint; a TPU has no float16 units.
    """
    named = {"float": "float32", "half": "float16"}.get(args.dtype, args.dtype)
    if named != "auto":
        return named
    if backend == "cpu" or model is None:
        return "float32"
    return "float16" if backend == "gpu" and model.dtype == "float16" else "bfloat16"


def resolve_cache(args: EngineArgs, dtype: str, backend: Backend) -> CacheConfig:
    """KV settings. A CPU reads bfloat16 with a shift, and its kernels take no float16."""
    auto_dtype = "float32" if backend == "cpu" and dtype == "float16" else dtype
    return CacheConfig(
        page_size=args.page_size or _DEFAULTS[backend].page_size,
        num_pages=args.num_pages,
        memory_bytes=args.kv_cache_memory_bytes,
        memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_partial_page_reuse=args.enable_partial_page_reuse,
        dtype=auto_dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
    )


def resolve_scheduler(args: EngineArgs, model: ModelConfig | None, backend: Backend) -> SchedulerConfig:
    """Limits of the scheduler.

    Raises:
        ConfigError: max_model_len is above the model's, or the token budget of a step is too small.
    """
    longest = model.max_positions if model else _LONGEST_WITHOUT_MODEL
    max_model_len = args.max_model_len or longest
    if model and max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} is above what the model was made for; accepted: 1 to {longest}"
        )
    budget, num_seqs = _step_limits(args, max_model_len, _DEFAULTS[backend])
    return SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        policy=args.scheduling_policy,
        policy_options=json_object("scheduling_policy_options", args.scheduling_policy_options),
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_num_partial_prefills=args.max_num_partial_prefills,
        max_long_partial_prefills=args.max_long_partial_prefills,
        decode_budget_share=args.decode_budget_share,
        in_batch_prefix_sharing=args.in_batch_prefix_sharing,
        enable_chunked_prefill=args.enable_chunked_prefill,
        async_scheduling=args.async_scheduling,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        default_deadline_s=args.default_deadline_s,
    )


def _step_limits(args: EngineArgs, max_model_len: int, defaults: _Defaults) -> tuple[int, int]:
    """(tokens in a step, requests at once): every running request must get its token in a step."""
    floor = 1 if args.enable_chunked_prefill else max_model_len
    given = args.max_num_batched_tokens
    num_seqs = args.max_num_seqs or min(defaults.num_seqs, given or defaults.num_seqs)
    budget = given or max(defaults.num_batched_tokens, num_seqs, floor)
    if budget < num_seqs:
        raise ConfigError(f"max_num_batched_tokens={budget} is below max_num_seqs={num_seqs}; accepted: at least that")
    if budget < floor:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is below max_model_len={max_model_len} with "
            "enable_chunked_prefill=False; accepted: at least that, or chunked prefill"
        )
    return budget, num_seqs


def json_object(name: str, text: str | None) -> dict[str, Any]:
    """The object that a setting's text is; empty for None.

    Raises:
        ConfigError: it is not JSON, or not an object.
    """
    try:
        value: Any = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={shown(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={shown(text)}; accepted: a JSON object")
    return cast("dict[str, Any]", value)


def _in_range(config: object, name: str, low: float, high: float = float("inf"), *, hint: str = "") -> None:
    value = getattr(config, name)
    if value is None or low <= value <= high:
        return
    upper = "" if high == float("inf") else f", at most {high}"
    raise ConfigError(f"{name}={value!r} is out of range; accepted: at least {low}{upper}{hint}")


def _check_page_size(page_size: int | None) -> None:
    if page_size is not None and not 1 <= page_size <= 1024:
        raise ConfigError(f"page_size={page_size} is out of range; accepted: 1 to 1024")


def _check_kv_events(args: EngineArgs) -> None:
    if args.kv_events is not None and not args.enable_prefix_caching:
        raise ConfigError("kv_events_config tells of the prefix cache; accepted with enable_prefix_caching alone")


def _check_shares(args: EngineArgs) -> None:
    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization={args.gpu_memory_utilization} is out of range; accepted: above 0, at most 1"
        )
    if not 0 <= args.decode_budget_share < 1:
        raise ConfigError(
            f"decode_budget_share={args.decode_budget_share} is out of range; accepted: at least 0, below 1"
        )
    if args.default_deadline_s is not None and not args.default_deadline_s > 0:
        raise ConfigError(f"default_deadline_s={args.default_deadline_s} is out of range; accepted: above 0")
    if not args.watchdog_s > 0:
        raise ConfigError(f"watchdog_s={args.watchdog_s} is out of range; accepted: above 0")


def _check_executor(executor: str) -> None:
    if executor != "device" and not executor.removeprefix("scripted:"):
        raise ConfigError("executor='scripted:' names no file; accepted: device, scripted:FILE.json")
    if executor != "device" and not executor.startswith("scripted:"):
        raise ConfigError(f"executor={executor!r} is unknown; accepted: device, scripted:FILE.json")


def _check_cors(config: ServerConfig) -> None:
    for origin in config.allowed_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,\[\]\"]+", origin):
            raise ConfigError(
                f"allowed_origins holds {origin!r}; accepted: *, or scheme://host[:port] without a path or a last /"
            )
    for method in config.allowed_methods:
        if not re.fullmatch(r"\*|[A-Z]+", method):
            raise ConfigError(f"allowed_methods holds {method!r}; accepted: * or methods in capitals, such as POST")
    for header in config.allowed_headers:
        if not re.fullmatch(r"\*|[A-Za-z0-9!#$%&'+.^_`|~-]+", header):
            raise ConfigError(f"allowed_headers holds {header!r}; accepted: * or names of headers")
    if config.allow_credentials and "*" in config.allowed_origins:  # any page could act as its visitor
        raise ConfigError(
            "allow_credentials=True with allowed_origins '*'; accepted: origins by name, or no credentials"
        )


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}={getattr(config, name)!r} needs ssl_certfile; accepted: both, or neither")
    if config.ssl_cert_reqs != "none" and (config.ssl_ca_certs is None or config.ssl_certfile is None):
        raise ConfigError(f"ssl_cert_reqs={config.ssl_cert_reqs!r} needs ssl_certfile and ssl_ca_certs")


def _check_paths(config: ServerConfig) -> None:
    if config.uds is not None and (not config.uds or "\0" in config.uds):
        raise ConfigError(f"uds={config.uds!r} is no path; accepted: the path of a socket to make")
    if config.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", config.root_path):
        raise ConfigError(f"root_path={config.root_path!r}; accepted: a path such as /llm, without a last /")
    if config.profiler_dir is not None and (not config.profiler_dir or "\0" in config.profiler_dir):
        raise ConfigError(f"profiler_dir={config.profiler_dir!r} is no path; accepted: the path of a folder")
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", config.metrics_prefix):
        raise ConfigError(f"metrics_prefix={config.metrics_prefix!r}; accepted: letters, digits and _, such as vllm")


_NO_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


def _check_template_kwargs(text: str | None) -> None:
    value = json_object("default_chat_template_kwargs", text)
    for name in _NO_TEMPLATE_KWARGS & value.keys():
        raise ConfigError(f"default_chat_template_kwargs sets {name}, which belongs to requests; accepted: other names")
