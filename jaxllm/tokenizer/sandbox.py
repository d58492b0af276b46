"""A jinja2 environment for templates that are not trusted: no Python internals, bounded work.

Jinja's own sandbox stops a template from reaching Python internals or changing what it is given;
it does not stop it from working for ever. Work is bounded here:

- the parsed template is rewritten so that each turn of a loop looks at the clock, and so does
  each call, filter and arithmetic operator;
- what operators, calls and filters make is bounded in size, before it is made where the result
  can be far larger than what goes in, so that one step between two looks at the clock is short.

A render that passes a bound is cut with `TemplateCut`, in the caller's thread.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import CodeType
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 16 * 2**20  # characters of a prompt, or of any string made on the way
MAX_ITEMS = 200_000  # of a list, of a range, of the parts of one value written as text
_MAX_COUNT = 100_000  # a width, an indent, a number of repeats
_MAX_BITS = 4096  # of an integer
_SHORT = 4096  # characters
_MAX_CODE = 400_000  # characters of Python made of a template: Python compiles it while no other thread runs

_WIDE_FIELD = re.compile(r"[%:][^a-zA-Z%\s{}]*\d{6,}")  # a field width in a format string
_STARRED_FIELD = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a field width taken from an argument
_COUNTING_FILTERS = frozenset(["batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"])
_TEXT_FILTERS = {"capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "pprint", "replace"} | {
    *("string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap"),
    "xmlattr",
}


class TemplateCut(TemplateError):
    """The template did more work than a chat prompt can need."""


class TemplateRaised(TemplateError):
    """The template called raise_exception: its own words for what is wrong with the messages."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds, and with the names that Hugging Face chat templates rely on.

    `start` sets the deadline of the render that the calling thread does next.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension])
        self._clock = threading.local()
        self.finalize = self._printable
        del self.globals["lipsum"]
        self.globals.update(range=self._range, raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}

    def start(self, limit_s: float) -> None:
        self._clock.deadline = time.monotonic() + limit_s

    def check(self) -> None:
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise TemplateCut("the chat template ran for too long")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Doubly underscored, as in jinja: a macro may have an argument of any plain name.
        __self.check()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            args = __self._bounded_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        elif isinstance(__obj, LoopContext) and args:
            args = (_Turns(args[0], __self.check), *args[1:])  # a recursive loop goes down
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str and len(left) + len(right) <= _SHORT:
            return left + right  # most of what templates do, and too little to look at the clock for
        self.check()
        if operator == "+":
            left, right = _addends(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        return _sized(super().call_binop(context, operator, left, right))

    def bounded_text(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of a render, while they are within the bounds."""
        length = 0
        for piece in pieces:
            self.check()
            length += len(piece)
            _check_length(length)
            yield piece

    def turns(self, iterable: Any) -> Any:
        """What a loop walks over (the rewritten template calls this)."""
        return _Turns(iterable, self.check)

    def join_texts(self, *parts: Any) -> str:
        """The `~` operator (the rewritten template calls this)."""
        texts = [str(self._printable(part)) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = Parser(self, source, name, filename).parse()
        for loop in list(template.find_all(nodes.For)):
            loop.iter = _own_call("turns", loop.iter)
        _replace_concat(template)
        return template

    def _compile(self, source: str, filename: str) -> CodeType:
        if len(source) > _MAX_CODE:
            raise TemplateCut("the chat template has too many expressions")
        return super()._compile(source, filename)

    def _bounded_method(
        self, owner: str | bytes | int, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Check a call of a method of a string or a number; return the arguments to call it with."""
        if name == "join" and args and isinstance(owner, str):
            args = (_joinable(owner, args[0]),)
        elif name in {"format", "format_map"} and isinstance(owner, str):
            self._check_format(owner, (*args, *kwargs.values()))
            return args
        elif name == "replace" and len(args) > 1 and isinstance(owner, str):
            _check_replace(owner, *args[:2])
        elif name == "expandtabs" and isinstance(owner, str):
            _check_length(owner.count("\t") * int(args[0] if args else kwargs.get("tabsize", 8)))
        elif name == "translate" or isinstance(owner, bytes):
            raise TemplateCut(f"chat templates may not call {type(owner).__name__}.{name}")
        _check_counts((*args, *kwargs.values()))
        return args

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the value comes after the environment

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.check()
            values = self._check_filter(name, list(args[first:]), kwargs)
            return _sized(function(*args[:first], *values, **kwargs))

        return bounded

    def _check_filter(self, name: str, values: list[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Check a filter's value and arguments; return those to call it with."""
        if name in _TEXT_FILTERS:
            values[0] = self._printable(values[0])
        if name in _COUNTING_FILTERS:
            _check_counts((*values[1:], *kwargs.values()))
        if name == "join":
            values[0] = list(values[0])
            separator = values[1] if len(values) > 1 else kwargs.get("d", "")
            _joinable(str(separator), [str(self._printable(item)) for item in values[0]])
        elif name == "replace" and len(values) > 2:
            _check_replace(str(values[0]), str(values[1]), str(values[2]))
        elif name == "format":
            self._check_format(str(values[0]), (*values[1:], *kwargs.values()))
        elif name == "sum":
            values[0] = list(values[0])
            _check_items(sum(len(item) for item in values[0] if isinstance(item, (str, list, tuple))))
        return values

    def _check_format(self, template: str, values: Sequence[Any]) -> None:
        if _WIDE_FIELD.search(template):
            raise TemplateCut("the chat template formats a field that is too wide")
        if _STARRED_FIELD.search(template):
            _check_counts(values)
        for value in values:
            self._measure(value)

    def _measure(self, value: Any) -> None:
        """Refuse to write as text a nested value with too many parts; shared parts count each time."""
        pending: list[Any] = [value]
        parts = length = 0
        while pending:
            self.check()
            item = pending.pop()
            parts += 1
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, Mapping):
                pending.extend(cast("Mapping[Any, Any]", item).keys())
                pending.extend(cast("Mapping[Any, Any]", item).values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                pending.extend(cast("Sequence[Any]", item))
            _check_items(parts + len(pending))
            _check_length(length)

    def _printable(self, value: Any) -> Any:
        """What is shown for a value: nothing for null, so that no prompt says "None"."""
        if type(value) is str:
            return value
        if value is None:
            return ""
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            self._measure(value)
        return cast("Any", value)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        _check_items(len(numbers))
        return numbers

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it is; jinja's own filter escapes it for HTML."""
        self._measure(value)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Turns:
    """An iterable that looks at the clock on each turn. Has a length where the original has one."""

    def __init__(self, iterable: Any, check: Callable[[], None]) -> None:
        self._iterable = iterable
        self._check = check

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._check()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


class _GenerationExtension(Extension):
    """`{% generation %}` marks what a model wrote, for training; a prompt is the same without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _own_call(method: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _replace_concat(node: nodes.Node) -> None:
    """Put a bounded call in place of each `~` below `node`."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_without_concat(item) for item in cast("list[Any]", value)])
        else:
            setattr(node, name, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concat(value)
    return _own_call("join_texts", *value.nodes) if isinstance(value, nodes.Concat) else value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _sized(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        _check_length(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _check_items(len(cast("list[Any]", value)))
    return cast("Any", value)


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise TemplateCut(f"the chat template makes a text of more than {MAX_TEXT} characters")


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateCut(f"the chat template makes a value of more than {MAX_ITEMS} items")


def _check_counts(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_COUNT:
            raise TemplateCut(f"the chat template asks for a width or count of {value}; at most {_MAX_COUNT}")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateCut("the chat template makes a number that is too large")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes)) and isinstance(times, int):
            _check_length(len(sequence) * times)
        elif isinstance(sequence, (list, tuple)) and isinstance(times, int):
            _check_items(len(cast("list[Any]", sequence)) * times)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
        raise TemplateCut("the chat template makes a number that is too large")


def _check_replace(text: str, old: str, new: str) -> None:
    _check_length(len(text) + text.count(old) * len(new))


def _joinable(separator: str, items: Any) -> list[Any]:
    """The items to join, as a list (they may come from a generator), if the result is not too long."""
    listed = list(items)
    _check_items(len(listed))
    _check_length(sum(len(item) + len(separator) for item in listed if isinstance(item, str)))
    return listed


def _addends(left: Any, right: Any) -> tuple[Any, Any]:
    """Operands of `+`. Beside a text, null is no text and an object is its JSON.

    Templates add `message.content` and `tool_call.arguments` to texts; which of them are null or
    an object depends on the client.
    """
    if isinstance(left, str):
        return left, _as_addend(right)
    if isinstance(right, str):
        return _as_addend(left), right
    return left, right


def _as_addend(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
