"""What a request says of how it wants to be served: it reaches the engine, under the tenant of its own key."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams
from tests.server.canned import Canned, CannedEngine, ask
from tests.server.harness import events_of

KEYS = ("first-secret", "second-secret")
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HINTS: dict[str, Any] = {
    "deadline_s": 2.5,
    "retention_priority": 80,
    "retention_tokens": 64,
    "ttft_target_s": 1,
    "tpot_target_s": 0.05,
    "predicted_tokens": 12,
}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "hi"} if path == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
    return {**prompt, **fields}


def served(path: str = TEXT, *, key: str | None = None, keys: tuple[str, ...] = (), **fields: Any) -> Any:
    """The terms that the engine was given for one request."""
    engine = CannedEngine([Canned([b"ok"])])
    headers = {"x-api-key": key} if key else None
    assert ask(engine, path, body_for(path, **fields), headers=headers, api_keys=keys).status_code == 200
    (terms,) = engine.terms
    return terms


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_every_hint_reaches_the_engine(path: str, stream: bool) -> None:
    terms = served(path, stream=stream, priority=-3, cache_salt="salt", tenant="alice", **HINTS)
    assert terms == {"priority": -3, "cache_salt": "salt", "service": ServiceParams(tenant="alice", **HINTS)}


def test_a_request_without_hints_has_the_default_ones() -> None:
    assert served()["service"] is DEFAULT_SERVICE


def test_beam_search_is_served_on_the_same_terms() -> None:
    terms = served(use_beam_search=True, n=1, temperature=0, priority=4, cache_salt="salt", deadline_s=9)
    assert terms == {"priority": 4, "cache_salt": "salt", "service": ServiceParams(deadline_s=9.0)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline_s", 0),
        ("deadline_s", -1.5),
        ("deadline_s", "soon"),
        ("retention_priority", 101),
        ("retention_priority", 1.5),
        ("retention_tokens", -1),
        ("ttft_target_s", -0.1),
        ("tpot_target_s", 0),
        ("predicted_tokens", -5),
        ("tenant", ""),
        ("tenant", "x" * 129),
        ("tenant", 7),
        ("priority", 2**63),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_wrong_hint_is_refused_by_name(path: str, field: str, value: Any) -> None:
    engine = CannedEngine([])
    reply = ask(engine, path, body_for(path, **{field: value}))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert field in error["message"] and ("accepted" in error["message"] or "wrong type" in error["message"])
    assert not engine.asked


def test_each_key_of_several_is_a_tenant() -> None:
    tenants = [served(key=key, keys=KEYS)["service"].tenant for key in KEYS]
    assert tenants == ["key0", "key1"]
    assert served(key=KEYS[1], keys=KEYS[1:])["service"].tenant is None  # one key is for all


def test_no_key_can_pose_as_another_and_none_is_shown() -> None:
    claims = ["key0", "key1", "key0/alice", "../key0", "key0\0", "x" * 128]
    own = {served(key=KEYS[1], keys=KEYS, tenant=claim)["service"].tenant for claim in claims}
    others = {served(key=KEYS[0], keys=KEYS, tenant=claim)["service"].tenant for claim in claims}
    assert len(own) == len(others) == len(claims)
    assert not own & others
    assert all(tenant.startswith("key1/") for tenant in own)
    assert not any(key in tenant for key in KEYS for tenant in own | others)


def past_deadline(path: str, *texts: bytes, pieces: tuple[dict[int, int], ...] = (), **fields: Any) -> httpx.Response:
    """Answers of requests, one for each prompt, that were ended by their deadline after these tokens."""
    answers = [Canned([text], pieces=pieces, reasons=("abort",), stop_reason="deadline") for text in texts]
    return ask(CannedEngine(answers), path, body_for(path, deadline_s=2.5, **fields))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_503_that_names_it(path: str, stream: bool) -> None:
    reply = past_deadline(path, b"", stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (503, "deadline_exceeded", "deadline_s")
    assert "deadline_s=2.5" in error["message"]
    assert reply.headers["retry-after"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_deadline_under_way_answers_with_what_there_is(path: str) -> None:
    reply = past_deadline(path, b"half an")
    (choice,) = reply.json()["choices"]
    assert reply.status_code == 200
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
    assert choice.get("text", choice.get("message", {}).get("content")) == "half an"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_deadline_under_way_ends_a_stream_as_any_other_end_does(path: str) -> None:
    *chunks, done = events_of(past_deadline(path, b"half an", pieces=({0: 4},), stream=True).text)
    assert done == "[DONE]" and not any("error" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices) == "half an"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("abort", "deadline")


@pytest.mark.parametrize("texts", [(b"", b"some"), (b"some", b"")])
def test_a_prompt_that_never_ran_does_not_take_what_another_has_got(texts: tuple[bytes, bytes]) -> None:
    reply = past_deadline(TEXT, *texts, prompt=["a", "b"])
    assert reply.status_code == 200
    assert [choice["text"].encode() for choice in reply.json()["choices"]] == list(texts)
    assert {choice["stop_reason"] for choice in reply.json()["choices"]} == {"deadline"}


def test_an_abort_that_is_no_deadline_is_still_the_engines_fault() -> None:
    reply = ask(CannedEngine([Canned([b"half"], reasons=("abort",))]), TEXT, body_for(TEXT, deadline_s=2.5))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "generation_failed")
