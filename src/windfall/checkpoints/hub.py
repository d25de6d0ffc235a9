"""Models on the Hugging Face hub: from the local cache if possible, with a clear error if the hub is unreachable."""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

from windfall.checkpoints.model_dir import has_tokenizer, weight_files
from windfall.checkpoints.quiet_libs import first_line
from windfall.core.types import InputError

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
SAFE_WEIGHTS = re.compile(r"(model(-\d+-of-\d+)?|(medusa|hydra)_lm_head)\.safetensors(\.index\.json)?")
OTHER_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|(medusa|hydra)_lm_head\.pt")
OTHER_FILES = re.compile(r".*(?<!\.index)\.(json|jinja|txt|model|tiktoken)")
HUB_TIMEOUT_SECONDS = 8.0  # for the first answer


def fetch(name: str, code: bool) -> Path:
    """The local snapshot of a hub repository, downloaded if it is incomplete."""
    known = cached(name)
    if known and has_tokenizer(known) and not (code and lacks_code(known)):
        return known
    try:
        files = _within(HUB_TIMEOUT_SECONDS, lambda: _hub_files(name))
        return Path(snapshot_download(name, allow_patterns=_wanted(files, code)))
    except GatedRepoError:
        raise InputError(f"'{name}' is gated: accept its terms on the hub and log in with `hf auth login`") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(
            f"there is no model '{name}' on the hub (or it is private: log in with `hf auth login`)"
        ) from None
    except Exception as error:
        if known:
            return known
        why = "offline mode is on (HF_HUB_OFFLINE)" if isinstance(error, OfflineModeIsEnabled) else first_line(error)
        raise InputError(
            f"cannot reach the Hugging Face hub for '{name}': {why}; pass a local folder or GGUF file, or connect"
        ) from error


def cached(name: str) -> Path | None:
    """The folder of a hub model that was downloaded before, with its config and all of its weights."""
    try:
        config = try_to_load_from_cache(name, "config.json")
        weights = weight_files(Path(config).parent) if isinstance(config, str) else []
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # not a hub id, or a damaged index
        return None
    return weights[0].parent if weights and all(file.is_file() for file in weights) else None


def lacks_code(folder: Path) -> bool:
    """Whether Python modules that the model's files name are missing, because it was downloaded without them."""
    named: list[Any] = []
    for file in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, AttributeError):
            named += json.loads((folder / file).read_text("utf-8")).get("auto_map", {}).values()
    classes = [each for entry in named for each in (entry if isinstance(entry, list) else [entry])]
    own = {each.partition(".")[0] for each in classes if isinstance(each, str) and "--" not in each}
    return any(not (folder / f"{module}.py").is_file() for module in own)


def _hub_files(name: str) -> list[str]:
    return [file.rfilename for file in HfApi().model_info(name, timeout=5).siblings or ()]


def _wanted(files: list[str], code: bool) -> list[str]:
    """The files that loading needs: one kind of weights, no subfolders, code only if it is trusted."""
    weights = [f for f in files if SAFE_WEIGHTS.fullmatch(f)] or [f for f in files if OTHER_WEIGHTS.fullmatch(f)]
    others = [f for f in files if OTHER_FILES.fullmatch(f) or (code and f.endswith(".py"))]
    return weights + [f for f in others if "/" not in f]


def _within(seconds: float, work: Callable[[], list[str]]) -> list[str]:
    """The result of `work`, or a TimeoutError; a DNS lookup can take longer than network timeouts."""
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer
