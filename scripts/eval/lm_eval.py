"""EleutherAI's lm-eval over our server against lm-eval over transformers, on the same weights in float32.

Both runs ask for the log likelihood of the same continuations; the verdict is whether each one agrees.
Without --url a server of the default model is started. The tool, transformers and torch live in an
environment of their own under --cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.clients.checks import Server
from scripts.clients.environments import default_cache, python_environment
from scripts.clients.servers import KEY, MODEL_FLAGS, server_process, wait_until_ready
from scripts.eval.hf_folder import write_folder
from scripts.eval.lm_eval_tasks import write_tasks

HERE = Path(__file__).resolve().parent
ROWS = HERE.parents[1] / "tests/golden/gsm8k-test-40.jsonl"
TOLERANCE = 1e-3  # nats, of each continuation
# torch's float32 log_softmax over a vocabulary of this size is 2e-5 nats too high at each token, which adds up
# to more than the tolerance over a sentence; the logits are float32 on both sides.
_EXACT_SUM = "softmax_dtype=float64"


@dataclass(frozen=True, slots=True)
class Likelihood:
    value: float  # nats
    is_greedy: bool  # every token of the continuation was the most likely one


Key = tuple[str, int, str]  # task, item, continuation
Found = dict[Key, Likelihood]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", help="a running server, without /v1; it must serve --model in float32")
    parser.add_argument("--api-key", default=KEY, help="key of that server")
    parser.add_argument("--served-name", default="model", help="name of the model there")
    parser.add_argument("--model", help=".gguf file or alias of the weights; default: the default model")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the environment (%(default)s)")
    parser.add_argument("--limit", type=int, default=40, help="items of each task")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds a server gets to be ready")
    args = parser.parse_args()
    python = python_environment(args.cache / "lm-eval", HERE / "requirements-lm-eval.txt")
    with tempfile.TemporaryDirectory(prefix="jaxllm-lm-eval-") as made:
        folder = Path(made)
        weights = _hf_folder(args.model, folder)
        run = Run(python, folder, tuple(write_tasks(ROWS, folder)), args.limit)
        theirs = run.ask("transformers", "hf", f"pretrained={weights},dtype=float32,{_EXACT_SUM}")
        with _server(args, folder) as server:
            options = f"model={server.model},base_url={server.v1}/completions,num_concurrent=8,max_length=512"
            tokenizer = f"tokenizer_backend=huggingface,tokenizer={weights}"
            ours = run.ask("jaxllm", "local-completions", f"{options},{tokenizer}", server.key)
    return report(ours, theirs)


def _hf_folder(model: str | None, folder: Path) -> Path:
    from jaxllm.config.checkpoint import resolve_model

    weights = folder / "weights"
    write_folder(resolve_model(model), weights)
    return weights


@contextmanager
def _server(args: argparse.Namespace, folder: Path) -> Iterator[Server]:
    if args.url:
        yield Server(args.url.rstrip("/"), args.api_key, args.served_name)
        return
    flags = (*MODEL_FLAGS, "--generation-config=vllm", f"--api-key={KEY}", *([args.model] if args.model else []))
    with server_process("model", flags, folder) as (process, server):
        wait_until_ready("model", process, server, args.start_timeout, folder)
        yield server


@dataclass(frozen=True, slots=True)
class Run:
    """How lm-eval is called."""

    python: Path
    folder: Path
    tasks: tuple[str, ...]
    limit: int

    def ask(self, label: str, model: str, model_args: str, key: str = "none") -> Found:
        """Run it and read what it logged of each continuation."""
        output = self.folder / f"{label}-output"
        print(f"lm-eval over {label} …", flush=True)
        command = [str(self.python), "-m", "lm_eval", "run", "--model", model, "--model_args", model_args]
        command += ["--tasks", *self.tasks, "--include_path", str(self.folder), "--output_path", str(output)]
        command += ["--log_samples", "--limit", str(self.limit), "--batch_size", "1", "--device", "cpu"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"OPENAI_API_KEY": key, "HF_HOME": str(self.folder / "hf"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=3600
        )
        if done.returncode:
            raise SystemExit(f"lm-eval over {label} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith("|")), flush=True)
        return {key: value for file in sorted(output.rglob("samples_*.jsonl")) for key, value in _samples(file)}


def _samples(file: Path) -> Iterator[tuple[Key, Likelihood]]:
    task = file.name.removeprefix("samples_").rsplit("_", 1)[0]
    for line in file.read_text(encoding="utf-8").splitlines():
        sample: dict[str, Any] = json.loads(line)
        for choice, (answer,) in enumerate(sample["resps"]):
            continuation = sample["arguments"][f"gen_args_{choice}"]["arg_1"]
            yield (task, sample["doc_id"], continuation), Likelihood(float(answer[0]), str(answer[1]) == "True")


def report(ours: Found, theirs: Found) -> int:
    """Print the largest differences and the verdict; exit code 0 if all agree."""
    if not ours or ours.keys() != theirs.keys():
        print(f"FAIL: {len(ours)} likelihoods over jaxllm, {len(theirs)} over transformers")
        return 1
    rows = sorted(((abs(ours[key].value - theirs[key].value), key) for key in ours), reverse=True)
    print(f"{'task':18} {'item':>5} {'jaxllm':>12} {'transformers':>13} {'difference':>11}  continuation")
    for difference, key in rows[:10]:
        task, item, continuation = key
        pair = f"{ours[key].value:12.6f} {theirs[key].value:13.6f}"
        print(f"{task:18} {item:5d} {pair} {difference:11.2e}  {continuation[:40]!r}")
    unequal = sum(ours[key].is_greedy != theirs[key].is_greedy for key in ours)
    worst = rows[0][0]
    agrees = all(difference < TOLERANCE for difference, _ in rows) and not unequal  # NaN is never below
    print(
        f"{'ok' if agrees else 'FAIL'}: {len(rows)} log likelihoods, largest difference {worst:.2e} "
        f"(accepted: below {TOLERANCE}), {unequal} differ in whether greedy decoding would say the same"
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
