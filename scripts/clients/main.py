"""Try other people's clients on our server: one line a check, a summary, and an exit code.

Each client lives in an environment of its own under --cache, with the versions that
requirements/NAME.txt (or openai-js/package.json) pins. Runs in the project's own environment.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.clients.environments import Missing, default_cache, node_environment, python_environment
from scripts.clients.servers import all_servers, as_argument

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Client:
    name: str
    script: str


CLIENTS = (
    Client("openai-py", "client_openai.py"),
    Client("openai-js", "openai-js/client_openai.mjs"),
    Client("langchain-openai", "client_langchain.py"),
    Client("pydantic-ai", "client_pydantic_ai.py"),
)


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    broken: int = 0  # clients that ended without telling, or could not be installed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", choices=names, help="try this client; may be given again")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the environments (%(default)s)")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds the servers get to be ready")
    parser.add_argument("--client-timeout", type=float, default=900, help="seconds a client gets for its checks")
    args = parser.parse_args(argv)
    chosen = [client for client in CLIENTS if args.only is None or client.name in args.only]
    tally = Tally()
    commands = _commands(chosen, args.cache, tally)
    with tempfile.TemporaryDirectory(prefix="jaxllm-clients-") as folder:
        start = time.monotonic()
        with all_servers(Path(folder), args.start_timeout) as servers:
            print(f"servers ready after {time.monotonic() - start:.0f} s", flush=True)
            for client, command in commands.items():
                _run(client.name, [*command, as_argument(servers)], args.client_timeout, tally)
    print(f"{tally.passed} checks passed, {tally.failed} failed, {tally.broken} clients did not run", flush=True)
    return 0 if tally.passed and not tally.failed and not tally.broken else 1


def _commands(chosen: list[Client], cache: Path, tally: Tally) -> dict[Client, list[str]]:
    """How to start each client; its environment is made on the way."""
    commands: dict[Client, list[str]] = {}
    for client in chosen:
        try:
            commands[client] = _command(client, cache)
        except (Missing, SystemExit) as error:
            tally.broken += 1
            print(f"FAIL {client.name}: no environment: {error}", flush=True)
    return commands


def _command(client: Client, cache: Path) -> list[str]:
    script = HERE / client.script
    if script.suffix == ".mjs":  # node looks for packages beside the script
        folder = node_environment(cache / client.name, script.parent / "package.json")
        return ["node", str(shutil.copy(script, folder / script.name))]
    python = python_environment(cache / client.name, HERE / "requirements" / f"{client.name}.txt")
    return [str(python), str(script)]


def _run(name: str, command: list[str], timeout_s: float, tally: Tally) -> None:
    """Run a client's script, showing its lines behind its name as they come. Only lines of checks count."""
    passed, failed = 0, 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        for line in process.stdout or ():
            is_good, is_bad = line.startswith("ok "), line.startswith("FAIL ")
            passed, failed = passed + is_good, failed + is_bad
            if is_good or is_bad:
                print(f"{name:16} {line.rstrip()}", flush=True)
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        said = errors.read()[-2000:]
    tally.passed, tally.failed = tally.passed + passed, tally.failed + failed
    if code != (1 if failed else 0) or not passed + failed:
        tally.broken += 1
        print(f"{name:16} FAIL the script ended with code {code}, at most {timeout_s:.0f} s after: {said}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
