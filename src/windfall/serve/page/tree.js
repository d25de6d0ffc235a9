// The draft tree of a cycle as SVG: depth grows to the right. The first line is what the cycle added to the text.

import { depthsOf } from "./answer.js";
import { svg } from "./dom.js";

const LINE = 24, BOX = 19, GAP = 26, MARGIN = 4, PADDING = 6; // pixels
const LETTER = 6.9; // pixels of a character; twice that of a wide one
const LONGEST = 16; // characters of a word
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f000}-\u{1faff}]/u;
const MEANINGS = {
  accepted: "accepted",
  own: "the model's own token",
  verified: "verified, not accepted",
  unverified: "drafted, not verified",
};

/** A drawing of the cycle. Its levels are groups with the class `level`, the root's first. */
export function drawTree(cycle) {
  const nodes = nodesOf(cycle);
  const lines = linesOf(nodes);
  const { lefts, width } = columnsOf(nodes);
  const height = (Math.max(...lines) + 1) * LINE + 2 * MARGIN;
  const levels = lefts.map(() => svg("g", { class: "level" }));
  const middle = (place) => MARGIN + lines[place] * LINE + BOX / 2;
  const edges = nodes.map((_, place) => place).slice(1).sort((a, b) => rank(nodes[a]) - rank(nodes[b]));
  edges.forEach((place) => {
    const node = nodes[place];
    const from = lefts[node.depth - 1] + nodes[node.parent].width;
    levels[node.depth].append(edge(from, middle(node.parent), lefts[node.depth], middle(place), node.kind));
  });
  nodes.forEach((node, place) => levels[node.depth].append(box(node, lefts[node.depth], middle(place) - BOX / 2)));
  const image = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, ...levels);
  image.setAttribute("aria-label", summaryOf(cycle));
  return image;
}

/** What the cycle did, in one line. */
export function summaryOf(cycle) {
  const { drafted_tokens: drafted, verified_tokens: verified, accepted_tokens: accepted, tokens } = cycle;
  const added = `${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`;
  if (drafted === 0) return `nothing drafted: ${added}, the model's own`;
  return `${drafted} drafted, ${verified} verified, ${accepted} accepted: ${added} from one pass`;
}

/** The server's nodes, and the model's own token after the accepted path. */
function nodesOf(cycle) {
  const depths = depthsOf(cycle.nodes);
  const nodes = cycle.nodes.map((node, place) => {
    const kind = place === 0 ? "root" : node.accepted ? "accepted" : node.verified ? "verified" : "unverified";
    return { ...node, depth: depths[place], kind, label: place ? short(node.path_probability) : "" };
  });
  const own = cycle.tokens.at(-1);
  if (own && !own.drafted) {
    const tip = nodes.findLastIndex((node) => node.accepted);
    const text = own.text || "end or part of a character";
    nodes.push({ parent: tip, text, depth: nodes[tip].depth + 1, kind: "own", label: "" });
  }
  for (const node of nodes) {
    node.word = shown(node.text);
    node.width = (cells(node.word) + (node.label ? node.label.length + 1 : 0)) * LETTER + 2 * PADDING;
  }
  return nodes;
}

const short = (value) => (value >= 0.995 ? "1" : value.toFixed(2).slice(1));

function shown(text) {
  const letters = [...text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·")];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : letters.join("");
}

const cells = (text) => [...text].reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);

/** The line of each node: the highest that is free in its level and not above its parent. In a level, nodes are in the
 * order of their parents; of siblings, the one that became text is first, then the likeliest. */
function linesOf(nodes) {
  const levels = [];
  nodes.forEach((node, place) => (levels[node.depth] ??= []).push(place));
  const lines = [0];
  for (const level of levels.slice(1)) {
    const above = (place) => lines[nodes[place].parent];
    level.sort((a, b) => above(a) - above(b) || rank(nodes[b]) - rank(nodes[a]));
    let next = 0;
    for (const place of level) {
      lines[place] = Math.max(next, above(place));
      next = lines[place] + 1;
    }
  }
  return lines;
}

const rank = (node) => (node.kind === "accepted" || node.kind === "own" ? 2 : node.path_probability);

/** The left edge of each level's boxes, and the width of the drawing. */
function columnsOf(nodes) {
  const widest = [];
  for (const node of nodes) widest[node.depth] = Math.max(widest[node.depth] ?? 0, node.width);
  const lefts = [];
  let left = MARGIN;
  for (const width of widest) {
    lefts.push(left);
    left += width + GAP;
  }
  return { lefts, width: Math.ceil(left - GAP + MARGIN) };
}

function edge(fromX, fromY, toX, toY, kind) {
  const bend = toX - GAP / 2;
  const path = `M${fromX} ${fromY}H${bend - 6}C${bend} ${fromY} ${bend} ${toY} ${toX} ${toY}`;
  return svg("path", { d: path, class: `edge ${kind}` });
}

function box(node, left, top) {
  const words = svg("text", { x: left + PADDING, y: top + 13.5 }, node.word);
  if (node.label) words.append(svg("tspan", { class: "chance", dx: LETTER }, node.label));
  const frame = svg("rect", { x: left, y: top, width: node.width, height: BOX, rx: 5 });
  return svg("g", { class: `node ${node.kind}` }, svg("title", {}, meaning(node)), frame, words);
}

function meaning(node) {
  const quoted = JSON.stringify(node.text);
  if (node.kind === "own") return `${quoted}: ${MEANINGS.own}`;
  if (node.parent < 0) return `${quoted}: the last token of the cycle before`;
  const chances = `drafter: ${node.probability.toFixed(3)} after its parent, ${node.path_probability.toFixed(3)} for the path`;
  return `${quoted}: ${MEANINGS[node.kind]}; ${chances}`;
}
