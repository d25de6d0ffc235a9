"""What all JSON objects that clients send have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


def wrong(message: str) -> PydanticCustomError:
    """An error of validation with this message."""
    return PydanticCustomError("wrong", message)


class Body(BaseModel):
    """A JSON object without unknown fields. Null is the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given
