// An answer in the conversation: its tokens, coloured by where they come from.

import { brief, counted, element, onFrame } from "./dom.js";

export class AnswerView {
  /** `scroll()` is called after the text has grown; `choose(cycle)` when a token is clicked. */
  constructor(log, scroll, choose) {
    this.text = element("div", { class: "text" });
    this.meta = element("p", { class: "meta" }, "…");
    this.root = element("article", { class: "message answer", "aria-label": "Answer" }, this.text, this.meta);
    this.cycles = []; // the elements of each cycle's tokens
    this.waiting = []; // elements that the next frame adds
    this.current = -1; // the highlighted cycle
    this.flush = onFrame(() => {
      this.text.append(...this.waiting.splice(0));
      scroll();
    });
    this.text.addEventListener("click", (event) => {
      const cycle = event.target.dataset?.cycle;
      if (cycle !== undefined && getSelection().isCollapsed) choose(Number(cycle));
    });
    log.append(this.root);
  }

  add(cycle) {
    const place = this.cycles.length;
    const made = cycle.tokens.filter((token) => token.text).map((token) => {
      const kind = token.drafted ? "drafted" : "own";
      return element("span", { class: `token ${kind}`, "data-cycle": place }, token.text);
    });
    this.cycles.push(made);
    this.waiting.push(...made);
    this.flush();
  }

  /** Mark the tokens of this cycle. */
  highlight(cycle) {
    for (const each of this.cycles[this.current] ?? []) each.classList.remove("current");
    for (const each of this.cycles[cycle] ?? []) each.classList.add("current");
    this.current = cycle;
  }

  /** What is known about the answer, in one line. */
  describe(answer, ending) {
    const parts = [
      ending,
      counted(answer.ids.length, "token"),
      `${answer.tokensPerPass.toFixed(2)} per pass`,
      ...(answer.speed ? [`${brief(answer.speed)} tokens/s`] : []),
      ...(answer.request.seed === undefined ? [] : [`seed ${answer.request.seed}`]),
    ];
    this.meta.textContent = parts.filter(Boolean).join(" · ");
  }

  /** Join neighbours of one kind, so that a long conversation has few elements. */
  settle() {
    this.highlight(-1);
    let last = null;
    for (const token of [...this.text.children]) {
      delete token.dataset.cycle;
      if (last?.className === token.className) {
        last.append(token.textContent);
        token.remove();
      } else {
        last = token;
      }
    }
    this.text.normalize();
    this.cycles = [];
  }
}
