// The load of the server: asked for once a second while the page is visible, and drawn as small plots.

import { ApiError, getJson } from "./api.js";
import { brief, byId, onFrame } from "./dom.js";
import { Plot } from "./plot.js";

const INTERVAL_MS = 1000, RETRY_MS = 4000;
const SAMPLES = 60;

export class Load {
  /** `onAbout(about)` is called with each answer's description of the server, `onLocked()` if a key is needed. */
  constructor(onAbout, onLocked) {
    this.onAbout = onAbout;
    this.onLocked = onLocked;
    this.samples = [];
    this.last = null; // the last answer, and when it came
    const root = byId("plots");
    this.plots = {
      texts: new Plot(root, "Texts", ["running", "waiting"]),
      rows: new Plot(root, "Rows in a pass", ["texts", "rows", "budget"]),
      drafts: new Plot(root, "Draft passes", ["drafts"]),
      cache: new Plot(root, "KV cache", ["cache"], 1),
      speed: new Plot(root, "Tokens/s, all texts", ["speed"]),
    };
    this.draw = onFrame(() => this.#draw());
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** Ask now, and again and again. */
  async ask() {
    clearTimeout(this.timer);
    if (document.hidden || this.asking) return;
    this.asking = true;
    let wait = INTERVAL_MS;
    try {
      this.#take(await getJson("live", AbortSignal.timeout(10 * INTERVAL_MS)));
    } catch (error) {
      wait = RETRY_MS;
      if (error instanceof ApiError && error.status === 401) {
        this.onLocked();
        return;
      }
      byId("load-note").textContent = `No figures: ${error instanceof ApiError ? error.message : "the server is slow"}.`;
    } finally {
      this.asking = false;
    }
    this.timer = setTimeout(() => this.ask(), wait);
  }

  #take(live) {
    const now = performance.now() / 1000, before = this.last;
    this.last = { live, now };
    this.onAbout(live.about);
    byId("load-note").textContent = `The last minute, for all clients. ${this.#budget(live)}`;
    const grown = (name) => (before ? Math.max(live.totals[name] - before.live.totals[name], 0) : 0);
    const rounds = grown("rounds");
    const known = live.running ? this.samples.at(-1) : undefined; // of passes that take longer than the interval
    const perRound = (name, sample) => (rounds ? grown(name) / rounds : known?.[sample] ?? 0);
    this.samples.push({
      running: live.running,
      waiting: live.waiting,
      texts: perRound("texts", "texts"),
      rows: perRound("rows", "rows"),
      budget: live.budget ? live.budget.rows : null,
      drafts: perRound("draft_passes", "drafts"),
      cache: live.cache_use,
      speed: before ? grown("tokens") / (now - before.now) : 0,
    });
    this.samples.splice(0, this.samples.length - SAMPLES);
    this.draw();
  }

  #budget({ running, budget }) {
    if (budget) return `Shared budget of the last round: ${budget.draft_passes} draft passes, ${budget.rows} rows.`;
    return running > 1 ? "Each text decides on its own tree." : "";
  }

  #draw() {
    const { texts, rows, drafts, cache, speed } = this.plots, now = this.samples.at(-1);
    texts.draw(this.samples, SAMPLES, now.waiting ? `${now.running} running, ${now.waiting} waiting` : `${now.running} running`);
    const drafted = now.rows - now.texts;
    rows.draw(this.samples, SAMPLES, now.rows ? `${brief(now.rows)}, ${brief(drafted)} drafted` : "0");
    drafts.draw(this.samples, SAMPLES, now.drafts ? brief(now.drafts) : "0");
    cache.draw(this.samples, SAMPLES, now.cache === null ? "unknown" : `${(100 * now.cache).toFixed(1)}% in use`);
    speed.draw(this.samples, SAMPLES, now.speed ? brief(now.speed) : "0");
  }
}
