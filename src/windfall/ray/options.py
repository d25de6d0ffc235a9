"""The options of an application: of its engines, of its server, and of its replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from windfall.core.errors import InputError
from windfall.core.options import split_settings
from windfall.engine.load_options import BatchLimits, ModelChoice, PolicyChoice
from windfall.serve.options import ServerOptions
from windfall.serve.settings import Settings

PREFIX = "WINDFALL_RAY_"  # of environment variables: WINDFALL_RAY_TARGET and so on
KEY_VARIABLE = "WINDFALL_API_KEY"
BUSY_SHARE = 0.75  # of the texts that run together: the load that the number of replicas is chosen for


def _as_list(given: Any) -> Any:
    """`a,b` as a list; the command line and the environment have text only."""
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def _as_settings(given: Any) -> Any:
    """`depth=4,k=3` as a dict."""
    return split_settings(_as_list(given)) if isinstance(given, str) else given


Names = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Named = Annotated[dict[str, Any], BeforeValidator(_as_settings)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]


@dataclass
class Options(ServerOptions, BatchLimits, PolicyChoice, ModelChoice):
    """What an application may be given: by `serve run`, in a YAML file, or by the environment.

    The options of the engine and of the server are those of `windfall serve`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    drafter_options: Named = field(default_factory=dict)
    policy_options: Named = field(default_factory=dict)

    # the server of a replica
    api_keys: Names = field(default=(), repr=False)
    max_queue: int = 8  # the rest waits at the proxy, and goes to the first replica with room
    request_policies: Names = ()
    page: bool = False  # it shows one replica's load
    log_format: Literal["text", "json", "none"] = "none"  # Ray logs requests, too

    # the replicas
    min_replicas: Count = 1
    max_replicas: Annotated[int, Field(ge=1)] | None = None  # None: always `min_replicas`
    cpus: Amount = 1.0  # of a replica; also its number of threads
    gpus: Amount | None = None  # None: 1 if the machine that builds the application has one
    max_queued_requests: Annotated[int, Field(ge=-1)] = 256  # at each proxy; further ones are refused. -1: no limit
    drain_seconds: Amount = 600.0  # that running texts have before a replica ends

    @classmethod
    def read(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
        """These options; those that are not given come from the environment."""
        variables = {name: value for name, value in environment.items() if name.startswith(PREFIX) and value}
        named = {name.removeprefix(PREFIX).lower(): value for name, value in variables.items()}
        keys = {"api_keys": [environment[KEY_VARIABLE]]} if environment.get(KEY_VARIABLE) else {}
        try:
            return TypeAdapter(cls).validate_python({**keys, **named, **given})
        except ValidationError as error:
            raise InputError(_first_problem(error)) from None

    @property
    def load(self) -> dict[str, Any]:
        """The keywords of `windfall.load`."""
        settings = {"drafter_options": self.drafter_options, "policy_options": self.policy_options}
        return {**self.model_keywords, **self.limits, "policy": self.policy, "preset": self.preset, **settings}

    @property
    def settings(self) -> Settings:
        """The settings of the server."""
        return self.settings_with(self.api_keys, self.request_policies, self.page)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":
        return f"there is no option '{name}'; there are {', '.join(each.name for each in fields(Options))}"
    return f"the option '{name}': {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
