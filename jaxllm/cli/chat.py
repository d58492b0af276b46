"""`jaxllm chat`: talk in the terminal. Ctrl-C stops a reply; /clear forgets; /exit or Ctrl-D leaves."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from jaxllm.cli.flags import Flag, given_sampling, parse, sampling_flags, schema_flags
from jaxllm.cli.report import print_summary, printing_report, progress_bars
from jaxllm.config.engine import EngineArgs
from jaxllm.errors import ConfigError, JaxLLMError, RequestError, shown
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind

Messages = list[dict[str, str]]
Show = Callable[[str], None]

_OWN_FLAGS = [
    Flag("model", "text", "folder, .gguf file, Hub id or alias; default smollm2-135m", positional=True),
    Flag("url", "text", "talk to the OpenAI-compatible server at this address instead of a model in process"),
    Flag("api_key", "text", "key for --url"),
    Flag("system", "text", "system message at the start of the conversation"),
]
_LONGEST = "default: as long as fits"
_TIMEOUT_S = 600.0  # of one read from the server


class Speaker(Protocol):
    """Whoever answers."""

    def reply(self, messages: Messages, show: Show) -> None:
        """Answer a conversation, piece by piece. KeyboardInterrupt in the middle leaves it usable."""
        ...


def main(argv: list[str]) -> int:
    engine = schema_flags(EngineArgs, leave_out=("model", "seed"))
    sampling_own = [replace(f, help=_LONGEST) if f.name == "max_tokens" else f for f in sampling_flags()]
    values = parse("chat", __doc__ or "", [*_OWN_FLAGS, *sampling_own, *engine], argv, schemas=(EngineArgs,))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # half a character is no reason to stop
    sampling = given_sampling(values)
    start: Messages = [{"role": "system", "content": values["system"]}] if values["system"] else []
    with _speaker(values, sampling) as speaker:
        talk(speaker, start)
    return 0


def talk(speaker: Speaker, start: Messages) -> None:
    """Read lines and answer them until /exit or the end of the input."""
    messages = list(start)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt: clear the line, as shells do
            print()
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(start)
        elif line:
            messages = _turn(speaker, messages, line)


def _turn(speaker: Speaker, messages: Messages, line: str) -> Messages:
    """The conversation after one more turn; unchanged where the turn failed."""
    asked = [*messages, {"role": "user", "content": line}]
    said: list[str] = []

    def show(piece: str) -> None:
        said.append(piece)
        print(piece, end="", flush=True)

    try:
        speaker.reply(asked, show)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(f"jaxllm: {error}", file=sys.stderr)
        return messages
    print()
    return [*asked, {"role": "assistant", "content": "".join(said)}]


@contextlib.contextmanager
def _speaker(values: dict[str, Any], sampling: dict[str, Any]) -> Generator[Speaker]:
    if values["url"] is not None:
        yield RemoteSpeaker(values["url"], values["model"], values["api_key"], sampling)
        return
    from jaxllm.llm import LLM

    flags = {f.name: values[f.name] for f in fields(EngineArgs) if f.name != "seed"}
    report = printing_report()
    with progress_bars() as progress:
        llm = LLM(report=report, progress=progress, **flags)
    print_summary(report)
    with llm:
        yield LocalSpeaker(llm, sampling)


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, llm: Any, sampling: dict[str, Any]) -> None:
        # A reply may be as long as fits, unless the user says otherwise.
        self._params = llm.default_sampling_params(**{"max_tokens": None, **sampling, "output_kind": OutputKind.DELTA})
        self._llm = llm

    def reply(self, messages: Messages, show: Show) -> None:
        def on_update(output: RequestOutput) -> None:
            if output.outputs[0].text:
                show(output.outputs[0].text)

        self._llm.chat(messages, self._params, on_update=on_update)


class RemoteSpeaker:
    """An OpenAI-compatible server: POST {url}/v1/chat/completions, streamed."""

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        self._url = parts = _address(url)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("--api-key holds a character that no key has; accepted: printable ASCII")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = sampling
        self._model = model or self._first_model()

    def reply(self, messages: Messages, show: Show) -> None:
        body = {**self._sampling, "model": self._model, "messages": messages, "stream": True}
        with self._send("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for event in _events(response):
                if "error" in event:
                    raise RequestError(f"the server says: {_error_text(event)}")
                piece = _content(event)
                if piece:
                    show(piece)

    def _first_model(self) -> str:
        with self._send("GET", "/v1/models") as response:
            body = response.read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerUnreachable(
                f"--url {self._url.geturl()}: /v1/models answers {shown(body)}; accepted: OpenAI's list of models"
            ) from None

    @contextlib.contextmanager
    def _send(self, method: str, path: str, body: str | None = None) -> Generator[http.client.HTTPResponse]:
        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError(f"the server answers {response.status}: {_refusal(response.read())}")
            yield response
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ServerUnreachable(f"--url {self._url.geturl()}: {error}") from error
        finally:
            connection.close()


def _address(url: str) -> SplitResult:
    wrong = ConfigError(f"--url {url!r} is no address; accepted: http://HOST:PORT")
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        _ = parts.port  # refuses what is no port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    return parts


class ServerUnreachable(JaxLLMError):
    """The server of --url does not answer (exit code 1)."""


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    for line in response:
        data = line.strip()
        if not data.startswith(b"data:"):
            continue
        payload = data.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            return
        try:
            event: Any = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise RequestError(f"the server sent {shown(payload)}; accepted: JSON objects")
        yield cast("dict[str, Any]", event)


def _content(event: dict[str, Any]) -> str:
    """The text in one chunk of a reply; empty where it holds none."""
    try:
        pieces = [(choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()]
        return "".join(piece for piece in pieces if piece)
    except (AttributeError, TypeError):
        raise RequestError(f"the server sent {shown(event)}; accepted: chunks as OpenAI's") from None


def _refusal(body: bytes) -> str:
    try:
        return _error_text(json.loads(body))
    except ValueError:
        return body[:200].decode(errors="replace")


def _error_text(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)


__all__: Sequence[str] = ["LocalSpeaker", "RemoteSpeaker", "Speaker", "main", "talk"]
