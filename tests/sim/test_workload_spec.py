"""The section `workload`: what is accepted, and how the rest is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from jaxllm.errors import ConfigError
from jaxllm.sim.section import Section, load_lined
from jaxllm.sim.workload_spec import make_workload

POISSON = {"kind": "poisson", "rate": 1, "num_requests": 2, "prompt": 3, "output": 4}
CHATS = {"kind": "chats", "rate": 1, "num_sessions": 2, "turns": 2, "user": 3, "output": 4}
AGENTS = {"kind": "agents", "concurrency": 1, "num_sessions": 2, "task": 5, "calls": 2, "call": 3, "result": 4}


def refusal(spec):
    with pytest.raises(ConfigError) as error:
        make_workload(spec, 0, "sim.yaml: workload")
    return str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "sim.yaml: workload.kind is missing; accepted: poisson, gamma"),
        ([], "sim.yaml: workload=[]; accepted: a mapping"),
        ({"kind": "posson"}, "workload.kind='posson'; accepted: poisson"),
        ({**POISSON, "rates": 2}, "workload.rates: unknown key; did you mean 'rate'?"),
        ({**POISSON, "zzz": 2}, "workload.zzz: unknown key; accepted: "),
        ({k: v for k, v in POISSON.items() if k != "rate"}, "workload.rate is missing"),
        ({k: v for k, v in POISSON.items() if k != "output"}, "workload.output is missing"),
        ({k: v for k, v in POISSON.items() if k != "num_requests"}, "no end is given; accepted: num_requests"),
        ({**POISSON, "rate": 0}, "workload.rate=0; accepted: requests a second"),
        ({**POISSON, "rate": True}, "workload.rate=True"),
        ({**POISSON, "rate": "5"}, "workload.rate='5'"),
        ({**POISSON, "rate": [[1, 0]]}, "workload.rate=[[1, 0]]"),
        ({**POISSON, "rate": [[0, 1]]}, "workload.rate=[[0, 1]]"),
        ({**POISSON, "rate": [1, 2]}, "workload.rate=[1, 2]"),
        ({**POISSON, "rate": 10**400}, "workload.rate="),
        ({**POISSON, "num_requests": 0}, "workload.num_requests=0; accepted: a whole number, at least 1"),
        ({**POISSON, "num_requests": 2.0}, "workload.num_requests=2.0"),
        ({**POISSON, "duration_s": -1}, "workload.duration_s=-1; accepted: a number above 0"),
        ({**POISSON, "cv": 2}, "workload.cv: unknown key"),
        ({**POISSON, "kind": "gamma"}, "exactly one of cv, burstiness"),
        ({**POISSON, "kind": "gamma", "cv": 1, "burstiness": 1}, "exactly one of cv, burstiness"),
        ({**POISSON, "prompt": 0}, "workload.prompt=0; accepted: a whole number from 1"),
        ({**POISSON, "prompt": []}, "workload.prompt=[]"),
        ({**POISSON, "prompt": [1, "2"]}, "workload.prompt=[1, '2']"),
        ({**POISSON, "prompt": {"kind": "normal"}}, "workload.prompt.kind='normal'; accepted: constant, uniform"),
        ({**POISSON, "prompt": {"kind": "uniform", "low": 5, "high": 4}}, "workload.prompt.high=4"),
        ({**POISSON, "prompt": {"kind": "lognormal", "mean": 5}}, "exactly one of sigma, cv"),
        ({**POISSON, "prompt": {"kind": "lognormal", "mean": 0, "sigma": 1}}, "workload.prompt.mean=0"),
        ({**POISSON, "prompt": {"kind": "lognormal", "mean": 5, "sigma": 1, "mx": 1}}, "workload.prompt.mx: unknown"),
        ({**POISSON, "prefixes": {"count": 2}}, "workload.prefixes.tokens is missing"),
        ({**POISSON, "prefixes": 3}, "workload.prefixes=3; accepted: a mapping"),
        ({**POISSON, "classes": {}}, "workload.classes={}; accepted: a list, not empty"),
        ({**POISSON, "classes": [{"weight": -1}]}, "workload.classes[0].weight=-1"),
        ({**POISSON, "classes": [{"weight": 0}]}, "all weights are 0"),
        ({**POISSON, "classes": [{}, {"tenant": ""}]}, "workload.classes[1].tenant: tenant=''"),
        ({**POISSON, "classes": [{"ttft_target_s": "fast"}]}, "workload.classes[0].ttft_target_s"),
        ({**POISSON, "classes": [{"speed": 1}]}, "workload.classes[0].speed: unknown key"),
        ({**POISSON, "lengths": {"file": "nowhere.json"}}, "workload.lengths.file='nowhere.json'; accepted: a file"),
        ({"kind": "azure"}, "workload.file is missing"),
        ({"kind": "azure", "file": "nowhere.csv"}, "workload.file='nowhere.csv'; accepted: a file that exists"),
        ({"kind": "jaxllm_trace", "file": ""}, "workload.file=''"),
        ({**CHATS, "concurrency": 2}, "exactly one of rate, concurrency"),
        ({**CHATS, "think_s": -1}, "workload.think_s=-1; accepted: seconds"),
        ({**CHATS, "system_per_tenant": 1}, "workload.system_per_tenant=1; accepted: true or false"),
        ({**CHATS, "classes": [{"prompt": 3, "output": 1}]}, "workload.classes[0].prompt: unknown key"),
        (AGENTS, "workload.answer is missing"),
        ({**AGENTS, "answer": 2, "calls": -1}, "workload.calls=-1; accepted: a whole number from 0"),
    ],
)
def test_a_wrong_section_is_refused_by_key_and_value(spec, said):
    assert said in refusal(spec)


@pytest.mark.parametrize(
    "spec",
    [
        POISSON,
        {**POISSON, "kind": "gamma", "cv": 3, "duration_s": 100},
        {**POISSON, "kind": "gamma", "burstiness": 0.5, "rate": [[10, 1], [5, 0]]},
        {
            **POISSON,
            "prompt": {"kind": "lognormal", "median": 9, "cv": 1},
            "output": {"kind": "exponential", "mean": 4},
        },
        {k: v for k, v in POISSON.items() if k not in ("prompt", "output")} | {"classes": [{"prompt": 1, "output": 1}]},
        {"kind": "at_once", "num_requests": 2, "prompt": [1, 2], "output": 1},
        {"kind": "closed", "concurrency": 1, "duration_s": 1, "prompt": 1, "output": 1},
        {**CHATS, "think_s": [1, 2.5], "system_tokens": 5, "max_context": 9},
        {**CHATS, "cv": 2, "think_s": {"kind": "uniform", "low": 0, "high": 2}},
        {**AGENTS, "answer": 4, "pause_s": {"kind": "lognormal", "median": 1, "sigma": 1}},
    ],
)
def test_what_the_tables_of_keys_say_is_accepted(spec):
    arrival = next(iter(make_workload(spec, 0, "test: workload").start()))
    assert arrival.num_prompt >= 1
    assert arrival.num_output >= 1


def test_a_yaml_file_keeps_its_lines_for_messages(tmp_path):
    path = tmp_path / "sim.yaml"
    path.write_text(
        "workload:\n  kind: poisson\n  rate: 2\n  num_requests: 5\n"
        "  prompt:\n    kind: uniform\n    low: 3\n    high: 2\n  output: 1\n"
    )
    spec = load_lined(path)["workload"]
    with pytest.raises(ConfigError) as error:
        make_workload(spec, 0, f"{path}: workload")
    assert str(error.value).startswith(f"{path}: workload.prompt (line 5).high (line 8)=2; accepted: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: key 'a' again, after line 1"),
        ("a: 1\n2: 3\n", "line 2: key 2; accepted: text"),
        ("- 1\n", "holds list; accepted: lines of KEY: VALUE"),
        ("a: [1\n", "is not YAML"),
        ("a: !!python/object:os.system x\n", "is not YAML"),
        ("a: &x [*x]\n", "is not YAML"),
    ],
)
def test_a_wrong_yaml_file_is_refused(tmp_path, text, said):
    path = tmp_path / "sim.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_lined(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_yaml_file_may_be_empty_and_name_a_value_often(tmp_path):
    path = tmp_path / "sim.yaml"
    path.write_text("")
    assert load_lined(path) == {}
    depth = 60  # 2 ** 60 values, if each name were read anew
    path.write_text("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, depth)))
    assert len(load_lined(path)) == depth


def test_a_section_gives_a_default_where_a_key_is_absent():
    section = Section({"a": 1, "b": None}, "here")
    assert section.whole("a", None) == 1
    assert section.whole("b", None) is None
    assert section.number("c", 2.5) == 2.5
    section.done()


def test_the_examples_of_the_documentation_are_accepted():
    text = (Path(__file__).parents[2] / "docs" / "sim-workloads.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        spec = yaml.safe_load(example)
        spec.update({"num_sessions": 5} if "num_sessions" in spec else {"num_requests": 50})
        assert len(list(make_workload(spec, 0, "docs").start())) == spec.get("num_requests", 5)


def test_every_kind_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "sim-workloads.md").read_text()
    kinds = refusal({}).partition("accepted: ")[2].split(", ")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) - {"kind"} == set(kinds)
