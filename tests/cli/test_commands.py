"""The command line as a whole, serve, chat, models and collect-env."""

from __future__ import annotations

import http.client
import http.server
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxllm
from jaxllm.cli import COMMANDS, main

Cli = Callable[..., tuple[int, str, str]]
READY = re.compile(r"jaxllm ready on http://(127\.0\.0\.1):(\d+)")


def test_help_names_every_command_and_loads_almost_nothing() -> None:
    code = (
        "import sys\nfrom jaxllm.cli import main\nassert main(['--help']) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'tyro', 'jax', 'numpy', 'rich', 'tokenizers'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == ""
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_module_is_the_command() -> None:
    args = [sys.executable, "-m", "jaxllm"]
    done = subprocess.run([*args, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"jaxllm {jaxllm.__version__}\n"
    done = subprocess.run([*args, "fly"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "jaxllm: unknown command 'fly'; accepted: serve, run, chat, bench, simulate, models, collect-env\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: jaxllm {command}" in text
    if command in ("serve", "run", "chat"):
        for flag in ("--max-model-len", "--block-size", "--no-enable-prefix-caching", "-tp", "--config"):
            assert flag in text, flag
    assert ("as long as fits" in text) == (command == "chat")


def test_an_interrupt_is_exit_code_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxllm.cli.run.main", interrupted)
    assert cli("run", "--prompt", "a") == (130, "", "jaxllm: interrupted\n")


def test_too_little_memory_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(argv: list[str]) -> int:
        raise MemoryError("Unable to allocate 238 GiB")

    monkeypatch.setattr("jaxllm.cli.run.main", too_much)
    code, out, err = cli("run", "--prompt", "a")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "238 GiB" in err


def test_models_lists_the_registries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert "LlamaForCausalLM" in table["architectures"]
    assert "llama" in table["gguf_architectures"]
    assert any("Q4_1" in name for name in table["formats"])
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_collect_env_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"jaxllm", "python", "jax", "jaxlib", "devices", "attention_implementation"} <= set(report)
    assert report["attention_implementation"]["chosen"] in {"native", "xla"}  # native where a C++ compiler is found
    assert report["attention_implementation"]["why_not"]
    assert all("cpu" in device for device in report["devices"])


def test_chat_in_process_keeps_the_conversation(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nWhat is the capital of France?\n/clear\n\nhi\n/exit\nnever\n"))
    code, out, err = cli("chat", "--max-model-len", 256)
    assert (code, out) == (0, "Hello 🫠!\n Paris.\nHello 🫠!\n")
    assert "start-up" in err


def test_a_refused_turn_does_not_end_the_chat(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 300 + "\nhi\n"))
    code, out, err = cli("chat", "--max-model-len", 64)
    assert (code, out) == (0, "Hello 🫠!\n")
    assert "maximum context length" in err


def test_chat_goes_on_after_bytes_that_are_no_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"hi \xff there\nhi\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli("chat", "--max-model-len", 256)[:2] == (0, "Hello 🫠!\nHello 🫠!\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """`jaxllm serve` as its own process, in which jax cannot be imported."""
    script = tmp_path_factory.mktemp("serve") / "script.json"
    script.write_text(
        json.dumps({"responses": [{"prompt_contains": "France", "text": "Paris."}], "default": {"text": "Hi"}})
    )
    args = [
        "serve",
        "--executor",
        f"scripted:{script}",
        "--port",
        "0",
        "--api-key",
        "secret",
        "--served-model-name",
        "toy",
    ]
    blocked = "import sys\nfor name in ('jax', 'jaxlib', 'flax', 'pallas_kernels'):\n    sys.modules[name] = None\n"
    code = f"{blocked}from jaxllm.cli import main\nsys.exit(main({args!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = READY.fullmatch(line.strip())
        assert match, line
        yield match[1], int(match[2])
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert re.search(r"tokenizer +\d+\.\d\d s +\d+\.\d\d CPU-s", err)


def test_serve_answers_without_jax(server: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*server, timeout=30)
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "capital of France?"}]})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer secret"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    assert answer["choices"][0]["message"]["content"] == "Paris."


def test_chat_speaks_to_a_server(server: tuple[str, int], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nthe capital of France?\n"))
    url = f"http://{server[0]}:{server[1]}/v1"
    assert cli("chat", "--url", url, "--api-key", "secret", scripted=False)[:2] == (0, "Hi\nParis.\n")
    code, _, err = cli("chat", "--url", url, "--api-key", "wrong", scripted=False)
    assert code == 2
    assert "the server answers 401" in err


def test_chat_with_an_unreachable_or_wrong_url(cli: Cli) -> None:
    code, _, err = cli("chat", "--url", "http://127.0.0.1:1", scripted=False)
    assert code == 1
    assert err.startswith("jaxllm: --url http://127.0.0.1:1")
    for url in ("ftp://x", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://[::1", ""):
        code, _, err = cli("chat", "--url", url, scripted=False)
        assert code == 2
        assert "is no address; accepted: http://HOST:PORT" in err
    code, _, err = cli("chat", "--url", f"http://{'a' * 70}.invalid", scripted=False)
    assert (code, err.count("\n")) == (1, 1)
    for key in ("日", "a\nb"):
        code, _, err = cli("chat", "--url", "http://127.0.0.1:1", "--api-key", key, scripted=False)
        assert code == 2
        assert "accepted: printable ASCII" in err


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """A server that is none of ours: its URL, and the bodies that it answers with, one after the other."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.pop(0)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("body", [b"page", b"[]", b'{"data": []}', b'{"data": [{}]}', b"\xff"])
def test_a_server_that_lists_no_models_is_refused(stranger: tuple[str, list[bytes]], cli: Cli, body: bytes) -> None:
    url, bodies = stranger
    bodies.append(body)
    code, _, err = cli("chat", "--url", url, scripted=False)
    assert (code, err.count("\n")) == (1, 1)
    assert "/v1/models answers" in err


@pytest.mark.parametrize("data", ["page", "5", '{"choices": 5}', '{"choices": [5]}', '{"choices": [{"delta": 5}]}'])
def test_an_event_that_is_no_chunk_fails_its_turn_alone(
    stranger: tuple[str, list[bytes]], cli: Cli, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    url, bodies = stranger
    sound = b'data: {"choices": [{"delta": null}, {"delta": {"content": "Hi"}}]}\n\ndata: [DONE]\n\n'
    bodies += [b'{"data": [{"id": "toy"}]}', f"data: {data}\n\n".encode(), sound]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    code, out, err = cli("chat", "--url", url, scripted=False)
    assert (code, out) == (0, "Hi\n")
    assert "the server sent" in err


def test_serve_refuses_a_wrong_configuration_before_it_loads(cli: Cli, tmp_path: Path) -> None:
    for args, word in [
        (["--port", 70000], "port=70000"),
        (["--max-num-seqs", 0], "max_num_seqs=0"),
        (["--uvicorn-log-level", "loud"], "loud"),
        (["--api-key", ""], "empty key"),
        (["--enable-lora"], "enable_lora=True is not served yet"),
        (["--executor", "scripted:"], "executor"),
        (["--chat-template", "missing.jinja"], "missing.jinja"),
        ([tmp_path / "nothing"], "nothing"),
    ]:
        code, out, err = cli("serve", *args, scripted=args[0] != "--executor")
        assert (code, out) == (2, ""), word
        assert word in err
        assert "Traceback" not in err
