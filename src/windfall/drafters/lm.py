"""Draft with a smaller language model that has the target's tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.checkpoints.bundled import bundled_lm
from windfall.checkpoints.find import check_vocabulary, load_fastest
from windfall.checkpoints.packed import WEIGHTS
from windfall.core.errors import HeadWarning
from windfall.core.options import option
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.drafters.base import Drafter, GpuForm, ModelForm, add_children_to_all
from windfall.kernels.few_rows import use_few_rows
from windfall.model.batch import Rows
from windfall.model.cpu_layers import use_cpu_layers
from windfall.model.decoder import Decoder, vocabulary_size
from windfall.model.target import Target, refuse_unsupported, uncompiled

AUTO = "auto"
MAX_PENDING = 32  # pending tokens that run with the first draft pass; more run before it


@dataclass
class LMDrafter(Drafter):
    """A language model of the same vocabulary: a folder, GGUF file, hub id or loaded model.

    Without one it is the bundled model for this target. If there is none, the target drafts for itself: every draft is
    right and nothing is gained, which is useful for tests only.
    """

    model: Any = option(None, "folder, GGUF file, hub id or loaded model; none: the bundled one, or the target itself")
    trust_remote_code: bool = option(False, "run Python code from the model's folder")
    weights: str = option(
        AUTO,
        "on a CPU, how its weights are stored; auto: packed without a change, where that is faster",
        choices=(AUTO, *WEIGHTS),
    )

    def attach(self, target: Target) -> None:
        model, tokenizer = self._find(target)
        name, size = str(self.model), vocabulary_size(model)
        check_vocabulary(target.tokenizer, tokenizer, target.vocab_size, size, name if len(name) < 80 else "model")
        self._serve(model, target)

    def _find(self, target: Target) -> tuple[Any, Any]:
        """The model and, where there is one, its tokenizer."""
        model = bundled_lm(target) if self.model is None else self.model
        if model is None:
            return target.model, target.tokenizer
        if isinstance(model, tuple):
            return model
        if hasattr(model, "forward"):
            return model, None
        loaded = load_fastest(
            model,
            device=target.device,
            dtype=target.decoder.dtype,
            trust_remote_code=self.trust_remote_code,
            lender=target.model,
            weights=None if self.weights == AUTO else self.weights,
        )
        return loaded.model, loaded.tokenizer

    def _serve(self, model: Any, target: Target) -> None:
        model = uncompiled(model)
        refuse_unsupported(model, "drafter")
        use_few_rows(model)
        if model.device.type == "cpu" and model.dtype == torch.float32:
            use_cpu_layers(model)
        self.decoder = Decoder(model)
        self.vocabulary = target.vocab_size  # the drafter's logits may be padded further
        self._last_token = ModelForm(self.decoder, self.vocabulary).last_token
        self._warned = False

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self._dice: list[Dice | None] = []
        self.decoder.reset(0)
        self._pending: list[list[int]] = []  # committed but not in the KV cache, the root last
        self._slots: list[dict[int, int]] = []  # expanded node → its staged row
        self.join(prompts, hidden, dice)

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self._dice += dice
        self.decoder.join([[] for _ in prompts])  # the tokens run when something is drafted from them
        self._pending += [self._readable(prompt) for prompt in prompts]
        self._slots += [{} for _ in prompts]

    @property
    def row_bytes(self) -> int:
        return self.decoder.row_bytes

    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        grows = [self._fitting(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        if not any(grows):
            return trees
        self._catch_up(grows)
        first = self.decoder.staged
        rows = [self._rows(b, tree, grow) for b, (tree, grow) in enumerate(zip(trees, grows, strict=True))]
        logits, _ = self.decoder.feed(rows)
        found = []
        for b, grow in enumerate(grows):
            if grow is not None:
                size, fresh = len(rows[b].tokens), len(grow.nodes)
                self._slots[b].update(zip(grow.nodes.tolist(), range(first + size - fresh, first + size), strict=True))
                found.append(logits[b][size - fresh :, : self.vocabulary])
        return add_children_to_all(trees, grows, torch.cat(found), self._dice)

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        keep = []
        for b, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            slots, nodes = self._slots[b], path.tolist()
            known = [slots[node] for node in nodes if node in slots]  # a node is expanded only after its parent
            left = self._readable([*tree.tokens[path[len(known) :]].tolist(), bonus[b]])
            if known:  # the root was expanded together with all pending tokens
                keep.append([*range(slots[0] - len(self._pending[b]) + 1, slots[0]), *known])
                self._pending[b] = left
            else:
                keep.append([])
                self._pending[b] += left[1:]
            self._slots[b] = {}
        self.decoder.commit(keep)

    def _readable(self, tokens: list[int]) -> list[int]:
        """The tokens, with the model's last one in place of padding ids that only the target has."""
        last = self._last_token
        return list(tokens) if last is None else [min(token, last) for token in tokens]

    def retain(self, keep: list[int]) -> None:
        self.decoder.retain(keep)
        self._pending = [self._pending[b] for b in keep]
        self._slots = [self._slots[b] for b in keep]
        self._dice = [self._dice[b] for b in keep]

    def gpu_form(self) -> GpuForm | str:
        return ModelForm(self.decoder, self.vocabulary)

    def expect(self, length: int) -> None:
        limit = self.decoder.context
        if self._warned or limit is None or length <= limit:
            return
        message = f"the drafter was made for texts of {limit} tokens; it does not draft after that"
        warnings.warn(message, HeadWarning, stacklevel=2)
        self._warned = True

    def _fitting(self, b: int, tree: DraftTree, grow: Grow | None) -> Grow | None:
        """None if the drafter's own context does not suffice for all of these nodes."""
        limit = self.decoder.context
        used = self.decoder.lengths[b] + len(self._pending[b])
        return grow if grow and (limit is None or used + int(tree.depth[grow.nodes].max()) <= limit) else None

    def _catch_up(self, grows: Sequence[Grow | None]) -> None:
        """Before the first pass of a cycle, run all pending tokens but the root where there are many."""
        many = [grow and len(own) > MAX_PENDING for own, grow in zip(self._pending, grows, strict=True)]
        if self.decoder.staged or not any(many):
            return
        self.decoder.extend([own[:-1] if run else [] for own, run in zip(self._pending, many, strict=True)])
        self._pending = [own[-1:] if run else own for own, run in zip(self._pending, many, strict=True)]

    def _rows(self, b: int, tree: DraftTree, grow: Grow | None) -> Rows:
        """The pending tokens if the root is expanded, else the nodes."""
        staged, length = self.decoder.staged, self.decoder.lengths[b]
        if grow is None:
            return Rows.chain([], 0, staged)
        slots, pending = self._slots[b], self._pending[b]
        if not slots:
            assert grow.nodes.tolist() == [0], "the root comes first"
            return Rows.chain(pending, length, staged)
        stem = range(slots[0] - len(pending) + 1, slots[0])
        return Rows.branch(tree, grow.nodes, slots, stem, length + len(pending) - 1, staged)
