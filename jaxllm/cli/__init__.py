"""The command line. One module a command, imported when it is called: help and errors come quickly.

Exit codes: 0 done; 1 failed while running; 2 wrong usage, configuration or prompt; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import jaxllm
from jaxllm.errors import ConfigError, JaxLLMError, RequestError, UnsupportedModel

COMMANDS = {
    "serve": "OpenAI-compatible HTTP server",
    "run": "offline batch: prompts in, text or JSON lines out",
    "chat": "chat in the terminal, in process or against a server",
    "bench": "latency, throughput, load on a server, start-up, host cost",
    "simulate": "the scheduler on a modelled device: policies, fleets, what-ifs, without a model",
    "models": "architectures and formats that are supported",
    "collect-env": "what to say about this machine in a bug report",
}
_WRONG_USAGE = (ConfigError, RequestError, UnsupportedModel)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"jaxllm {jaxllm.__version__}")
        return 0
    if args[0] not in COMMANDS:
        return _fail(f"unknown command {args[0]!r}; accepted: {', '.join(COMMANDS)}", 2)
    return _run(args[0], args[1:])


def _run(command: str, args: list[str]) -> int:
    module = importlib.import_module(f"jaxllm.cli.{command.replace('-', '_')}")
    try:
        code = int(module.main(args))
        sys.stdout.flush()
    except JaxLLMError as error:
        return _fail(str(error), 2 if isinstance(error, _WRONG_USAGE) else 1)
    except MemoryError as error:
        return _fail(f"out of host memory ({error}); lower max_num_seqs, max_num_batched_tokens or num_pages", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:  # the flag parser's: help, or a message on stderr
        return stop.code if isinstance(stop.code, int) else 2
    return code


def _fail(message: str, code: int) -> int:
    print(f"jaxllm: {' '.join(message.split())}", file=sys.stderr)
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jaxllm COMMAND [MODEL] [flags]",
            "",
            *lines,
            "",
            "`jaxllm COMMAND --help` lists the flags. MODEL is a folder in Hugging Face format, a .gguf file,",
            "a Hub id or an alias; without it the default model, smollm2-135m, is used.",
        ]
    )
