"""Options for structured output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from windfall.cli.declare import option
from windfall.core.files import read_text

if TYPE_CHECKING:
    from windfall.core.constraint import Constraint


@dataclass
class ConstraintOptions:
    """What the text must follow."""

    PANEL = "Structured output"

    json_schema: Path | None = option(None, "Write JSON that is valid for the schema in this file.", metavar="FILE")
    json_object: bool = option(False, "Write a JSON object.")
    regex: str | None = option(None, "Write a text that matches this regular expression.", metavar="PATTERN")
    ebnf: Path | None = option(None, "Write a text of the grammar (GBNF) in this file.", metavar="FILE")
    grammar_backend: str | None = option(None, "The grammar library: xgrammar or llguidance. Default: one that fits.")

    def keywords(self) -> dict[str, Constraint]:
        """The keywords of Engine.generate, with all checks that need no model."""
        from windfall.core.constraint import with_constraint
        from windfall.grammar.compile import check_installed

        given = with_constraint(
            {
                "json_schema": None if self.json_schema is None else read_text(self.json_schema),
                "json_object": self.json_object,
                "regex": self.regex,
                "ebnf": None if self.ebnf is None else read_text(self.ebnf),
                "grammar_backend": self.grammar_backend,
            }
        )
        if "constraint" in given:
            check_installed(given["constraint"])
        return given
