"""Compiles a C file for this machine, and loads it. Only on Linux."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_file

FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",  # products and sums in one instruction, in every variant of a kernel
    "-fno-schedule-insns",  # GCC would otherwise run out of registers
    "-fno-schedule-insns2",
    "-fPIC",
    "-shared",
)
COMPILERS = ("cc", "gcc", "clang")
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")  # functions for `bind`
SECONDS = 60.0  # after which a compiler is stopped
CPU_LINES = ("model name", "flags", "Features", "CPU implementer", "CPU part")  # of /proc/cpuinfo


def library(source: Path, folder: Path) -> tuple[ctypes.CDLL, Path] | None:
    """The compiled source and its file, which is kept in this folder. None if it cannot be compiled or loaded here.

    The source must have a function `bind`, which gets the functions of torch's OpenMP library.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        return None
    with suppress(OSError, ValueError, AttributeError, InputError, subprocess.SubprocessError):
        openmp = _torch_openmp()
        file = folder / f"{source.stem}-{_key(source, compiler)}.so"
        if not file.exists():
            make_folder(folder)
            command = [*shlex.split(compiler), *FLAGS, str(source), "-o"]
            replace_file(file, lambda made: _run([*command, str(made)]))
        loaded = ctypes.CDLL(str(file))
        loaded.bind.argtypes, loaded.bind.restype = [ctypes.c_void_p] * len(OPENMP), None
        loaded.bind(*openmp)
        return loaded, file
    return None


def _torch_openmp() -> list[int | None]:
    """The addresses of the functions in the OpenMP library that torch uses."""
    torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return [ctypes.cast(getattr(torch_library, name), ctypes.c_void_p).value for name in OPENMP]


def _key(source: Path, compiler: str) -> str:
    """A name that differs for every source, compiler and CPU. Sources may include the headers of their folder."""
    version = _run([*shlex.split(compiler), "--version"]).partition("\n")[0]
    lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    cpu = sorted({line for line in lines if line.startswith(CPU_LINES)})
    headers = (header.read_text("utf-8") for header in sorted(source.parent.glob("*.h")))
    parts = (source.read_text("utf-8"), *headers, " ".join(FLAGS), compiler, version, *cpu)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    """What this command prints."""
    run = subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    return run.stdout.decode("utf-8", errors="replace")
