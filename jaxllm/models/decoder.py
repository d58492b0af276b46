"""The decoder that families share: embed, runs of layers, norm, logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxllm.config.model import LayerSpec, ModelConfig, RopeSpec
from jaxllm.layers.attention import Attention
from jaxllm.layers.batch import BatchMetadata
from jaxllm.layers.embed import Embed
from jaxllm.layers.linear import LayerMatrices, LayerStack
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import RopeTable, rope_table

Runs = tuple[tuple[LayerSpec, int], ...]  # (spec, number of consecutive layers), in order
RopeKey = tuple[RopeSpec, int]  # and head_dim
Carry = tuple[jax.Array, jax.Array]  # hidden [T, D] and the pages of a run


class Step(NamedTuple):
    """What all layers of a forward share."""

    batch: BatchMetadata
    ropes: dict[RopeKey, RopeTable]

    @classmethod
    def of(cls, batch: BatchMetadata, runs: Runs) -> Step:
        keys = {key for spec, _ in runs if (key := rope_key(spec)) is not None}
        return cls(batch, {key: rope_table(batch.positions, *key) for key in keys})

    def rope(self, spec: LayerSpec) -> RopeTable | None:
        key = rope_key(spec)
        return None if key is None else self.ropes[key]


def rope_key(spec: LayerSpec) -> RopeKey | None:
    rope = spec.attention.rope
    return None if rope is None else (rope, spec.attention.head_dim)


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: h + attention(norm(h)), then h + mlp(norm(h))."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, dtype: jnp.dtype, attention: str | None) -> None:
        size = config.hidden_size
        self.attention_norm = RMSNorm(size, config.norm_eps, dtype)
        self.attention = Attention(spec.attention, size, dtype, attention)
        self.mlp_norm = RMSNorm(size, config.norm_eps, dtype)
        self.mlp = GatedMLP(spec.mlp, size, dtype)
        self.spec = spec

    def __call__(self, hidden: jax.Array, kv: jax.Array, layer: jax.Array, step: Step) -> Carry:
        """hidden [T, D], the run's pages and this layer's index in them -> the same, updated."""
        attended, kv = self.attention(self.attention_norm(hidden), kv, layer, step.batch, step.rope(self.spec))
        hidden = hidden + attended.astype(hidden.dtype)
        hidden = hidden + self.mlp(self.mlp_norm(hidden), step.batch.num_tokens).astype(hidden.dtype)
        return hidden, kv


def stacked(make_layer: Callable[[], nnx.Module], num_layers: int) -> nnx.Module:
    """A layer module whose every parameter has `num_layers` as an added leading axis."""
    graphdef, state = nnx.split(make_layer())
    return nnx.merge(graphdef, jax.tree.map(lambda a: jnp.zeros((num_layers, *a.shape), a.dtype), state))


def run_layers(run: nnx.Module, num_layers: int, hidden: jax.Array, kv: jax.Array, step: Step) -> Carry:
    """Pass hidden [T, D] through the layers stacked in `run`.

    The pages travel in the carry, where they are updated in place; as scan inputs and outputs they
    would be copied. A run of one is a plain call, whose weights are read without a slice.
    """
    graphdef, state = nnx.split(run)
    leaves, treedef = jax.tree.flatten(state)
    apart = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, LayerMatrices | LayerStack)}
    stacked_leaves = [leaf for i, leaf in enumerate(leaves) if i not in apart]

    def layer_at(carry: Carry, at: tuple[list[jax.Array], jax.Array]) -> tuple[Carry, None]:
        own, index = at
        own_leaves = iter(own)
        merged = [apart[i].at(index) if i in apart else next(own_leaves) for i in range(len(leaves))]
        layer: Any = nnx.merge(graphdef, jax.tree.unflatten(treedef, merged))
        return layer(*carry, index, step), None

    if num_layers == 1:
        return layer_at((hidden, kv), ([leaf[0] for leaf in stacked_leaves], jnp.int32(0)))[0]
    return lax.scan(layer_at, (hidden, kv), (stacked_leaves, jnp.arange(num_layers, dtype=jnp.int32)))[0]


class Decoder(nnx.Module):
    """A causal language model. Families with other layers set `layer_type`.

    Parameters: embed.weight [V, D], runs.{i}.… stacked over the layers of run i, norm.weight [D],
    lm_head.weight [V, D] unless the embeddings are tied. `attention` names the kernel implementation.
    """

    layer_type: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, runs: Runs, dtype: jnp.dtype, attention: str | None) -> None:
        self.embed = Embed(config.vocab_size, config.hidden_size, dtype)
        self.runs = nnx.List(
            [stacked(lambda spec=spec: self.layer_type(config, spec, dtype, attention), n) for spec, n in runs]
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.lm_head = None if config.tied_embeddings else Embed(config.vocab_size, config.hidden_size, dtype)
        self.layer_runs = runs

    def __call__(self, batch: BatchMetadata, kv: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One step; `kv` has the pages of each run -> (hidden [T, D] after the final norm, kv)."""
        hidden = self.embed(batch.token_ids)
        step = Step.of(batch, self.layer_runs)
        pages: list[jax.Array] = []
        for run, (_, num_layers), run_kv in zip(self.runs, self.layer_runs, kv, strict=True):
            hidden, updated = run_layers(run, num_layers, hidden, run_kv, step)
            pages.append(updated)
        return self.norm(hidden), tuple(pages)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """hidden [N, D] -> [N, V] float32; `num_rows` (int32 scalar; None: all): the rows that count."""
        return (self.embed if self.lm_head is None else self.lm_head).logits(hidden, num_rows)
