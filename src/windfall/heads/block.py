"""A block head: one pass over gamma rows predicts gamma tokens, from which a whole tree is drafted.

The first row is the last committed token (the anchor), the others are masks. Every layer attends to keys and values
made of the target's hidden states at all committed positions, and to the rows of the block. DFlash, DFlash 2, DSpark
and JetSpec heads are block heads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from windfall.heads.base import DraftHead, HeadConfig
from windfall.heads.block_conv import BlockConv
from windfall.heads.layers import ContextMemory, DecoderLayer, Memory, RMSNorm
from windfall.heads.pair_scores import PairScore, Tables, new_pair_score

PAIRS = ("none", "projected", "path", "selector", "markov", "gated", "rnn")


class Visibility(NamedTuple):
    """What the rows of a block see in a layer, see `block_mask`."""

    window: int | None = None
    bidirectional: bool = False
    anchor_window: bool = False


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Flags: bidirectional (rows of a block see later rows too), predict_anchor (row k predicts position t + k + 1;
    otherwise row 0 predicts nothing and row k predicts t + k), fc_norm (each tap is normed before `fc`),
    anchor_windows (windows are counted back from the anchor, see `block_mask`), own_vocabulary, own_embedding."""

    block: int = 8  # rows
    candidates: int = 16  # tokens of a row that get pair scores
    pair: str = "none"  # one of PAIRS
    rank: int = 64  # of the pair scores
    conv_taps: int = 0  # of the convolutions; 0: there are none
    conv_group: int = 16  # channels that share a coefficient
    mask_token: int | None = None  # the token whose embedding the mask rows have; None: a learned vector
    causal_layers: tuple[int, ...] = ()  # layers whose rows see no later rows although the head is bidirectional
    embedding_scale: float = 1.0  # factor of the embeddings of anchor and masks
    softcap: float | None = None  # limit of the logits: softcap * tanh(logits / softcap)

    @property
    def first_row(self) -> int:
        """The first row that predicts a token."""
        return 0 if self.flag("predict_anchor") else 1

    @property
    def depth(self) -> int:
        """Tokens that a block predicts."""
        return self.block - self.first_row

    def visibility(self, layer: int) -> Visibility:
        bidirectional = self.flag("bidirectional") and layer not in self.causal_layers
        return Visibility(self.window(layer), bidirectional, self.flag("anchor_windows"))


class BlockHead(DraftHead):
    """`remember` stores committed positions in a memory, `forward` runs a block, `logits` and `pair` score tokens."""

    config: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        layer, width = config.layer, config.layer.hidden_size
        if config.flag("fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden, layer.rms_norm_eps) for _ in config.taps)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden, width, bias=False)
        self.hidden_norm = RMSNorm(width, layer.rms_norm_eps)
        self.mask = nn.Parameter(torch.zeros(width)) if config.mask_token is None else None
        self.layers = nn.ModuleList(BlockLayer(config, i) for i in range(layer.num_hidden_layers))
        self.norm = RMSNorm(width, layer.rms_norm_eps)
        drafted = config.draft_vocab_size or config.vocab_size
        self.pair: PairScore | None = new_pair_score(config.pair, config.vocab_size, drafted, width, config.rank)

    def borrow(self, embedding: Tensor, vocabulary: Tensor, bias: Tensor | None = None) -> None:
        super().borrow(embedding, vocabulary, bias)
        if self.pair is not None:
            self.pair = copy.copy(self.pair)  # a copy of this head with another vocabulary has other tables
            self.pair.attach(self.embedding, self.draft_tokens)

    @property
    def owns_vocabulary(self) -> bool:
        return super().owns_vocabulary or isinstance(self.pair, Tables)

    def prepare(self) -> None:
        """Compute what drafting uses again and again; call it after `borrow` and whenever weights have changed."""
        if self.pair is not None:
            self.pair.prepare()

    def context(self, features: Tensor) -> Tensor:
        """The target's tapped states [.., taps * target_hidden] → [.., H]."""
        if self.config.flag("fc_norm"):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        found: Tensor = self.hidden_norm(self.fc(features))
        return found

    def remember(self, context: Tensor, positions: Tensor, memory: ContextMemory) -> None:
        """Store the keys and values of committed positions: context [B, n, H] at positions [B, n]."""
        turn = self.rotary(positions, context.dtype)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            memory.append(layer.self_attn.place, *layer.self_attn.keys_values(context, turn))

    def forward(self, anchors: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """The states [B, gamma, H] of blocks after the anchors [B], whose rows are at positions [B, gamma].

        The memory decides which rows and remembered positions a row sees.
        """
        hidden = self.rows(anchors, positions.shape[1])
        turn = self.rotary(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, turn, memory)
        return hidden

    def rows(self, anchors: Tensor, size: int) -> Tensor:
        """The input of a block, [B, size, H]: the anchor's embedding and masks."""
        first = self.embed(anchors)[:, None]
        mask = self.embedding[self.config.mask_token] if self.mask is None else self.mask
        found = torch.cat([first, mask.to(first.dtype).expand(len(anchors), size - 1, -1)], 1)
        return found if self.config.embedding_scale == 1 else found * self.config.embedding_scale

    def vocabulary_logits(self, normed: Tensor) -> Tensor:
        found, cap = super().vocabulary_logits(normed), self.config.softcap
        return found if cap is None else torch.tanh(found / cap) * cap

    def normed(self, state: Tensor) -> Tensor:
        """The input of the vocabulary and of the pair scores."""
        normed: Tensor = self.norm(state)
        return normed

    def first_carry(self, anchors: Tensor, normed: Tensor) -> Tensor | None:
        """What the pair score of the first predicting row takes as `carry`; normed states [B, gamma, H].

        A recurrent state also reads the row of an anchor that predicts nothing.
        """
        if self.pair is None or self.config.first_row == 0:
            return None
        return self.pair.query(anchors, normed[:, 0])[1]


class BlockLayer(DecoderLayer):
    """A decoder layer, with convolutions around attention and feed-forward if the config has them."""

    def __init__(self, config: BlockConfig, place: int):
        super().__init__(config.layer, place)
        if config.conv_taps:
            width = config.layer.hidden_size
            self.attention_conv = BlockConv(width, config.conv_taps, config.conv_group)
            self.mlp_conv = BlockConv(width, config.conv_taps, config.conv_group)
        self.convolved = config.conv_taps > 0

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        if not self.convolved:
            return super().forward(hidden, turn, memory)
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.attention_conv(normed, lambda x: self.self_attn(x, turn, memory))
        out: Tensor = hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)
        return out


def block_mask(context: Tensor, anchors: Tensor, size: int, visible: Visibility = Visibility()) -> Tensor:
    """Which columns the rows of blocks see: [B, blocks * size, n + blocks * size] bool.

    context [B, n] holds the positions of remembered columns, anchors [B, blocks] those of the blocks' first rows. A
    row sees columns before its anchor and rows of its own block, later ones only if `bidirectional`. A window limits
    this to columns less than `window` positions away or, with `anchor_window`, the columns before the anchor to the
    last `window`.
    """
    blocks, device = anchors.shape[1], anchors.device
    starts = anchors.repeat_interleave(size, 1)  # [B, rows]
    rows = torch.arange(blocks * size, device=device)
    positions = starts + rows % size
    seen = context[:, None] < starts[:, :, None]  # [B, rows, n]
    own = (rows[:, None] // size == rows // size).expand(len(anchors), -1, -1)  # [B, rows, rows]
    if not visible.bidirectional:
        own = own & (rows[:, None] >= rows)
    if visible.window is not None and visible.anchor_window:
        seen = seen & (context[:, None] >= starts[:, :, None] - visible.window)
    elif visible.window is not None:
        seen = seen & (positions[:, :, None] - context[:, None] < visible.window)
        own = own & ((positions[:, :, None] - positions[:, None]).abs() < visible.window)
    return torch.cat([seen, own], 2)
