// Acceptance by depth, as bars.

import { byId, element, onFrame } from "./dom.js";

const MOST = 10; // depths

export class AcceptanceView {
  constructor() {
    this.list = byId("acceptance");
    this.answer = null;
    this.rows = [];
    this.update = onFrame(() => this.#update());
  }

  show(answer) {
    this.answer = answer;
    this.update();
  }

  #update() {
    const depths = (this.answer?.depths ?? []).slice(0, MOST);
    while (this.rows.length > depths.length) this.rows.pop().root.remove();
    while (this.rows.length < depths.length) this.rows.push(this.#row(this.rows.length + 1));
    depths.forEach(({ verified, accepted }, place) => {
      const { bar, figure } = this.rows[place];
      bar.style.width = `${(100 * accepted) / verified}%`;
      figure.textContent = `${Math.round((100 * accepted) / verified)}% of ${verified}`;
    });
  }

  #row(depth) {
    const bar = element("span"), figure = element("output");
    const root = element("li", { class: "bar" }, element("span", { class: "name" }, `depth ${depth}`),
      element("span", { class: "track" }, bar), figure);
    this.list.append(root);
    return { root, bar, figure };
  }
}
