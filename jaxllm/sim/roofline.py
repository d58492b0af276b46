"""Step times from first principles: each part of a step takes as long as its arithmetic or its memory traffic.

Left out, so that a real device is slower: padding to compiled shapes, imbalance between experts, and
attention that reads a long prompt's keys more than once. Left out, so that it is faster: collectives
and copies that overlap with arithmetic. `scripts/calibrate_cost.py` measures where that matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.errors import ConfigError
from jaxllm.sim.cost import StepShape, shape_of
from jaxllm.sim.devices import DTYPE_BYTES, Device
from jaxllm.sim.models import ModelShape
from jaxllm.types.step import SchedulerOutput

_ACTIVATION_BYTES = 2.0  # of a number between layers, whatever type the weights have


class PartSeconds(NamedTuple):
    """Where the time of a step goes."""

    linear: float  # all layers' matrices, experts included
    attention: float
    head: float
    collectives: float
    launch: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.collectives + self.launch


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds a unit of work, on one of the devices; flops and bytes of a part overlap."""

    linear_flops: float  # a token
    weights: float  # once a step
    expert: float  # an expert of every layer
    activations: float  # a token
    decode_pair: float
    prefill_pair: float
    kv: float  # a token read or written
    head_flops: float  # a sampled row
    head_weights: float
    logits: float  # a sampled row


@dataclass(frozen=True, slots=True)
class Roofline:
    """A `CostModel`: `model` on `tensor_parallel` devices, which split every matrix and every head."""

    device: Device
    model: ModelShape
    tensor_parallel: int = 1
    _costs: _Costs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: `tensor_parallel` is more than the interconnect joins, or splits heads unevenly.
        """
        num, device, model = self.tensor_parallel, self.device, self.model
        if not 1 <= num <= device.num_devices or model.heads % num:
            fit = [n for n in range(1, device.num_devices + 1) if model.heads % n == 0]
            raise ConfigError(
                f"tensor_parallel={num} on {device.name} with the {model.heads} heads of {model.name}; "
                f"accepted: {', '.join(map(str, fit))}"
            )
        object.__setattr__(self, "_costs", _costs(device, model, num))

    def step_seconds(self, plan: SchedulerOutput) -> float:
        return self.parts(shape_of(plan)).total

    def seconds(self, shape: StepShape) -> float:
        return self.parts(shape).total

    def parts(self, shape: StepShape) -> PartSeconds:
        costs, model, device = self._costs, self.model, self.device
        tokens, samples = shape.tokens, shape.samples
        reads = costs.weights + costs.activations * tokens
        if model.experts is not None:
            reads += costs.expert * model.distinct_experts(tokens)
        pairs = costs.decode_pair * shape.decode_context + costs.prefill_pair * shape.prefill_pairs
        head = max(costs.head_flops * samples, costs.head_weights + costs.logits * samples) if samples else 0.0
        reduced = tokens * model.hidden * _ACTIVATION_BYTES
        return PartSeconds(
            linear=max(costs.linear_flops * tokens, reads),
            attention=max(pairs, costs.kv * (shape.context + tokens)),
            head=head,
            collectives=2 * model.num_layers * device.all_reduce_s(reduced, self.tensor_parallel),
            launch=device.launch_s,
        )

    def kv_capacity_tokens(self, *, memory_utilization: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights, in that share of the memory; 0: not even the weights."""
        num = self.tensor_parallel
        left = self.device.memory_bytes * memory_utilization - self.model.weight_bytes / num
        return max(0, int(left * self.model.kv_shards(num) / self.model.kv_bytes_per_token))


def _costs(device: Device, model: ModelShape, num: int) -> _Costs:
    flop_s = 1 / device.flops_per_s(model.weight_dtype) / num
    attention_flop_s = 1 / device.flops_per_s("bfloat16") / num
    byte_s = 1 / device.bytes_per_s
    weight_s = DTYPE_BYTES[model.weight_dtype] * byte_s / num
    num_active = 0 if model.experts is None else model.experts.active
    per_token = model.dense_params + model.expert_layers * num_active * model.expert_params
    whole, shared = model.activation_numbers
    return _Costs(
        linear_flops=2 * per_token * flop_s,
        weights=model.dense_params * weight_s,
        expert=model.expert_layers * model.expert_params * weight_s,
        activations=(whole + shared / num) * _ACTIVATION_BYTES * byte_s,
        decode_pair=model.pair_flops(is_decode=True) * attention_flop_s,
        prefill_pair=model.pair_flops(is_decode=False) * attention_flop_s,
        kv=model.kv_bytes_per_token / model.kv_shards(num) * byte_s,
        head_flops=2 * model.head_params * flop_s,
        head_weights=model.head_params * weight_s,
        logits=model.vocab / num * _ACTIVATION_BYTES * byte_s,
    )
