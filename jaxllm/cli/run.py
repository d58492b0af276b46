"""`jaxllm run`: an offline batch. Prompts from --prompt or --prompts, text or JSON lines out.

A wrong prompt (empty, too long, ids outside the vocabulary, a bad sampling field) is wrong usage:
exit code 2, the message says which one, and nothing is run.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli.flags import Flag, given_sampling, parse, sampling_flags, schema_flags
from jaxllm.cli.prompts import Job, jobs_from_file, jobs_from_flags, params_of
from jaxllm.cli.report import print_summary, printing_report, progress_bars
from jaxllm.cli.results import json_line
from jaxllm.config.engine import EngineArgs
from jaxllm.errors import ConfigError, RequestError, shown
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.inputs import TokensPrompt
    from jaxllm.llm import LLM

_OWN_FLAGS = [
    Flag("model", "text", "folder, .gguf file, Hub id or alias; default smollm2-135m", positional=True),
    Flag("prompt", "texts", "text to complete; may be repeated", (), repeats=True),
    Flag("prompts", "text", "file of JSON lines: prompt, messages or prompt_token_ids, sampling fields beside it"),
    Flag("json", "switch", "one JSON object a prompt, in order, on stdout", False),
    Flag("verbose", "switch", "say what start-up does", False, ("v",)),
]


def main(argv: list[str]) -> int:
    engine = schema_flags(EngineArgs, leave_out=("model", "seed"))
    values = parse("run", __doc__ or "", [*_OWN_FLAGS, *sampling_flags(), *engine], argv, schemas=(EngineArgs,))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    given = given_sampling(values)
    jobs = _jobs(values)
    for job in jobs:
        params_of(job, given)  # a wrong field should not cost a start-up
    seed = min(abs(given["seed"]), 2**63 - 1) if isinstance(given.get("seed"), int) else 0
    engine_values: dict[str, Any] = {f.name: values[f.name] for f in fields(EngineArgs)}
    args = EngineArgs(**{**engine_values, "seed": seed})
    outputs = _run(args, jobs, given, verbose=values["verbose"])
    if values["json"]:
        for output, params in outputs:
            sys.stdout.write(json.dumps(json_line(output, params), ensure_ascii=False) + "\n")
    else:
        _print_texts([output for output, _ in outputs])
    return 0


def _jobs(values: dict[str, Any]) -> list[Job]:
    jobs = jobs_from_flags(values["prompt"])
    if values["prompts"] is not None:
        jobs += jobs_from_file(Path(values["prompts"]).expanduser())
    if not jobs:
        accepted = "give --prompt TEXT (repeatable) or --prompts FILE.jsonl"
        model = values["model"]
        taken = "" if model is None else f"; {shown(model)} was taken as the model"
        raise ConfigError(f"no prompts{taken}; {accepted}")
    return jobs


def _run(
    args: EngineArgs, jobs: Sequence[Job], given: dict[str, Any], *, verbose: bool
) -> list[tuple[RequestOutput, SamplingParams]]:
    from jaxllm.llm import LLM

    report = printing_report() if verbose else None
    flags = {f.name: getattr(args, f.name) for f in fields(EngineArgs)}
    with progress_bars() as progress, LLM(report=report, progress=progress, **flags) as llm:
        if report is not None:
            print_summary(report)
        defaults = llm.default_sampling_params()
        own = {f.name: getattr(defaults, f.name) for f in fields(SamplingParams)}
        params = [replace(params_of(job, own, given), output_kind=OutputKind.DELTA) for job in jobs]
        prompts = [_prompt(llm, job, each) for job, each in zip(jobs, params, strict=True)]
        num_finished = 0

        def watch(output: RequestOutput) -> None:
            nonlocal num_finished
            num_finished += output.finished
            progress("prompts", num_finished, len(jobs))

        outputs = llm.generate(prompts, params, on_update=watch)
        return list(zip(outputs, params, strict=True))


def _prompt(llm: LLM, job: Job, params: SamplingParams) -> TokensPrompt:
    from jaxllm.engine.inputs import TextPrompt, TokensPrompt

    try:
        if job.kind == "messages":
            return llm.prepare(llm.render(job.content), params)
        return llm.prepare(TextPrompt(job.content) if job.kind == "prompt" else TokensPrompt(job.content), params)
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}", param=error.param) from None


def _print_texts(outputs: Sequence[RequestOutput]) -> None:
    """One text as it is; of several each under the number of its prompt and, with n > 1, of the sequence."""
    is_alone = len(outputs) == 1 and len(outputs[0].outputs) == 1
    for index, output in enumerate(outputs):
        for completion in output.outputs:
            if not is_alone:
                print(f"=== {index}" if len(output.outputs) == 1 else f"=== {index}.{completion.index}")
            print(completion.text)
