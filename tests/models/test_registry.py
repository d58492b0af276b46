from __future__ import annotations

import pytest

from jaxllm.errors import UnsupportedModel
from jaxllm.models.llama import LlamaForCausalLM
from jaxllm.models.registry import MODELS, model_class


def test_every_registered_architecture_has_its_class() -> None:
    assert {name: model_class(name).__name__ for name in MODELS} == {name: name for name in MODELS}
    assert model_class("LlamaForCausalLM") is LlamaForCausalLM


def test_unknown_architecture_names_itself_and_the_supported() -> None:
    with pytest.raises(UnsupportedModel, match=r"architecture='NoSuchModel' .* LlamaForCausalLM"):
        model_class("NoSuchModel")
