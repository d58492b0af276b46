"""Models as numbers: how many weights a token meets, and what it leaves in the KV memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxllm.sim.cost_fields import Fields, described, names_of
from jaxllm.sim.devices import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture-of-experts MLPs, in all layers but the first `dense_layers`."""

    num: int
    active: int  # of them, those that a token goes through
    intermediate: int  # width of one
    shared: int = 0  # more of that width, that all tokens go through
    dense_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: `kv_lora_rank + rope_head_dim` numbers a token and layer are kept, for all heads."""

    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0  # 0: queries are not compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder. Biases are left out: no published total changes in its fourth digit."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the dense MLPs
    vocab: int
    gated: bool = True  # the MLP has three matrices, not two
    tied: bool = False  # the head is the embedding
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    experts: Experts | None = None
    latent: Latent | None = None

    # Counts of weights

    @property
    def attention_params(self) -> int:
        """Of one layer."""
        if self.latent is None:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        latent = self.latent
        query_dim = self.heads * (latent.nope_head_dim + latent.rope_head_dim)
        rank = latent.q_lora_rank
        queries = (self.hidden + query_dim) * rank if rank else self.hidden * query_dim
        compress = self.hidden * (latent.kv_lora_rank + latent.rope_head_dim)
        expand = latent.kv_lora_rank * self.heads * (latent.nope_head_dim + latent.v_head_dim)
        return queries + compress + expand + self.heads * latent.v_head_dim * self.hidden

    @property
    def expert_params(self) -> int:
        """Of one expert of one layer."""
        return 0 if self.experts is None else self._mlp_params(self.experts.intermediate)

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - self.experts.dense_layers

    @property
    def dense_params(self) -> int:
        """Of all layers, what each token goes through: all but the experts that are chosen among."""
        per_expert_layer = 0
        if self.experts is not None:
            per_expert_layer = self.experts.shared * self.expert_params + self.hidden * self.experts.num
        norms = 2 * self.hidden
        if self.latent is not None:
            norms += self.latent.kv_lora_rank + self.latent.q_lora_rank
        dense_layers = self.num_layers - self.expert_layers
        return (
            self.num_layers * (self.attention_params + norms)
            + dense_layers * self._mlp_params(self.intermediate)
            + self.expert_layers * per_expert_layer
        )

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def num_params(self) -> int:
        num_experts = 0 if self.experts is None else self.experts.num
        return self._params_with(num_experts)

    @property
    def active_params(self) -> int:
        """What one token goes through, embedding and head included."""
        num_active = 0 if self.experts is None else self.experts.active
        return self._params_with(num_active)

    @property
    def weight_bytes(self) -> float:
        return self.num_params * DTYPE_BYTES[self.weight_dtype]

    # What a token leaves, and passes through

    @property
    def kv_bytes_per_token(self) -> float:
        """On one device that holds all heads."""
        return self.num_layers * self._kv_numbers * DTYPE_BYTES[self.kv_dtype]

    def distinct_experts(self, num_tokens: float) -> float:
        """Experts of a layer that at least one of the tokens chooses: expected, if all are equally likely."""
        if self.experts is None:
            return 0.0
        missed = (1 - self.experts.active / self.experts.num) ** num_tokens
        return self.experts.num * (1 - missed)

    def pair_flops(self, *, is_decode: bool) -> float:
        """FLOPs of all layers for one (query, key) pair. With latent attention decodes work on the latents."""
        if self.latent is None:
            return 4.0 * self.num_layers * self.heads * self.head_dim
        latent = self.latent
        if is_decode:
            width = 2 * latent.kv_lora_rank + latent.rope_head_dim
        else:
            width = latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim
        return 2.0 * self.num_layers * self.heads * width

    def kv_shards(self, num_devices: int) -> int:
        """Into how many parts the KV memory of a token falls: latents are not split, heads are not cut."""
        return 1 if self.latent is not None else min(num_devices, self.kv_heads)

    @property
    def activation_numbers(self) -> tuple[int, int]:
        """That the linear layers read and write for a token: those of full width, those that devices share."""
        mlp_width = (self.num_layers - self.expert_layers) * self.intermediate
        if self.experts is not None:
            mlp_width += self.expert_layers * (self.experts.active + self.experts.shared) * self.experts.intermediate
        heads = self.num_layers * 2 * (self.heads + self.kv_heads) * self.head_dim
        return 4 * self.num_layers * self.hidden, heads + (3 if self.gated else 2) * mlp_width

    @property
    def _kv_numbers(self) -> int:
        if self.latent is not None:
            return self.latent.kv_lora_rank + self.latent.rope_head_dim
        return 2 * self.kv_heads * self.head_dim

    def _mlp_params(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    def _params_with(self, num_experts: int) -> int:
        embeddings = self.head_params * (1 if self.tied else 2)
        chosen = self.expert_layers * num_experts * self.expert_params
        return self.dense_params + chosen + embeddings + self.hidden  # and the last norm


def load_model(name: str, *, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """By name (`model_names`), or from a JSON file of the same fields; other types than described if they are given.

    Raises:
        ConfigError: there is none, or a field of it is wrong.
    """
    fields = described("models", name)
    num_layers = fields.integer("num_layers")
    model = ModelShape(
        name=fields.text("name"),
        num_layers=num_layers,
        hidden=fields.integer("hidden"),
        heads=fields.integer("heads"),
        kv_heads=fields.integer("kv_heads"),
        head_dim=fields.integer("head_dim"),
        intermediate=fields.integer("intermediate"),
        vocab=fields.integer("vocab"),
        gated=fields.flag("gated", default=True),
        tied=fields.flag("tied"),
        weight_dtype=fields.choice("weight_dtype", DTYPE_BYTES),
        kv_dtype=fields.choice("kv_dtype", DTYPE_BYTES),
        experts=_experts(fields, num_layers),
        latent=_latent(fields),
    )
    fields.texts("source")
    fields.done()
    changed = {"weight_dtype": weight_dtype or model.weight_dtype, "kv_dtype": kv_dtype or model.kv_dtype}
    return replace(model, **changed)


def model_names() -> tuple[str, ...]:
    return names_of("models")


def _experts(fields: Fields, num_layers: int) -> Experts | None:
    if "experts" not in fields:
        return None
    section = fields.section("experts")
    experts = Experts(
        num=section.integer("num"),
        active=section.integer("active"),
        intermediate=section.integer("intermediate"),
        shared=section.integer("shared", at_least=0, default=0),
        dense_layers=section.integer("dense_layers", at_least=0, default=0),
    )
    if experts.active > experts.num:
        raise section.error("active", experts.active, f"at most num={experts.num}")
    if experts.dense_layers >= num_layers:
        raise section.error("dense_layers", experts.dense_layers, f"less than num_layers={num_layers}")
    section.done()
    return experts


def _latent(fields: Fields) -> Latent | None:
    if "latent" not in fields:
        return None
    section = fields.section("latent")
    latent = Latent(
        kv_lora_rank=section.integer("kv_lora_rank"),
        nope_head_dim=section.integer("nope_head_dim"),
        rope_head_dim=section.integer("rope_head_dim"),
        v_head_dim=section.integer("v_head_dim"),
        q_lora_rank=section.integer("q_lora_rank", at_least=0, default=0),
    )
    section.done()
    return latent
