"""LOAD-06: hostile and cut files end in a clear error, within 2 s and 200 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.config.gguf_file import MAX_NUMBERS, MAX_STRINGS
from tests.config.gguf_bytes import ARRAY, F32, STRING, U32, GGUFBytes, array, pair, tensor, text, u32

REPO = Path(__file__).resolve().parents[2]
TOKENS = "tokenizer.ggml.tokens"

CASES: dict[str, GGUFBytes] = {
    "product of dimensions wraps round 64 bits": GGUFBytes(tensors=[tensor("w", (2**32, 2**32, 2**2, 2))]),
    "product of dimensions wraps round to the true size": GGUFBytes(tensors=[tensor("w", (8, 2**61 + 1, 1))]),
    "dimension 0": GGUFBytes(tensors=[tensor("w", (0, 8))]),
    "a million dimensions": GGUFBytes(tensors=[tensor("w", (8,), num_dims=10**6)]),
    "a string of 1 GiB": GGUFBytes(pairs=[text("general.name") + u32(STRING) + (2**30).to_bytes(8, "little")]),
    "a string of 2^64 - 1 bytes": GGUFBytes(pairs=[text("k") + u32(STRING) + b"\xff" * 8]),
    "alignment 2^30": GGUFBytes(pairs=[pair("general.alignment", U32, u32(2**30))]),
    "alignment 0": GGUFBytes(pairs=[pair("general.alignment", U32, u32(0))]),
    "wrong array type": GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(77, 4, b"\0" * 64))]),
    "2^62 tokens": GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(STRING, 2**62, b"\0" * 64))]),
    "2^21 tokens of a short file": GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(STRING, 2**21, b"\0" * 64))]),
    "arrays in arrays": GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(ARRAY, 1, array(ARRAY, 1, b"\0" * 64)))]),
    "2^63 tensors": GGUFBytes(num_tensors=2**63),
    "2^63 pairs": GGUFBytes(num_pairs=2**63),
    "unknown block type": GGUFBytes(tensors=[tensor("w", (8,), 9999)]),
    "offset of 2^64 - 32": GGUFBytes(tensors=[tensor("w", (8,), F32, offset=2**64 - 32)]),
    "data cut off": GGUFBytes(data=b"\0" * 31),
    "no magic": GGUFBytes(magic=b"PK\3\4"),
}
# Files that truly are as long as they say: (content, the length the file is stretched to).
LONG_CASES: dict[str, tuple[GGUFBytes, int]] = {
    "a string of 1 GiB that is there": (CASES["a string of 1 GiB"], 2 * 2**30),
    "an array of 2^30 bytes that is there": (
        GGUFBytes(pairs=[pair("k", ARRAY, array(0, 2**30, b""))]),
        2 * 2**30,
    ),
    "2^40 empty tokens in a long file": (GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(STRING, 2**40, b""))]), 2**31),
    "as many tokens as are accepted": (
        GGUFBytes(pairs=[pair(TOKENS, ARRAY, array(STRING, MAX_STRINGS, b""))], tensors=[], num_tensors=1),
        2**31,
    ),
    "as many numbers as are accepted": (
        GGUFBytes(pairs=[pair("k", ARRAY, array(U32, MAX_NUMBERS, b""))], tensors=[], num_tensors=1),
        2**31,
    ),
    "130 thousand tensors that are there": (GGUFBytes(tensors=[], num_tensors=130_000), 2**31),
}

# Opens each file as a start-up does, and reports the error, the time and the growth of the peak.
PROBE = """
import json, resource, sys, time
from pathlib import Path
from jaxllm.config.checkpoint import load_generation, load_model_config
from jaxllm.errors import JaxLLMError
import gguf

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

base = peak_mb()
for name in sys.argv[1:]:
    start = time.perf_counter()
    try:
        load_model_config(Path(name))
        kind, message = "loaded", ""
    except JaxLLMError as error:
        kind, message = type(error).__name__, str(error)
    report = {"kind": kind, "message": message, "seconds": time.perf_counter() - start, "mb": peak_mb() - base}
    print(json.dumps(report), flush=True)
"""


def probe(files: list[Path]) -> list[dict[str, object]]:
    command = [sys.executable, "-c", PROBE, *map(str, files)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_cases(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for number, (name, content) in enumerate(CASES.items()):
        files[name] = folder / f"{number}.gguf"
        files[name].write_bytes(content.build())
    for number, (name, (content, length)) in enumerate(LONG_CASES.items()):
        files[name] = folder / f"long{number}.gguf"
        files[name].write_bytes(content.header())
        os.truncate(files[name], length)  # a hole: takes no space on the disk
    whole = GGUFBytes().build()
    for length in (0, 3, 20, 30, len(whole) // 2, len(whole) - 1):
        files[f"cut after {length} bytes"] = folder / f"cut{length}.gguf"
        files[f"cut after {length} bytes"].write_bytes(whole[:length])
    return files


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    files = write_cases(tmp_path_factory.mktemp("hostile"))
    return dict(zip(files, probe(list(files.values())), strict=True))


def test_load_06_every_hostile_file_is_refused_as_broken_weights(reports: dict[str, dict[str, object]]) -> None:
    assert {name: r["kind"] for name, r in reports.items() if r["kind"] != "WeightsError"} == {}


def test_load_06_every_refusal_names_the_file(reports: dict[str, dict[str, object]]) -> None:
    assert [name for name, r in reports.items() if ".gguf" not in str(r["message"])] == []


def test_load_06_every_refusal_takes_under_2_seconds(reports: dict[str, dict[str, object]]) -> None:
    assert {name: r["seconds"] for name, r in reports.items() if float(str(r["seconds"])) > 2} == {}


def test_load_06_all_refusals_together_take_under_200_mb(reports: dict[str, dict[str, object]]) -> None:
    assert {name: r["mb"] for name, r in reports.items() if float(str(r["mb"])) > 200} == {}
