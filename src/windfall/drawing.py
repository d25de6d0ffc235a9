"""A cycle's tree as a picture: what was drafted, what was verified, what the target accepted."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from rich.tree import Tree

from windfall.records import Step

ACCEPTED, VERIFIED, UNVERIFIED, OWN = "bold #0072b2", "default", "dim", "bold underline #d55e00"  # safe for all eyes


def draw(step: Step, tokenizer: Any, most: int = 60) -> Tree:
    """Nodes with token and path probability, likeliest first; of a tree beyond `most` nodes only the verified ones."""
    tree, verified = step.drafted, set(step.kept.tolist())
    accepted = set(step.kept[step.path].tolist())
    shown = set(range(len(tree))) if len(tree) <= most else verified
    labels = [_word(tokenizer, token) for token in tree.tokens.tolist()]
    chances, parents = tree.score.exp().tolist(), tree.parents.tolist()
    drawn = {0: Tree(Text(labels[0], ACCEPTED), guide_style="dim")}
    for node in sorted(shown - {0}, key=lambda n: (int(tree.depth[n]), -chances[n])):
        style = ACCEPTED if node in accepted else VERIFIED if node in verified else UNVERIFIED
        label = Text.assemble((labels[node], style), (f"  {chances[node]:.2f}", "dim"))
        drawn[node] = drawn[parents[node]].add(label)
    tip = step.kept[step.path[-1]].item()
    if len(step.tokens) > step.accepted:  # else the text ended inside the path
        drawn[int(tip)].add(Text(_word(tokenizer, step.tokens[-1]), OWN))
    return drawn[0]


def legend(step: Step) -> Text:
    return Text.assemble(
        ("accepted", ACCEPTED),
        " · ",
        ("the target's own token", OWN),
        f" · {len(step.drafted) - 1} drafted in {step.draft_passes} passes, {len(step.tree) - 1} verified, ",
        f"{step.accepted} accepted: {len(step.tokens)} tokens from one pass of the target",
    )


def _word(tokenizer: Any, token: int) -> str:
    return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)
