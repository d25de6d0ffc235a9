"""The options of an application: of its engines, of its server, and of its replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from windfall.core.constraint import MAX_SOURCE_CHARACTERS
from windfall.core.errors import InputError
from windfall.core.options import split_settings
from windfall.serve.settings import GRAMMAR_SECONDS, MAX_BODY_BYTES, Settings

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


class Options(BaseModel):
    """What an application may be given: by `serve run`, in a YAML file, or by the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # the engine of a replica, as in `windfall.load`
    target: str | None = None
    drafter: str | None = None
    policy: str | None = None
    preset: str | None = None
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    fast: bool = False
    drafter_options: Named = {}
    policy_options: Named = {}
    max_requests: int | None = Field(None, ge=1)  # None: depends on whether there is a GPU
    kv_memory: str | None = None

    # its server, as in `windfall serve`
    served_model_name: str | None = None
    api_keys: Names = Field((), repr=False)
    max_queue: int = Field(8, ge=0)  # the rest waits at the proxy, and goes to the first replica with room
    request_timeout: float | None = Field(None, gt=0)
    max_body_mb: int = Field(MAX_BODY_BYTES // 2**20, ge=1)
    request_policies: Names = ()
    grammar_timeout: float = Field(GRAMMAR_SECONDS, gt=0)
    max_grammar_chars: int = Field(MAX_SOURCE_CHARACTERS, ge=1, le=MAX_SOURCE_CHARACTERS)
    page: bool = False  # it shows one replica's load
    log_format: Literal["text", "json", "none"] = "none"  # Ray logs requests, too

    # its replicas
    min_replicas: int = Field(1, ge=0)
    max_replicas: int | None = Field(None, ge=1)  # None: always `min_replicas`
    cpus: float = Field(1.0, ge=0)  # of a replica; also its number of threads
    gpus: float | None = Field(None, ge=0)  # None: 1 if the machine that builds the application has one
    max_queued_requests: int = Field(256, ge=-1)  # at each proxy; further ones are refused. -1: no limit
    drain_seconds: float = Field(600.0, ge=0)  # that running texts have before a replica ends

    @classmethod
    def read(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
        """These options; those that are not given come from the environment."""
        variables = {name: value for name, value in environment.items() if name.startswith(PREFIX) and value}
        named = {name.removeprefix(PREFIX).lower(): value for name, value in variables.items()}
        keys = {"api_keys": [environment[KEY_VARIABLE]]} if environment.get(KEY_VARIABLE) else {}
        try:
            return cls.model_validate({**keys, **named, **given})
        except ValidationError as error:
            raise InputError(_first_problem(error)) from None

    @property
    def load(self) -> dict[str, Any]:
        """The keywords of `windfall.load`."""
        same = "target drafter policy preset device dtype trust_remote_code drafter_options policy_options kv_memory"
        keywords = {name: getattr(self, name) for name in same.split()}
        return {**keywords, "max_requests": self.max_requests, "exact": not self.fast}

    @property
    def settings(self) -> Settings:
        """The settings of the server."""
        return Settings(
            model_name=self.served_model_name,
            api_keys=self.api_keys,
            max_queue=self.max_queue,
            request_timeout=self.request_timeout,
            max_body_bytes=self.max_body_mb * 2**20,
            request_policies=self.request_policies,
            page=self.page,
            grammar_timeout=self.grammar_timeout,
            max_grammar_chars=self.max_grammar_chars,
        )


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no option '{name}'; there are {', '.join(Options.model_fields)}"
    return f"the option '{name}': {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"
