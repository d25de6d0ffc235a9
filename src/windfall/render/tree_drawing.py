"""Drawings of a cycle's draft tree, for the terminal or as SVG: drafted, verified and accepted tokens."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from rich.tree import Tree

from windfall.core.types import Step
from windfall.core.wording import counted

STYLES = {  # colours for any colour vision
    "accepted": "bold #0072b2",
    "own": "bold underline #d55e00",
    "verified": "default",
    "unverified": "dim",
}
MARKS = {"accepted": "  ← accepted", "own": "  ← the target's own next token", "unverified": "  (not verified)"}


class Node(NamedTuple):
    """A node of the drawing."""

    parent: int  # index in the list of nodes, -1 for the root
    depth: int
    kind: str  # a key of STYLES
    word: str
    chance: float | None  # the drafter's probability of the path


def nodes(step: Step, tokenizer: Any, most: int = 60) -> list[Node]:
    """The nodes, parents before children and likelier siblings first; above `most` nodes only the verified ones."""
    tree, verified = step.drafted, set(step.kept.tolist())
    accepted = set(step.kept[step.path].tolist())
    shown = set(range(len(tree))) if len(tree) <= most else verified
    chances, parents, depths = tree.score.exp().tolist(), tree.parents.tolist(), tree.depth.tolist()
    words = [_word(tokenizer, token) for token in tree.tokens.tolist()]
    places: dict[int, int] = {-1: -1}
    found: list[Node] = []
    for node in sorted(shown, key=lambda n: (depths[n], -chances[n])):
        kind = "accepted" if node in accepted else "verified" if node in verified else "unverified"
        places[node] = len(found)
        found.append(Node(places[parents[node]], depths[node], kind, words[node], chances[node] if node else None))
    if len(step.tokens) > step.accepted:  # otherwise the text ended within the path
        tip = places[int(step.kept[step.path[-1]])]
        found.append(Node(tip, found[tip].depth + 1, "own", _word(tokenizer, step.tokens[-1]), None))
    return found


def draw(step: Step, tokenizer: Any, most: int = 60) -> Tree:
    """A drawing for the terminal, with path probabilities."""
    drawn: list[Tree] = []
    for node in nodes(step, tokenizer, most):
        chance = "" if node.chance is None else f"  {node.chance:.2f}"
        mark = MARKS.get(node.kind, "") if drawn else ""
        label = Text.assemble((node.word, STYLES[node.kind]), (chance, "dim"), (mark, STYLES[node.kind]))
        drawn.append(drawn[node.parent].add(label) if drawn else Tree(label, guide_style="dim"))
    return drawn[0]


def summary(step: Step) -> str:
    passes, tokens = counted(step.draft_passes, "pass", "passes"), counted(len(step.tokens), "token")
    return (
        f"{step.drafted_tokens} drafted in {passes}, {len(step.tree) - 1} verified, "
        f"{step.accepted} accepted: {tokens} from one pass of the target"
    )


def _word(tokenizer: Any, token: int) -> str:
    return repr(tokenizer.decode([token])) if tokenizer is not None else str(token)


# ---- SVG: depth grows to the right, and every leaf has its own line

LINE, BOX, GAP, MARGIN = 28, 20, 36, 16  # pixels: line height, box height, between levels, around everything
LETTER, LONGEST = 7.3, 20  # pixels of a character, characters of a word
BOXES = {  # fill, frame, letters, dashes of the frame
    "accepted": ("#0072b2", "#0072b2", "#ffffff", ""),
    "own": ("#ffffff", "#d55e00", "#b34e00", ""),
    "verified": ("#ffffff", "#555555", "#222222", ""),
    "unverified": ("#ffffff", "#aaaaaa", "#767676", "4 3"),
}
THICK = ("accepted", "own")
MEANINGS = {
    "accepted": "accepted",
    "own": "the target's own token",
    "verified": "verified, not accepted",
    "unverified": "drafted, not verified",
}


def svg(step: Step, tokenizer: Any, most: int = 200) -> str:
    """A drawing as an SVG document."""
    found = nodes(step, tokenizer, most)
    labels = [_label(node) for node in found]
    lines = _lines(found)
    lefts, width = _columns(found, labels)
    keys, keys_width = _keys(MARGIN, (max(lines) + 2) * LINE + MARGIN, {node.kind for node in found})
    notes_at = (max(lines) + 3) * LINE + MARGIN
    width = max(width, keys_width, len(summary(step)) * LETTER + 2 * MARGIN)
    later = sorted(
        range(1, len(found)), key=lambda place: found[place].kind in THICK
    )  # the accepted path is drawn last
    parts = [_edge(found, place, lefts, lines, labels) for place in later]
    parts += [_box(lefts[n.depth], MARGIN + lines[i] * LINE, labels[i], n.kind) for i, n in enumerate(found)]
    parts += [*keys, _letters(MARGIN, notes_at + 14, summary(step), "#222222")]
    height = notes_at + LINE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace, DejaVu Sans Mono, monospace"'
            ' font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _label(node: Node) -> str:
    word = node.word if cell_len(node.word) <= LONGEST else set_cell_size(node.word, LONGEST - 1).rstrip() + "…"
    return word if node.chance is None else f"{word} {node.chance:.2f}"


def _lines(found: list[Node]) -> list[float]:
    """The line of each node: leaves below one another, parents in the middle of their children."""
    children: list[list[int]] = [[] for _ in found]
    for index, node in enumerate(found[1:], 1):
        children[node.parent].append(index)
    lines, leaves = [0.0] * len(found), itertools.count()

    def place(index: int) -> float:
        own = [place(child) for child in children[index]]
        lines[index] = (own[0] + own[-1]) / 2 if own else next(leaves)
        return lines[index]

    place(0)
    return lines


def _columns(found: list[Node], labels: list[str]) -> tuple[list[float], float]:
    """The left edges of the boxes of each depth, and the total width."""
    widest = [0.0] * (max(node.depth for node in found) + 1)
    for node, label in zip(found, labels, strict=True):
        widest[node.depth] = max(widest[node.depth], _width(label))
    lefts = [MARGIN + sum(widest[:depth]) + GAP * depth for depth in range(len(widest))]
    return lefts, lefts[-1] + widest[-1] + MARGIN


def _width(label: str) -> float:
    return cell_len(label) * LETTER + 14


def _edge(found: list[Node], place: int, lefts: list[float], lines: list[float], labels: list[str]) -> str:
    node = found[place]
    left = lefts[found[node.parent].depth] + _width(labels[node.parent])
    right, top, bottom = (lefts[node.depth], *(MARGIN + lines[i] * LINE + BOX / 2 for i in (node.parent, place)))
    bend = right - GAP / 2
    frame, thick = BOXES[node.kind][1], 2.5 if node.kind in THICK else 1
    return (
        f'<path d="M{left:.1f} {top:.1f} H{bend - 8:.1f} C{bend:.1f} {top:.1f} {bend:.1f} {bottom:.1f}'
        f' {right:.1f} {bottom:.1f}" fill="none" stroke="{frame}" stroke-width="{thick}"/>'
    )


def _box(left: float, top: float, label: str, kind: str) -> str:
    fill, frame, letters, dashes = BOXES[kind]
    thick = 2 if kind == "own" else 1
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{_width(label):.1f}" height="{BOX}" rx="6" fill="{fill}"'
        f' stroke="{frame}" stroke-width="{thick}"{dashed}/>' + _letters(left + 7, top + 14, label, letters)
    )


def _letters(left: float, base: float, text: str, colour: str) -> str:
    return f'<text x="{left:.1f}" y="{base:.1f}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'


def _keys(left: float, top: float, kinds: set[str]) -> tuple[list[str], float]:
    """The legend, with a box for each kind that occurs, and its right edge."""
    boxes = []
    for kind in (each for each in MEANINGS if each in kinds):
        boxes.append(_box(left, top, MEANINGS[kind], kind))
        left += _width(MEANINGS[kind]) + 10
    return boxes, left + MARGIN
