"""What a model family provides, and the pure functions that a step is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxllm.config.model import ModelConfig
from jaxllm.layers.batch import BatchMetadata
from jaxllm.layers.linear import LayerMatrices, LayerStack, has_native_matmul
from jaxllm.memory.spec import FullKV, KVCacheSpec
from jaxllm.models.decoder import Runs
from jaxllm.models.registry import model_class
from jaxllm.weights.spec import TensorSpec

Leaves = tuple[jax.Array, ...]
# How the matrices of a run reach its layers: slices of a scanned stack; one leaf a layer, where a slice would be
# copied; or the whole stack and an index, for a kernel that takes them.
Matrices = Literal["scanned", "apart", "whole"]


class Model(Protocol):
    """A model family: a flax.nnx.Module that is only ever built abstractly, so it holds no memory.

    `runs` says how layers are stacked; `attention` names the kernel implementation, None for the
    platform's best.
    """

    def __init__(self, config: ModelConfig, runs: Runs, dtype: jnp.dtype, attention: str | None) -> None: ...

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raises UnsupportedModel for a config that this family cannot run."""
        ...

    @classmethod
    def tensors(cls, config: ModelConfig, runs: Runs) -> tuple[TensorSpec, ...]:
        """Every tensor of the checkpoint, and the piece of which parameter it becomes."""
        ...

    @classmethod
    def head_names(cls, config: ModelConfig) -> tuple[str, ...]:
        """Paths of the parameters that `logits` reads."""
        ...

    def __call__(self, batch: BatchMetadata, kv: Leaves) -> tuple[jax.Array, Leaves]: ...

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class SplitModel:
    """A model as pure functions over a flat tuple of arrays: jit dispatches few leaves quickly.

    Nothing here holds weights. `forward` and `logits` are to be traced, not called eagerly.
    """

    config: ModelConfig
    runs: Runs
    attention: str | None
    names: tuple[str, ...]  # path of each leaf, in the order of the leaves
    params: dict[str, jax.ShapeDtypeStruct]
    tensors: tuple[TensorSpec, ...]  # what the checkpoint must hold
    head_names: tuple[str, ...]  # the leaves that `logits` needs, in its order
    matrices: Matrices
    _paths: tuple[str, ...]  # of the module's parameters
    _apart: Mapping[str, int]  # of those, the ones that are a leaf a layer, and their number of layers
    _graphdef: Any
    _treedef: Any

    def forward(self, leaves: Leaves, kv: Leaves, batch: BatchMetadata) -> tuple[jax.Array, Leaves]:
        """One step over ragged token rows.

        Args:
            leaves: the weights, in the order of `names`.
            kv: the pages of each run, shaped as `kv_shapes` says; donate them.
            batch: T token rows.

        Returns:
            hidden [T, D] after the final norm, in the weights' dtype; and kv, updated.
        """
        return self._model(leaves)(batch, kv)

    def logits(self, head_leaves: Leaves, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """hidden [N, D] -> float32 [N, V]; `head_leaves` in the order of `head_names`.

        `num_rows` (int32 scalar; None: all): the rows that count, from the first on.
        """
        given = dict(zip(self.head_names, head_leaves, strict=True))
        return self._model([given.get(name, self.params[name]) for name in self.names]).logits(hidden, num_rows)

    def kv_specs(self, page_size: int, dtype: str) -> tuple[KVCacheSpec, ...]:
        """What each layer keeps per token."""
        specs = (layer.attention for layer in self.config.layers)
        return tuple(FullKV(page_size, spec.num_kv_heads, spec.head_dim, dtype) for spec in specs)

    def kv_shapes(self, num_pages: int, page_size: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The page array of each run, in the layout of the attention implementation."""
        return tuple(
            pallas_kernels.kv_cache_shape(
                num_layers,
                num_pages,
                page_size,
                spec.attention.num_kv_heads,
                spec.attention.head_dim,
                jnp.dtype(dtype),
                implementation=self.attention,
            )
            for spec, num_layers in self.runs
        )

    def _model(self, leaves: Sequence[Any]) -> Any:
        rest = iter(leaves)
        values = [self._value(path, rest) for path in self._paths]
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, values))

    def _value(self, path: str, rest: Iterator[Any]) -> Any:
        if path in self._apart:
            return LayerMatrices(tuple(itertools.islice(rest, self._apart[path])))
        leaf = next(rest)
        return LayerStack(leaf) if self.matrices == "whole" and _is_matrix(path, self.params[path]) else leaf


def split_model(
    config: ModelConfig, dtype: str, attention: str | None = None, *, matrices: Matrices | None = None
) -> SplitModel:
    """Build the family of `config` abstractly and split it once.

    Args:
        dtype: of weights and activations: "float32", "bfloat16" or "float16".
        attention: kernel implementation; None is the platform's best.
        matrices: see `Matrices`; None: what is fastest here. Where they are "apart" the leaves are
            named "{path}.{layer}".

    Raises:
        UnsupportedModel: no family runs this architecture, or the family lacks something it asks for.
    """
    family = model_class(config.architecture)
    family.check(config)
    runs = config.runs()
    model = nnx.eval_shape(lambda: family(config, runs, jnp.dtype(dtype), attention))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    paths = tuple(".".join(map(str, path)) for path, _ in nnx.to_flat_state(state))
    if matrices is None:
        matrices = _best_matrices(jnp.dtype(dtype))
    whole = dict(zip(paths, leaves, strict=True))
    apart = {path: a.shape[0] for path, a in whole.items() if matrices == "apart" and _is_stack(path, a)}
    params = dict(_parameters(whole, apart))
    return SplitModel(
        config=config,
        runs=runs,
        attention=attention,
        names=tuple(params),
        params=params,
        tensors=tuple(_retarget(spec, apart) for spec in family.tensors(config, runs)),
        head_names=family.head_names(config),
        matrices=matrices,
        _paths=paths,
        _apart=apart,
        _graphdef=graphdef,
        _treedef=treedef,
    )


def _best_matrices(dtype: jnp.dtype) -> Matrices:
    if jax.default_backend() != "cpu":
        return "scanned"
    return "whole" if has_native_matmul(dtype) else "apart"


def _is_stack(path: str, parameter: jax.ShapeDtypeStruct) -> bool:
    """Whether it holds a matrix of several layers; vectors are small enough to be sliced."""
    return _is_matrix(path, parameter) and parameter.shape[0] > 1


def _is_matrix(path: str, parameter: jax.ShapeDtypeStruct) -> bool:
    """Whether it holds the matrices of a run's layers, or of its only one."""
    return path.startswith("runs.") and parameter.ndim == 3


def _parameters(
    whole: Mapping[str, jax.ShapeDtypeStruct], apart: Mapping[str, int]
) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    for path, parameter in whole.items():
        if path not in apart:
            yield path, parameter
        for layer in range(apart.get(path, 0)):
            yield f"{path}.{layer}", jax.ShapeDtypeStruct(parameter.shape[1:], parameter.dtype)


def _retarget(spec: TensorSpec, apart: Mapping[str, int]) -> TensorSpec:
    return replace(spec, target=f"{spec.target}.{spec.layer}", layer=None) if spec.target in apart else spec
