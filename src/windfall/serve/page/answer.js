// One answer: what the server said about its cycles, and the figures that follow from it.

export class Answer {
  /** `request`: the body with which it was asked for. */
  constructor(request) {
    this.request = request;
    this.text = "";
    this.finish = null; // why it ended; null: it was stopped
    this.cycles = [];
    this.ids = [];
    this.depths = []; // of each depth from 1: cycles that verified a token there, and that accepted one
  }

  /** Take in a chunk of the stream; returns its cycle, if it has one. */
  add(chunk) {
    for (const choice of chunk.choices) {
      this.text += choice.delta?.content ?? choice.text ?? "";
      this.finish = choice.finish_reason ?? this.finish;
    }
    const cycle = chunk.speculation;
    if (cycle === undefined) return null;
    this.cycles.push(cycle);
    for (const token of cycle.tokens) this.ids.push(token.id);
    this.#count(cycle);
    return cycle;
  }

  #count(cycle) {
    const depths = depthsOf(cycle.nodes);
    const verified = new Set(), accepted = new Set();
    cycle.nodes.forEach((node, place) => {
      if (node.verified) verified.add(depths[place]);
      if (node.accepted) accepted.add(depths[place]);
    });
    for (const depth of verified) {
      if (depth === 0) continue;
      this.depths[depth - 1] ??= { verified: 0, accepted: 0 };
      this.depths[depth - 1].verified += 1;
      this.depths[depth - 1].accepted += accepted.has(depth) ? 1 : 0;
    }
  }

  /** Tokens per second after the first cycle; null: there are too few cycles. */
  get speed() {
    const first = this.cycles[0], last = this.cycles.at(-1);
    if (this.cycles.length < 2 || last.at <= first.at) return null;
    return (this.ids.length - first.tokens.length) / (last.at - first.at);
  }

  get tokensPerPass() {
    return this.cycles.length ? this.ids.length / this.cycles.length : 0;
  }

  /** The place of the cycle that accepted most. */
  get best() {
    const most = Math.max(...this.cycles.map((cycle) => cycle.accepted_tokens));
    return this.cycles.findIndex((cycle) => cycle.accepted_tokens === most);
  }
}

/** The depth of each node; parents come before their children. */
export function depthsOf(nodes) {
  const depths = [];
  for (const node of nodes) depths.push(node.parent < 0 ? 0 : depths[node.parent] + 1);
  return depths;
}

/** The first place where two lists differ, possibly the end of the shorter one; -1: they are equal. */
export function firstDifference(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let place = 0; place < shorter; place++) if (one[place] !== other[place]) return place;
  return one.length === other.length ? -1 : shorter;
}
