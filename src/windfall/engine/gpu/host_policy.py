"""A target and a drafter for the host loop whose passes are CUDA graphs, for policies that decide on the host.

They replace Target and Drafter for one sequence. Each pass is one graph: it copies its rows from the host, runs the
model, and copies its results back. The host writes and reads these buffers as numpy arrays.
"""

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
from windfall.engine.gpu.children import CHILDREN_SIZES, ChildrenBuffers, publish_children
from windfall.engine.gpu.drafters import ChildSampler, Drafted, GpuDrafter, with_entropy
from windfall.engine.gpu.forward import Pass
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, PREFILL_CHUNK_TOKENS, VERIFY_SIZES, GpuTarget, sampling_key
from windfall.engine.gpu.transfer import PackedBuffer, place

DRAFT_PASS_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # nodes of captured draft passes
MAX_PENDING_COLUMNS = 32  # pending columns that one pass adds to the KV cache
MAX_STAGED_NODES = 1024  # nodes that a cycle expands
STAGED_STEP_ROWS = 128  # step of the bound on staged rows in captured passes
SLOT_NUMBERS = np.arange(MAX_STAGED_NODES + DRAFT_PASS_SIZES[-1])


class GraphTarget:
    """The part of Target that the host loop uses, for one sequence."""

    def __init__(self, gpu_target: GpuTarget):
        self.gpu_target, long = gpu_target, torch.long
        self.buffers_id = object()  # part of the keys of its graphs
        self.params = SamplingParams()  # of the sequence to come
        self._verdict = PackedBuffer(gpu_target.device, path=(long, (MAX_VERIFY_ROWS,)), accepted=(long, (1,)))
        self._drawn = PackedBuffer(gpu_target.device, tokens=(long, (MAX_VERIFY_ROWS,)))
        self._states = (
            torch.zeros(MAX_VERIFY_ROWS, gpu_target.width, dtype=gpu_target.dtype, device=gpu_target.device)
            if gpu_target.taps
            else None
        )
        self._logits: dict[Key, Tensor] = {}  # memory of each graph that holds its logits
        self._scored = torch.empty(0)  # logits of the last capture or eager run

    @property
    def recordings(self) -> int:
        """CUDA graphs captured so far, those of the drafter included."""
        return self.gpu_target.graph_cache.captures

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        if not prompts:
            return [] if taps else None
        (prompt,) = prompts
        self.gpu_target.set_sampling(self.params)
        given = place(prompt[:-1], self.gpu_target.device)
        pieces = [None if states is None else states.clone() for states in self.gpu_target.prefill(given)]
        return [torch.cat([piece for piece in pieces if piece is not None])] if taps else None

    def join(self, prompts: list[list[int]]) -> list[Tensor] | None:
        raise NotImplementedError("there is one sequence at a time")

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """Scores include the target's draws if sampling depends on the logits alone."""
        gpu_target, (tree,), params = self.gpu_target, trees, self.params
        drawn = not (params.reads_prefix or params.logit_bias)
        size = gpu_target.write_rows(tree)
        columns = gpu_target.columns(size)
        key = ("score", self.buffers_id, drawn and sampling_key(params), size, columns)
        fresh = key not in gpu_target.graph_cache.graphs
        gpu_target.graph_cache.refresh(key, lambda: self._score(size, columns, drawn))
        if fresh:  # drop the logits of graphs that no longer exist
            self._logits = {
                known: kept for known, kept in self._logits.items() if known in gpu_target.graph_cache.graphs
            }
            self._logits[key] = self._scored
        gpu_target.graph_cache.wait()
        count = len(tree)
        draws = self._drawn.host["tokens"][:count].tolist() if drawn else None
        return [Scores(self._logits[key][:count], None if self._states is None else self._states[:count], draws)]

    def _score(self, size: int, columns: int, drawn: bool) -> None:
        gpu_target = self.gpu_target
        gpu_target.rows.send()
        scored = gpu_target.score(size, columns)
        self._scored = scored.logits
        if self._states is not None and scored.states is not None:  # other graphs may reuse the memory
            self._states[:size].copy_(scored.states)
        if drawn:
            self._drawn.device["tokens"][:size].copy_(gpu_target.draw(scored, self.params))
            self._drawn.publish()

    def commit(self, paths: list[Tensor]) -> None:
        gpu_target, path = self.gpu_target, paths[0].numpy()
        count, host = len(path), self._verdict.host
        size = VERIFY_SIZES[bisect_left(VERIFY_SIZES, count)]
        host["path"][:count] = path
        host["path"][count:size] = -1
        host["accepted"][0] = count
        gpu_target.graph_cache.run(("keep", self.buffers_id, size), lambda: self._commit(size))
        gpu_target.length_bound += count

    def states(self, scores: list[Scores], paths: list[Tensor]) -> list[Tensor] | None:
        """The states of the last committed path, which is on the device already."""
        hidden = scores[0].hidden
        return None if hidden is None else [hidden.index_select(0, self._verdict.device["path"][: len(paths[0])])]

    def _commit(self, size: int) -> None:
        self._verdict.send()
        self.gpu_target.commit_host_path(self._verdict, size)

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]


class GraphDrafter(Drafter):
    """A Drafter for one sequence whose passes are CUDA graphs."""

    def __init__(self, draft: GpuDrafter):
        self.draft, self.max_positions = draft, draft.max_positions
        self.params = SamplingParams()  # of the sequence to come
        self._device = draft.gpu_target.device
        self._pending_buffer = PackedBuffer(
            self._device, tokens=(torch.long, (MAX_PENDING_COLUMNS,)), count=(torch.long, (1,))
        )
        self._rows_buffers: dict[tuple[int, int], PackedBuffer] = {}
        self._children = ChildrenBuffers(self._device)
        self._slots: dict[int, int] = {}  # expanded node → its slot; the root's is 0
        self._staged_rows = 0
        # by slot: the staged rows of the node and its ancestors
        self._ancestors = np.zeros((MAX_STAGED_NODES + 1, MAX_STAGED_NODES), dtype=bool)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.gpu_target.taps

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Many[Dice | None]) -> None:
        (prompt,) = prompts
        self._dice = dice[0]
        self._sampler = ChildSampler(self.params, self._dice is not None, self.draft.gpu_target.sampling)
        self.draft.start()
        given, at = place(prompt, self._device), 0
        while at < len(prompt) - 1:
            at = self.draft.prefill_chunk(given, at, hidden[0][at : at + PREFILL_CHUNK_TOKENS] if hidden else None)
        self._taken = len(prompt) - self.draft.draw_offset
        self._tokens = prompt[-1:]
        self._features = hidden[0][-1:] if hidden else None

    def begin(self, tokens: list[int]) -> list[DraftTree]:
        self._slots, self._staged_rows = {}, 0
        if self._dice is not None:
            self.draft.gpu_target.set_kappa(self._dice.kappa)
        return super().begin(tokens)

    def expand(self, trees: list[DraftTree], grows: Many[Grow | None]) -> list[DraftTree]:
        (tree,), (grow,) = trees, grows
        if grow is None:
            return trees
        nodes, k = grow.nodes.numpy(), CHILDREN_SIZES[bisect_left(CHILDREN_SIZES, min(grow.k, CHILDREN_SIZES[-1]))]
        if not self._fits(tree, nodes):
            return trees
        if not self._slots:
            found = self._run_first_pass(k, grow.entropy)
            self._slots[0] = 0
        else:
            found = self._run_next_pass(tree, nodes, k, grow.entropy)
        return [self._with_children(tree, grow, nodes, found)]

    def _fits(self, tree: DraftTree, nodes: Integers) -> bool:
        """Whether the model has enough positions, and the buffers enough rows, for these nodes."""
        if self._staged_rows + len(nodes) > MAX_STAGED_NODES:
            return False
        limit = self.max_positions
        return limit is None or self._taken + len(self._tokens) + max(tree.arrays.depth[nodes]) <= limit

    def _run_first_pass(self, k: int, entropy: bool) -> PackedBuffer:
        """Add the pending columns to the KV cache, and draft the root's children."""
        while len(self._tokens) > MAX_PENDING_COLUMNS:
            self._write_pending(MAX_PENDING_COLUMNS)
            self._run(("absorb",), self._take_in_pending)
            self._tokens = self._tokens[MAX_PENDING_COLUMNS:]
            self._features = None if self._features is None else self._features[MAX_PENDING_COLUMNS:]
            self._taken += MAX_PENDING_COLUMNS
        count = len(self._tokens)
        rows, found = DRAFT_PASS_SIZES[bisect_left(DRAFT_PASS_SIZES, count)], self._children.buffer(1, k)
        self._write_pending(count)

        def work() -> None:
            self._publish_children(
                self._first_pass(rows), self.draft.length, self.draft.draw_offset - 1, k, entropy, found
            )

        self._run(("open", rows, k, entropy), work)
        return found

    def _write_pending(self, count: int) -> None:
        """Write the first pending columns into the buffers that the first pass reads."""
        host, draft = self._pending_buffer.host, self.draft
        host["tokens"][:count] = self._tokens[:count]
        host["count"][0] = count
        if self._features is not None and draft.features is not None:
            draft.features[:count] = self._features[:count]

    def _first_pass(self, rows: int) -> Drafted:
        self._pending_buffer.send()
        self.draft.tokens.copy_(self._pending_buffer.device["tokens"])
        self.draft.pending_count.copy_(self._pending_buffer.device["count"])
        return self.draft.first_pass(rows, self._sampler)

    def _take_in_pending(self) -> None:
        self._first_pass(MAX_PENDING_COLUMNS)

    def _run_next_pass(self, tree: DraftTree, nodes: Integers, k: int, entropy: bool) -> PackedBuffer:
        draft, count = self.draft, len(nodes)
        if count > DRAFT_PASS_SIZES[-1]:
            raise InputError(f"a draft pass takes {DRAFT_PASS_SIZES[-1]} nodes at the most on a GPU, not {count}")
        width = DRAFT_PASS_SIZES[bisect_left(DRAFT_PASS_SIZES, count)]
        bound = min(-(-(self._staged_rows + width) // STAGED_STEP_ROWS) * STAGED_STEP_ROWS, MAX_STAGED_NODES)
        rows_buffer, found = self._rows_buffer(width, bound), self._children.buffer(width, k)
        self._write_nodes(tree, nodes, rows_buffer)

        def work() -> None:
            rows_buffer.send()
            tokens, depth, staged, above = (rows_buffer.device[name] for name in ("tokens", "depth", "staged", "above"))
            positions = draft.length - 1 + depth
            rows = Pass(tokens, positions, draft.length + staged, rows_buffer.device["mask"], draft.length)
            logits = draft.next_pass(rows, above, staged + 1, self._sampler)
            self._publish_children(logits, positions, draft.draw_offset, k, entropy, found)

        self._run(("grow", width, bound, k, entropy), work)
        return found

    def _write_nodes(self, tree: DraftTree, nodes: Integers, rows_buffer: PackedBuffer) -> None:
        """Write the rows of a pass for the device; rows after the nodes are padding."""
        host, known, count, start = rows_buffer.host, tree.arrays, len(nodes), self._staged_rows
        width, bound = host["mask"].shape
        above = [self._slots[parent] for parent in known.parents[nodes].tolist()]
        lines = self._ancestors[above]  # of the parents; the nodes' own rows follow
        lines[SLOT_NUMBERS[:count], SLOT_NUMBERS[start : start + count]] = True
        self._ancestors[start + 1 : start + count + 1] = lines
        host["mask"][:count] = lines[:, :bound]
        host["staged"][:] = SLOT_NUMBERS[start : start + width]
        host["tokens"][:count] = known.tokens[nodes]
        host["depth"][:count] = known.depth[nodes]
        host["above"][:count] = above
        if count < width:
            for name in ("tokens", "depth", "above", "mask"):
                host[name][count:] = 0
        self._slots.update(zip(nodes.tolist(), range(start + 1, start + count + 1), strict=True))
        self._staged_rows += count

    def _rows_buffer(self, width: int, bound: int) -> PackedBuffer:
        """The buffer with the rows of a pass of this size."""
        if (width, bound) not in self._rows_buffers:
            names = dict.fromkeys(("tokens", "depth", "staged", "above"), (torch.long, (width,)))
            self._rows_buffers[width, bound] = PackedBuffer(self._device, **names, mask=(torch.bool, (width, bound)))
        return self._rows_buffers[width, bound]

    def _publish_children(
        self, logits: Drafted, positions: Tensor, offset: int, k: int, entropy: bool, found: PackedBuffer
    ) -> None:
        if entropy:
            logits, uncertainty = with_entropy(logits)
            found.device["entropy"].copy_(uncertainty)
        values, tokens = self._sampler.children(logits, positions, offset, k, self.draft.vocabulary)
        publish_children(found, values, tokens)

    def _run(self, key: Key, work: Callable[[], None]) -> None:
        gpu_target = self.draft.gpu_target
        gpu_target.graph_cache.run((*key, self.draft.buffers_id, *self._sampler.key, self.draft.columns), work)
        gpu_target.graph_cache.wait()

    def _with_children(self, tree: DraftTree, grow: Grow, nodes: Integers, found: PackedBuffer) -> DraftTree:
        """The tree with the drafted children."""
        count, host = len(nodes), found.host
        if grow.entropy:
            tree = tree.measure(grow.nodes, torch.from_numpy(host["entropy"][:count]))
        return add_child_arrays(tree, nodes, host["tokens"][:count, : grow.k], host["values"][:count, : grow.k])

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        tree, path = trees[0], paths[0]
        if self._slots:  # the pending columns are in the KV cache
            self._taken += len(self._tokens)
            self._tokens, self._features = [], None
        self._tokens = [*self._tokens, *tree.arrays.tokens[path.numpy()[1:]].tolist(), bonus[0]]
        if hidden:
            self._features = hidden[0] if self._features is None else torch.cat([self._features, hidden[0]])

    def retain(self, keep: list[int]) -> None:
        assert keep == [0]
