"""`jaxllm serve`: the HTTP server."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from jaxllm.cli.flags import Flag, parse, schema_flags
from jaxllm.cli.report import print_summary, printing_report, progress_bars
from jaxllm.config.engine import EngineArgs, ServerConfig
from jaxllm.config.env import read_environment

if TYPE_CHECKING:
    from jaxllm.server.run import Served

_SHARED = ("served_model_names", "chat_template")  # EngineArgs has them, in the singular


def main(argv: list[str]) -> int:
    flags = [
        Flag("model", "text", "folder, .gguf file, Hub id or alias; default smollm2-135m", positional=True),
        *schema_flags(ServerConfig, leave_out=_SHARED),
        *schema_flags(EngineArgs, leave_out=("model",)),
    ]
    values = parse("serve", __doc__ or "", flags, argv, schemas=(EngineArgs, ServerConfig))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args = EngineArgs(**{f.name: values[f.name] for f in fields(EngineArgs)})
    return _serve(args, _server_config(values, args))


def _server_config(values: dict[str, Any], args: EngineArgs) -> ServerConfig:
    from jaxllm.build import model_name

    own = {f.name: values[f.name] for f in fields(ServerConfig) if f.name not in _SHARED}
    own["api_keys"] = (*own["api_keys"], *read_environment().api_keys)
    return ServerConfig(
        **own, served_model_names=args.served_model_name or (model_name(args),), chat_template=args.chat_template
    )


def _serve(args: EngineArgs, config: ServerConfig) -> int:
    from jaxllm.server.run import serve

    return serve(lambda: _load(args, config), config)


def _load(args: EngineArgs, config: ServerConfig) -> Served:
    from jaxllm.build import build_chat_template, build_parts
    from jaxllm.engine.async_engine import AsyncEngine
    from jaxllm.server.run import Served

    report = printing_report()
    with report.phase("chat template"):
        template = build_chat_template(args)
    with progress_bars() as progress:
        parts = build_parts(args, report, progress=progress)
    print_summary(report)
    prefix = config.metrics_prefix.removesuffix(":") + ":"
    return Served(AsyncEngine(replace(parts, metrics_prefix=prefix)), template)
