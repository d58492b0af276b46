"""Perplexity of a model on a text: `scripts/eval/perplexity [MODEL] --text FILE [--window 512] [flags of LLM]`.

The text is tokenised without special tokens and cut into windows, each scored by itself; tokens that
do not fill a window at the end are left out. `--jsonl` reads rows of {"question", "answer"} and joins
them as "Question: …\nAnswer: …" with blank lines between. Needs the project's own environment (scripts/setup).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jaxllm.errors import JaxLLMError
from scripts.eval.windows import cut, joined_rows, score, together


def main() -> int:
    parser = argparse.ArgumentParser(description="perplexity of a model on a text", allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="folder, .gguf file, Hub id or alias; default: the default model")
    parser.add_argument("--text", type=Path, required=True, help="file to score, UTF-8")
    parser.add_argument("--jsonl", action="store_true", help="the file holds rows of question and answer")
    parser.add_argument("--window", type=int, default=512, help="tokens scored together; default 512")
    parser.add_argument("--max-windows", type=int, help="stop after so many; default: the whole text")
    parser.add_argument("--dtype", default="auto", help="of weights and activations")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        return run(args)
    except (JaxLLMError, OSError, ValueError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    from jaxllm import LLM

    text = joined_rows(args.text) if args.jsonl else args.text.read_text(encoding="utf-8")
    with LLM(model=args.model, dtype=args.dtype, max_model_len=args.window, generation_config="vllm") as llm:
        windows = cut(llm.tokenizer.encode(text, False), args.window, args.max_windows)
        scores = score(llm.generate, windows)
    total = together(scores)
    if args.json:
        found = {"nll": total.nll, "perplexity": total.perplexity, "num_tokens": total.num_tokens}
        print(json.dumps(found | {"windows": [each.nll for each in scores]}))
        return 0
    for index, each in enumerate(scores):
        print(f"window {index:4d}  nll/token {each.nll:.6f}  perplexity {each.perplexity:.4f}")
    print(f"{total.num_tokens} tokens  nll/token {total.nll:.6f}  perplexity {total.perplexity:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
