"""Documentation that the API reference takes from the source: comments of fields, and lists of arguments.

A comment after a field of a class becomes its docstring. Lines `name: text` in the docstring of a function, where each
name is an argument, become a list.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


class SourceComments(griffe.Extension):
    """Adds what the project writes in comments and plain docstrings to the objects that griffe reads."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and isinstance(node, ast.AnnAssign):
            line = attr.lines_collection[attr.filepath][(node.end_lineno or node.lineno) - 1]
            _, found, comment = line.partition("  # ")
            if found:
                attr.docstring = griffe.Docstring(comment.strip(), parent=attr)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is None:
            return
        known = {parameter.name for parameter in func.parameters}
        began = False

        def item(found: re.Match[str]) -> str:
            nonlocal began
            names = found[1].split(", ")
            if not known.issuperset(names):
                return found[0]
            start = "- " if began else "\n- "
            began = True
            return f"{start}{', '.join(f'`{name}`' for name in names)}: "

        func.docstring.value = ARGUMENT.sub(item, func.docstring.value)
