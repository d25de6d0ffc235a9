"""The target and the drafter of one sequence on fixed buffers, for policies that decide on the host: they take the
places of Target and Drafter in the engine's own cycle. Each pass is one launch, which brings its rows from the host and
ends with one small copy back; the host fills and reads the buffers as numpy arrays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree, Integers
from windfall.core.types import Grow, InputError, SamplingParams, Scores
from windfall.drafters.base import Drafter, add_child_arrays
from windfall.engine.gpu.drafters import GpuDrafter, GpuHeadDrafter, Sprouting, multiplied
from windfall.engine.gpu.drafters import entropy as entropy_of
from windfall.engine.gpu.forward import Pass
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, PIECE, ROWS, GpuTarget, shape_of
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.top import LazyLogits

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # sizes of recorded draft passes
CHILDREN = (1, 2, 4, 8, 16, 32, 64, 128)
PENDING = 32  # columns that one opening pass takes in
STAGED = 1024  # nodes expanded in a cycle, at the most
STEP = 128  # by which the bound on them grows
PLACES = np.arange(STAGED + WIDTHS[-1])


class GraphTarget:
    """Prefill, score and commit as Target has them."""

    def __init__(self, judge: GpuTarget):
        self.judge, long = judge, torch.long
        self.name = object()  # in keys of recorded work
        self.params = SamplingParams()  # of the sequence to come
        self._verdict = PackedBuffer(judge.device, path=(long, (MAX_VERIFY_ROWS,)), accepted=(long, (1,)))
        self._drawn = PackedBuffer(judge.device, tokens=(long, (MAX_VERIFY_ROWS,)))
        self._states = (
            torch.zeros(MAX_VERIFY_ROWS, judge.width, dtype=judge.dtype, device=judge.device) if judge.taps else None
        )
        self._logits: dict[Key, Tensor] = {}  # where each recorded pass leaves them
        self._scored = torch.empty(0)  # the last that Python saw

    @property
    def recordings(self) -> int:
        """Passes that were recorded so far, the drafter's among them."""
        return self.judge.recorder.recordings

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        (prompt,) = prompts
        self.judge.sample(self.params)
        given = torch.tensor(prompt[:-1], device=self.judge.device)
        pieces = [None if states is None else states.clone() for states in self.judge.read(given)]
        return [torch.cat([piece for piece in pieces if piece is not None])] if taps else None

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """The draws come with the scores, where they depend on these alone."""
        judge, (tree,), params = self.judge, trees, self.params
        drawn = not (params.reads_prefix or params.logit_bias)
        size = judge.lay(tree)
        columns = judge.columns(size)
        key = ("score", self.name, drawn and shape_of(params), size, columns)
        fresh = key not in judge.recorder.graphs
        judge.recorder.refresh(key, lambda: self._score(size, columns, drawn))
        if fresh:  # those of passes that are no longer recorded go
            self._logits = {known: kept for known, kept in self._logits.items() if known in judge.recorder.graphs}
            self._logits[key] = self._scored
        judge.recorder.wait()
        count = len(tree)
        draws = self._drawn.host["tokens"][:count].tolist() if drawn else None
        return [Scores(self._logits[key][:count], None if self._states is None else self._states[:count], draws)]

    def _score(self, size: int, columns: int, drawn: bool) -> None:
        judge = self.judge
        judge.rows.send()
        scored = judge.score(size, columns)
        self._scored = scored.logits
        if self._states is not None and scored.states is not None:  # other recorded work may use their place
            self._states[:size].copy_(scored.states)
        if drawn:
            self._drawn.device["tokens"][:size].copy_(judge.draw(scored, self.params))
            self._drawn.tell()

    def commit(self, paths: list[Tensor]) -> None:
        judge, path = self.judge, paths[0].numpy()
        count, here = len(path), self._verdict.host
        size = ROWS[bisect_left(ROWS, count)]
        here["path"][:count] = path
        here["path"][count:size] = -1
        here["accepted"][0] = count
        judge.recorder.run(("keep", self.name, size), lambda: self._keep(size))
        judge.known += count

    def states(self, hidden: Tensor, path: Tensor) -> Tensor:
        """Of the path last committed, which the device knows."""
        return hidden.index_select(0, self._verdict.device["path"][: len(path)])

    def _keep(self, size: int) -> None:
        self._verdict.send()
        self.judge.keep(self._verdict, size)

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]


class GraphDrafter(Drafter):
    """A head or a smaller model as Drafter has it, for one sequence."""

    def __init__(self, draft: GpuDrafter, longest: int | None):
        self.draft, self.longest = draft, longest
        self.params = SamplingParams()  # of the sequence to come
        self._device = draft.judge.device
        self._opening = PackedBuffer(self._device, tokens=(torch.long, (PENDING,)), waiting=(torch.long, (1,)))
        self._rows: dict[tuple[int, int], PackedBuffer] = {}
        self._found: dict[tuple[int, int], PackedBuffer] = {}
        self._slots: dict[int, int] = {}  # expanded node → its place; the root's is 0
        self._staged = 0
        self._lines = np.zeros((STAGED + 1, STAGED), dtype=bool)  # by place: the node and its expanded ancestors

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.judge.taps

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Many[Dice | None]) -> None:
        (prompt,) = prompts
        self._dice, self._kappa = dice[0], 1.0
        self._sprouting = Sprouting(self.params, self._dice is not None, self.draft.judge.dials)
        self.draft.start()
        given, at = torch.tensor(prompt, device=self._device), 0
        while at < len(prompt) - 1:
            at = self.draft.take_piece(given, at, hidden[0][at : at + PIECE] if hidden else None)
        self._taken = len(prompt) - (2 if isinstance(self.draft, GpuHeadDrafter) else 1)
        self._tokens = prompt[-1:]
        self._features = hidden[0][-1:] if hidden else None

    def begin(self, tokens: list[int]) -> list[DraftTree]:
        self._slots, self._staged = {}, 0
        if self._dice is not None and self._dice.kappa != self._kappa:
            self._kappa = self._dice.kappa
            self.draft.judge.dials.kappa.fill_(self._kappa)
        return super().begin(tokens)

    def expand(self, trees: list[DraftTree], grows: Many[Grow | None]) -> list[DraftTree]:
        (tree,), (grow,) = trees, grows
        if grow is None:
            return trees
        nodes, k = grow.nodes.numpy(), CHILDREN[bisect_left(CHILDREN, min(grow.k, CHILDREN[-1]))]
        if not self._fits(tree, nodes):
            return trees
        if not self._slots:
            found = self._open(k, grow.entropy)
            self._slots[0] = 0
        else:
            found = self._grow(tree, nodes, k, grow.entropy)
        return [self._hung(tree, grow, nodes, found)]

    def _fits(self, tree: DraftTree, nodes: Integers) -> bool:
        """Whether there is room for these nodes, in the model's positions and in the buffers."""
        if self._staged + len(nodes) > STAGED:
            return False
        return self.longest is None or self._taken + len(self._tokens) + max(tree.arrays.depth[nodes]) <= self.longest

    def _open(self, k: int, entropy: bool) -> PackedBuffer:
        """Take in what is pending; the root's children."""
        while len(self._tokens) > PENDING:
            self._bring(PENDING)
            self._record(("absorb",), self._absorb)
            self._tokens = self._tokens[PENDING:]
            self._features = None if self._features is None else self._features[PENDING:]
            self._taken += PENDING
        count = len(self._tokens)
        rows, found = WIDTHS[bisect_left(WIDTHS, count)], self._children_box(1, k)
        self._bring(count)

        def work() -> None:
            self._children(self._opened(rows), self.draft.length, self.draft.lag - 1, k, entropy, found)

        self._record(("open", rows, k, entropy), work)
        return found

    def _bring(self, count: int) -> None:
        """Put the first pending columns where the draft expects them."""
        here, draft = self._opening.host, self.draft
        here["tokens"][:count] = self._tokens[:count]
        here["waiting"][0] = count
        if self._features is not None and draft.features is not None:
            draft.features[:count] = self._features[:count]

    def _opened(self, rows: int) -> Tensor | LazyLogits:
        self._opening.send()
        self.draft.tokens.copy_(self._opening.device["tokens"])
        self.draft.waiting.copy_(self._opening.device["waiting"])
        return self.draft.open(rows)

    def _absorb(self) -> None:
        self._opened(PENDING)

    def _grow(self, tree: DraftTree, nodes: Integers, k: int, entropy: bool) -> PackedBuffer:
        draft, count = self.draft, len(nodes)
        if count > WIDTHS[-1]:
            raise InputError(f"a draft pass takes {WIDTHS[-1]} nodes at the most on a GPU, not {count}")
        width = WIDTHS[bisect_left(WIDTHS, count)]
        bound = min(-(-(self._staged + width) // STEP) * STEP, STAGED)
        box, found = self._rows_box(width, bound), self._children_box(width, k)
        self._place(tree, nodes, box)

        def work() -> None:
            box.send()
            tokens, depth, staged, above = (box.device[name] for name in ("tokens", "depth", "staged", "above"))
            positions = draft.length - 1 + depth
            rows = Pass(tokens, positions, draft.length + staged, box.device["mask"], draft.length)
            logits = draft.grow(rows, above, staged + 1)
            self._children(logits, positions, draft.lag, k, entropy, found)

        self._record(("grow", width, bound, k, entropy), work)
        return found

    def _place(self, tree: DraftTree, nodes: Integers, box: PackedBuffer) -> None:
        """Write the rows of a pass for the device; those past the nodes are padding that nobody sees."""
        here, known, count, start = box.host, tree.arrays, len(nodes), self._staged
        width, bound = here["mask"].shape
        above = [self._slots[parent] for parent in known.parents[nodes].tolist()]
        lines = self._lines[above]  # of the parents: theirs and their own places
        lines[PLACES[:count], PLACES[start : start + count]] = True
        self._lines[start + 1 : start + count + 1] = lines
        here["mask"][:count] = lines[:, :bound]
        here["staged"][:] = PLACES[start : start + width]
        here["tokens"][:count] = known.tokens[nodes]
        here["depth"][:count] = known.depth[nodes]
        here["above"][:count] = above
        if count < width:
            for name in ("tokens", "depth", "above", "mask"):
                here[name][count:] = 0
        self._slots.update(zip(nodes.tolist(), range(start + 1, start + count + 1), strict=True))
        self._staged += count

    def _rows_box(self, width: int, bound: int) -> PackedBuffer:
        """Where a pass of this size finds its rows."""
        if (width, bound) not in self._rows:
            names = dict.fromkeys(("tokens", "depth", "staged", "above"), (torch.long, (width,)))
            self._rows[width, bound] = PackedBuffer(self._device, **names, mask=(torch.bool, (width, bound)))
        return self._rows[width, bound]

    def _children_box(self, width: int, k: int) -> PackedBuffer:
        """Where a pass of this size leaves its children."""
        if (width, k) not in self._found:
            number, shape = torch.float32, (width, k)
            arrays = {"values": (number, shape), "tokens": (torch.long, shape), "entropy": (number, (width,))}
            self._found[width, k] = PackedBuffer(self._device, **arrays)
        return self._found[width, k]

    def _children(
        self, logits: Tensor | LazyLogits, positions: Tensor, offset: int, k: int, entropy: bool, found: PackedBuffer
    ) -> None:
        if entropy:
            logits = multiplied(logits)
            found.device["entropy"].copy_(entropy_of(logits))
        values, tokens = self._sprouting.children(logits, positions, offset, k, self.draft.vocabulary)
        there, most = found.device, values.shape[1]
        if most < k:
            there["values"].fill_(-torch.inf)
        there["values"][:, :most].copy_(values)
        there["tokens"][:, :most].copy_(tokens)
        found.tell()

    def _record(self, key: Key, work: Callable[[], None]) -> None:
        judge = self.draft.judge
        judge.recorder.run((*key, self.draft.name, *self._sprouting.key, self.draft.columns), work)
        judge.recorder.wait()

    def _hung(self, tree: DraftTree, grow: Grow, nodes: Integers, found: PackedBuffer) -> DraftTree:
        """The tree with the children that came back."""
        count, here = len(nodes), found.host
        if grow.entropy:
            tree = tree.measure(grow.nodes, torch.from_numpy(here["entropy"][:count]))
        return add_child_arrays(tree, nodes, here["tokens"][:count, : grow.k], here["values"][:count, : grow.k])

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        tree, path = trees[0], paths[0]
        if self._slots:  # what was pending is taken in
            self._taken += len(self._tokens)
            self._tokens, self._features = [], None
        self._tokens = [*self._tokens, *tree.arrays.tokens[path.numpy()[1:]].tolist(), bonus[0]]
        if hidden:
            self._features = hidden[0] if self._features is None else torch.cat([self._features, hidden[0]])

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]
