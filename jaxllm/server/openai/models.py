"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.openai.body import json_response
from jaxllm.server.openai.replies import ModelCard, ModelList
from jaxllm.server.state import ServerState, state_of


async def list_models(request: Request) -> Response:
    state = state_of(request)
    return json_response(ModelList(data=tuple(_card(state, name) for name in state.model_names)))


async def get_model(request: Request) -> Response:
    state = state_of(request)
    return json_response(_card(state, state.resolve_model(request.path_params["model"])))


def _card(state: ServerState, name: str) -> ModelCard:
    engine = state.engine
    return ModelCard(id=name, created=state.created_s, root=engine.model_name, max_model_len=engine.max_model_len)
