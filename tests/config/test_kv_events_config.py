"""`--kv-events-config`: vLLM's keys and defaults, and refusals that name the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllm.config.engine import EngineArgs
from jaxllm.config.kv_events import KVEventsConfig, binds
from jaxllm.errors import ConfigError


def test_the_defaults_are_vllms() -> None:
    config = EngineArgs(kv_events_config='{"enable_kv_cache_events": true}').kv_events
    assert config is not None
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.publisher, config.int_block_hashes, config.positional_events) == ("zmq", True, False)


@pytest.mark.parametrize(
    "value",
    [None, {}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}],
)
def test_nothing_is_published_unless_asked_for(value: dict[str, Any] | None) -> None:
    assert EngineArgs(kv_events_config=None if value is None else json.dumps(value)).kv_events is None


def test_a_publisher_of_null_is_the_default_one() -> None:
    assert KVEventsConfig.of({"enable_kv_cache_events": True, "publisher": None}).is_on


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "kv_events_config='{' is not JSON"),
        ("[]", "accepted: a JSON object"),
        ('{"port": 1}', "kv_events_config: 'port' is unknown; accepted: enable_kv_cache_events, publisher, endpoint"),
        ('{"hwm": "many"}', "kv_events_config: hwm='many' has the wrong type; accepted: an integer"),
        ('{"topic": 5}', "kv_events_config: topic=5 has the wrong type; accepted: text"),
        ('{"publisher": "kafka"}', "publisher='kafka' has the wrong type; accepted: 'zmq', 'null'"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events=1 has the wrong type; accepted: true or false"),
        ('{"hwm": -1}', "kv_events_config: hwm=-1; accepted: 0 to 1000000000"),
        ('{"max_queue_size": 0}', "max_queue_size=0; accepted: 1 to"),
        ('{"endpoint": "5557"}', "endpoint='5557'; accepted: tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:70000"}', "accepted: ports 1 to 65535"),
        ('{"replay_endpoint": "udp://*:1"}', "replay_endpoint='udp://.*:1'; accepted: tcp"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(kv_events_config=text)


def test_events_of_a_cache_that_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_events_config tells of the prefix cache"):
        EngineArgs(kv_events_config='{"enable_kv_cache_events": true}', enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://0.0.0.0:1", True),
        ("ipc:///a", True),
        ("inproc://a", True),
        ("tcp://router:1", False),
        ("tcp://127.0.0.1:1", False),
    ],
)
def test_an_endpoint_is_bound_where_it_means_this_machine(endpoint: str, listens: bool) -> None:
    assert binds(endpoint) == listens
