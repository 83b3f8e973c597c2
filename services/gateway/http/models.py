"""Shapes of /v1/models."""

from __future__ import annotations

from typing import Any

from services.gateway.errors import ModelNotFound
from services.gateway.models import Models, Served


def model_object(served: Served) -> dict[str, Any]:
    """OpenAI's model object, with vLLM's additions."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.card.created_unix_s,
        "owned_by": "forebay",
        "engine": served.card.engine,
        "root": served.card.model,
        "parent": served.card.model if served.adapter else None,
        "max_model_len": served.card.max_model_len,
    }


def model_list(models: Models) -> dict[str, Any]:
    """All models and adapters that can be served now."""
    return {"object": "list", "data": [model_object(s) for s in models.served()]}


def one_model(models: Models, name: str) -> dict[str, Any]:
    """One of them, by its id, slashes and all. Raises ModelNotFound."""
    served = models.resolve(name)
    if served is None:
        raise ModelNotFound(name)
    return model_object(served)
