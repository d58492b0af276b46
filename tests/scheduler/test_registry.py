from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from jaxllm.errors import ConfigError
from jaxllm.scheduler import registry
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.registry import create_policy


class Backwards(FirstComeFirstServed):
    """A policy of another package."""


class Half:
    def order(self) -> None: ...


def test_a_policy_is_found_by_its_name() -> None:
    assert isinstance(create_policy("fcfs"), FirstComeFirstServed)


def test_a_policy_is_found_by_its_import_path() -> None:
    assert create_policy(f"{__name__}:Backwards").name == "Backwards"  # type: ignore[attr-defined]


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(group: str) -> list[EntryPoint]:
        return [EntryPoint("backwards", f"{__name__}:Backwards", group), EntryPoint("fcfs", "nowhere:Nothing", group)]

    monkeypatch.setattr(registry, "entry_points", installed)
    assert create_policy("backwards").name == "Backwards"  # type: ignore[attr-defined]
    assert isinstance(create_policy("fcfs"), FirstComeFirstServed)
    with pytest.raises(ConfigError, match="policy='nope' is unknown; accepted: backwards, cache_aware"):
        create_policy("nope")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "unknown; accepted: cache_aware, fair, fcfs, priority, shortest_first, slo, or package.module:Class"),
        ("jaxllm.nowhere:Policy", "cannot be made from 'jaxllm.nowhere:Policy': No module named"),
        ("jaxllm.scheduler.policies.fcfs:Nothing", "has no attribute 'Nothing'"),
        ("not a path:", "accepted: package.module:Class"),
        ("collections:OrderedDict", "lacks order, admit, token_budget, victim"),
        (f"{__name__}:Half", "lacks admit, token_budget, victim; accepted: a class with order"),
    ],
)
def test_what_is_not_a_policy_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_policy(name)


def test_options_are_arguments_of_the_class() -> None:
    assert create_policy("priority", {"ageing_s": 5})._ageing_s == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("priority", {"aging": 1}, "policy='priority' has no option aging; accepted: ageing_s"),
        ("fcfs", {"x": 1}, "policy='fcfs' has no option x; accepted: none"),
        ("fair", {"quantum_tokens": -1}, "quantum_tokens=-1; accepted: a number above 0"),
        ("slo", {"ttft_target_s": "soon"}, "ttft_target_s='soon'; accepted: a number above 0"),
        (f"{__name__}:Backwards", {"y": 1}, "has no option y"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_policy(name, options)
