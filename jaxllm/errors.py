"""Every error that jaxllm raises on purpose.

    JaxLLMError
    ├── ConfigError        a flag, a config file or an environment variable is wrong
    ├── UnsupportedModel   the checkpoint is sound, but no family here runs it
    ├── WeightsError       a checkpoint file is broken, or lacks or adds a tensor
    ├── RequestError       one request is wrong; the engine is unharmed
    ├── CapacityError      sound, but more than this engine can hold now
    └── EngineDead         the device loop stopped; only a restart helps

A message names the field, the value that was given and what would be accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

_MAX_SHOWN = 120  # characters of a user's value in a message


def shown(value: object) -> str:
    """A user's value for a message: `repr`, cut to a length that fits a line."""
    try:
        text = ""
        for piece in _pieces(value):
            text += piece
            if len(text) > _MAX_SHOWN:
                break
    except (RecursionError, ValueError):  # nested too deep, or an integer of thousands of digits
        text = f"(a value of type {type(value).__name__}, too large to show)"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _pieces(value: object) -> Iterator[str]:
    """`repr` in parts, each made when it is needed: aliases make a value of a small file too large to be written."""
    if isinstance(value, dict):
        yield "{"
        for place, (key, item) in enumerate(cast("dict[Any, Any]", value).items()):
            yield ", " if place else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif type(value) is list:
        yield "["
        for place, item in enumerate(cast("list[Any]", value)):
            yield ", " if place else ""
            yield from _pieces(item)
        yield "]"
    else:
        yield repr(value)


class JaxLLMError(Exception):
    """Root of the tree. Its text is safe to show to a user."""


class ConfigError(JaxLLMError):
    """A flag, a configuration file or an environment variable is wrong (exit code 2)."""


class UnsupportedModel(JaxLLMError):
    """No model family here runs this checkpoint."""


class WeightsError(JaxLLMError):
    """A checkpoint file is broken, hostile, or does not hold the tensors the model needs."""


class RequestError(JaxLLMError):
    """One request is wrong (HTTP 400, or 404 for `code="model_not_found"`).

    `param` is the offending field as the user spelled it; `code` is OpenAI's error code.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CapacityError(JaxLLMError):
    """Sound, but more than this engine can hold now (HTTP 503, or exit code 1 at start-up)."""


class EngineDead(JaxLLMError):
    """The device loop stopped, froze or died (HTTP 503); only a restart helps."""
