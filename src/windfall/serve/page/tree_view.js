// The panel with the tree of one cycle: it follows the answer, or shows the cycle that the user chooses.

import { byId, onFrame } from "./dom.js";
import { drawTree, summaryOf } from "./tree.js";

const LEVEL_MS = 70; // between two levels of a tree that grows
const HOLD_MS = 350; // that a finished tree stays before the next one
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

export class TreeView {
  /** `onShow(place)` is called with the cycle that is shown. */
  constructor(onShow) {
    this.onShow = onShow;
    this.answer = null;
    this.place = -1; // of the cycle that is shown
    this.follows = true;
    this.growing = false;
    this.range = byId("cycle");
    this.update = onFrame(() => this.#update());
    this.range.addEventListener("input", () => this.choose(Number(this.range.value) - 1));
    byId("previous").addEventListener("click", () => this.choose(this.place - 1));
    byId("next").addEventListener("click", () => this.choose(this.place + 1));
  }

  /** Follow the cycles of a new answer. */
  follow(answer) {
    this.answer = answer;
    this.place = -1;
    this.follows = true;
    byId("tree").replaceChildren();
    this.#summarise("Waiting for the first cycle…");
    this.update();
  }

  /** The answer has ended: show the cycle that accepted most, unless the user has chosen one. */
  end() {
    if (!this.follows) return;
    this.follows = false;
    if (this.answer.cycles.length) this.#show(this.answer.best, false);
    else this.#summarise("The tree of the current cycle appears here.");
    this.update();
  }

  /** Show this cycle, and follow no more. */
  choose(place) {
    if (!this.answer || place < 0 || place >= this.answer.cycles.length) return;
    this.follows = false;
    this.#show(place, false);
    this.update();
  }

  clear() {
    this.answer = null;
    this.place = -1;
    byId("tree").replaceChildren();
    this.#summarise("The tree of the current cycle appears here.");
    this.update();
  }

  #update() {
    const count = this.answer?.cycles.length ?? 0;
    if (this.follows && !this.growing && count - 1 > this.place) this.#show(count - 1, !STILL.matches);
    this.range.max = Math.max(count, 1);
    this.range.value = this.place + 1;
    this.range.disabled = count === 0;
    byId("previous").disabled = this.place <= 0;
    byId("next").disabled = this.place < 0 || this.place >= count - 1;
    if (this.place >= 0) this.#summarise();
  }

  #show(place, grows) {
    this.place = place;
    const image = drawTree(this.answer.cycles[place]);
    byId("tree").replaceChildren(image);
    if (grows) this.#grow(image);
    else this.#judge(image);
    this.onShow(place);
  }

  /** Show the levels one after another, as they were drafted, and then what was accepted. */
  #grow(image) {
    const levels = [...image.querySelectorAll(".level")];
    const current = () => byId("tree").contains(image);
    for (const level of levels.slice(1)) level.classList.add("hidden");
    this.growing = true;
    const next = (depth) => {
      if (depth < levels.length && current()) {
        levels[depth].classList.remove("hidden");
        setTimeout(next, LEVEL_MS, depth + 1);
        return;
      }
      if (current()) this.#judge(image);
      setTimeout(() => {
        this.growing = false;
        this.update();
      }, current() ? HOLD_MS : 0);
    };
    setTimeout(next, LEVEL_MS, 1);
  }

  /** Colour the accepted path, which begins at the top left. */
  #judge(image) {
    image.classList.add("judged");
    byId("tree").scrollTo(0, 0);
  }

  #summarise(text) {
    if (text === undefined) {
      const cycle = this.answer.cycles[this.place];
      text = `Cycle ${this.place + 1} of ${this.answer.cycles.length}: ${summaryOf(cycle)}.`;
      if (!cycle.whole_tree) text += " Nodes that were not verified stay on the GPU and are not shown.";
      if (cycle.left_out) text += ` ${cycle.left_out} unlikely nodes are not shown.`;
    }
    byId("tree-summary").textContent = text;
  }
}
