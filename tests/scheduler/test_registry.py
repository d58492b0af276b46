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
    assert type(create_policy(f"{__name__}:Backwards")).__name__ == "Backwards"


def test_a_policy_of_an_installed_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(group: str) -> list[EntryPoint]:
        return [EntryPoint("backwards", f"{__name__}:Backwards", group), EntryPoint("fcfs", "nowhere:Nothing", group)]

    monkeypatch.setattr(registry, "entry_points", installed)
    assert type(create_policy("backwards")).__name__ == "Backwards"
    assert isinstance(create_policy("fcfs"), FirstComeFirstServed)
    with pytest.raises(ConfigError, match="policy='nope' is unknown; accepted: backwards, fcfs, or package"):
        create_policy("nope")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "unknown; accepted: fcfs, or package.module:Class"),
        ("jaxllm.nowhere:Policy", "cannot be made from 'jaxllm.nowhere:Policy': No module named"),
        ("jaxllm.scheduler.policies.fcfs:Nothing", "has no attribute 'Nothing'"),
        ("not a path:", "cannot be made"),
        ("collections:OrderedDict", "lacks order, admit, token_budget, victim"),
        (f"{__name__}:Half", "lacks admit, token_budget, victim; accepted: a class with order"),
    ],
)
def test_what_is_not_a_policy_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_policy(name)
