"""The target model: scores whole trees in one forward and commits the rows of the accepted paths."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windfall.core.tree import MAX_VERIFY_ROWS, DraftTree
from windfall.core.types import FULL_PRECISION, InputError, Scores
from windfall.model.batch import Rows
from windfall.model.decoder import WINDOWS, Decoder, max_plain_rows, tree_attention
from windfall.model.pass_lock import pass_lock

TREE_LAYERS = {"full_attention", "attention", "global", *WINDOWS, "mlp", "moe"}  # kinds of layers that can score a tree
MAX_PROMPT_LOGIT_ROWS = 256  # of a pass with the logits of a prompt, which take much memory
OWN_GAPS = 5  # a model whose rows depend on each other may differ by this many times as much from one pass to another
ROUNDING = 1e-4  # more than what rounding in float32 changes, relative to the largest logit
MAX_GAP = 0.2  # but by no more than this, relative to the largest logit
TEST_WINDOW = 3  # tokens of a window while a model is checked
ALIBI = "has ALiBi attention, whose biases go by places in the cache, where a tree's rows lie otherwise"
PLAIN_LINEAR = ("torch.nn.", "transformers.models.", "windfall.")  # modules with the forward of such linear layers
UNSUPPORTED = {  # architectures whose config does not show that they cannot score a tree
    "gpt_neo": "masks by places in the cache, where the rows of a tree lie otherwise than those of a text",
    "blt": "reads bytes in patches of varying length, so that its caches have no row for each token",
    "bloom": ALIBI,
    "mpt": ALIBI,
}


class Target:
    """A Hugging Face causal language model. Its KV cache holds every committed token but the last, the tree's root."""

    recordings = 0  # CUDA graphs captured so far, see engine/gpu

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None, check: bool = True):
        """`check=False` skips the test with a tree, unless the model has windows."""
        model = uncompiled(model)
        self.name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        if (where := torch.get_default_device()).type != "cpu":  # host tensors would be made there
            raise InputError(f"torch makes tensors on {where} by default; call torch.set_default_device('cpu')")
        refuse_unsupported(model, self.name)
        self.model = model
        self.tokenizer = tokenizer
        self.turn = threading.RLock()  # held while a text is generated
        self.texts = 0  # started so far; the only KV cache belongs to the last one
        self.has_own_products = has_own_products(model)
        self.rows_depend = False  # whether logits depend on the other rows of a pass, by more than rounding
        try:
            self.decoder = Decoder(model)
            if not (check or self.decoder.windows or self.decoder.max_length):
                return
            with pass_lock(model), tree_attention(model):
                ahead, gap = looks_ahead(model), self._tree_gap()
                agrees = self._agrees(gap)
                self.rows_depend = agrees and self._rows_depend(gap)
                if not self._follows_windows():  # shorter texts are exact: their windows hide nothing
                    self.decoder.limit_to_windows()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"{self.name}: {type(model).__name__} cannot score a tree: {reason}") from error
        if ahead:
            raise InputError(f"{self.name}: {type(model).__name__} reads ahead; load it with is_decoder=True")
        if not agrees:
            raise InputError(
                f"{self.name}: {type(model).__name__} does not score a tree as it scores the tree's paths "
                f"(logits differ by {gap:.1%}), so its output could change; windfall refuses it"
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
        """Start new sequences; returns the states at `taps` of all tokens but the last."""
        self.decoder.taps = taps
        self.decoder.reset(len(prompts))
        return self.decoder.extend([prompt[:-1] for prompt in prompts])

    def join(self, prompts: list[list[int]]) -> list[Tensor] | None:
        """Add sequences to those that run; returns what `prefill` returned for them, at the same taps."""
        return self.decoder.join([prompt[:-1] for prompt in prompts])

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """ONE forward for all trees: a row sees the prefix and its ancestors, at position prefix + depth."""
        if (most := max(map(len, trees))) > MAX_VERIFY_ROWS:
            raise InputError(f"a verify pass takes {MAX_VERIFY_ROWS} rows at most, not {most}")
        limit = max_plain_rows(self.decoder.config)
        if limit and self.decoder.cache.top + most > limit:
            raise InputError(f"{self.name} takes {limit - self.decoder.cache.top} rows in this pass, not {most}")
        rows = [
            Rows(tree.tokens, length + tree.depth, tree.mask())
            for tree, length in zip(trees, self.decoder.lengths, strict=True)
        ]
        logits, hidden = self.decoder.feed(rows)
        return [Scores(row, None if hidden is None else hidden[b]) for b, row in enumerate(logits)]

    def commit(self, paths: list[Tensor]) -> None:
        """Keep the rows of these nodes of the trees last scored."""
        self.decoder.commit([path.tolist() for path in paths])

    def states(self, scores: list[Scores], paths: list[Tensor]) -> list[Tensor] | None:
        """The hidden states [N, taps * H] of committed paths; None if the passes have none."""
        found = [score.hidden[path] for score, path in zip(scores, paths, strict=True) if score.hidden is not None]
        return found or None

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only."""
        self.decoder.retain(keep)

    def prompt_logits(self, prompt: list[int]) -> Iterator[Tensor]:
        """The logits [n, V] after all tokens of a prompt but the last, in parts.

        They come from passes of their own, in a KV cache that is dropped afterwards.
        """
        reader = Decoder(self.model)
        reader.reset(1)
        for start in range(0, len(prompt) - 1, MAX_PROMPT_LOGIT_ROWS):
            part = prompt[start : min(start + MAX_PROMPT_LOGIT_ROWS, len(prompt) - 1)]
            (logits,), _ = reader.feed([Rows.chain(part, start)], causal=True)
            reader.commit([list(range(len(part)))])
            yield logits

    @torch.inference_mode()
    def _tree_gap(self) -> float:
        """The largest difference between the logits of a small tree and of its paths, relative to the largest logit.

        The model runs the paths itself, without windfall's cache and masks.
        """
        prompt, tree = small_tree(self.vocab_size)
        self.prefill([[*prompt, int(tree.tokens[0])]])
        in_tree = self.score([tree])[0].logits.float()
        gap = 0.0
        for leaf in (2, 3):
            path = tree.path(leaf)
            text = torch.tensor([prompt + tree.tokens[path].tolist()], device=self.device)
            positions = torch.arange(text.shape[1], device=self.device)[None]  # as `generate` passes them
            outputs = self.model(input_ids=text, position_ids=positions, use_cache=False)
            alone = outputs.logits[0, -len(path) :].float()
            gap = max(gap, float((alone - in_tree[path]).abs().max()))
        self.decoder.reset(0)
        return gap / max(float(in_tree.abs().max()), 1e-3)

    def _follows_windows(self) -> bool:
        """Whether the model's windows, if it has any, are those that the masks apply."""
        if not self.decoder.windows:
            return True
        with self._short_windows():
            return self._agrees(self._tree_gap())

    def _agrees(self, gap: float) -> bool:
        """Whether two passes over the same rows may differ by this much, relative to the largest logit."""
        return gap <= logit_tolerance(self.decoder.dtype) or gap <= min(OWN_GAPS * self._own_gap(), MAX_GAP)

    def _rows_depend(self, gap: float) -> bool:
        """Whether a row depends on the other rows of a pass, if small trees differ by this much from their paths."""
        if self.decoder.dtype not in FULL_PRECISION:
            return gap > logit_tolerance(self.decoder.dtype)
        return (self.has_own_products or gap > ROUNDING) and self._own_gap() > ROUNDING

    @torch.inference_mode()
    def _own_gap(self) -> float:
        """How much a text's logits change beside another text: layers may quantise all rows of a pass together."""
        texts = torch.arange(12, device=self.device).remainder(self.vocab_size).view(2, 6)
        positions = torch.arange(6, device=self.device).expand(2, 6)
        alone, beside = (
            self.model(input_ids=texts[:n], position_ids=positions[:n], use_cache=False).logits[0].float()
            for n in (1, 2)
        )
        return float((alone - beside).abs().max() / alone.abs().max().clamp(min=1e-3))

    @contextmanager
    def _short_windows(self) -> Iterator[None]:
        """In this block windows have a few tokens, so that a short text is longer."""
        config, usual = self.decoder.config, self.decoder.windows
        kept = {name: getattr(config, name) for name in WINDOWS.values() if getattr(config, name, None)}
        try:
            for name in kept:
                setattr(config, name, TEST_WINDOW)
            self.decoder.windows = {kind: size and TEST_WINDOW for kind, size in usual.items()}
            yield
        finally:
            for name, size in kept.items():
                setattr(config, name, size)
            self.decoder.windows = usual


def has_own_products(model: Any) -> bool:
    """Whether linear layers compute other products than `nn.Linear`, or from other weights, as quantised layers do."""
    for module in model.modules():
        if not hasattr(module, "in_features"):
            continue
        plain = isinstance(module, nn.Linear) and type(module).forward.__module__.startswith(PLAIN_LINEAR)
        weight: Any = module.weight if plain else None
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.itemsize == 1:
            return True
    return False


def small_tree(vocab_size: int) -> tuple[list[int], DraftTree]:
    """A prompt and a tree after it, for checks of a model."""
    tokens = torch.arange(6) % vocab_size
    tree = DraftTree.root(int(tokens[3]))
    for parent, token in ((0, tokens[4]), (0, tokens[5]), (1, tokens[2])):
        tree = tree.extend(torch.tensor([parent]), token[None], torch.zeros(1), torch.zeros(1, dtype=torch.long))
    return tokens[:3].tolist(), tree


def logit_tolerance(dtype: torch.dtype) -> float:
    """The allowed difference between the logits of two passes, relative to the largest logit."""
    return 0.01 if dtype in FULL_PRECISION else 0.05


@torch.inference_mode()
def looks_ahead(model: Any) -> bool:
    """Whether tokens see later tokens, as in models that are encoders by default."""
    if getattr(model.config.get_text_config(), "is_decoder", True):
        return False
    device = model.get_input_embeddings().weight.device
    one, other = (model(input_ids=torch.tensor([[2, 3, last]], device=device)).logits[0, :2] for last in (4, 5))
    return bool((one - other).abs().max() > 1e-4 * one.abs().max())


def uncompiled(model: Any) -> Any:
    """The model inside a `torch.compile` wrapper, which would recompile for every shape of tree."""
    return getattr(model, "_orig_mod", model)


def refuse_offloaded(model: Any) -> None:
    """Raise an InputError if the model's weights are offloaded or on the meta device."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    name = type(model).__name__
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InputError(
            f"{name} has offloaded weights (accelerate), which windfall cannot use; load it without offloading"
        )
    raise InputError(f"{name} has weights on the meta device, where they have no values; load them first")


def refuse_unsupported(model: Any, name: str) -> None:
    """Raise an InputError if the model cannot score trees."""
    refuse_offloaded(model)
    config, kind = model.config.get_text_config(), type(model).__name__
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    odd = sorted(set(kinds) - TREE_LAYERS)
    forward = inspect.signature(model.forward).parameters
    reason = ""
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "is an encoder–decoder; windfall speeds up decoder-only models"
    elif config.model_type in UNSUPPORTED:
        reason = UNSUPPORTED[config.model_type]
    elif odd or (getattr(model, "_is_stateful", False) and not kinds):
        names = ", ".join(odd) or "recurrent"
        reason = f"has {names} layers, whose state windfall cannot undo when it rejects tokens"
    elif getattr(config, "alibi", False):
        reason = ALIBI
    elif missing := [given for given in ("past_key_values", "position_ids") if given not in forward]:
        reason = f"takes no {' and no '.join(missing)}, which a tree pass needs"
    elif getattr(config, "attention_type", None) == "block_sparse":
        reason = "attends to sparse blocks of long texts; load it with attention_type='original_full'"
    if reason:
        raise InputError(f"{name}: {kind} {reason}")
