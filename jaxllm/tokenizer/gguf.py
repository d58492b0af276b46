"""The tokenizer inside a GGUF file's metadata (keys `tokenizer.ggml.*` of the GGUF specification)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jaxllm.errors import UnsupportedModel, WeightsError

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type; 1 is a normal token
_NORMAL = 1
_SPACE = "\u2581"  # sentencepiece's visible space

_GPT2_KIND = "gpt-2"
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is split before merges. Names that mean the same split share a kind.
_PRE_KINDS = {
    "gpt-2": _GPT2_KIND,
    "default": _GPT2_KIND,
    "smollm": "smollm",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
}


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id with their types. Of a token that stands twice, the last id wins."""

    tokens: Sequence[str]
    types: Sequence[int]

    def ids(self, *, but: frozenset[int] = frozenset()) -> dict[str, int]:
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: index for index, (token, kind) in enumerate(pairs) if kind not in but}


def build_backend(metadata: Mapping[str, Any]) -> BuiltTokenizer:
    """See `FastTokenizer.from_gguf`."""
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level_bpe(metadata)
    elif model == "llama":
        backend = _sentencepiece_bpe(metadata)
    else:
        raise UnsupportedModel(f"tokenizer.ggml.model={model!r} is not known here; accepted: 'gpt2', 'llama'")
    vocabulary = _vocabulary(metadata)
    _add_tokens(backend, vocabulary)
    bos_id, eos_id = (_token_id(metadata, vocabulary, name) for name in ("bos", "eos"))
    _set_post_processor(backend, metadata, vocabulary, bos_id, eos_id)
    return BuiltTokenizer(backend, bos_id, eos_id)


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _array(metadata, "tokens", str)
    types = _array(metadata, "token_type", int) if "tokenizer.ggml.token_type" in metadata else [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return _Vocabulary(tokens, types)


def _array(metadata: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    values = cast("list[Any]", list(value)) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if values is None or any(not isinstance(item, kind) for item in values):
        raise WeightsError(f"{key} is missing or not an array of {kind.__name__}")
    return values


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """GPT-2's kind: text is split by the rule named in `tokenizer.ggml.pre`, spelled in bytes, merged."""
    from tokenizers import Tokenizer, decoders, models

    kind = _pre_kind(metadata)
    ids = _vocabulary(metadata).ids(but=frozenset({_UNUSED}))
    merges = [_merge_pair(merge) for merge in _array(metadata, "merges", str)]
    try:
        # Llama 3 takes a piece that is itself a token whole, even where its merges would not reach it.
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=kind == "llama3")
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = Tokenizer(model)
    _set_split(backend, kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge_pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise WeightsError(f"tokenizer.ggml.merges: {merge!r} is not two tokens with a space between")
    return left, right


def _pre_kind(metadata: Mapping[str, Any]) -> str:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning(
            "THE GGUF FILE DOES NOT SAY HOW TO SPLIT TEXT (tokenizer.ggml.pre is missing): splitting as GPT-2 does. "
            "If the model was trained with another rule its answers will be worse; convert the model again."
        )
        return _GPT2_KIND
    kind = _PRE_KINDS.get(pre) if isinstance(pre, str) else None
    if kind is None:
        accepted = ", ".join(sorted(_PRE_KINDS))
        raise UnsupportedModel(f"tokenizer.ggml.pre={pre!r} is not known here; accepted: {accepted}")
    return kind


def _set_split(backend: tokenizers.Tokenizer, kind: str) -> None:
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if kind == _GPT2_KIND:
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    elif kind == "smollm":
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    else:
        pattern = Regex(_QWEN2_SPLIT if kind == "qwen2" else _LLAMA3_SPLIT)
        backend.pre_tokenizer = Sequence(
            [Split(pattern, behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: spaces are visible, unknown characters fall back to byte tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = _vocabulary(metadata)
    ids = vocabulary.ids()
    unknown = _token_id(metadata, vocabulary, "unknown")
    merges = _merges_from_scores(vocabulary, _array(metadata, "scores", float))
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merge rules in the order that sentencepiece applies them.

    Sentencepiece joins the adjacent pair whose union has the best score; so each token of the
    vocabulary gives one rule for every way to cut it into two tokens, best scores first.
    """
    if len(scores) != len(vocabulary.tokens):
        raise WeightsError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    ids = vocabulary.ids()
    rules: list[tuple[float, int, int, int, str, str]] = []
    for token, index in ids.items():
        if vocabulary.types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                rules.append((-scores[index], index, ids[left], ids[right], left, right))
    rules.sort()
    return [(left, right) for *_, left, right in rules]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Mark the tokens that text is searched for before it is split; control tokens are special."""
    from tokenizers import AddedToken

    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in {_CONTROL, _UNKNOWN}:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
        else:
            continue
        if backend.token_to_id(token) != index:
            raise WeightsError(f"tokenizer.ggml.tokens: {token!r} stands twice, at {index} too")


def _token_id(metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(vocabulary.tokens):
        raise WeightsError(
            f"tokenizer.ggml.{name}_token_id={value!r} is outside the vocabulary of {len(vocabulary.tokens)}"
        )
    return value


def _set_post_processor(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    vocabulary: _Vocabulary,
    bos_id: int | None,
    eos_id: int | None,
) -> None:
    from tokenizers import processors

    # Files of these kinds leave the flag out and mean yes (llama.cpp's defaults).
    is_llama = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or _PRE_KINDS.get(str(metadata.get("tokenizer.ggml.pre"))) == "llama3"
    )
    before = bos_id if metadata.get("tokenizer.ggml.add_bos_token", is_llama) else None
    after = eos_id if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    special = {vocabulary.tokens[i]: i for i in (before, after) if i is not None}
    if not special:
        return
    single = ["$A"]
    if before is not None:
        single.insert(0, vocabulary.tokens[before])
    if after is not None:
        single.append(vocabulary.tokens[after])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(special.items()))
