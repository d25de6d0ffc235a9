"""A forward of merged weight matrices, with few kernels between the products, for the families of families.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windfall.engine.gpu.families import ExpertsMlp, Layer, PlainMlp, describe
from windfall.engine.gpu.forward import Pass, paths_of
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.rope import CosSin, RotaryTable, cos_and_sin
from windfall.engine.gpu.weights import check_products, module_products
from windfall.kernels.attention import path_attention, tree_attention
from windfall.kernels.experts import experts
from windfall.kernels.module_product import LARGER_PIECES, PIECE_ROWS
from windfall.kernels.norm import activate, add_norm, soft_cap
from windfall.kernels.product import linear, norm_gate, norm_rotate, product
from windfall.kernels.rows import embed
from windfall.model.hidden_states import boundary

TRIAL_ROWS = (1, PIECE_ROWS, LARGER_PIECES[-1])  # for which a layer is captured on trial


class FusedForward:
    """The forward of a model of a known family. The model's own modules still work: they share the weights."""

    bucketed = False

    def __init__(self, model: Any, exact: bool = False):
        """`exact`: round a row alike in every pass."""
        self.exact = exact
        self.described = described = describe(model)
        self.layers, self.eps = described.layers, described.eps
        self.shape = (len(self.layers), described.kv_heads, described.d)
        self.group = described.heads // described.kv_heads  # query heads for each key head
        self.needs_paths = described.score_cap is not None or any(
            layer.window is not None or layer.sinks is not None for layer in self.layers
        )
        self.module_products = list(module_products(described))
        check_products(self.module_products, described.embedding, exact)
        self._angles: list[
            Tensor
        ] = []  # tables [positions, rotaries * 2r]; captured graphs go on reading the shorter ones

    def require_capture(self, graph_cache: GraphCache) -> None:
        """Turn graphs off, with a warning, if layers that compute their own products cannot be captured."""
        if self.module_products:
            kinds = sorted({kind for layers in self.module_products for kind in layers.kinds})
            graph_cache.require_capture(f"its {' and '.join(kinds)} layers", self._run_module_products)

    @torch.no_grad()
    def _run_module_products(self) -> None:
        """Run the layers that compute their own products, with the numbers of rows for which their kernels differ."""
        for layers in self.module_products:
            for count in TRIAL_ROWS:
                layers(self.described.embedding.new_zeros(count, layers.shape[1]), self.exact)

    @torch.no_grad()
    def __call__(
        self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int, scored: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `Forward` says; with `scored`, only the first `scored` rows get logits."""
        normed, tapped = self._run(rows, kv, taps)
        logits = product(normed[:scored], self.described.vocabulary, self.described.vocabulary_bias, self.exact)
        if self.described.logit_scale is not None:
            logits.mul_(self.described.logit_scale)
        return logits if self.described.logit_cap is None else soft_cap(logits, self.described.logit_cap), tapped

    @torch.no_grad()
    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        return self._run(rows, kv, taps)[1]

    def _run(self, rows: Pass, kv: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The states after the last norm [n, H], and those at `taps`."""
        if self.needs_paths and rows.paths is None:
            rows = rows._replace(paths=paths_of(rows.mask, rows.length))
        pages = None if rows.paths is None else rows.paths.pages
        x, rotary = self._embed(rows, kv.shape[3] if pages is None else pages.positions)
        total: Tensor | None = None  # the residual stream, to which x is added next
        states: dict[int, Tensor] = {}
        for place, layer in enumerate(self.layers):
            queries, total = self._attention_inputs(layer, x, total, rotary[layer.rotary], rows, kv[:, place])
            states[place] = total
            attended = self._attend(layer, queries, rows, kv[:, place])
            x, total = self._mlp(layer, attended, total)
        norm, count = self.described.norm, len(self.layers)
        normed, total = add_norm(x, total, norm.weight, self.eps, style=norm.style)
        states |= {count: total, -1: normed}
        return normed, torch.cat([states[boundary(tap, count)] for tap in taps], -1) if taps else None

    def _embed(self, rows: Pass, longest: int) -> tuple[Tensor, list[CosSin]]:
        """Embed the tokens [n, H]; cos and sin [n, r] of each kind of rotary angles. `longest`: a text's length.

        The last kind, NO_ANGLES, has r = 0.
        """
        described = self.described
        positions = min(longest, described.positions or longest)
        if not self._angles or len(self._angles[-1]) < positions:
            tables = [RotaryTable(each, described.embedding, positions).table for each in described.rotaries]
            self._angles.append(torch.cat(tables, -1))
        x, turns = embed(
            rows.tokens, described.embedding, rows.positions, self._angles[-1], scale=described.embedding_scale
        )
        return x, [cos_and_sin(part) for part in (*turns.chunk(len(described.rotaries), -1), turns[:, :0])]

    def _attention_inputs(
        self, layer: Layer, x: Tensor, total: Tensor | None, rotary: CosSin, rows: Pass, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, and store keys and values; returns queries [n, heads, d] and the stream."""
        weights = (layer.norm.weight, self.eps, layer.qkv, layer.qkv_bias)
        return norm_rotate(
            x,
            total,
            *weights,
            *rotary,
            kv[0],
            kv[1],
            rows.slots,
            self.exact,
            style=layer.norm.style,
            norms=layer.head_norms,
            rotation=self.described.rotation,
        )

    def _attend(self, layer: Layer, queries: Tensor, rows: Pass, kv: Tensor) -> Tensor:
        """queries [n, heads, d] → [n, H]"""
        scale, cap = self.described.scale, self.described.score_cap
        paths, given = rows.paths, (queries, kv[0], kv[1], rows.length)
        if paths is None or not (self.exact or self.needs_paths or paths.lineage is None or paths.pages):
            out = tree_attention(*given, rows.mask, scale)
        else:
            reach, lineage, pages, _ = paths
            out = path_attention(*given, reach, lineage, scale, layer.window, cap, layer.sinks, pages)
        return linear(out.flatten(1), layer.o, layer.o_bias, self.exact)

    def _mlp(self, layer: Layer, attended: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of attention to the residual stream; returns the MLP's output [n, H] and the stream."""
        (norm, style), mlp = layer.mlp_norm, layer.mlp
        if isinstance(mlp, ExpertsMlp):
            normed, total = add_norm(attended, total, norm, self.eps, style=style)
            return experts(normed, *mlp), total
        if isinstance(mlp, PlainMlp):
            normed, total = add_norm(attended, total, norm, self.eps, style=style)
            inner = activate(linear(normed, mlp.up, mlp.up_bias, self.exact), mlp.activation)
            return linear(inner, mlp.down, mlp.down_bias, self.exact), total
        given = (attended, total, norm, self.eps, mlp.gate_up)
        gates, total = norm_gate(*given, self.exact, style, mlp.gelu)
        return linear(gates, mlp.down, None, self.exact), total
