// The speed of an answer, against plain decoding of the same text that is measured when the user asks for it.

import { firstDifference } from "./answer.js";
import { brief, byId, counted, onFrame } from "./dom.js";

export class SpeedView {
  constructor() {
    this.answer = null;
    this.plain = null; // the answer of plain decoding
    this.done = false; // whether plain decoding has ended
    this.update = onFrame(() => this.#update());
  }

  /** Show a new answer, whose plain decoding is not measured yet. */
  show(answer) {
    this.answer = answer;
    this.plain = null;
    this.done = false;
    this.update();
  }

  /** Plain decoding of the same text has begun. */
  compare(plain) {
    this.plain = plain;
    this.done = false;
    this.update();
  }

  /** Plain decoding has ended, or was stopped. */
  finish() {
    this.done = true;
    this.update();
  }

  #update() {
    const drafts = this.answer?.speed ?? null, plain = this.plain?.speed ?? null;
    const most = Math.max(drafts ?? 0, plain ?? 0, 1e-9);
    for (const [name, speed] of [["drafts", drafts], ["plain", plain]]) {
      byId(`${name}-bar`).style.width = `${(100 * (speed ?? 0)) / most}%`;
      byId(`${name}-speed`).textContent = speed === null ? "–" : `${brief(speed)} tokens/s`;
    }
    byId("verdict").textContent = this.#verdict(drafts, plain);
    byId("verdict").classList.toggle("differs", this.done && this.#difference() >= 0);
  }

  #verdict(drafts, plain) {
    if (this.answer?.request.policy === "none") return "This answer is from plain decoding itself.";
    if (this.plain === null) return "Plain decoding has not been measured yet.";
    if (!this.done) return `Plain decoding: ${counted(this.plain.ids.length, "token")} of ${this.answer.ids.length}…`;
    const place = this.#difference();
    const same = place < 0
      ? `The same text: all ${counted(this.answer.ids.length, "token")} are equal.`
      : place === this.plain.ids.length
        ? `The first ${counted(place, "token")} are equal; then the measurement was stopped.`
        : `The texts differ from token ${place + 1} on: in half precision, texts that run together may.`;
    const times = drafts && plain ? `${(drafts / plain).toFixed(2)} times as fast as plain decoding. ` : "";
    return times + same;
  }

  #difference() {
    return this.plain === null ? -1 : firstDifference(this.answer.ids, this.plain.ids);
  }
}
