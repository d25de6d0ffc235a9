"""The model that has the last word: it scores whole trees in one forward and keeps the rows of the accepted paths."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor

from windfall.batch import Rows
from windfall.decoder import Decoder
from windfall.records import InputError, Scores
from windfall.tree import MOST_ROWS, DraftTree

ORDINARY = {"full_attention", "sliding_attention", "attention", "global"}  # layer kinds whose rows can be gathered


class Target:
    """A Hugging Face causal language model. Its cache holds every committed token but the last, which is the root."""

    recordings = 0  # passes that were recorded so far: see resident/

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None):
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        if (where := torch.get_default_device()).type != "cpu":  # what the host keeps would be made there
            raise InputError(f"torch makes tensors on {where} by default; call torch.set_default_device('cpu')")
        refuse_unsupported(model, self.name)
        self.model = model
        self.tokenizer = tokenizer
        self.decoder = Decoder(model)
        self.turn = threading.RLock()  # held while a whole text is generated
        self.texts = 0  # begun so far: it has one cache, for whichever engine is the last
        try:
            ahead, (gap, scale) = looks_ahead(model), self._tree_gap()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.name}: {type(model).__name__} cannot score a tree: {reason}") from error
        if ahead:
            raise InputError(f"{self.name}: {type(model).__name__} reads ahead; load it with is_decoder=True")
        if not gap <= 0.05 * max(scale, 1e-3):
            raise InputError(
                f"{self.name}: {type(model).__name__} does not score a tree as it scores the tree's paths "
                f"(logits differ by {gap:.3g}), so its output could change; windfall refuses it"
            )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def context(self) -> int | None:
        return self.decoder.context

    @property
    def eos(self) -> tuple[int, ...]:
        """Every token id that ends a text."""
        ids: set[int] = set()
        for holder in (self.model.generation_config, self.decoder.config, self.tokenizer):
            found = getattr(holder, "eos_token_id", None)
            ids.update([found] if isinstance(found, int) else found or [])
        return tuple(sorted(ids))

    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        """Start new sequences, whose states at `taps` are handed out; returns those of all tokens but the last."""
        self.decoder.taps = taps
        self.decoder.reset(len(prompts))
        return self.decoder.extend([prompt[:-1] for prompt in prompts])

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """ONE forward for all trees: a row sees the prefix and its ancestors, at position prefix + depth."""
        if (most := max(map(len, trees))) > MOST_ROWS:
            raise InputError(f"a verify pass takes {MOST_ROWS} rows at the most, not {most}")
        rows = [
            Rows(tree.tokens, length + tree.depth, tree.mask())
            for tree, length in zip(trees, self.decoder.lengths, strict=True)
        ]
        logits, hidden = self.decoder.feed(rows)
        return [Scores(row, None if hidden is None else hidden[b]) for b, row in enumerate(logits)]

    def commit(self, paths: list[Tensor]) -> None:
        """Keep the rows of these nodes of the trees last scored."""
        self.decoder.commit([path.tolist() for path in paths])

    def states(self, hidden: Tensor, path: Tensor) -> Tensor:
        """Of a score's hidden states [N, taps * H], those of a committed path."""
        return hidden[path]

    def retain(self, keep: list[int]) -> None:
        """Go on with these sequences only."""
        self.decoder.retain(keep)

    def _tree_gap(self) -> tuple[float, float]:
        """How far a small tree's scores are from its paths' scores, and their scale.

        Some families hide positions in the mask, or in the places of cache rows.
        """
        tokens = torch.arange(6) % self.vocab_size
        tree = DraftTree.root(int(tokens[3]))
        for parent, token in ((0, tokens[4]), (0, tokens[5]), (1, tokens[2])):
            tree = tree.extend(torch.tensor([parent]), token[None], torch.zeros(1), torch.zeros(1, dtype=torch.long))
        prompt = tokens[:4].tolist()
        self.prefill([prompt])
        in_tree = self.score([tree])[0].logits.float()
        gap = 0.0
        for leaf in (2, 3):
            path = tree.path(leaf)
            self.prefill([prompt])
            alone = self.score([tree.select(torch.tensor(path))])[0].logits.float()
            gap = max(gap, float((alone - in_tree[path]).abs().max()))
        self.decoder.reset(0)
        return gap, float(in_tree.abs().max())


@torch.inference_mode()
def looks_ahead(model: Any) -> bool:
    """Whether tokens see those behind them, as in models that are encoders unless they are told otherwise."""
    if getattr(model.config.get_text_config(), "is_decoder", True):
        return False
    device = model.get_input_embeddings().weight.device
    one, other = (model(input_ids=torch.tensor([[2, 3, last]], device=device)).logits[0, :2] for last in (4, 5))
    return bool((one - other).abs().max() > 1e-4 * one.abs().max())


def refuse_unsupported(model: Any, name: str) -> None:
    """Say by name why a model cannot be verified in trees, before anything goes wrong."""
    config, kind = model.config.get_text_config(), type(model).__name__
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    odd = sorted(set(kinds) - ORDINARY)
    forward = inspect.signature(model.forward).parameters
    reason = ""
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "is an encoder–decoder; windfall speeds up decoder-only models"
    elif getattr(model, "_is_stateful", False) or odd:
        names = ", ".join(odd) or "recurrent"
        reason = f"has {names} layers, whose state or window cannot drop rejected tokens"
    elif config.model_type == "gpt_neo":
        reason = "masks by a table that ends with its context, past which rows of a tree may lie"
    elif "past_key_values" not in forward or "position_ids" not in forward:
        reason = "takes no past_key_values or position_ids, which a tree pass needs"
    if reason:
        raise InputError(f"{name}: {kind} {reason}")
