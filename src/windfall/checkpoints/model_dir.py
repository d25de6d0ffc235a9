"""Read a model's folder (config, weights, tokenizer) strictly, with one-line errors."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from transformers.quantizers.auto import AutoHfQuantizer

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # as one file, or in shards with an index
HEADS = tuple(
    f"{kind}_lm_head.{end}" for kind in ("medusa", "hydra") for end in ("safetensors", "pt")
)  # used if there are no others
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
)


def read_model(
    folder: Path, label: str, dtype: torch.dtype | str, code: bool, device: torch.device | None = None
) -> PreTrainedModel:
    """The model of a folder. If it is quantised, it is loaded onto `device`: its kernels are chosen for that."""
    config = _read_config(folder, label, code)
    _check_causal(config, label, code)
    check_weight_files(folder, label)
    with readable(f"cannot load '{label}'", label):
        where = _placed(config, label, device)
        model, report = _read_weights(folder, config=config, dtype=dtype, **where, **_trust(code))
    check_report(model, report, label)
    return model


def is_quantised(config: Any) -> bool:
    """Whether this is the configuration of a checkpoint with quantised weights."""
    return any(getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))


def _placed(config: Any, label: str, device: torch.device | None) -> dict[str, Any]:
    """The option that loads quantised weights onto this device; an InputError if transformers does not know them."""
    if not is_quantised(config):
        return {}
    about = getattr(config, "quantization_config", None) or config.get_text_config().quantization_config
    if not AutoHfQuantizer.supports_quant_method(about):
        method = about.get("quant_method")
        raise InputError(
            f"'{label}' is quantised by the method {method}, which this version of transformers does not read"
        )
    return {} if device is None else {"device_map": {"": device}}


def _trust(code: bool) -> dict[str, bool]:
    """Use local files only, unless code is trusted, which may refer to another repository."""
    return {"trust_remote_code": code, "local_files_only": not code}


def _read_config(folder: Path, label: str, code: bool) -> Any:
    if not (folder / "config.json").is_file():
        raise InputError(f"'{label}' has no config.json: it is not the folder of a Hugging Face model")
    with readable(f"cannot read the config.json of '{label}'", label):
        return transformers.AutoConfig.from_pretrained(str(folder), **_trust(code))


def _check_causal(config: Any, label: str, code: bool) -> None:
    """Raise an InputError for encoders, encoder-decoders and other models that are not causal."""
    kind = type(config)
    own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if own_class and not known and not code:
        raise InputError(_needs_code(label))
    encoder = kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or encoder or not (known or own_class):
        architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
        raise InputError(f"'{label}' is not a causal language model but a {architecture}")


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, even if some are missing; empty if the folder has no weights."""
    for single in (*WEIGHTS, *HEADS):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
            return sorted({folder / shard for shard in shards})
    return []


def check_weight_files(folder: Path, label: str) -> None:
    """Find missing, empty and truncated files before loading, so that the error names the file."""
    try:
        files = weight_files(folder)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"the weights index of '{label}' is damaged: {first_line(error)}") from error
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
        raise InputError(f"'{file}' is damaged or incomplete: {first_line(error)}") from error


def _read_weights(folder: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, with sdpa attention if it has it, and transformers' report on its weights."""
    read = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        str(folder),
        weights_only=True,
        ignore_mismatched_sizes=True,  # `check_report` refuses them
        output_loading_info=True,
        **options,
    )
    try:
        return read(attn_implementation="sdpa")  # type: ignore[no-any-return]
    except ValueError as error:
        if "attention" not in str(error):
            raise
        return read(attn_implementation="eager")  # type: ignore[no-any-return]


def check_report(model: PreTrainedModel, report: dict[str, Any], label: str) -> None:
    """Raise an InputError if weights are missing or have another shape; tied weights may be missing."""
    missing = sorted(set(report["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or ()))
    if missing:
        more = ", ..." if len(missing) > 3 else ""
        raise InputError(f"'{label}' lacks {len(missing)} of its weights: {', '.join(missing[:3])}{more}")
    for key, found, wanted in sorted(report["mismatched_keys"]):
        raise InputError(f"'{label}' has weights of another shape: {key} is {tuple(found)}, not {tuple(wanted)}")


def read_tokenizer(folder: Path, label: str, code: bool) -> PreTrainedTokenizerBase | None:
    if not has_tokenizer(folder):
        return None
    with readable(f"cannot read the tokenizer of '{label}'", label):
        return transformers.AutoTokenizer.from_pretrained(str(folder), **_trust(code))


def has_tokenizer(folder: Path) -> bool:
    return any(file for pattern in TOKENIZERS for file in folder.glob(pattern))


@contextmanager
def readable(failure: str, label: str) -> Iterator[None]:
    """Turn every exception in this block into an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        raise InputError(f"{failure}: its weights are damaged, or hold code instead of numbers") from error
    except ModuleNotFoundError as error:
        raise InputError(f"{failure}: it needs the package '{error.name}', which is not installed") from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(_needs_code(label)) from error
        raise InputError(f"{failure}: {first_line(error)}") from error


def _needs_code(label: str) -> str:
    return f"'{label}' needs Python code of its own, which runs only with --trust-remote-code"
