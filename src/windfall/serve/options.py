"""The options of a server that the command line and Ray offer, each declared once."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.constraint import MAX_SOURCE_CHARACTERS
from windfall.core.options import option
from windfall.serve.settings import GRAMMAR_SECONDS, MAX_BODY_BYTES, MAX_QUEUE, Settings


@dataclass
class ServerOptions:
    """What a server allows, and the name of its model."""

    max_queue: int = option(MAX_QUEUE, "Largest number of texts that wait; further requests get status 429.")
    served_model_name: str | None = option(
        None, "Name of the model for clients. Default: the name of the target.", metavar="NAME"
    )
    request_timeout: float | None = option(None, "Time after which a text ends. Default: no limit.", metavar="SECONDS")
    max_body_mb: int = option(MAX_BODY_BYTES // 2**20, "Largest body of a request, in MiB.", min=1, metavar="MIB")
    log_format: str = option("text", "Log of requests on stdout: text, json or none.", metavar="FORMAT")
    grammar_timeout: float = option(
        GRAMMAR_SECONDS, "Longest time to compile the schema or grammar of a request.", metavar="SECONDS"
    )
    max_grammar_chars: int = option(
        MAX_SOURCE_CHARACTERS, "Most characters of the schema or grammar of a request.", metavar="N"
    )

    def settings_with(self, api_keys: tuple[str, ...], request_policies: tuple[str, ...], page: bool) -> Settings:
        """The settings of a server with these options."""
        return Settings(
            model_name=self.served_model_name,
            api_keys=api_keys,
            max_queue=self.max_queue,
            request_timeout=self.request_timeout,
            max_body_bytes=self.max_body_mb * 2**20,
            request_policies=request_policies,
            page=page,
            grammar_timeout=self.grammar_timeout,
            max_grammar_chars=self.max_grammar_chars,
        )
