"""Known kinds of draft heads that windfall does not read: how each is recognised, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from windfall.core.errors import InputError

Config = dict[str, Any]
Names = set[str]

SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "qweight")  # of quantised weights
MTP_LAYERS = ("mtp.", "mtp_layers.", "mtp_block.")  # MiMo, Qwen3-Next, LongCat
MTP_PARTS = ("eh_proj.weight", "enorm.weight", "hnorm.weight")  # DeepSeek-V3, GLM-4.5


class Unsupported(NamedTuple):
    """A kind of head that windfall does not read."""

    name: str
    matches: Callable[[Config, Names], bool]  # config.json and the tensors' plain names; either may be empty
    reason: str  # what windfall would need to read it
    inside: bool = False  # it may be part of a complete language model, which can draft itself


def _speculator(config: Config, kind: str) -> bool:
    return bool(config.get("speculators_model_type") == kind)


def _named(config: Config, *parts: str) -> bool:
    """Whether the config's architecture or model type has one of these words in it."""
    given = config.get("architectures")
    words = [*(given if isinstance(given, list) else []), config.get("model_type", "")]
    return any(part in str(word).lower() for part in parts for word in words)


def _dflash(config: Config) -> Config:
    inner = config.get("dflash_config")
    return inner if isinstance(inner, dict) else {}


def _projector(config: Config) -> Any:
    return _dflash(config).get("projector_type", config.get("projector_type"))


def _begins(names: Names, *parts: str) -> bool:
    return any(name.startswith(parts) for name in names)


def _is_domino(config: Config, names: Names) -> bool:
    return _named(config, "domino") or _projector(config) == "domino" or _begins(names, "prefix_gru.")


def _is_xpress(config: Config, names: Names) -> bool:
    return _speculator(config, "xpress") or _named(config, "xpress") or _begins(names, "refiner_head.")


def _is_jetspec(config: Config, names: Names) -> bool:
    return _speculator(config, "jetspec")


def _is_peagle(config: Config, names: Names) -> bool:
    return _speculator(config, "peagle") or _named(config, "peagle") or "mask_hidden" in names


def _is_mtp(config: Config, names: Names) -> bool:
    named = _speculator(config, "mtp") or _named(config, "mtp", "nextn")
    return named or _begins(names, *MTP_LAYERS) or any(name.endswith(MTP_PARTS) for name in names)


def _is_mla(config: Config, names: Names) -> bool:
    latent = any(name.endswith("self_attn.kv_a_proj_with_mqa.weight") for name in names) or "kv_lora_rank" in config
    return latent and (_named(config, "eagle3") or "layers.0.hidden_norm.weight" in names)


def _is_assistant(config: Config, names: Names) -> bool:
    named = str(config.get("model_type", "")).endswith("_assistant") or _named(config, "assistantforcausallm")
    return named or {"pre_projection.weight", "post_projection.weight"} <= names


def _is_mlp(config: Config, names: Names) -> bool:
    return _named(config, "mlp_speculator", "mlpspeculator", "lstmspeculator") or _begins(names, "speculator.emb.")


def _is_medusa2(config: Config, names: Names) -> bool:
    heads = "medusa_num_heads" in config or _begins(names, "medusa_head")
    return heads and _begins(names, "layers.", "base_model.")


def _is_specexit(config: Config, names: Names) -> bool:
    return "early_stop_method" in config or any("early_stop" in name for name in names)


UNSUPPORTED = (  # the first match counts, so special kinds come before general ones
    Unsupported("Domino", _is_domino, "it needs a block head with a GRU over the drafted tokens"),
    Unsupported("XPress", _is_xpress, "it needs a block head with a refiner"),
    Unsupported("JetSpec of speculators", _is_jetspec, "it needs a drafter that feeds drafted tokens to later rows"),
    Unsupported("P-EAGLE", _is_peagle, "it needs a drafter that runs all depths in one pass, from its mask_hidden"),
    Unsupported(
        "MTP", _is_mtp, "it needs a drafter that runs the multi-token prediction layers of a target's files", True
    ),
    Unsupported("EAGLE-3 with MLA", _is_mla, "it needs multi-head latent attention in the head's layer"),
    Unsupported(
        "Gemma-4 assistant", _is_assistant, "it needs a drafter that attends to the target's own keys and values"
    ),
    Unsupported("MLPSpeculator", _is_mlp, "it needs a drafter with a small network for each token ahead"),
    Unsupported(
        "Medusa-2", _is_medusa2, "it holds its target too; give the heads in a folder of their own as --drafter"
    ),
    Unsupported("SpecExit", _is_specexit, "its exit signals end texts early, so that they would not be the target's"),
)


def find_unsupported(config: Config, names: Names) -> Unsupported | None:
    """The unsupported kind of these files, if they are of one."""
    return next((kind for kind in UNSUPPORTED if kind.matches(config, names)), None)


def quantised(names: Names) -> bool:
    """Whether these are the tensors of quantised weights."""
    return any(name.endswith(SCALES) for name in names)


def is_model(names: Names) -> bool:
    """Whether these are the tensors of a complete language model, not counting MTP layers."""
    own = [f".{name}" for name in names if not name.startswith(MTP_LAYERS)]
    parts = (".embed_tokens.weight", ".layers.0.input_layernorm.weight", ".norm.weight")
    return all(any(name.endswith(part) for name in own) for part in parts)


def refuse(kind: Unsupported, label: str) -> InputError:
    return InputError(f"'{label}' is a head of kind {kind.name}, which windfall does not read: {kind.reason}")


def refuse_quantised(kind: str, label: str) -> InputError:
    scales = "its weights are quantised; give it in bfloat16, float16 or float32"
    return InputError(f"'{label}' is a head of kind {kind} that windfall does not read: {scales}")
