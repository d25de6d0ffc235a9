"""Compile every kernel that the tests of kernels launch, for a GPU of compute capability 9.0, without having one.

python tests/compile_kernels.py [PYTEST ARGUMENTS]

Triton's interpreter accepts what its compiler refuses. Kernels are compiled and not run, so the results of the tests do
not count. The exit code is 1 if a kernel does not compile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED_MEMORY = 232_448  # bytes for one program
HERE = Path(__file__).parent


class Driver:
    """Answers what Triton asks its driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompileOnly:
    """A plugin of pytest: tests launch kernels, which are compiled."""

    def __init__(self) -> None:
        self.kernels: set[tuple[str, str]] = set()  # name and hash
        self.errors: dict[str, str] = {}  # by name

    def pytest_collection_finish(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        from windfall.kernels import backend

        triton.runtime.driver.set_active(Driver())
        instead = {
            "on_triton": lambda x: x.dtype != torch.float64,
            "supports_pdl": lambda device: True,
            "shared_memory": lambda device: SHARED_MEMORY,
        }
        before = {name: getattr(backend, name) for name in instead}
        for module in list(sys.modules.values()):
            for name, function in instead.items():
                if getattr(module, name, None) is before[name]:
                    setattr(module, name, function)
        run = JITFunction.run

        def compiled(own: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
            try:
                kernel = run(own, *args, grid=grid, warmup=True, **given)
                self.kernels.add((own.__name__, kernel.hash))
            except Exception as error:
                causes = [error]
                while (cause := causes[-1].__cause__) is not None:
                    causes.append(cause)  # type: ignore[arg-type]
                self.errors.setdefault(own.__name__, str(causes[-1]))
            return None

        JITFunction.run = compiled  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None]:
        with contextlib.suppress(Exception):
            yield


def main() -> None:
    plugin = CompileOnly()
    given = sys.argv[1:] or [str(HERE / "kernels")]
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *given], plugins=[plugin])
    names = {name for name, _ in plugin.kernels}
    print(f"{len(plugin.kernels)} variants of {len(names)} kernels compiled")
    for name, error in plugin.errors.items():
        print(f"{name} does not compile:\n{error}")
    sys.exit(bool(plugin.errors) or not names)


if __name__ == "__main__":
    main()
