"""Small models that borrow embeddings and vocabulary head from the target that they draft for (light folders).

Otherwise such a folder is what transformers writes: config.json, with a mark, and model.safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from windfall.checkpoints.bundled import BORROWS, TARGET
from windfall.checkpoints.model_dir import readable
from windfall.checkpoints.tensors import read_tensors
from windfall.core.types import InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "olmo2")  # whose embeddings and vocabulary head are plain matrices
EMBEDDINGS = "embeddings"  # value of BORROWS: the embedding and the vocabulary head


def borrows(folder: Path) -> bool:
    """Whether the model in this folder needs a target's embeddings."""
    try:
        return BORROWS in json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):  # reading the model reports what is wrong
        return False


def read_borrower(folder: Path, label: str, lender: Any, dtype: torch.dtype) -> Any:
    """The model in a light folder, with the embeddings of `lender`, a transformers model: shared, not copied."""
    with readable(f"cannot read the config.json of '{label}'", label):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if config.model_type not in FAMILIES or getattr(config, BORROWS) != EMBEDDINGS:
        raise InputError(
            f"'{label}' borrows {getattr(config, BORROWS)!r} for a {config.model_type}, which is unknown here"
        )
    embedding, vocabulary = lender.get_input_embeddings(), lender.get_output_embeddings()
    _check_sizes(config, label, tuple(vocabulary.weight.shape))
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(folder, label).items()}
    with readable(f"cannot load '{label}'", label):
        model = fill(without_embeddings(config), tensors).to(embedding.weight.device).requires_grad_(False)
    model.base_model.embed_tokens, model.lm_head = embedding, vocabulary
    return model


def _check_sizes(config: Any, label: str, found: tuple[int, int]) -> None:
    if found != (config.vocab_size, config.hidden_size):
        raise InputError(
            f"'{label}' borrows its embeddings from {_lender(config)} ({config.vocab_size} "
            f"tokens of width {config.hidden_size}); this target has {found[0]} of width {found[1]}"
        )


def _lender(config: Any) -> str:
    lender = getattr(config, TARGET, {})
    return str(
        lender.get("name", "another model") if isinstance(lender, dict) else lender
    )  # older folders have the name


def without_embeddings(config: Any) -> Any:
    """A causal language model on the meta device, without embeddings and vocabulary head."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    body = model.base_model
    body.embed_tokens = model.lm_head = None
    body.rotary_emb = type(body.rotary_emb)(config=config)  # it has buffers, which need real memory
    return model


def fill(model: Any, tensors: dict[str, Tensor]) -> Any:
    """Load exactly the weights that a model without embeddings has."""
    model.load_state_dict(tensors, assign=True)
    return model
