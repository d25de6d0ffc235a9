"""A device that is only pretended: it finds the places where the host would wait for a GPU, on any machine.

Tensors count as on the device if they were put there by `hold` or `to`, made with an explicit `device=`, or computed
from such tensors. All of them are in the memory of the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = (
    "_local_scalar_dense",  # item, int, float, bool
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",  # without `output_size`
    "unique",
    "_unique",
)  # prefixes of operators whose results or sizes the host reads
READS = (Tensor.cpu, Tensor.item, Tensor.numpy, Tensor.tolist)
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostWaitsError(AssertionError):
    """The host would wait for the device, or would mix tensors of host and device."""


class PretendDevice:
    """In its context, fails where the host would wait; `operators` counts what runs on the device."""

    def __init__(self, held: Iterable[Tensor]):
        self._storages: dict[int, Any] = {}  # kept, so that no other storage gets the same address
        self.operators: Counter[str] = Counter()
        self.computes = False  # while a function runs that was given tensors on the device
        self.hold(held)
        self._modes = _Functions(self), _Operators(self)

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count these as on the device."""
        for tensor in tensors:
            if (storage := _storage(tensor)) is not None:
                self._storages[storage._cdata] = storage

    def holds(self, tensor: Any) -> bool:
        storage = _storage(tensor)
        return storage is not None and storage._cdata in self._storages

    def __enter__(self) -> PretendDevice:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, at)


class _Functions(TorchFunctionMode):
    """What Python code calls: reading tensors, and copies to the device, which operators do not show on a CPU."""

    def __init__(self, device: PretendDevice):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, device = kwargs or {}, self._device
        there = any(map(device.holds, tree_leaves((args, given))))
        if func in READS and there:
            raise HostWaitsError(f"Tensor.{func.__name__} of a tensor on the device")
        if func in (torch.tensor, torch.as_tensor) and given.get("device") is not None:
            raise HostWaitsError(f"torch.{func.__name__} copies to the device from memory that is not pinned")
        before, device.computes = device.computes, there
        try:
            found = func(*args, **given)
        finally:
            device.computes = before
        if func is Tensor.to and not there and _names_device(args[1:], given):
            if not given.get("non_blocking"):
                raise HostWaitsError("Tensor.to copies to the device without non_blocking=True")
            if not args[0].is_contiguous():
                raise HostWaitsError("Tensor.to copies what is not contiguous through memory that is not pinned")
            found = found.clone()
            device.hold([found])
        elif given.get("device") is not None:
            device.hold(tree_leaves(found))
        return found


class _Operators(TorchDispatchMode):
    """The operators that run, those of autograd and optimizers included."""

    def __init__(self, device: PretendDevice):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in leaves if self._device.holds(leaf)]
        name = func._schema.name.removeprefix("aten::")
        if there:
            self._check(name, args, leaves)
            if not func.is_view:
                self._device.operators[name] += 1
        found = func(*args, **(kwargs or {}))
        if there or (self._device.computes and not leaves):  # a function may make new tensors for its own use
            self._device.hold(tree_leaves(found))
        return found

    def _check(self, name: str, args: Any, leaves: list[Tensor]) -> None:
        if name.startswith(WAITS):
            raise HostWaitsError(f"{name} of a tensor on the device")
        indices = [own for own in args[1] if own is not None] if name in INDEXED else []
        if any(own.dtype in (torch.bool, torch.uint8) for own in indices):
            raise HostWaitsError(f"{name} with a mask on the device")
        if any(leaf.dim() and not self._device.holds(leaf) for leaf in leaves):
            raise HostWaitsError(f"{name} of tensors of host and device")


def _storage(tensor: Any) -> Any:
    """The memory of a tensor; None for other objects and for tensors inside `vmap`, whose operators are seen anyway."""
    if not isinstance(tensor, Tensor) or torch._C._functorch.is_batchedtensor(tensor):
        return None
    return tensor.untyped_storage()


def _names_device(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of `Tensor.to` name a device."""
    return "device" in kwargs or any(isinstance(own, torch.device | str) for own in args)
