"""DFlash, DFlash 2 and DSpark heads with random weights, by the code of speculators."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import peers
from helpers.blocks import run
from helpers.peers import WIDTH
from helpers.tiny import VOCABULARY
from windfall.heads.block import BlockHead
from windfall.heads.fitting import fit

BLOCK, LENGTH, ANCHORS, TAPS = 4, 14, (2, 5, 9), (2, 4, 8)
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, its config, the config of its layers
    "DFlash": ("dflash", {}, {}),
    "DFlash: sample_from_anchor": ("dflash", {"sample_from_anchor": True}, {}),
    "DFlash: draft vocabulary": ("dflash", {"draft_vocab_size": 30}, {}),
    "DFlash: sliding windows": ("dflash", {}, SLIDING),
    "DFlash: sliding_window_non_causal": ("dflash", {"sliding_window_non_causal": True}, SLIDING),
    "DFlash: biases, wide heads": ("dflash", {}, {"attention_bias": True, "head_dim": 16}),
    "DFlash 2": ("dflash2", {"sliding_window_non_causal": True}, SLIDING),
    "DFlash 2: sample_from_anchor": ("dflash2", {"sample_from_anchor": True, "conv_kernel_size": 3}, {}),
    "DSpark": ("dspark", {}, {}),
    "DSpark: draft vocabulary": ("dspark", {"draft_vocab_size": 30}, {}),
    "DSpark: gated": ("dspark", {"markov_head_type": "gated"}, {}),
    "DSpark: rnn": ("dspark", {"markov_head_type": "rnn", "draft_vocab_size": 30}, {}),
    "DSpark: rnn, not sample_from_anchor": ("dspark", {"markov_head_type": "rnn", "sample_from_anchor": False}, {}),
    "DSpark: no Markov head": (
        "dspark", {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}, {}
    ),
}  # fmt: skip
OWN = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7},
    "dspark": {"markov_rank": 6},
}
CLASSES = {
    "dflash": ("DFlashSpeculatorConfig", "DFlashDraftModel"),
    "dflash2": ("DFlash2SpeculatorConfig", "DFlash2DraftModel"),
    "dspark": ("DSparkSpeculatorConfig", "DSparkDraftModel"),
}


class Outputs(NamedTuple):
    """Of all rows of all blocks that predict a token."""

    states: Tensor  # [rows, H], normed
    logits: Tensor  # [rows, Vd]
    corrected: Tensor  # [rows, Vd], with the pair scores of the text's tokens


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, LENGTH, len(TAPS) * WIDTH, generator=generator)
    return features, torch.randint(VOCABULARY, (1, LENGTH), generator=generator)


def make(variant: str, place: Path) -> Any:
    """One of speculators' own models; embedding and whole vocabularies are those of `peers.target()`."""
    from transformers import Qwen3Config

    package = peers.speculators()
    kind, given, layer = VARIANTS[variant]
    module = importlib.import_module(f"speculators.models.{kind}")
    greedy = importlib.import_module("speculators.proposals").GreedyTokenProposalConfig(speculative_tokens=3)
    about = package.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[greedy],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig(name_or_path=str(peers.verifier(place)), architectures=["LlamaForCausalLM"]),
    )
    shape = {**peers.layer_config(head_dim=8, num_hidden_layers=2), **layer}
    inner = Qwen3Config(**{key: value for key, value in shape.items() if key not in ("architectures", "model_type")})
    inner._attn_implementation = "eager"
    config_class, model_class = (getattr(module, name) for name in CLASSES[kind])
    config = config_class(
        transformer_layer_config=inner,
        speculators_config=about,
        **{
            "draft_vocab_size": VOCABULARY,
            "block_size": BLOCK,
            "aux_hidden_state_layer_ids": list(TAPS),
            "mask_token_id": 5,
            **OWN[kind],
            **given,
        },
    )
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            small = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.2)
            parameter.copy_(small + (parameter.dim() == 1))
        model.embed_tokens.weight.copy_(peers.embedding())
        if model.d2t is None:
            model.lm_head.weight.copy_(peers.vocabulary())
    if model.d2t is not None:
        offsets, mask = peers.some_tokens(len(model.d2t))
        model.load_vocab_mappings(mask, offsets)
    return model


@torch.no_grad()
def theirs(model: Any) -> Outputs:
    features, tokens = text()
    chosen = torch.zeros(1, LENGTH)
    chosen[0, list(ANCHORS)] = 1
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    hidden, logits, *_, places = model._backbone_forward(
        features, tokens, chosen, torch.zeros(1, LENGTH, WIDTH), documents, max_anchors=len(ANCHORS)
    )
    blocks = tokens[0, places].view(len(ANCHORS), BLOCK)
    first = model.config.sample_from_anchor
    before = blocks if first else torch.cat([blocks[:, :1], blocks[:, :-1]], 1)
    corrected = logits
    if getattr(model, "markov_head", None) is not None:
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden.view(len(ANCHORS), BLOCK, -1))
        corrected = logits + bias.view(1, -1, logits.shape[-1])
    if getattr(model, "candidate_selector", None) is not None:
        every = torch.arange(VOCABULARY).expand(*logits.shape[:2], -1)
        corrected = model.candidate_selector.score_candidates(logits, hidden, before.view(1, -1), every)
    rows = (torch.arange(len(places)) % BLOCK > 0) | first
    return Outputs(hidden[0, rows], logits[0, rows], corrected[0, rows])


@torch.no_grad()
def ours(head: BlockHead) -> Outputs:
    fit(head, peers.target()).prepare()
    features, tokens = text()
    starts = torch.tensor([ANCHORS])
    states = run(head, features, tokens[:, list(ANCHORS)], starts, BLOCK).view(len(ANCHORS), BLOCK, -1)
    normed, logits = head.normed(states), head.logits(states)
    corrected = logits.clone()
    if head.pair is not None:
        carry = head.first_carry(tokens[0, list(ANCHORS)], normed)
        keys = head.pair.keys(torch.arange(logits.shape[-1]))
        for level, row in enumerate(range(head.config.first_row, BLOCK)):
            query, carry = head.pair.query(tokens[0, starts[0] + level], normed[:, row], carry)
            corrected[:, row] += query @ keys.T
    own = (part[:, head.config.first_row :].flatten(0, 1) for part in (normed, logits, corrected))
    return Outputs(*own)


def difference(one: Outputs, other: Outputs) -> float:
    """The largest of all outputs, relative to the largest number of its kind."""
    return max(peers.difference([a], [b]) for a, b in zip(one, other, strict=True))
