// A small plot of a few series over time.

import { brief, element, svg } from "./dom.js";

const WIDTH = 100, HEIGHT = 36; // of the drawing, which is stretched

export class Plot {
  /** `names`: the fields of a sample that are drawn; `top`: the end of the scale, if it is fixed. */
  constructor(root, title, names, top = null) {
    this.names = names;
    this.top = top;
    this.figure = element("span", { class: "figure" }, "–");
    this.scale = element("span", { class: "scale" });
    this.image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.lines = names.map((name) => svg("path", { class: `series ${name}` }));
    this.image.append(...this.lines);
    root.append(element("div", { class: "plot" },
      element("h3", {}, title), this.figure, element("div", { class: "area" }, this.image, this.scale)));
  }

  /** `count`: samples that fill the width; `figure`: the newest values in words. */
  draw(samples, count, figure) {
    const values = samples.flatMap((sample) => this.names.map((name) => sample[name] ?? 0));
    const top = this.top ?? Math.max(...values, 1);
    this.figure.textContent = figure;
    this.scale.textContent = this.top === null ? brief(top) : "";
    const step = WIDTH / (count - 1), start = WIDTH - (samples.length - 1) * step;
    this.names.forEach((name, series) => {
      let path = "", open = false;
      samples.forEach((sample, place) => {
        const value = sample[name];
        if (value === null) {
          open = false;
          return;
        }
        const x = (start + place * step).toFixed(2), y = (HEIGHT - 1 - (value / top) * (HEIGHT - 2)).toFixed(2);
        path += open ? `L${x} ${y}` : `M${x} ${y}`;
        open = true;
      });
      this.lines[series].setAttribute("d", path);
    });
  }
}
