"""The engine's settings: what users set (`EngineArgs`, flat, vLLM's names) and the parts rooms receive."""

from __future__ import annotations

from dataclasses import dataclass, field


def _flag(default: object, help: str, *aliases: str) -> object:
    """A field with its help text and its alternative spellings on the command line."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory. `page_size` None: the backend's default (CPU 16, GPU 64, TPU 128)."""

    page_size: int = 16
    num_pages: int | None = None  # fixed number of pages, the null page included; tests need it
    memory_bytes: int | None = None  # KV budget; None: from the memory plan
    memory_utilization: float = 0.92  # of an accelerator's memory, for everything
    enable_prefix_caching: bool = True
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # requests running at once = slots
    max_num_batched_tokens: int = 512  # token budget of a step
    max_model_len: int = 8192
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True  # plan the next step while one is in flight
    max_num_queued_reqs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 32 * 2**20
    uvicorn_log_level: str = "info"
