"""What all draft heads share, and the interface of a feature head."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from windfall.heads.layers import Memory, Rotary
from windfall.kernels.few_rows import linear
from windfall.kernels.packed import PackedLinear

H = TypeVar("H", bound="DraftHead")


@dataclass(frozen=True)
class HeadConfig:
    """The description of a head, independent of its file format."""

    kind: str  # a name of windfall.heads.kinds.KINDS
    layer: LlamaConfig  # widths, heads, rope, activation; qk_norm and o_bias as extra attributes
    target_hidden: int  # width of one of the target's states
    taps: tuple[int, ...]  # the target states that it reads, see windfall.model.hidden_states
    vocab_size: int  # of the target
    draft_vocab_size: int | None = None  # if it is smaller
    flags: dict[str, bool] = field(default_factory=dict)  # the variants of a kind, see the classes
    windows: tuple[int | None, ...] = ()  # positions that each layer's attention sees, with its own; None: all
    logit_scale: float = 1.0  # factor of the logits of a borrowed vocabulary; the head's own one includes it

    def flag(self, name: str) -> bool:
        return self.flags.get(name, False)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class DraftHead(nn.Module):
    """A small network that predicts tokens from the target's hidden states.

    `embedding` and `vocabulary` are the target's unless the file has its own; borrowed ones are frozen and not part of
    the module.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.layer)
        self.draft_tokens: Tensor | None = None  # [Vd] target id of each draft id; None: the target's vocabulary
        self.agreement: float | None = None  # share of first predictions that equal the target's, if measured
        self._shared: dict[str, Any] = {}
        self.packed_vocabulary: PackedLinear | None = None  # used instead of `vocabulary`
        width = config.layer.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.flag("own_embedding") else None
        drafted = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(width, drafted, bias=False) if config.flag("own_vocabulary") else None

    def borrow(self, embedding: Tensor, vocabulary: Tensor, bias: Tensor | None = None) -> None:
        """Use the target's embedding [V, H] and the drafted rows of its vocabulary head [V, H]."""
        if self.draft_tokens is not None:
            self.draft_tokens = self.draft_tokens.to(vocabulary.device)
            vocabulary = vocabulary.detach()[self.draft_tokens].contiguous()
            bias = None if bias is None else bias.detach()[self.draft_tokens]
        if self.config.logit_scale != 1:
            vocabulary = vocabulary.detach() * self.config.logit_scale
            bias = None if bias is None else bias.detach() * self.config.logit_scale
        self._shared = {"embedding": embedding.detach(), "vocabulary": vocabulary.detach(), "bias": bias}

    @property
    def owns_vocabulary(self) -> bool:
        """Whether its weights are for the tokens that it drafts, so that it cannot draft others."""
        return self.lm_head is not None

    @property
    def vocabulary(self) -> Tensor:
        """[Vd, H]"""
        found: Tensor = self._shared["vocabulary"] if self.lm_head is None else self.lm_head.weight
        return found

    @property
    def vocabulary_bias(self) -> Tensor | None:
        """[Vd]; only a borrowed vocabulary may have one."""
        found: Tensor | None = self._shared.get("bias") if self.lm_head is None else None
        return found

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        found: Tensor = self._shared["embedding"] if self.embed_tokens is None else self.embed_tokens.weight
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, state: Tensor) -> Tensor:
        """[.., H] → [.., Vd]"""
        return self.vocabulary_logits(self.normed(state))

    def vocabulary_logits(self, normed: Tensor) -> Tensor:
        """`logits` of what `normed` returned."""
        if self.packed_vocabulary is not None:
            found: Tensor = self.packed_vocabulary(normed)
            return found
        return linear(normed, self.vocabulary, self.vocabulary_bias)

    def normed(self, state: Tensor) -> Tensor:
        """The input of the vocabulary head."""
        return state

    def twin(self: H) -> H:
        """A copy that shares all weights, for changes of the config or of what is borrowed."""
        made = copy.copy(self)
        made._modules = dict(self._modules)
        return made

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class Guess(NamedTuple):
    """A head's outputs for some rows."""

    state: Tensor  # [B, n, H], for `FeatureHead.logits`
    recycled: Tensor  # [B, n, H], used instead of the target's feature to draft the next token


class FeatureHead(DraftHead):
    """Column t reads token x[t+1] and the feature of position t, and predicts x[t+2].

    The feature of a committed token is the target's, through `fuse`; that of a drafted one is `Guess.recycled`.
    """

    def fuse(self, features: Tensor) -> Tensor:
        """The target's tapped states [.., taps * target_hidden] → [.., H]."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        """Rows of tokens [B, n], each with its (fused or recycled) feature [B, n, H]."""
        raise NotImplementedError
