"""Triton's interpreter, which runs kernels on a CPU: it must be asked for before Triton is imported."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter does not multiply or round in bf16
both = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])


if INTERPRETED and find_spec("triton"):
    from triton.runtime import interpreter

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched_for: dict[int, dict[str, Any]] = {}  # globals by their id

    def patch_tensor_index(tensor: type, scope: Any) -> None:
        """Triton before 3.9 takes int() of an array of one element as a loop's bound; numpy no longer allows it."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_language_once(function: Any) -> Any:
        """Triton patches its language for each call of a function, which takes long. Here it stays patched."""
        seen = function.__globals__
        if id(seen) not in patched_for:
            patched_for[id(seen)] = seen
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_tensor_index, patch_language_once
    # It computes whether integers overflow, but does not look at the result.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
