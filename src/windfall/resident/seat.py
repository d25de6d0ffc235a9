"""The target and the drafter of one sequence on fixed buffers, for policies that decide on the host: they take the
places of Target and Drafter in the engine's own cycle. One small copy to the host per draft pass, one per cycle."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from windfall.drafters.base import Drafter, hang
from windfall.records import Grow, InputError, SamplingParams, Scores
from windfall.resident.drafting import Draft, HeadDraft, Sprouting
from windfall.resident.forward import Pass
from windfall.resident.judge import MOST, Judge
from windfall.resident.parcel import Parcel
from windfall.resident.recorder import Key
from windfall.sampling import Dice
from windfall.tree import DraftTree

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # sizes of recorded draft passes
CHILDREN = (1, 2, 4, 8, 16, 32, 64, 128)
PENDING = 32  # columns that one opening pass takes in
STAGED = 1024  # nodes expanded in a cycle, at the most
STEP = 128  # by which the bound on them grows


class SeatedTarget:
    """Prefill, score and commit as Target has them."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self._results: dict[Key, tuple[Tensor, Tensor | None]] = {}  # where each recorded pass leaves them
        self._verdict = Parcel(judge.device, path=(torch.long, (MOST,)), accepted=(torch.long, (1,)))

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        (prompt,) = prompts
        given = torch.tensor(prompt[:-1], device=self.judge.device)
        pieces = [None if states is None else states.clone() for states in self.judge.read(given)]
        return [torch.cat([piece for piece in pieces if piece is not None])] if taps else None

    @torch.inference_mode()
    def score(self, trees: list[DraftTree]) -> list[Scores]:
        judge, (tree,) = self.judge, trees
        size = judge.place(tree)
        columns = judge.columns(size)
        key = ("score", size, columns, judge.capacity)
        fresh = key not in judge.recorder.graphs
        judge.recorder.refresh(key, lambda: judge.score(size, columns))
        if fresh:
            self._results[key] = judge.logits[size], judge.hidden[size]
        logits, states = self._results[key]
        kept = None if states is None else states[: len(tree)].clone()  # other recorded work may use their place
        return [Scores(logits[: len(tree)], kept)]

    @torch.inference_mode()
    def commit(self, paths: list[Tensor]) -> None:
        judge, (path,) = self.judge, paths
        host = self._verdict.host
        host["path"].fill_(-1)
        host["path"][: len(path)] = path
        host["accepted"][0] = len(path)
        self._verdict.send()
        size = next(rows for rows in WIDTHS if rows >= len(path))
        judge.recorder.run(("keep", size, judge.capacity), lambda: judge.keep(self._verdict, size))
        judge.known += len(path)

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]


class SeatedDrafter(Drafter):
    """A head or a smaller model as Drafter has it, for one sequence."""

    def __init__(self, draft: Draft, longest: int | None):
        self.draft, self.longest = draft, longest
        self.params = SamplingParams()  # of the sequence to come
        device, long = draft.judge.device, torch.long
        names = ("tokens", "depth", "staged", "above")
        self._rows = Parcel(device, **dict.fromkeys(names, (long, (MOST,))), mask=(torch.bool, (MOST, STAGED)))
        self._opening = Parcel(device, tokens=(long, (PENDING,)), waiting=(long, (1,)))
        self._found: dict[tuple[int, int], Parcel] = {}
        self._slots: dict[int, int] = {}  # expanded node → its place; the root's is 0
        self._staged = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.judge.taps

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Many[Dice | None]) -> None:
        (prompt,) = prompts
        self._dice = dice[0]
        self._sprouting = Sprouting(self.params, self._dice is not None, self.draft.judge.dials)
        self.draft.judge.sample(self.params)
        self.draft.start()
        given, at = torch.tensor(prompt, device=self.draft.judge.device), 0
        while at < len(prompt) - 1:
            at = self.draft.take_piece(given, at, hidden[0][at : at + MOST] if hidden else None)
        self._taken = len(prompt) - (2 if isinstance(self.draft, HeadDraft) else 1)
        self._tokens = prompt[-1:]
        self._features = hidden[0][-1:] if hidden else None

    @torch.inference_mode()
    def begin(self, tokens: list[int]) -> list[DraftTree]:
        self._slots, self._staged = {}, 0
        if self._dice is not None:
            self.draft.judge.dials.kappa.fill_(self._dice.kappa)
        return super().begin(tokens)

    @torch.inference_mode()
    def expand(self, trees: list[DraftTree], grows: Many[Grow | None]) -> list[DraftTree]:
        (tree,), (grow,) = trees, grows
        if grow is None or not self._fits(tree, grow):
            return trees
        k = next(size for size in CHILDREN if size >= min(grow.k, CHILDREN[-1]))
        if not self._slots:
            found = self._open(k, grow.entropy)
            self._slots[0] = 0
        else:
            found = self._grow(tree, grow, k)
        return [self._hung(tree, grow, found)]

    def _fits(self, tree: DraftTree, grow: Grow) -> bool:
        """Whether there is room for these nodes, in the model's positions and in the buffers."""
        deepest = self._taken + len(self._tokens) + int(tree.depth[grow.nodes].max())
        return (self.longest is None or deepest <= self.longest) and self._staged + len(grow.nodes) <= STAGED

    def _open(self, k: int, entropy: bool) -> Parcel:
        """Take in what is pending; the root's children."""
        draft = self.draft
        while len(self._tokens) > PENDING:
            self._bring(PENDING)
            self._record(("absorb",), self._absorb)
            self._tokens = self._tokens[PENDING:]
            self._features = None if self._features is None else self._features[PENDING:]
            self._taken += PENDING
        count = len(self._tokens)
        rows = next(size for size in WIDTHS if size >= count)
        self._bring(count)
        found = self._parcel(1, k)

        def work() -> None:
            logits, positions = draft.open(rows)
            self._children(logits, positions, k, entropy, found)

        self._record(("open", rows, k, entropy), work)
        return found

    def _bring(self, count: int) -> None:
        """Put the first pending columns where the draft expects them."""
        host, draft = self._opening.host, self.draft
        host["tokens"][:count] = torch.tensor(self._tokens[:count])
        host["waiting"][0] = count
        self._opening.send()
        draft.tokens.copy_(self._opening.device["tokens"])
        draft.waiting.copy_(self._opening.device["waiting"])
        if self._features is not None and draft.features is not None:
            draft.features[:count] = self._features[:count]

    def _absorb(self) -> None:
        self.draft.open(PENDING)

    def _grow(self, tree: DraftTree, grow: Grow, k: int) -> Parcel:
        draft, count = self.draft, len(grow.nodes)
        width = next((size for size in WIDTHS if size >= count), 0)
        if not width:
            raise InputError(f"a draft pass takes {WIDTHS[-1]} nodes at the most on a GPU, not {count}")
        bound = -(-(self._staged + width) // STEP) * STEP
        self._place(tree, grow, width, bound)
        found, there = self._parcel(width, k), self._rows.device

        def work() -> None:
            tokens, depth, staged, above = (there[name][:width] for name in ("tokens", "depth", "staged", "above"))
            positions = draft.length - 1 + depth
            rows = Pass(tokens, positions, draft.length + staged, there["mask"][:width, :bound], draft.length)
            logits = draft.grow(rows, above, staged + 1)
            self._children(logits, positions + draft.lag, k, grow.entropy, found)

        self._record(("grow", width, bound, k, grow.entropy), work)
        return found

    def _place(self, tree: DraftTree, grow: Grow, width: int, bound: int) -> None:
        """Send the rows of a pass to the device; those past the nodes are padding that nobody sees."""
        host, nodes, count = self._rows.host, grow.nodes, len(grow.nodes)
        slots = {node: place for node, place in self._slots.items() if node}
        slots.update(zip(nodes.tolist(), range(self._staged + 1, self._staged + count + 1), strict=True))
        host["tokens"][:count] = tree.tokens[nodes]
        host["tokens"][count:width] = 0
        host["depth"][:count] = tree.depth[nodes]
        host["depth"][count:width] = 0
        host["staged"][:width] = self._staged + torch.arange(width)
        host["above"][:count] = torch.tensor([self._slots[parent] for parent in tree.parents[nodes].tolist()])
        host["above"][count:width] = 0
        mask = host["mask"][:width, :bound]
        mask.fill_(False)
        columns = torch.tensor(list(slots.values())) - 1
        mask[:count, columns] = tree.mask()[nodes][:, list(slots)]
        self._rows.send()
        self._slots = {0: 0, **slots}
        self._staged += count

    def _parcel(self, width: int, k: int) -> Parcel:
        """Where a pass of this size leaves its children."""
        if (width, k) not in self._found:
            number, shape = torch.float32, (width, k)
            arrays = {"values": (number, shape), "tokens": (torch.long, shape), "entropy": (number, (width,))}
            self._found[width, k] = Parcel(self.draft.judge.device, **arrays)
        return self._found[width, k]

    def _children(self, logits: Tensor, positions: Tensor, k: int, entropy: bool, found: Parcel) -> None:
        values, tokens = self._sprouting.children(logits, positions, k, self.draft.vocabulary)
        there = found.device
        there["values"].fill_(-torch.inf)
        there["values"][:, : values.shape[1]].copy_(values)
        there["tokens"][:, : values.shape[1]].copy_(tokens)
        if entropy:
            chances = logits.float().softmax(-1)
            there["entropy"].copy_(torch.special.entr(chances).sum(-1))
        found.fetch()

    def _record(self, key: Key, work: Callable[[], None]) -> None:
        judge = self.draft.judge
        judge.recorder.run((*key, id(self), *self._sprouting.key, self.draft.columns, judge.capacity), work)
        judge.recorder.wait()

    def _hung(self, tree: DraftTree, grow: Grow, found: Parcel) -> DraftTree:
        """The tree with the children that came back."""
        count = len(grow.nodes)
        if grow.entropy:
            tree = tree.measure(grow.nodes, found.host["entropy"][:count].clone())
        values, tokens = found.host["values"][:count, : grow.k], found.host["tokens"][:count, : grow.k]
        return hang(tree, grow.nodes, tokens.clone(), values.clone())

    @torch.inference_mode()
    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        tree, path = trees[0], paths[0]
        if self._slots:  # what was pending is taken in
            self._taken += len(self._tokens)
            self._tokens, self._features = [], None
        self._tokens = [*self._tokens, *tree.tokens[path[1:]].tolist(), bonus[0]]
        if hidden:
            self._features = hidden[0] if self._features is None else torch.cat([self._features, hidden[0]])

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]
