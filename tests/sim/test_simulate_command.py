"""`jaxllm simulate`: a YAML file in, tables and files out; what is wrong in it is named with its place."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from jaxllm.cli import main
from jaxllm.errors import ConfigError
from jaxllm.sim.config import load_simulation
from jaxllm.sim.linear import Linear

GOOD = """\
cost: {kind: constant, step_s: 0.01, token_s: 0.0001}
engine: {max_num_seqs: 8, max_num_batched_tokens: 64, num_pages: 200}
policies:
  - fcfs
  - {name: priority, options: {ageing_s: 10}}
seeds: [3, 4]
slo: {ttft_s: 1.0}
workload: {kind: poisson, rate: 20, num_requests: 30, prompt: 40, output: 10}
"""


FILES = Path(__file__).parents[2] / "configs" / "simulate"


def written(tmp_path: Path, text: str = GOOD) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_each_policy_runs_on_each_seed_and_all_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, page = written(tmp_path), tmp_path / "out.json", tmp_path / "out.html"
    assert main(["simulate", str(path), "--json", str(out), "--html", str(page)]) == 0
    assert "TTFT mean" in capsys.readouterr().out
    runs = json.loads(out.read_text())
    assert [(run["policy"], run["seed"]) for run in runs] == [
        *[("fcfs", 3), ("fcfs", 4)],
        *[("priority (ageing_s=10)", 3), ("priority (ageing_s=10)", 4)],
    ]
    contract = {"policy", "seed", "num_requests", "duration_s", "output_tokens_per_s", "ttft_s", "tpot_s", "e2e_s"}
    contract |= {"goodput_req_per_s", "jain", "preemptions", "recomputed_tokens", "kv_waste", "prefix_hit_rate"}
    assert all(run.keys() >= contract | {"plan_hash"} and run["num_requests"] == 30 for run in runs)
    assert runs[0]["plan_hash"] == runs[2]["plan_hash"] != runs[1]["plan_hash"]  # no priorities: the same decisions
    assert "<script" not in page.read_text()


def test_the_same_file_gives_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    found = [main(["simulate", str(path), "--json", "-"]) or capsys.readouterr().out for _ in range(2)]
    assert found[0] == found[1]


def test_a_fleet_from_a_file_is_the_same_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = "fleet:\n  report_s: 0.2\n  pools:\n    - {num_replicas: 3, router: power_of_two}\n"
    path = written(tmp_path, GOOD.replace("seeds: [3, 4]\n", fleet))
    found = [
        main(["simulate", str(path), "--json", "-", "--workers", workers]) or capsys.readouterr().out
        for workers in ("1", "2")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("path", sorted(FILES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_files_that_come_with_it_are_right(path: Path) -> None:
    load_simulation(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slo:", "slos:", r"run.yaml: slos \(line 7\): unknown key; did you mean 'slo'"),
        ("max_num_seqs: 8", "max_num_seqs: 0", r"engine.*max_num_seqs \(line 2\)=0; accepted: a whole number"),
        ("max_num_seqs: 8", "max_num_seq: 8", r"max_num_seq \(line 2\): unknown key; did you mean 'max_num_seqs'"),
        (", num_pages: 200", "", "num_pages is missing"),
        ("  - fcfs\n", "  - fcfs\n  - fcfs\n", "each once"),
        ("- fcfs", "- fastest", r"policies.*\[0\]: policy='fastest' is unknown"),
        ("ageing_s: 10", "ageing_s: -1", "a number above 0"),
        ("seeds: [3, 4]", "seeds: [3, 3]", "each once"),
        ("seeds: [3, 4]", "seeds: 3", "a list"),
        ("ttft_s: 1.0", "ttft_s: soon", "ttft_s"),
        ("kind: constant", "kind: free", "kind"),
        ("cost: {kind: constant, step_s: 0.01, token_s: 0.0001}", "cost: 3", r"cost \(line 1\)=3; accepted: a mapping"),
        ("slo: {ttft_s: 1.0}", "slo: soon", r"slo \(line 7\)='soon'; accepted: a mapping"),
        ("options: {ageing_s: 10}", "options: 10", r"policies.*options.*=10; accepted: a mapping"),
        ("seeds:", "fleet: {pools: [{num_replicas: 1, cost: 3}]}\nseeds:", r"cost.*=3; accepted: a mapping"),
        (
            "seeds:",
            "fleet: {pools: [{num_replicas: 1}], failures: [{at_s: 1, replica: 1}]}\nseeds:",
            "accepted: 0 to 0",
        ),
        (
            "seeds:",
            "fleet: {pools: [{num_replicas: 1}, {num_replicas: 1, router: prefix_hash}]}\nseeds:",
            "whole pools have routers least_loaded, prefix_hash",
        ),
        ("rate: 20", "rate: -1", "rate"),
        ("cost: {kind: constant, step_s: 0.01, token_s: 0.0001}\n", "", "cost is missing"),
        ("workload: {", "workload: [", "not YAML"),
        ("step_s: 0.01", "step_s: 0", r"cost, line 1: step_s=0; accepted: a number above 0"),
        ("step_s: 0.01", f"step_s: {10**400}", r"cost, line 1: step_s=1000.*at most 1e\+30"),
        ("ttft_s: 1.0", f"ttft_s: {10**400}", r"slo.ttft_s \(line 7\)=1000"),
        ("max_num_seqs: 8", "<<: {max_num_seqs: 8}", r"line 2: key '<<'; accepted: keys that are written out"),
        ("seeds: [3, 4]", "seeds: !!python/name:os.system [3]", r"line 6: tag .*os.system'; accepted: none"),
        (
            "num_pages: 200",
            "num_pages: 200, enable_chunked_prefill: false",
            r"tokens \(line 2\)=64; accepted: at least max",
        ),
        ("num_pages: 200", "num_pages: 9007199254740992", r"num_pages \(line 2\)=9007199254740992; accepted"),
        ("seeds:", "fleet: {report_s: 1.0e-9, pools: [{num_replicas: 1}]}\nseeds:", "report_s.*at least 0.001"),
        ("seeds:", "fleet: {pools: [{num_replicas: 3, autoscale: {most: 2}}]}\nseeds:", "most.*from 3"),
        (
            "seeds:",
            "fleet: {pools: [{num_replicas: 1, name: a}, {num_replicas: 1, name: a}]}\nseeds:",
            "each name once",
        ),
        (
            "seeds:",
            "fleet: {pools: [{num_replicas: 1}], transfer: {bytes_per_token: 1, bytes_per_s: 1}}\nseeds:",
            r"transfer \(line 6\) is of prefill and decode pools",
        ),
        (GOOD, "", "engine is missing"),
        (GOOD, "- 3", "accepted: lines of KEY: VALUE"),
        ("seeds:", "fleet: {pools: [{num_replicas: 0}]}\nseeds:", r"pools.*\[0\].num_replicas"),
        ("seeds:", "fleet: {pools: [{num_replicas: 1, role: decode}]}\nseeds:", "one prefill and one decode pool"),
        ("seeds:", "fleet: {pools: [{num_replicas: 1, router: fastest}]}\nseeds:", "router.*accepted: round_robin"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        load_simulation(written(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs a file"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["FILE", "--workers", "0"], "workers=0; accepted: at least 1"),
        (["FILE", "--json", "/nowhere/x.json"], "no place for a file"),
        (["FILE", "--workers", "1000"], "workers=1000; accepted: at least 1, at most 256"),
        (["FILE", "--json", "FILE"], "is the file that is simulated too; accepted: another file"),
        (["FILE", "--json", "x.html", "--html", "x.html"], "is json too"),
        (["FILE", "--html", "-"], "json alone"),
        (["FILE", "--plot", "x.gif"], "accepted: a name that ends in"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    assert main(["simulate", *[str(path) if flag == "FILE" else flag for flag in flags]]) == 2
    assert message in capsys.readouterr().err


def test_aliases_cannot_make_a_message_without_end(tmp_path: Path) -> None:
    names = "abcdefghij"
    bomb = "a: &a [x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise(names)
    )
    with pytest.raises(ConfigError, match=r"seeds.*\[\[\[.*\.\.\.; accepted"):
        load_simulation(written(tmp_path, GOOD.replace("seeds: [3, 4]", f"{bomb}seeds: *j")))


def test_numbers_may_have_an_exponent_alone(tmp_path: Path) -> None:
    simulation = load_simulation(written(tmp_path, GOOD.replace("step_s: 0.01", "step_s: 1e-2")))
    assert simulation.fleet.pools[0].cost == Linear(step_s=0.01, token_s=0.0001, source="constant")


def test_a_checkpoint_knows_what_is_in_the_files_that_are_named(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    text = GOOD.replace("{kind: constant, step_s: 0.01, token_s: 0.0001}", "{kind: linear, file: cost.json}")
    digests: set[str] = set()
    for step_s in (0.01, 0.02, 0.01):
        cost.write_text(json.dumps({"kind": "linear", "step_s": step_s}))
        simulation = load_simulation(written(tmp_path, text))
        digests.add(simulation.digest(simulation.policies[0], 3))
    assert len(digests) == 2


def test_a_step_that_would_never_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GOOD.replace("step_s: 0.01", "step_s: 1e20"))
    assert main(["simulate", str(path)]) == 2
    assert "a step of 40 tokens takes 1e+20 s" in capsys.readouterr().err


def test_a_pool_without_replicas_is_filled_again(tmp_path: Path) -> None:
    fleet = "fleet:\n  pools: [{num_replicas: 1, autoscale: {most: 2, startup_s: 0.5}}]\n"
    fleet += "  failures: [{at_s: 0.5, replica: 0}]\n"
    path, out = written(tmp_path, GOOD.replace("seeds: [3, 4]\n", fleet)), tmp_path / "out.json"
    assert main(["simulate", str(path), "--json", str(out)]) == 0
    assert all(run["num_finished"] == 30 for run in json.loads(out.read_text()))
