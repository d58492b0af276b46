"""The section `cost:` of a simulation's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.sim.cost import CostModel
from jaxllm.sim.cost_fields import Fields
from jaxllm.sim.devices import DTYPE_BYTES, load_device
from jaxllm.sim.linear import Linear
from jaxllm.sim.models import load_model
from jaxllm.sim.roofline import Roofline
from jaxllm.sim.table_cost import Table


def make_cost(spec: Mapping[str, Any], where: str, *, folder: Path | None = None) -> CostModel:
    """The cost model that a section describes.

    {kind: roofline, device:, model:, tensor_parallel: 1, weight_dtype:, kv_dtype:} (types: the model's own),
    {kind: linear | table, file:} or {kind: constant, step_s:, token_s: 0}.

    Args:
        where: the file and section, for messages.
        folder: what a relative `file` is relative to; default: the working directory.

    Raises:
        ConfigError: a key is unknown, missing or wrong, or the file it names is.
    """
    fields = Fields(spec, where)
    kind = fields.choice("kind", _MAKERS)
    cost = _MAKERS[kind](fields, folder or Path())
    fields.done()
    return cost


def _roofline(fields: Fields, folder: Path) -> CostModel:
    device_name, model_name = fields.text("device"), fields.text("model")
    num = fields.integer("tensor_parallel", default=1)
    dtypes = {name: fields.choice(name, DTYPE_BYTES) for name in ("weight_dtype", "kv_dtype") if name in fields}
    place = fields.place("device")
    try:
        device = load_device(_located(device_name, folder))
        place = fields.place("model")
        model = load_model(_located(model_name, folder), **dtypes)
        place = fields.place("tensor_parallel")
        return Roofline(device, model, num)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _from_file(load: Callable[[Path], CostModel]) -> Callable[[Fields, Path], CostModel]:
    def make(fields: Fields, folder: Path) -> CostModel:
        path = folder / Path(fields.text("file")).expanduser()
        try:
            return load(path)
        except ConfigError as error:
            raise ConfigError(f"{fields.place('file')}: {error}") from None

    return make


def _constant(fields: Fields, folder: Path) -> CostModel:
    del folder
    step_s = fields.number("step_s", above=0)  # in steps of no time a closed loop has no end
    return Linear(step_s=step_s, token_s=fields.number("token_s", default=0.0), source="constant")


def _located(name: str, folder: Path) -> str:
    """A file's name as it is read from `folder`; a described thing's stays as it is."""
    return str(folder / Path(name).expanduser()) if name.endswith(".json") else name


_MAKERS: dict[str, Callable[[Fields, Path], CostModel]] = {
    "roofline": _roofline,
    "linear": _from_file(Linear.load),
    "table": _from_file(Table.load),
    "constant": _constant,
}
