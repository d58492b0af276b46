"""Behind a proxy's path: both kinds of proxies, and no way around the keys."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from tests.helpers.scripted_engine import scripted
from tests.server.harness import Running, running

KEY = {"x-api-key": "k"}


@pytest.fixture(scope="module")
def behind() -> Iterator[Running]:
    with running(scripted(), root_path="/llm/one", api_keys=("k",)) as served:
        yield served


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
def test_routes_answer_whether_or_not_the_proxy_takes_the_path_away(behind: Running, prefix: str) -> None:
    assert behind.get(prefix + "/health").status_code == 200
    assert behind.get(prefix + "/v1/models").status_code == 401
    assert behind.get(prefix + "/v1/models", headers=KEY).status_code == 200
    text = behind.post(prefix + "/v1/completions", {"prompt": "hi"}, headers=KEY).json()["choices"][0]["text"]
    assert text == "Hello"
    assert behind.get(prefix + "/nowhere", headers=KEY).status_code == 404


def test_the_index_names_the_public_paths(behind: Running) -> None:
    assert "/llm/one/v1/models" in behind.get("/").json()["routes"]
    assert behind.get("/llm/one").json() == behind.get("/").json()


@pytest.mark.parametrize(
    "path",
    [
        *("/llm/one/llm/one/v1/models", "/llm/one//v1/models", "/LLM/one/v1/models", "/llm/one%2fv1/models"),
        *("/llm/onev1/models", "/llm/one/health/../v1/models", "/llm/one/llm/one/health", "/llm/onehealth"),
    ],
)
def test_sec_03_variants_of_the_root_path_need_the_key(behind: Running, path: str) -> None:
    with pytest.raises(HTTPError) as refused, urlopen(behind.url + path, timeout=5):
        pass
    refused.value.close()
    assert refused.value.code == 401


@pytest.mark.parametrize("root_path", ["llm", "/", "/llm/", "//llm", "/a b", "/a?b"])
def test_paths_of_another_form_are_refused(root_path: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path.*accepted"):
        ServerConfig(root_path=root_path)
