"""The trees that a target would draft for itself, grown from columns of a text; made on the fly or kept in files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_file
from windfall.model.batch import Packed
from windfall.model.decoder import Decoder, tree_attention
from windfall.train.losses import Bend
from windfall.train.shards import Batch
from windfall.train.sparse import Sparse
from windfall.train.teacher import Teacher

CHUNK = 2**26  # logits at once at the most
ROOTS = 64  # columns of each text whose trees are grown together at the most
KEPT = 64  # probabilities that a file keeps of each node


class Level(NamedTuple):
    """All nodes of one depth, k for each root."""

    tokens: Tensor  # [B, R, k]
    parents: Tensor  # [B, R, k]: the parent's place among the k nodes above; 0 below a root
    labels: Tensor | Sparse  # what follows: [B, R, k, Ht], for the target's vocabulary head, or its likeliest tokens


class Trees(NamedTuple):
    """A tree for each chosen column: its root has read the token of that column and guesses the one after it."""

    columns: Tensor  # [B, R]
    valid: Tensor  # [B, R] bool: the others are padding
    levels: list[Level]  # from depth 1 on


@dataclass(frozen=True)
class Shape:
    """Beams of `k` nodes, `depth` levels below the root; `forced`: the text's own tokens are always among them."""

    k: int = 4
    depth: int = 2
    forced: bool = False


def choose_roots(answer: Tensor, share: float = 1.0, random: bool = True) -> tuple[Tensor, Tensor]:
    """Columns [B, R] whose next word the target wrote, and which of them are no padding. A share of them: drawn, or
    evenly spread."""
    wanted = answer[:, 2:].clone()  # by column
    if share < 1 and random:
        wanted &= (torch.rand(wanted.shape) < share).to(wanted.device)
    elif share < 1:
        wanted &= wanted.cumsum(1) % max(1, round(1 / share)) == 0
    if not wanted.shape[1]:
        wanted = answer[:, :1] & False
    most = max(1, int(wanted.sum(1).max()))
    columns = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return columns, wanted.gather(1, columns)


def lineages(parents: list[Tensor]) -> list[Tensor]:
    """For the nodes of the last level [.., k], the place of each one's ancestor in every level, its own last."""
    places = [torch.arange(parents[-1].shape[-1], device=parents[-1].device).expand_as(parents[-1])]
    for above in reversed(parents[1:]):
        places.insert(0, above.gather(-1, places[0]))
    return places


def sight(last: Tensor, columns: int, lineage: list[Tensor]) -> Tensor:
    """What the newest level's nodes see: text up to column `last` [B, R] of `columns`, and in each level their own
    ancestor. → [B, R * k, columns + levels * R * k] bool."""
    batch, roots, k = lineage[0].shape
    text = torch.arange(columns, device=last.device) <= last[:, :, None]  # [B, R, columns]
    apart = torch.eye(roots, dtype=torch.bool, device=last.device)[:, None, :, None]  # a tree sees itself only
    nodes = torch.arange(k, device=last.device)
    blocks = [apart & (places[..., None] == nodes)[:, :, :, None] for places in lineage]  # [B, R, k, R, k]
    flat = [block.reshape(batch, roots * k, roots * k) for block in blocks]
    return torch.cat([text.repeat_interleave(k, 1), *flat], -1)


class Grower(Decoder):
    """A target whose cache holds whole texts, and behind them the trees of a few columns at a time."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.output, self.bend = model.get_output_embeddings(), Bend.of(self.config)
        self._room = self.context or 2**31  # positions; a tree that needs more does not count

    @torch.no_grad()
    def grow(self, tokens: Tensor, final: Tensor, roots: tuple[Tensor, Tensor], shape: Shape) -> Trees:
        """The target's own beam trees: the k likeliest next tokens, then the k likeliest paths of one token more.

        tokens [B, L] and the target's last states of them, final [B, L, Ht].
        """
        columns, valid = roots
        valid = valid & (columns + 1 + shape.depth < self._room)
        self._read(tokens)
        size = max(1, min(ROOTS, CHUNK // (len(tokens) * shape.k * self.vocab_size)))
        parts = [self._grow(tokens, final, part, shape) for part in torch.split(columns, size, 1)]
        self.reset(0)
        levels = [Level(*(torch.cat(x, 1) for x in zip(*same, strict=True))) for same in zip(*parts, strict=True)]
        return Trees(columns, valid, levels)

    def _read(self, tokens: Tensor) -> None:
        """Texts into the empty cache, padding and all: no row that matters sees it."""
        batch, length = tokens.shape
        self.reset(batch)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=tokens.device).tril()
        positions = torch.arange(length, device=tokens.device)
        self._look(Packed(tokens, positions.expand(batch, -1), causal.expand(batch, -1, -1)), causal=True)
        self.cache.lengths, self.cache.staged = [length] * batch, 0

    def _grow(self, tokens: Tensor, final: Tensor, columns: Tensor, shape: Shape) -> list[Level]:
        self.cache.staged = 0
        self._staged_positions = columns[:, :0]
        beam = Beam(self, tokens, columns, shape)
        beam.start(_pick(final, columns + 1))
        levels: list[Level] = []
        for depth in range(1, shape.depth + 1):
            if depth > 1:
                beam.advance()
            mask = sight(columns + 1, tokens.shape[1], lineages([level.parents for level in levels] + [beam.parents]))
            positions = (columns + 1 + depth).clamp(max=self._room - 1).repeat_interleave(shape.k, 1)
            states = self._look(Packed(beam.tokens.flatten(1), positions, mask), causal=False)
            beam.states = states.reshape(*beam.tokens.shape, -1)
            levels.append(Level(beam.tokens, beam.parents, beam.states))
        return levels

    def _look(self, packed: Packed, causal: bool) -> Tensor:
        """One forward, staged behind what is there: last states [B, n, Ht]."""
        width = packed.tokens.shape[1]
        self.cache.reserve(width)
        with tree_attention(self.model):
            outputs = self.model.base_model(
                input_ids=packed.tokens,
                position_ids=packed.positions,
                attention_mask=self._mask(packed, causal),
                past_key_values=self.cache,
                use_cache=True,
            )
        self.cache.staged += width
        self._staged_positions = torch.cat([self._staged_positions, packed.positions], 1)
        states: Tensor = outputs.last_hidden_state
        return states

    def best(self, states: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k likeliest tokens after states [.., Ht], their log-probabilities, and all logits normalised [.., V]."""
        logits = self.bend(self.output(states.to(self.output.weight.dtype)).float())
        logits = logits - logits.logsumexp(-1, keepdim=True)
        chances, tokens = logits.topk(k, -1)
        return tokens, chances, logits


class Beam:
    """The newest level of some trees."""

    def __init__(self, grower: Grower, text: Tensor, columns: Tensor, shape: Shape):
        self._grower, self._text, self._columns, self._shape = grower, text, columns, shape
        self.states: Tensor = text  # [B, R, k, Ht], once they were looked at
        self._depth = 0
        self._place = torch.zeros_like(columns)  # of the text's own token, if forced

    def start(self, roots: Tensor) -> None:
        """roots [B, R, Ht]: the target's states at the roots."""
        self._take(roots[:, :, None], self._columns[..., None] * 0.0)

    def advance(self) -> None:
        self._take(self.states, self.scores)

    def _take(self, states: Tensor, scores: Tensor) -> None:
        """The best children of these nodes [B, R, n, Ht] with path scores [B, R, n]."""
        k = self._shape.k
        tokens, chances, logits = self._grower.best(states, k)
        found = (scores[..., None] + chances).flatten(2).topk(k, -1)  # of [B, R, n * k]
        self.scores, self.parents = found.values, found.indices // k
        self.tokens = tokens.flatten(2).gather(-1, found.indices)
        self._depth += 1
        if self._shape.forced:
            self._force(scores, logits)

    def _force(self, scores: Tensor, logits: Tensor) -> None:
        """Put the text's own token in the last place where it is not there already, while there is text."""
        places = self._columns + 1 + self._depth
        there = places < self._text.shape[1]
        wanted = self._text.gather(1, places.clamp(max=self._text.shape[1] - 1))  # [B, R]
        parent = self._place[..., None]
        hit = (self.tokens == wanted[..., None]) & (self.parents == parent)
        lost = there & ~hit.any(-1)
        after = logits.gather(2, parent[..., None].expand(-1, -1, 1, logits.shape[-1]))[:, :, 0]  # [B, R, V]
        score = scores.gather(-1, parent) + after.gather(-1, wanted[..., None])
        last = lost[..., None] & (torch.arange(self._shape.k, device=lost.device) == self._shape.k - 1)
        self.tokens = torch.where(last, wanted[..., None], self.tokens)
        self.parents = torch.where(last, parent, self.parents)
        self.scores = torch.where(last, score, self.scores)
        self._place = torch.where(lost, self._shape.k - 1, hit.int().argmax(-1))


def _pick(rows: Tensor, places: Tensor) -> Tensor:
    """rows [B, n, H], places [B, R] → [B, R, H]."""
    return rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))


# ---- in files


def write_trees(
    teacher: Teacher, batches: Iterable[Batch], folder: Path, shape: Shape, share: float = 1.0
) -> Iterator[int]:
    """Grow trees and keep each node's likeliest tokens, one file per batch; yields how many batches are there.

    Files that are there already are kept, so that the same call goes on where it was interrupted.
    """
    make_folder(folder)
    grower = Grower(teacher.model)
    for number, given in enumerate(batches):
        batch = Batch(given.tokens.to(grower.device), given.answer.to(grower.device))
        file = folder / f"trees-{number:06}.safetensors"
        if not file.exists():
            roots = choose_roots(batch.answer, share, random=False)
            trees = grower.grow(batch.tokens, teacher.teach(batch).final, roots, shape)
            _save(file, _flatten(grower, batch, trees), shape)
        yield number + 1


def _flatten(grower: Grower, batch: Batch, trees: Trees) -> dict[str, Tensor]:
    """Only what is no padding, text after text."""
    valid = trees.valid
    kept = [_sparse(grower, level.labels[valid]) for level in trees.levels]
    stacked = {
        "columns": trees.columns[valid].int(),  # [N]
        "tokens": torch.stack([level.tokens[valid] for level in trees.levels], 1).int(),  # [N, D, k]
        "parents": torch.stack([level.parents[valid] for level in trees.levels], 1).to(torch.uint8),
        "label_tokens": torch.stack([own.tokens for own in kept], 1).int(),  # [N, D, k, KEPT]
        "label_chances": torch.stack([own.chances for own in kept], 1).half(),
        "label_tails": torch.stack([own.tail for own in kept], 1).half(),  # [N, D, k]
    }
    counts = {"keys": torch.tensor(_keys(batch)), "counts": valid.sum(1)}
    return {name: x.cpu().contiguous() for name, x in {**stacked, **counts}.items()}


def _sparse(grower: Grower, states: Tensor) -> Sparse:
    """[N, k, Ht] → the likeliest tokens, a bounded number of rows at a time."""
    size = max(1, CHUNK // (states.shape[1] * grower.vocab_size))
    kept = min(KEPT, grower.vocab_size)
    parts = [grower.best(part, kept)[:2] for part in torch.split(states, size)]
    tokens, chances = (torch.cat(x) for x in zip(*parts, strict=True))
    return Sparse(tokens, chances.exp(), (1 - chances.exp().sum(-1)).clamp(min=0))


def _keys(batch: Batch) -> list[int]:
    """A number for each text up to the last word that the target wrote."""
    places = torch.arange(1, batch.answer.shape[1] + 1, device=batch.answer.device)
    lengths = (batch.answer * places).amax(1).tolist()
    rows = (row[:length].tobytes() for row, length in zip(batch.tokens.int().cpu().numpy(), lengths, strict=True))
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little", signed=True) for row in rows]


def _save(file: Path, tensors: dict[str, Tensor], shape: Shape) -> None:
    told = {"k": str(shape.k), "depth": str(shape.depth)}
    replace_file(file, lambda temporary: save_file(tensors, temporary, told))


class StoredTrees:
    """Trees from files, found by the texts they belong to."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._places: dict[int, tuple[Path, int, int]] = {}  # text → file, first root, number of roots
        shapes = {self._index(file) for file in sorted(folder.glob("trees-*.safetensors"))}
        if len(shapes) != 1:
            raise InputError(f"'{folder}' holds {'trees of several shapes' if shapes else 'no trees'}")
        [self.shape] = shapes

    def _index(self, file: Path) -> Shape:
        try:
            with safe_open(str(file), framework="pt") as opened:
                keys, counts = opened.get_tensor("keys").tolist(), opened.get_tensor("counts")
                told = opened.metadata()
        except Exception as error:
            raise InputError(f"'{file}' is damaged: {first_line(error)}") from error
        starts = (counts.cumsum(0) - counts).tolist()
        self._places |= {key: (file, *at) for key, *at in zip(keys, starts, counts.tolist(), strict=True)}
        return Shape(int(told["k"]), int(told["depth"]))

    def find(self, batch: Batch) -> Trees:
        """The trees of a batch, padded to the most that a text has."""
        rows = [self._rows(key) for key in _keys(batch)]
        most = max(1, max(len(row["columns"]) for row in rows))
        device = batch.tokens.device

        def padded(name: str) -> Tensor:
            own = [row[name] for row in rows]
            full = [torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])]) for part in own]
            return torch.stack(full).to(device)

        valid = torch.stack([torch.arange(most) < len(row["columns"]) for row in rows]).to(device)
        names = ("tokens", "parents", "label_tokens", "label_chances", "label_tails")
        tokens, parents, labels, chances, tails = (padded(name).unbind(2) for name in names)  # by level
        levels = [
            Level(own.long(), above.long(), Sparse(names.long(), likely.float(), rest.float()))
            for own, above, names, likely, rest in zip(tokens, parents, labels, chances, tails, strict=True)
        ]
        return Trees(padded("columns").long(), valid, levels)

    def _rows(self, key: int) -> dict[str, Tensor]:
        if key not in self._places:
            raise InputError(f"'{self.folder}' has no trees for a text; make them from the same data and max_length")
        file, start, count = self._places[key]
        names = ("columns", "tokens", "parents", "label_tokens", "label_chances", "label_tails")
        with safe_open(str(file), framework="pt") as opened:
            return {name: opened.get_slice(name)[start : start + count] for name in names}
