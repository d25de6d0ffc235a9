"""GET /v1/models."""

from __future__ import annotations

import time

from fastapi import APIRouter

from windfall.serve.backend import Backend
from windfall.serve.calls import check_model, served_name
from windfall.serve.protocol import Model, ModelList


def model_routes(backend: Backend) -> APIRouter:
    routes = APIRouter()
    served = Model(id=served_name(backend), created=int(time.time()), max_model_len=backend.model.context)

    @routes.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[served])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        check_model(backend, name)
        return served

    return routes
