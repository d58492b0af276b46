"""Public traces, from files written by hand."""

from __future__ import annotations

import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.trace_files import AZURE, BURSTGPT, read_trace
from jaxllm.sim.workload_spec import make_workload

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,API log
60,GPT-4,0,0,0,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
7,12,1.5,GPT-4,10,20,30,Conversation log
9.5,,2,GPT-4,11,21,32,API log
"""


def written(folder, text, name="trace.csv"):
    path = folder / name
    path.write_text(text)
    return path


def rows(path, columns=AZURE, **kwargs):
    found = read_trace(path, columns, **kwargs)
    return list(zip(found.at_s, found.num_prompt, found.num_output, strict=True))


def test_azure_traces_of_both_years_are_read(tmp_path):
    assert rows(written(tmp_path, AZURE_2023)) == [
        (0.0, 374, 44),
        (pytest.approx(4.314579), 396, 109),
        (pytest.approx(60.0), 879, 55),
    ]
    assert rows(written(tmp_path, AZURE_2024)) == [(0.0, 2162, 5), (1.0, 2399, 6)]


def test_burstgpt_is_read_without_its_failed_requests(tmp_path):
    path = written(tmp_path, BURST)
    assert rows(path, BURSTGPT) == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]
    assert read_trace(path, BURSTGPT).num_left_out == 1
    assert rows(path, BURSTGPT, limit=2) == [(0.0, 472, 18), (40.0, 1087, 230)]
    assert rows(path, BURSTGPT, only={"Model": "GPT-4"}) == [(0.0, 417, 276)]
    assert rows(written(tmp_path, BURST_2), BURSTGPT) == [(0.0, 10, 20), (2.5, 11, 21)]


def test_json_lines_of_the_same_names_say_the_same(tmp_path):
    for text, columns in ((AZURE_2023, AZURE), (BURST, BURSTGPT)):
        heading, *lines = [line.split(",") for line in text.splitlines()]
        values = [{k: int(v) if v.isdigit() else v for k, v in zip(heading, line, strict=True)} for line in lines]
        path = written(tmp_path, "\n".join(map(json.dumps, values)) + "\n\n", "trace.jsonl")
        assert rows(path, columns) == rows(written(tmp_path, text), columns)


def test_rows_out_of_order_are_put_in_order(tmp_path):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n9,1,1\r\n\r\n4,2,2\r\n9,3,3\r\n4,4,4\r\n"
    assert rows(written(tmp_path, text)) == [(0, 2, 2), (0, 4, 4), (5, 1, 1), (5, 3, 3)]
    assert rows(written(tmp_path, "\ufeff" + text))[0] == (0, 2, 2)  # as spreadsheets write it


def test_a_replay_is_so_many_times_as_fast(tmp_path):
    spec = {"kind": "burstgpt", "file": "trace.csv", "speed": 10, "classes": [{"tenant": "x", "priority": 2}]}
    written(tmp_path, BURST)
    found = list(make_workload(spec, 0, "test: workload", folder=tmp_path).start())
    assert [(r.at_s, r.num_prompt, r.num_output) for r in found] == [(0, 472, 18), (4, 1087, 230), (11.3, 417, 276)]
    assert {(r.service.tenant, r.priority) for r in found} == {("x", 2)}
    assert len({r.prompt_ids[:8] for r in found}) == 3
    one = make_workload({**spec, "log_type": "API log", "limit": 5}, 0, "test: workload", folder=tmp_path)
    assert [r.num_prompt for r in one.start()] == [1087]


HEADING = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: no column 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,Generated\n1,2,3\n", "line 1: no column 'GeneratedTokens'"),
        (HEADING, "no request that was answered"),
        (HEADING + "1,5,0\n", "no request that was answered"),
        (HEADING + "1,2,3\n2,x,3\n", "line 3: ContextTokens='x'; accepted: a whole number of tokens"),
        (HEADING + "1,2,3\n2,2.5,3\n", "line 3: ContextTokens='2.5'"),
        (HEADING + "1,2,-3\n", "line 2: GeneratedTokens='-3'"),
        (HEADING + "1,2,99999999\n", "line 2: GeneratedTokens='99999999'"),
        (HEADING + "1,²,3\n", "line 2: ContextTokens='²'"),
        ("TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", "line 1: column 'ContextTokens' twice"),
        (HEADING + "1e300,2,3\n", "line 2: TIMESTAMP='1e300'; accepted: seconds, 0 to 1e+12"),
        (HEADING + "1,2\n", "line 2: 2 columns; accepted: 3"),
        (HEADING + "1,2,3,4\n", "line 2: 4 columns; accepted: 3"),
        (HEADING + "yesterday,2,3\n", "line 2: TIMESTAMP='yesterday'; accepted: seconds"),
        (HEADING + "nan,2,3\n", "line 2: TIMESTAMP='nan'"),
        (HEADING + "-1,2,3\n", "line 2: TIMESTAMP='-1'"),
        (HEADING + "1,2,3\n2024-05-10,2,3\n", "line 3: TIMESTAMP='2024-05-10'; accepted: what the rows before have"),
        (HEADING + '"' + "x" * 200_000 + '",2,3\n', "line 2: not CSV"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line_and_column(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_trace(path, AZURE)
    assert said in str(error.value)
    assert "accepted: " in str(error.value) or "not CSV" in said
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"TIMESTAMP": 1, "ContextTokens": 2, "GeneratedTokens": 3}\n[1]\n', "line 2: [1]; accepted: an object"),
        ("\n{not json}\n", "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"TIMESTAMP": 1, "ContextTokens": 2}', "line 1: no 'GeneratedTokens'"),
        ('{"TIMESTAMP": 1, "ContextTokens": true, "GeneratedTokens": 3}', "line 1: ContextTokens=True"),
        ('{"TIMESTAMP": null, "ContextTokens": 1, "GeneratedTokens": 3}', "line 1: TIMESTAMP=None"),
        ('{"TIMESTAMP": 1e999, "ContextTokens": 1, "GeneratedTokens": 3}', "line 1: TIMESTAMP=inf"),
        ('{"TIMESTAMP": 1, "ContextTokens": ' + "9" * 5000 + ', "GeneratedTokens": 3}', "line 1: not JSON"),
    ],
)
def test_a_wrong_json_line_is_refused_by_its_line_and_name(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        read_trace(written(tmp_path, text, "trace.jsonl"), AZURE)
    assert said in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv", AZURE)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "bytes.csv", AZURE)
