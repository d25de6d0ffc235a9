"""GGUF files, converted once into an ordinary model folder in the user's cache: all of it or nothing."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError

from windfall.folder import check_report
from windfall.quiet import announced, first_line, quiet
from windfall.records import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CACHE_FORMAT = 1  # raise it when the conversion changes: older conversions are then left alone
CACHE_MARKER = "windfall.json"  # written last: the files of a finished conversion and their sizes
STALE_SECONDS = 24 * 3600.0
HASHED_WHOLE = 256 * 2**20  # bytes; larger GGUF files are known by path, size and time
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def cache_dir() -> Path:
    """Where converted models are kept."""
    if own := os.environ.get("WINDFALL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "windfall"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "windfall"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "windfall"
    return Path.home() / ".cache" / "windfall"


def converted(file: Path, name: str, convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The cached conversion of a GGUF file, made now if there is none or it is damaged."""
    _check_gguf(file)
    cache = cache_dir()
    folder = cache / f"{name}-{_fingerprint(file)}"
    if is_complete(folder):
        return folder
    temporary = cache / f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        temporary.mkdir(parents=True)
        _sweep(cache)
        _discard(folder)
        with announced(f"Preparing {name} (first run only)…"), quiet(), _without_gguf_bar():
            (convert or _convert_gguf)(file, temporary)
        _mark_complete(temporary)
        _publish(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot convert '{file}' in the cache folder '{cache}': {first_line(error)} "
            "(WINDFALL_CACHE can name another folder)"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _check_gguf(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise InputError(f"cannot read '{file}': {error.strerror}") from error
    if not magic:
        raise InputError(f"'{file}' is empty")
    if magic != b"GGUF":
        raise InputError(f"'{file}' is not a GGUF file; pass a GGUF file or the folder of a model")


def _fingerprint(file: Path) -> str:
    digest = hashlib.sha256(f"format {CACHE_FORMAT}".encode())
    about = file.stat()
    if about.st_size <= HASHED_WHOLE:
        digest.update(file.read_bytes())
    else:
        digest.update(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def _mark_complete(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / CACHE_MARKER).write_text(json.dumps({"format": CACHE_FORMAT, "files": sizes}, indent=2), "utf-8")


def is_complete(folder: Path) -> bool:
    """Whether every file of a conversion is there in full."""
    try:
        sizes = json.loads((folder / CACHE_MARKER).read_text("utf-8"))["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(temporary: Path, folder: Path) -> None:
    """Move a finished conversion into place in one act; where another process was faster, its result stands."""
    try:
        temporary.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


def _discard(folder: Path) -> None:
    """Take a damaged conversion away, by a rename first so that nobody sees it half deleted."""
    with suppress(FileNotFoundError):
        doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove what processes that were killed in the middle of a conversion left behind."""
    for folder in cache.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer as an ordinary model folder."""
    file = file.resolve()
    metadata = _gguf_metadata(file)
    try:
        tokenizer = _gguf_tokenizer(file, metadata) if "tokenizer.ggml.model" in metadata else None
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=str(file),
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(f"cannot read '{file}': {first_line(error)}") from error
    check_report(model, report, str(file))
    _forget_quantisation(model)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _gguf_metadata(file: Path) -> dict[str, Any]:
    """The single values in a GGUF file's header; reading them also proves that every tensor is there in full."""
    from gguf import GGUFReader, GGUFValueType

    try:
        fields = GGUFReader(str(file)).fields
    except Exception as error:
        raise InputError(f"'{file}' is damaged or incomplete: {first_line(error)}") from error
    metadata: dict[str, Any] = {}
    for key, field in fields.items():
        if field.types == [GGUFValueType.STRING]:
            metadata[key] = bytes(field.parts[-1]).decode("utf-8", "replace")
        elif field.types and field.types[0] != GGUFValueType.ARRAY:
            metadata[key] = field.parts[-1][0].item()
    return metadata


def _gguf_tokenizer(file: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, with what transformers leaves out or (in older versions) gets wrong put right."""
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=str(file))
    tokenizer.clean_up_tokenization_spaces = False
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokenizer):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    if metadata["tokenizer.ggml.model"] == "gpt2" and metadata.get("tokenizer.ggml.pre") in DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Make a dequantised model an ordinary one, which transformers agrees to save."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """Hold back the progress bar of transformers' GGUF reader, which heeds no setting."""
    try:
        reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        bar = reader.tqdm
    except (ImportError, AttributeError):  # it has gone
        yield
        return
    reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
