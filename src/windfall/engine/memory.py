"""How much memory the KV caches of running requests may take."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from windfall.core.options import is_number
from windfall.core.types import InputError

FREE_SHARE = 0.5  # of the free memory that is used by default
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MEMINFO = Path("/proc/meminfo")


def as_bytes(given: str | int | None) -> int | None:
    """A number of bytes, or a text such as "4GB" or "512 MiB"; None stays None."""
    if given is None:
        return None
    size = float(given) if is_number(given) else 0.0
    if isinstance(given, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given)):
        size = float(found[1]) * UNITS.get(found[2].upper(), 0)
    if not 1 <= size < 2**63:
        raise InputError(f"kv_memory takes a size such as 4GB or a number of bytes, not {given!r}")
    return int(size)


def default_bytes(device: torch.device) -> int | None:
    """A share of the memory that is free on this device; None if that is unknown."""
    free = _free_bytes(device)
    return None if free is None else int(FREE_SHARE * free)


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        if found := re.search(r"MemAvailable:\s*(\d+) kB", MEMINFO.read_text("utf-8")):
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all of it, where the free part is unknown
    except (AttributeError, OSError, ValueError):
        return None
