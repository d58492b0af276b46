"""From an OpenAI request to ServiceParams: hints for the scheduler and the prefix cache."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.schema import GenerationRequest
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

# Request fields that mean the same, under the same name, in ServiceParams.
_SAME = (
    "deadline_s",
    "retention_priority",
    "retention_tokens",
    "ttft_target_s",
    "tpot_target_s",
    "predicted_tokens",
)


def service_of(request: GenerationRequest, key_name: str | None) -> ServiceParams:
    """How a request asks to be served. `key_name`: that of the API key it came with, where there are several.

    A request's tenant is then one of its key's, so that no key can pose as another.

    Raises:
        RequestError: a value is out of range.
    """
    values: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    tenant = request.tenant
    if tenant is not None and not 1 <= len(tenant) <= limits.MAX_TENANT_CHARS:
        accepted = f"1 to {limits.MAX_TENANT_CHARS} characters"
        raise RequestError(f"tenant={shown(tenant)}; accepted: {accepted}", param="tenant")
    if key_name is not None:
        tenant = key_name if tenant is None else f"{key_name}/{tenant}"
    if tenant is not None:
        values["tenant"] = tenant
    return ServiceParams(**values) if values else DEFAULT_SERVICE
