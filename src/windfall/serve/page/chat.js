// The conversation: sends messages, shows answers as they come, and measures plain decoding.

import { AcceptanceView } from "./acceptance.js";
import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { stream } from "./api.js";
import { byId, counted, element } from "./dom.js";
import { askForKey } from "./key.js";
import { readSettings } from "./settings.js";
import { SpeedView } from "./speed.js";
import { TreeView } from "./tree_view.js";

const ENDINGS = { stop: "", length: "cut at the limit" };
const NEAR_END = 60; // pixels from the end of the conversation within which it follows the text

export class Chat {
  constructor() {
    this.log = byId("log");
    this.history = []; // messages
    this.hasTemplate = true; // whether the model takes messages; otherwise it continues a text
    this.aborter = null; // of the request that runs
    this.answer = null; // the last one
    this.view = null; // of the last answer
    this.tree = new TreeView((place) => this.view?.highlight(place));
    this.acceptance = new AcceptanceView();
    this.speed = new SpeedView();
  }

  get busy() {
    return this.aborter !== null;
  }

  /** Send a message and show the answer. */
  async send(text) {
    const settings = readSettings();
    const asked = { role: "user", content: text };
    const request = { ...this.#prompt([...this.history, asked]), ...settings.request };
    byId("welcome")?.remove();
    this.view?.settle();
    const question = element("article", { class: "message question", "aria-label": "You" }, text);
    this.log.append(question);
    this.#begin(request);
    const error = await this.#run(this.answer, (cycle) => {
      this.view.add(cycle);
      this.#updatePanels();
    });
    this.tree.end();
    if (error) {
      this.#fail(error, question, text);
      return;
    }
    this.history.push(asked, { role: "assistant", content: this.answer.text });
    const ending = this.answer.finish === null ? "stopped" : ENDINGS[this.answer.finish] ?? this.answer.finish;
    this.view.describe(this.answer, ending);
    this.#scroll();
    say(`Answer ${ending || "finished"}: ${counted(this.answer.ids.length, "token")}.`);
    if (settings.measures && this.canMeasure && this.answer.finish !== null) await this.measure();
  }

  get canMeasure() {
    return !this.busy && (this.answer?.cycles.length ?? 0) > 1 && this.answer.request.policy !== "none";
  }

  /** Generate the last answer once more by plain decoding, and compare. */
  async measure() {
    const plain = new Answer({ ...this.answer.request, policy: "none", max_tokens: this.answer.ids.length });
    this.speed.compare(plain);
    say("Measuring plain decoding.");
    const error = await this.#run(plain, () => this.speed.update());
    if (error) {
      this.speed.show(this.answer);
      this.#showError(error);
      return;
    }
    this.speed.finish();
    requestAnimationFrame(() => say(byId("verdict").textContent));
  }

  stop() {
    this.aborter?.abort();
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.history = [];
    this.answer = this.view = null;
    this.log.replaceChildren();
    this.tree.clear();
    this.acceptance.show(null);
    this.speed.show(null);
    this.#showState();
  }

  #prompt(messages) {
    return this.hasTemplate ? { messages } : { prompt: messages.at(-1).content };
  }

  #begin(request) {
    this.answer = new Answer(request);
    this.view = new AnswerView(this.log, () => this.#scroll(), (cycle) => this.tree.choose(cycle));
    this.tree.follow(this.answer);
    this.acceptance.show(this.answer);
    this.speed.show(this.answer);
    this.log.scrollTop = this.log.scrollHeight;
    say("Generating an answer.");
  }

  /** Fill the answer from the server; returns the error, if there is one. A stop is none. */
  async #run(answer, onCycle) {
    const path = this.hasTemplate ? "v1/chat/completions" : "v1/completions";
    const body = { ...answer.request, stream: true, stream_options: { include_speculation: true } };
    this.aborter = new AbortController();
    this.#showState();
    try {
      for await (const chunk of stream(path, body, this.aborter.signal)) {
        const cycle = answer.add(chunk);
        if (cycle) onCycle(cycle);
      }
    } catch (error) {
      return error.name === "AbortError" ? null : error;
    } finally {
      this.aborter = null;
      this.#showState();
    }
    return null;
  }

  #updatePanels() {
    this.tree.update();
    this.acceptance.update();
    this.speed.update();
  }

  /** Show the error. A message without any answer goes back to where it was written. */
  #fail(error, question, text) {
    if (this.answer.ids.length) {
      this.view.describe(this.answer, "broken off");
    } else {
      this.view.root.remove();
      question.classList.add("failed");
      const box = byId("message");
      if (!box.value) box.value = text;
    }
    this.#showError(error);
    if (error.status === 401) askForKey(() => byId("message").focus());
  }

  #showError(error) {
    this.log.append(element("p", { class: "message error", role: "alert" }, `Error: ${error.message}`));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #scroll() {
    const { log } = this;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END + log.clientHeight / 4) {
      log.scrollTop = log.scrollHeight;
    }
  }

  #showState() {
    const { busy } = this, focused = document.activeElement === byId("stop");
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    byId("measure").disabled = !this.canMeasure;
    this.log.setAttribute("aria-busy", String(busy));
    if (focused && !busy) byId("message").focus();
  }
}

/** Tell it to users of screen readers. */
function say(text) {
  byId("status").textContent = text;
}
