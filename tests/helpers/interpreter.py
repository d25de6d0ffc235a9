"""Triton's interpreter, which runs kernels on a CPU: it must be asked for before Triton is imported."""

from __future__ import annotations

import dataclasses
import math
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter does not multiply or round in bf16
both = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])


if INTERPRETED and find_spec("triton"):
    import triton.language as tl
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

    # The interpreter makes a new type for each operation and computes its shape again. There are few shapes: keep them.
    numpy_type, block_type, equal = interpreter._get_np_dtype, tl.block_type.__init__, tl.tuple.__eq__
    numpy_types: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, int, Any, Any]] = {}  # of types, then of tensors
    names: dict[tuple[str, tuple[int, ...]], str] = {}
    NUMBER = tl.constexpr(1), tl.tuple([])  # size and shape of a tensor without dimensions

    def known_numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    def known_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if (element_ty.name, sizes) not in names:
            block_type(self, element_ty, shape)
            names[element_ty.name, sizes] = self.name
            if sizes not in shapes:
                size, wrapped = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])
                shapes[sizes] = (self.shape, self.numel, size, wrapped)
        self.element_ty, self.name = element_ty, names[element_ty.name, sizes]
        self.shape, self.numel, *self.of_tensors = shapes[sizes]

    def known_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else NUMBER

    def equal_sizes(self: Any, other: Any) -> Any:
        if isinstance(other, list) and all(type(size) is int for size in other):
            return tl.constexpr(self.values == other)
        return equal(self, other)

    interpreter._get_np_dtype, tl.block_type.__init__ = known_numpy_type, known_block_type
    tl.tensor.__init__, tl.tuple.__eq__ = known_tensor, equal_sizes
