"""How KV events are published: the JSON of `--kv-events-config`, with vLLM's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://.+:[0-9]+|(ipc|inproc)://.+")
_LISTENS = ("*", "::", "0.0.0.0")  # a host that means this machine
_MOST_BATCHES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where KV events go.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    enable_kv_cache_events: bool = setting(False, "publish them")
    publisher: Literal["zmq", "null"] = setting("zmq", "null: publish nothing after all")
    endpoint: str = setting("tcp://*:5557", "ZeroMQ address of the PUB socket; bound if * or ::, else connected")
    replay_endpoint: str | None = setting(None, "ZeroMQ address that answers for missed batches; always bound")
    buffer_steps: int = setting(10_000, "batches kept for that")
    hwm: int = setting(100_000, "batches a slow subscriber may be behind before it misses some; 0: no limit")
    max_queue_size: int = setting(100_000, "batches that may wait for the publisher before some are dropped")
    topic: str = setting("", "first frame of every message")
    int_block_hashes: bool = setting(True, "hashes as 64-bit integers; false: all 32 bytes")
    positional_events: bool = setting(False, "events as arrays, as vLLM wrote them until June 2026")

    def __post_init__(self) -> None:
        try:
            check_settings(self)
        except ConfigError as error:
            raise ConfigError(f"kv_events_config: {error}") from None
        for name in ("endpoint", "replay_endpoint"):
            _check_endpoint(name, getattr(self, name))
        for name, low in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
            if not low <= getattr(self, name) <= _MOST_BATCHES:
                raise ConfigError(f"kv_events_config: {name}={getattr(self, name)}; accepted: {low} to {_MOST_BATCHES}")

    @staticmethod
    def of(value: Mapping[str, Any]) -> KVEventsConfig:
        """
        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        known = [f.name for f in fields(KVEventsConfig)]
        for name in value:
            if name not in known:
                raise ConfigError(f"kv_events_config: {name!r} is unknown; accepted: {', '.join(known)}")
        given = {name: each for name, each in value.items() if (name, each) != ("publisher", None)}  # vLLM's default
        return KVEventsConfig(**given)

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def binds(endpoint: str) -> bool:
    """Whether a PUB socket listens there; else it connects to somebody who does."""
    return endpoint.startswith(("ipc://", "inproc://")) or any(mark in endpoint for mark in _LISTENS)


def endpoint_of(endpoint: str, rank: int) -> str:
    """The address of one of several cores: the port counts up, a name gets a number."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _is_port(digits: str) -> bool:
    return len(digits) <= 5 and 1 <= int(digits) <= 65535


def _check_endpoint(name: str, value: str | None) -> None:
    if value is None:
        return
    if not _ENDPOINT.fullmatch(value) or "\0" in value:
        raise ConfigError(
            f"kv_events_config: {name}={value!r}; accepted: tcp://HOST:PORT (host * to listen), ipc://PATH, inproc://NAME"
        )
    if value.startswith("tcp://") and not _is_port(value.rpartition(":")[2]):
        raise ConfigError(f"kv_events_config: {name}={value!r}; accepted: ports 1 to 65535")
