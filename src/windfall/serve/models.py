"""GET /v1/models."""

from __future__ import annotations

import time

from fastapi import APIRouter

from windfall.serve.admission import Admission
from windfall.serve.calls import check_model, served_name
from windfall.serve.protocol import Model, ModelList


def model_routes(admission: Admission) -> APIRouter:
    routes, target = APIRouter(), admission.engine.target
    served = Model(id=served_name(admission), created=int(time.time()), max_model_len=target.context)

    @routes.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[served])

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        check_model(admission, name)
        return served

    return routes
