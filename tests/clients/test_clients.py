"""Others' clients against the served model; each in an environment that is made the first time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.clients.main import CLIENTS

REPO = Path(__file__).parents[2]
CLIENT_FOLDER = REPO / "scripts/clients"
NO_SERVER = '{"model": {"url": "http://127.0.0.1:9", "key": "x", "model": "x"}}'


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.clients.main", *arguments]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_client_gets_what_it_asks_for() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    for client in CLIENTS:
        assert f"{client.name:16} ok" in done.stdout


def run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "client_of_a_test.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(CLIENT_FOLDER)!r})\nfrom checks import *\n{body}\n")
    return subprocess.run(
        [sys.executable, str(script), NO_SERVER], capture_output=True, text=True, check=False, cwd=tmp_path
    )


@pytest.mark.parametrize(
    ("check", "word"),
    [
        ("equal(1, 2, 'the sum')", "the sum is 1, wanted 2"),
        ("near(1.0, 1.1, 0.01)", "it is 1.0, wanted 1.1 within 0.01"),
        ("near(float('nan'), 1.0, 9.0)", "it is nan"),
        ("true([], 'a list with items')", "not so: a list with items"),
        ("with raises(ValueError): pass", "nothing was raised, wanted ValueError"),
        ("until(lambda: False, 0.1, 'the end')", "not within 0.1 s: the end"),
        ("raise KeyError('x')", "KeyError: 'x' (line"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_check_that_fails_is_told_and_ends_in_code_1(tmp_path: Path, check: str, word: str, kind: str) -> None:
    body = f"@check('first')\n{kind} _():\n    {check}\n@check('second')\n{kind} _(): equal(1, 1)\n"
    done = run_script(tmp_path, body + "sys.exit(run_checks())")
    first, second = done.stdout.splitlines()
    assert first.startswith("FAIL first: ")
    assert word in first
    assert second.startswith("ok   second (")
    assert done.returncode == 1


def test_a_script_without_checks_or_with_good_ones_says_so(tmp_path: Path) -> None:
    assert run_script(tmp_path, "sys.exit(run_checks())").returncode == 1
    good = "@check('one')\ndef _():\n    with raises(KeyError) as caught: {}[1]\n    equal(caught.error.args, (1,))\n"
    done = run_script(tmp_path, good + "sys.exit(run_checks())")
    assert (done.returncode, done.stdout[:9]) == (0, "ok   one ")
