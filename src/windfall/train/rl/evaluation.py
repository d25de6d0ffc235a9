"""Evaluation of a training: throughput on test texts compared with fixed beams, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from windfall.core.errors import InputError
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Pair
from windfall.render.plots import COLOURS, FADED, check, new_figure
from windfall.train.rl.learner import DEFAULT_BEAM, STAGES, Event, Learner
from windfall.train.rl.rollout import Outcome, tau, throughput

TOKEN_RANGES = ((1, 2), (3, 5), (6, 99))  # tokens of a cycle, from and to
SMOOTHED_UPDATES = 8  # of the reward curve


def evaluate(learner: Learner, searched: bool) -> dict[str, list[Outcome]]:
    """The cycles on the test texts of fixed beams, of every stage's best policies and of the final ones, by name.

    `searched`: include the best fixed beam of a grid search on the training texts.
    """
    pairs: dict[str, Pair] = {
        "beam 6, 60 rows (default)": Pair(replace(learner.rules, **DEFAULT_BEAM)),
        "beam 8, 60 rows (EAGLE-3)": _fixed_beam(learner, 8, 59),
    }
    if searched:
        depth, nodes = _search(learner)
        pairs[f"beam {depth}, {nodes + 1} rows (grid search)"] = _fixed_beam(learner, depth, nodes)
    for name in ["iter0", *(stage.name for stage in learner.stages)]:
        try:
            pairs[name] = ltd.load(learner.folder / STAGES / name)
        except InputError:
            continue
    pairs["ltd"] = ltd.load(learner.folder)
    return {name: learner.rollout(pair, "test") for name, pair in pairs.items()}


def _fixed_beam(learner: Learner, depth: int, nodes: int) -> Pair:
    return Pair(replace(learner.rules, fixed_depth=depth, fixed_size=nodes))


def _search(learner: Learner) -> tuple[int, int]:
    """The best fixed depth and size on the training texts."""
    rules = learner.rules
    grid = [(depth, nodes) for depth in range(1, rules.max_depth + 1) for nodes in rules.sizes]
    return max(grid, key=lambda each: throughput(learner.rollout(_fixed_beam(learner, *each), "train")))


def table(found: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """For each name: tokens per second, tokens per cycle, and mean passes and verified nodes."""
    return [
        {
            "name": name,
            "throughput": throughput(outcomes),
            "tau": tau(outcomes),
            "passes": sum(each.passes for each in outcomes) / max(len(outcomes), 1),
            "nodes": sum(each.nodes for each in outcomes) / max(len(outcomes), 1),
        }
        for name, outcomes in found.items()
    ]


# ---- figures


def plot_curves(events: Sequence[Event], file: Path, default: float) -> None:
    """Reward and validation throughput of each stage by steps; `default`: the default beam's throughput."""
    check(file)
    names = list(dict.fromkeys(event.stage for event in events))
    if not names:
        raise InputError("the training has no events to plot")
    figure, axes = _figure(2, len(names))
    for column, name in enumerate(names):
        own = [event for event in events if event.stage == name]
        updates = [event for event in own if event.reward is not None]
        validations = [event for event in own if event.throughput is not None]
        steps, rewards = [event.step for event in updates], [event.reward or 0.0 for event in updates]
        ends = range(1, len(rewards) + 1)
        smooth = [float(np.mean(rewards[max(end - SMOOTHED_UPDATES, 0) : end])) for end in ends]
        axes[0][column].plot(steps, rewards, color=COLOURS[0], alpha=0.3)
        axes[0][column].plot(steps, smooth, color=COLOURS[0])
        measured = [event.step for event in validations], [event.throughput for event in validations]
        axes[1][column].plot(*measured, "o-", ms=3, color=COLOURS[1])
        axes[1][column].axhline(default, ls="--", color=FADED)
        axes[0][column].set(title=name, ylabel="reward" if not column else "")
        axes[1][column].set(xlabel="steps", ylabel="validation tokens/s" if not column else "")
    figure.savefig(file, dpi=130)


def plot_decisions(found: Mapping[str, Sequence[Outcome]], file: Path) -> None:
    """Depth against verified nodes: a row of panels for each policy, a column for each range of tokens."""
    check(file)
    figure, axes = _figure(len(found), len(TOKEN_RANGES))
    everything = [outcome for outcomes in found.values() for outcome in outcomes]
    deepest, largest = max(each.passes for each in everything), max(each.nodes for each in everything)
    bins = [np.arange(deepest + 2) - 0.5, np.arange(-10, largest + 21, 20)]
    for row, (name, outcomes) in enumerate(found.items()):
        for column, (low, high) in enumerate(TOKEN_RANGES):
            own = [each for each in outcomes if low <= each.tokens <= high]
            counts, *_ = np.histogram2d([e.passes for e in own], [e.nodes for e in own], bins=bins)
            panel = axes[row][column]
            panel.pcolormesh(*bins, counts.T / max(len(own), 1), cmap="Blues", vmin=0)
            span = f"{low} to {high}" if high < TOKEN_RANGES[-1][1] else f"{low} and more"
            panel.set(title=f"{name}: {span} tokens, {len(own)} cycles", xlabel="draft passes", ylabel="nodes verified")
    figure.savefig(file, dpi=130)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    figure, axes = new_figure(3.6 * columns, 2.8 * rows, rows, columns)
    for each in axes.flat:
        each.title.set_fontsize(9)
        each.locator_params(axis="x", nbins=4)
    return figure, axes
