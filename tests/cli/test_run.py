"""`jaxllm run`: the shape of its output, and what wrong input gets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.results import json_line
from jaxllm.testing.logprobs import scripted_logprob, scripted_rank, scripted_top
from jaxllm.types.outputs import CompletionOutput, RequestOutput, TokenLogprob
from jaxllm.types.sampling import SamplingParams

Cli = Callable[..., tuple[int, str, str]]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def strict(text: str) -> dict[str, Any]:
    """One object; NaN and infinities, which JSON does not know, are an error."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_json_lines_have_the_promised_shape_in_the_order_of_the_prompts(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "please count", "max_tokens": 3},
        {"prompt": "the capital of France is"},
        {"messages": [{"role": "user", "content": "hi"}], "stop": ["!"]},
        {"prompt_token_ids": [100, 200, 300], "max_tokens": 1},
    ]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    code, out, _ = cli("run", "--json", "--prompts", file, "--prompt", "first", "--max-tokens", 20)
    assert code == 0
    results = lines(out)
    assert [r["text"] for r in results] == ["Hello 🫠!", " one two three", " Paris.", "Hello 🫠", "Hello"]
    assert [r["finish_reason"] for r in results] == ["stop", "length", "stop", "stop", "length"]
    for result in results:
        assert set(result) == {"prompt_token_ids", "token_ids", "text", "finish_reason", "usage"}
        assert result["usage"]["prompt_tokens"] == len(result["prompt_token_ids"])
        assert result["usage"]["completion_tokens"] == len(result["token_ids"])
        assert result["usage"]["cached_tokens"] == 0
    assert results[4]["prompt_token_ids"] == [100, 200, 300]
    assert results[3]["prompt_token_ids"][0] == 1  # the chat template's own first token, once


def test_text_comes_alone_for_one_prompt_and_numbered_for_more(cli: Cli) -> None:
    assert cli("run", "--prompt", "the capital of France is")[:2] == (0, " Paris.\n")
    code, out, _ = cli("run", "--prompt", "a", "--prompt", "the capital of France is")
    assert (code, out) == (0, "=== 0\nHello 🫠!\n=== 1\n Paris.\n")


def test_ignore_eos_runs_to_the_full_length(cli: Cli) -> None:
    _, out, _ = cli("run", "--json", "--prompt", "a", "--ignore-eos", "--max_tokens", 12, "--temperature", 0)
    assert len(lines(out)[0]["token_ids"]) == 12


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "no prompts; give --prompt TEXT"),
        (["The sky is"], "no prompts; 'The sky is' was taken as the model; give --prompt TEXT"),
        (["--prompt", ""], "--prompt 1: prompt is empty"),
        (["--prompt", "fine", "--prompt", "x " * 200], "--prompt 2: the prompt has"),
        (["--prompt", "a", "--temperature", "7"], "temperature=7.0"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "a", "--thinking-token-budget", "1"], "thinking_token_budget=1 is not served yet"),
        (["--prompt", "a", "--logit-bias", "{"], "--logit-bias"),
        (["--prompt", "a", "--quantization", "int8"], "quantization='int8' is not served yet"),
        (["--prompt", "a", "--block-size", "0"], "page_size=0"),
        (["--prompt", "a", "--scheduling-policy", "none"], "policy='none' is unknown"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["no/such/model", "--prompt", "a"], "no/such/model"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(cli: Cli, args: list[str], word: str) -> None:
    code, out, err = cli("run", *args)
    assert (code, out) == (2, "")
    assert word in err
    assert err.startswith("jaxllm: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ("{}", "exactly one of"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"prompt": 7}', "accepted: text"),
        ('{"prompt": "a", "tempreature": 1}', "unknown key 'tempreature'"),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1"),
        ('{"prompt": "a", "top_p": "high"}', "top_p='high'"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt_token_ids": []}', "ids are empty"),
        ('{"prompt_token_ids": [1, 49152]}', "49152"),
        ('{"prompt_token_ids": [-1]}', "-1"),
        ('{"prompt_token_ids": ["a"]}', "'a'"),
        ('{"prompt": "a", "stop": 5}', "stop=5"),
        ('{"prompt": "a", "stop_token_ids": 5}', "stop_token_ids=5"),
        ('{"prompt": "a", "top_k": null}', "top_k=None"),
        ('{"prompt": "a", "ignore_eos": "yes"}', "ignore_eos='yes'"),
        ('{"prompt": "a", "stop_token_ids": [1, 49152]}', "49152, which is not in the vocabulary"),
        ('{"prompt": "a", "logprobs": 21}', "max_logprobs=20"),
        ('{"prompt": "a", "extra_args": {"mine": 1}}', "names 'mine'"),
        ('{"prompt": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens=0"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "assistant", "tool_calls": 5}]}', "tool_calls=5"),
        ('{"messages": [{"content": "x"}]}', "role"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_run(cli: Cli, tmp_path: Path, line: str, word: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, out, err = cli("run", "--json", "--prompts", file)
    assert (code, out) == (2, "")
    assert f"{file}:2: " in err
    assert word in err
    assert err.count("\n") == 1


def test_sam_09_log_probabilities_have_the_promised_shape(cli: Cli) -> None:
    code, out, _ = cli("run", "--json", "--prompt", "the capital of France is", "--logprobs", 2, "--temperature", 0)
    assert code == 0
    result = strict(out)
    assert set(result) == {"prompt_token_ids", "token_ids", "text", "finish_reason", "usage", "logprobs"}
    assert [entry["token_id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert set(entry) == {"token_id", "logprob", "rank", "top"}
        assert entry["logprob"] == scripted_logprob(entry["token_id"], None, 49152)
        assert entry["rank"] == scripted_rank(entry["token_id"], None, 49152)
        ids = scripted_top(entry["token_id"], 2, 49152)
        assert entry["top"] == [[i, scripted_logprob(entry["token_id"], i, 49152)] for i in ids]


def test_sam_09_zero_log_probabilities_are_those_of_the_tokens_alone(cli: Cli) -> None:
    result = strict(cli("run", "--json", "--prompt", "a", "--logprobs", 0)[1])
    assert [entry["top"] for entry in result["logprobs"]] == [[]] * len(result["token_ids"])


def test_tokens_of_ones_own_choice_come_in_their_order(cli: Cli) -> None:
    result = strict(cli("run", "--json", "--prompt", "a", "--logprob-token-ids", 9, 5, 7, "--max-tokens", 1)[1])
    (entry,) = result["logprobs"]
    assert [token_id for token_id, _ in entry["top"]] == [9, 5, 7]
    assert entry["token_id"] == result["token_ids"][0]


def test_sam_10_a_scored_prompt_begins_with_null(cli: Cli) -> None:
    result = strict(cli("run", "--json", "--prompt", "a b c d", "--prompt-logprobs", 1, "--max-tokens", 0)[1])
    assert (result["token_ids"], result["text"], result["finish_reason"]) == ([], "", "length")
    first, *others = result["prompt_logprobs"]
    assert first is None
    assert [entry["token_id"] for entry in others] == result["prompt_token_ids"][1:]
    assert all(len(entry["top"]) == 1 for entry in others)


def test_several_sequences_are_listed_and_the_first_stands_in_the_object_itself(cli: Cli) -> None:
    result = strict(cli("run", "--json", "--prompt", "two colours", "--n", 2, "--logprobs", 1)[1])
    assert [(each["index"], each["text"]) for each in result["outputs"]] == [(0, " red"), (1, " green")]
    assert {key: value for key, value in result["outputs"][0].items() if key != "index"} == {
        key: result[key] for key in ("token_ids", "text", "finish_reason", "logprobs")
    }
    assert result["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in result["outputs"])
    assert all(len(each["logprobs"]) == len(each["token_ids"]) for each in result["outputs"])
    _, out, _ = cli("run", "--prompt", "two colours", "--n", 2)
    assert out == "=== 0.0\n red\n=== 0.1\n green\n"


def test_what_is_impossible_is_strict_json() -> None:
    position = (TokenLogprob(5, -math.inf, 9), TokenLogprob(6, 0.0, 1))
    completion = CompletionOutput(0, "x", (5,), -math.inf, (position,), "stop")
    line = json_line(RequestOutput("a", "p", (1,), (completion,), True), SamplingParams(logprobs=1))
    assert line["logprobs"] == [{"token_id": 5, "logprob": -9999.0, "rank": 9, "top": [[6, 0.0]]}]
    strict(json.dumps(line))


def test_sam_01_keys_of_logit_bias_are_token_ids_as_json_spells_them(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "--prompt", "a", "--logit-bias", '{"5": 1.5, "7": -1}')[:2] == (0, "Hello 🫠!\n")
    file = tmp_path / "prompts.jsonl"
    for key in ("49157", "-1", "abc", "9" * 30):
        file.write_text(json.dumps({"prompt": "a", "logit_bias": {key: 1}}) + "\n")
        code, out, err = cli("run", "--prompts", file)
        assert (code, out) == (2, "")
        assert f"{file}:1: " in err
        assert key in err
        assert err.count("\n") == 1


def test_every_field_of_a_request_is_taken(cli: Cli) -> None:
    flags = ["--presence-penalty", 1, "--frequency-penalty", 1, "--repetition-penalty", 1.5, "--min-p", 0.1]
    flags += ["--bad-words", "x", "--bad-words", "yy", "--truncate-prompt-tokens", 1, "--min-tokens", 1]
    flags += ["--repetition-detection", '{"max_pattern_size": 3, "min_count": 9}', "--allowed-token-ids", 5, 6]
    code, out, err = cli("run", "--json", "--prompt", "one two three", *flags)
    assert (code, err) == (0, "")
    assert len(strict(out)["prompt_token_ids"]) == 1


def test_every_seed_of_64_bits_is_taken(cli: Cli) -> None:
    for seed in (-(2**63), -1, 2**63 - 1):
        assert cli("run", "--prompt", "a", f"--seed={seed}")[:2] == (0, "Hello 🫠!\n")


def test_flags_that_do_not_parse_exit_with_2(cli: Cli) -> None:
    for args, word in [
        (["--no-such-flag", "1"], "no-such-flag"),
        (["--max-model-len", "many"], "max-model-len"),
        (["--dtype", "int3"], "dtype"),
    ]:
        code, out, err = cli("run", "--prompt", "a", *args)
        assert (code, out) == (2, "")
        assert word in err
        assert "Traceback" not in err


def test_other_spellings_of_a_flag_work(cli: Cli) -> None:
    assert cli("run", "--prompt", "a", "--block_size", 32, "--max_model_len", "32", "--num-pages", "1k")[0] == 0
    assert cli("run", "--prompt", "a", "-tp", 1, "--no-enable-prefix-caching", "--num-gpu-blocks-override", 64)[0] == 0
    code, _, err = cli("run", "--prompt", "a", "-tp", 2)
    assert code == 2
    assert "tensor_parallel_size=2 is not served yet" in err


def test_an_unknown_kernel_is_wrong_configuration(cli: Cli) -> None:
    code, _, err = cli("run", "--prompt", "a", "--attention-implementation", "magic", scripted=False)
    assert code == 2
    assert "attention_implementation='magic'" in err
    assert "xla" in err


def test_a_failing_engine_is_exit_code_1(cli: Cli, script: Path) -> None:
    script.write_text(json.dumps({"faults": [{"step": 1, "kind": "raise"}]}))
    code, out, err = cli("run", "--prompt", "a")
    assert (code, out) == (1, "")
    assert "Traceback" not in err


def test_configuration_file_sets_flags_and_the_command_line_overrules_it(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max-model-len: 8\nblock_size: 4\n")
    assert cli("run", "--prompt", "word " * 10, "--config", file)[0] == 2
    assert cli("run", "--prompt", "word " * 10, "--config", file, "--max-model-len", 32)[0] == 0
    file.write_text("max-model-length: 8\n")
    code, _, err = cli("run", "--prompt", "a", f"--config={file}")
    assert code == 2
    assert "max-model-length" in err
    assert "max-model-len'" in err


def test_run_works_where_jax_cannot_be_imported(script: Path) -> None:
    blocked = "import sys\nfor name in ('jax', 'jaxlib', 'flax', 'pallas_kernels'):\n    sys.modules[name] = None\n"
    args = ["run", "--json", "--prompt", "the capital of France is", "--executor", f"scripted:{script}"]
    code = f"{blocked}from jaxllm.cli import main\nsys.exit(main({args!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == " Paris."
