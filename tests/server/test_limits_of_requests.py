"""SEC-02 and SAM-01: what asks for more than it should is refused at once, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.canned import Canned, CannedEngine, ask
from tests.server.harness import Running, events_of, running

HUGE = "1" + "0" * 400

ABUSES: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**6}, "n"),
    ({"best_of": 10**6}, "best_of"),
    ({"n": 2, "best_of": 10**6}, "best_of"),
    ({"stop": ["x"] * 500_000}, "stop"),
    ({"bad_words": ["x"] * 50_000}, "bad_words"),
    ({"logprobs": 2 * 10**9}, "logprobs"),
    ({"logprobs": 10**400}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 2 * 10**9}, "prompt_logprobs"),
    ({"top_p": -1}, "top_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"temperature": 999999}, "temperature"),
    ({"allowed_token_ids": list(range(10**6))}, "allowed_token_ids"),
    ({"logprob_token_ids": list(range(10**6)), "logprobs": 0}, "logprob_token_ids"),
    ({"stop_token_ids": list(range(10**6))}, "stop_token_ids"),
    ({"logit_bias": dict.fromkeys(map(str, range(10**5)), 1)}, "logit_bias"),
    ({"prompt": ["x"] * 100_000}, "prompt"),
    ({"prompt": ["x"] * 256, "n": 128}, "n"),
    ({"repetition_detection": {"max_pattern_size": 10**9}}, "repetition_detection"),
    ({"use_beam_search": True, "n": 100}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), ABUSES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_sec_02_work_far_above_the_bodys_size_is_refused_before_the_engine_hears_of_it(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    engine = CannedEngine([Canned([b"A"])])
    reply = ask(engine, "/v1/completions", {"prompt": "hi", "stream": stream, **fields})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == ("stream" if stream and "use_beam_search" in fields else param)
    assert param in error["message"] or stream
    assert len(error["message"]) < 400
    assert engine.asked == []


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(scripted(default=script("word ", repeat=True)), Settings(num_pages=513)) as server:
        yield server


def test_sec_02_a_request_beside_the_abuse_goes_on() -> None:
    endless = scripted(default=script("word ", repeat=True), step_s=0.01)
    settings = Settings(max_model_len=8192, num_pages=4097)
    body = {"prompt": "hi", "max_tokens": 8000, "stream": True}
    with running(endless, settings) as served, served.http.stream("POST", "/v1/completions", json=body) as reply:
        events = (line for line in reply.iter_lines() if line)
        next(events)
        for fields, param in ABUSES:
            refused = served.complete(**{"prompt": "hi", **fields})
            assert refused.status_code == 400, param
        assert served.gauge("num_requests_running") == 1
        [more] = events_of(next(events))
        assert more["choices"][0]["text"]
        assert served.get("/health").status_code == 200


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", HUGE, "2000000000", "-" + HUGE])
def test_sec_02_numbers_beyond_any_range_are_400_and_named(served: Running, field: str, number: str) -> None:
    reply = _posted(served, f'"{field}": {number}')
    if (field, number) == ("repetition_penalty", "2000000000"):  # it has no upper limit
        assert reply.status_code == 200
        return
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert field in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ("max_tokens", 200),  # above what fits is what fits
        ("top_k", 200),
        ("n", 400),
        ("best_of", 400),
        ("seed", 400),
        ("min_tokens", 400),
        ("logprobs", 400),
        ("prompt_logprobs", 400),
        ("priority", 400),
    ],
)
def test_sec_02_integers_beyond_any_range_are_400_or_cut(served: Running, field: str, status: int) -> None:
    reply = _posted(served, f'"{field}": {HUGE}')
    assert reply.status_code == status, reply.text
    if status == 400:
        assert reply.json()["error"]["param"] == field
    assert _posted(served, f'"{field}": 1e400').status_code == 400
    assert served.get("/health").status_code == 200


LONG = "7" * 5001  # more digits than Python reads at once
TOO_LARGE = {
    '"logit_bias": {"5": 1e400}': "logit_bias['5']=1e400 is out of range",
    f'"logit_bias": {{"6": 1, "5": {HUGE}}}': 'logit_bias={"6":1,"5":1000',
    f'"logit_bias": {{"5": {LONG}}}': "logit_bias['5']=7777",
    f'"stop_token_ids": [{HUGE}]': "stop_token_ids holds 1000",
    f'"stop_token_ids": [3, -{LONG}]': "stop_token_ids[1]=-7777",
    **{f'"{name}": {LONG}': f"{name}=7777" for name in ("seed", "max_tokens", "min_tokens", "n", "top_p")},
    f'"min_tokens": {HUGE}': "min_tokens=1000",
    '"vllm_xargs": {"a": [{"b": {"c": -1e999}}]}': "vllm_xargs['a'][0]['b']={\"c\": -1e999}",
    f'"unheard_of": {LONG}': "unheard_of=7777",
}


@pytest.mark.parametrize(("members", "named"), TOO_LARGE.items(), ids=lambda text: text[:30])
def test_sec_02_a_number_that_nothing_holds_is_shown_with_its_field(served: Running, members: str, named: str) -> None:
    error = _posted(served, members).json()["error"]
    assert error["param"] == members.split('"')[1]
    assert named in error["message"] and "accepted" in error["message"]
    assert len(error["message"]) < 250


def test_sec_02_a_number_that_nothing_holds_is_400_in_every_body(served: Running) -> None:
    for body in ("1e400", "[1e400]", '{"a": 1e400', '{"a": 1e400, "a": 1}', '{"a":' * 900 + "1e400" + "}" * 900):
        for path in ("/v1/completions", "/v1/chat/completions"):
            reply = served.http.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400
            assert len(reply.json()["error"]["message"]) < 250


def test_sec_02_numbers_inside_lists_too(served: Running) -> None:
    for members in (f'"allowed_token_ids": [{HUGE}]', f'"logprobs": 0, "logprob_token_ids": [{HUGE}]'):
        assert _posted(served, members).status_code == 400, members
    assert served.complete("hi").status_code == 200


def _posted(served: Running, members: str) -> Any:
    content = f'{{"prompt": "hi", {"" if "max_tokens" in members else chr(34) + "max_tokens" + chr(34) + ": 2, "}'
    return served.http.post(
        "/v1/completions", content=content + members + "}", headers={"content-type": "application/json"}
    )


@pytest.mark.parametrize("key", ["042", "0" * 37 + "42", "9" * 21, "١"])
def test_sam_01_a_logit_bias_key_is_never_read_as_another_token(served: Running, key: str) -> None:
    reply = served.complete(logit_bias={key: 100})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logit_bias" and key[:10] in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("key", ["265", "-1", "abc", "1.5", "", " 5", "9" * 5000, "٣"], ids=lambda key: key[:8])
def test_sam_01_a_logit_bias_for_no_token_is_400_and_harms_nobody(served: Running, path: str, key: str) -> None:
    reply = getattr(served, path)("hi", logit_bias={key: 1}, max_tokens=2)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "logit_bias"
    assert key[:8] in error["message"]
    assert served.get("/health").status_code == 200
    assert getattr(served, path)("hi", logit_bias={"5": 1}, max_tokens=2).status_code == 200


@pytest.mark.parametrize("field", ["allowed_token_ids", "logprob_token_ids", "stop_token_ids"])
def test_sam_01_ids_of_no_token_are_400_and_named(served: Running, field: str) -> None:
    for ids in ([265], [-1], [10**9]):
        reply = served.complete("hi", logprobs=0 if field == "logprob_token_ids" else None, **{field: ids})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
    assert served.complete("hi", max_tokens=2).status_code == 200


def test_unknown_processor_arguments_are_named_as_they_were_sent(served: Running) -> None:
    reply = served.complete("hi", vllm_xargs={"unheard_of": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "vllm_xargs"
    assert "unheard_of" in reply.json()["error"]["message"]
