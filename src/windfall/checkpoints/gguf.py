"""Convert GGUF files, once and atomically, into ordinary model folders in the user's cache."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib
import json
import math
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from windfall.checkpoints.model_dir import check_report
from windfall.checkpoints.quiet_libs import announced, first_line, quiet
from windfall.core.files import replace_text, user_folder
from windfall.core.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CACHE_FORMAT = 1  # increase it when the conversion changes; older conversions are then ignored
CACHE_MARKER = "windfall.json"  # written last: the files of a finished conversion and their sizes
HASH_DIGITS = 12  # at the end of a conversion's name
STALE_SECONDS = 24 * 3600.0
MAX_HASHED_BYTES = 256 * 2**20  # larger GGUF files are identified by path, size and time
ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")  # read by windfall; transformers' slow reader reads the others
QUANTISATIONS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
STRING = 8  # the number of this type in a GGUF file
HEAD_COUNTS = {"q": "head_count", "k": "head_count_kv"}
UNUSED_TENSORS = ("rope_freqs.weight",)  # transformers does not need them
SINGLE_DIGIT_TOKENIZERS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def cache_dir() -> Path:
    """The folder of converted models."""
    return user_folder("CACHE", mac="Library/Caches", linux=".cache")


def converted(file: Path, name: str, convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The cached conversion of a GGUF file; made now if it is missing or damaged."""
    _check_gguf(file)
    cache = cache_dir()
    source = _version(file)
    folder = _converted_before(cache, name, source) or cache / f"{name}-{_fingerprint(file)}"
    if is_complete(folder):
        _mark_source(folder, source)
        return folder
    temporary = cache / f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        temporary.mkdir(parents=True)
        _sweep(cache)
        _discard(folder)
        with announced(f"Preparing {name} (first run only)…"), quiet():
            (convert or _convert_gguf)(file, temporary)
        _mark_complete(temporary, source)
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


def architecture_of(file: Path) -> str | None:
    """The architecture that a GGUF file names at its beginning; None if it does not."""
    with suppress(OSError, struct.error, UnicodeDecodeError), file.open("rb") as opened:
        magic, _, _, _, length = struct.unpack("<4sIQQQ", opened.read(32))
        key = opened.read(min(length, 64))
        kind, size = struct.unpack("<IQ", opened.read(12))
        if (magic, key, kind) == (b"GGUF", b"general.architecture", STRING):
            return opened.read(min(size, 64)).decode()
    return None


def _version(file: Path) -> str:
    """The path, size and time of a file."""
    about = file.stat()
    return f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"


def _fingerprint(file: Path) -> str:
    """A hash of the file's content, or of its path, size and time where hashing the content would take seconds."""
    small = file.stat().st_size <= MAX_HASHED_BYTES
    digest = hashlib.sha256(f"format {CACHE_FORMAT}".encode())
    digest.update(file.read_bytes() if small else _version(file).encode())
    return digest.hexdigest()[:HASH_DIGITS]


def markers(cache: Path, name: str) -> Iterator[Path]:
    """The markers of the conversions with this name, of any version of a file."""
    return cache.glob(f"{glob.escape(name)}-{'?' * HASH_DIGITS}/{CACHE_MARKER}")


def _converted_before(cache: Path, name: str, source: str) -> Path | None:
    """The conversion of this version of a file, found without reading the file."""
    for marker in markers(cache, name):
        with suppress(OSError, ValueError, KeyError, TypeError):
            marks = json.loads(marker.read_text("utf-8"))
            if (marks["format"], marks["source"]) == (CACHE_FORMAT, source):
                return marker.parent
    return None


def _mark_complete(folder: Path, source: str) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marks = {"format": CACHE_FORMAT, "source": source, "files": sizes}
    (folder / CACHE_MARKER).write_text(json.dumps(marks, indent=2), "utf-8")


def _mark_source(folder: Path, source: str) -> None:
    """Record that a file of another path or time has the same content."""
    marker = folder / CACHE_MARKER
    with suppress(OSError, InputError):  # a read-only cache only costs time
        marks = json.loads(marker.read_text("utf-8"))
        if marks.get("source") != source:
            replace_text(marker, json.dumps({**marks, "source": source}, indent=2))


def is_complete(folder: Path) -> bool:
    """Whether every file of a conversion is complete."""
    try:
        sizes = json.loads((folder / CACHE_MARKER).read_text("utf-8"))["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(temporary: Path, folder: Path) -> None:
    """Move a finished conversion into place atomically; if another process was faster, its result stays."""
    try:
        temporary.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


def _discard(folder: Path) -> None:
    """Delete a damaged conversion; it is renamed first, so that no process sees it half deleted."""
    with suppress(FileNotFoundError):
        doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Delete what processes left that were killed during a conversion."""
    for folder in cache.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


class Contents(NamedTuple):
    """A GGUF file that is open."""

    file: Path
    header: Any  # with all tensors
    metadata: dict[str, Any]  # the values in the header except arrays
    tokenizer: PreTrainedTokenizerBase | None


@contextmanager
def opened(file: Path) -> Iterator[Contents]:
    """The contents of a GGUF file. Errors in this block become an InputError that names the file."""
    file = file.resolve()
    header = _read_header(file)
    metadata = _single_values(header)
    try:
        with _read_once(header, file):
            tokenizer = _gguf_tokenizer(file, metadata) if "tokenizer.ggml.model" in metadata else None
            yield Contents(file, header, metadata, tokenizer)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot read '{file}': {first_line(error)}") from error


def _convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantised to float32, and its tokenizer as an ordinary model folder."""
    with opened(file) as contents:
        model, report = _read_directly(contents) or _read_by_transformers(contents.file)
    check_report(model, report, str(file))
    model.save_pretrained(folder)
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(folder)


def _read_header(file: Path) -> Any:
    """The header of a GGUF file; reading it also checks that every tensor is complete."""
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        """gguf's reader over a plain array: it takes a million slices, which are slow on a memory map."""

        @property
        def data(self) -> np.ndarray:
            return self.array

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self.array = np.asarray(mapped)

    try:
        return Reader(str(file))
    except Exception as error:
        raise InputError(f"'{file}' is damaged or incomplete: {first_line(error)}") from error


def _single_values(header: Any) -> dict[str, Any]:
    """The values in a GGUF file's header except arrays."""
    from gguf import GGUFValueType

    metadata: dict[str, Any] = {}
    for key, field in header.fields.items():
        if field.types == [GGUFValueType.STRING]:
            metadata[key] = bytes(field.parts[-1]).decode("utf-8", "replace")
        elif field.types and field.types[0] != GGUFValueType.ARRAY:
            metadata[key] = field.parts[-1][0].item()
    return metadata


def _read_directly(contents: Contents) -> tuple[PreTrainedModel, Any] | None:
    """The model of a GGUF file, or None if its header has anything unknown."""
    found = matched(contents)
    if found is None:
        return None
    empty, tensors, paired = found
    weights = {
        name: torch.from_numpy(reordered(dequantised(tensor), tensor, paired)) for name, tensor in tensors.items()
    }
    return type(empty).from_pretrained(  # type: ignore[no-any-return]
        None, config=empty.config, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )


def matched(contents: Contents) -> tuple[PreTrainedModel, dict[str, Any], dict[str, Any]] | None:
    """The model without weights, the GGUF tensor of each of its weights, and the head counts of tensors with paired
    rows; None if the header has anything unknown."""
    header, metadata, folder = contents.header, contents.metadata, str(contents.file.parent)
    architecture = metadata.get("general.architecture")
    heads = {f"attn_{part}": metadata.get(f"{architecture}.attention.{key}") for part, key in HEAD_COUNTS.items()}
    kinds = {tensor.tensor_type.name for tensor in header.tensors}
    if architecture not in ARCHITECTURES or None in heads.values() or not kinds.issubset(QUANTISATIONS):
        return None
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=str(contents.file))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = _counterparts(empty, header)
    return None if tensors is None else (empty, tensors, heads if architecture == "llama" else {})


def _counterparts(model: PreTrainedModel, header: Any) -> dict[str, Any] | None:
    """The GGUF tensor for each of the model's; None unless they correspond one to one with the same shapes."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    if (kind := kinds.get(model.config.model_type)) is None:
        return None
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in header.tensors if tensor.name not in UNUSED_TENSORS}
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    wanted = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    found = {name: tensors.pop(names.get_name(name, (".weight", ".bias")), None) for name in wanted}
    same = all(tensor is not None and _shape(tensor) == wanted[name].shape for name, tensor in found.items())
    return found if same and not tensors else None


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))


def reordered(values: np.ndarray, tensor: Any, paired: dict[str, Any]) -> np.ndarray:
    """Rows of a GGUF tensor in transformers' order; `paired` are the head counts of tensors with paired rows.

    llama.cpp rotates neighbouring rows of a head, transformers rows of its halves: all even rows, then all odd ones.
    """
    heads = paired.get(tensor.name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.reshape(pairs.swapaxes(1, 2), values.shape)


def dequantised(tensor: Any) -> np.ndarray:
    """A GGUF tensor's values in float32, copied if necessary."""
    from gguf import dequantize

    rows = math.prod(tensor.data.shape[:-1])
    merged = math.gcd(rows, 16)  # gguf works on sixteen rows at a time, which is slow for short rows
    values = dequantize(tensor.data.reshape(rows // merged, -1), tensor.tensor_type).reshape(_shape(tensor))
    return values if values.flags.writeable else values.copy()  # type: ignore[no-any-return]


def _read_by_transformers(file: Path) -> tuple[PreTrainedModel, Any]:
    """The model of a GGUF file of any kind that transformers knows; many times slower than `_read_directly`."""
    with _without_gguf_bar():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=str(file),
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _forget_quantisation(model)
    return model, report


def _gguf_tokenizer(file: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, corrected where transformers leaves something out or (older versions) is wrong."""
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=str(file))
    tokenizer.clean_up_tokenization_spaces = False
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokenizer):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    if metadata["tokenizer.ggml.model"] == "gpt2" and metadata.get("tokenizer.ggml.pre") in SINGLE_DIGIT_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _forget_quantisation(model: PreTrainedModel) -> None:
    """Make a dequantised model an ordinary one, which transformers can save."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


@contextmanager
def _read_once(header: Any, file: Path) -> Iterator[None]:
    """Give transformers the header that is read already; otherwise it reads it again several times."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = lambda path, *rest, **more: header if path == str(file) else reader(path, *rest, **more)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """Suppress the progress bar of transformers' GGUF reader, which no setting turns off."""
    try:
        reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        bar = reader.tqdm
    except (ImportError, AttributeError):  # this version has none
        yield
        return
    reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
