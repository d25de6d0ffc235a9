// The live page: connects the elements of the page with the chat and the load of the server.

import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { askForKey } from "./key.js";
import { Load } from "./load.js";
import { offerPolicies } from "./settings.js";

const chat = new Chat();
const form = byId("form"), message = byId("message");

const load = new Load(
  (about) => {
    const { model, drafter, policy, device, dtype } = about;
    const words = `${model} · drafter ${drafter} · policy ${policy} · ${device}, ${dtype}`;
    if (byId("about").textContent !== words) byId("about").textContent = words;
    chat.hasTemplate = about.chat;
    message.placeholder = about.chat ? "Write a message" : "Begin a text";
    offerPolicies(about);
  },
  () => askForKey(() => load.ask()),
);

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!form.checkValidity()) {
    byId("settings").open = true;
    form.reportValidity();
    return;
  }
  const text = message.value.trim();
  if (!text || chat.busy) return;
  message.value = "";
  chat.send(text);
});

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy) chat.stop();
});

byId("stop").addEventListener("click", () => chat.stop());
byId("measure").addEventListener("click", () => chat.measure());
byId("clear").addEventListener("click", () => {
  chat.clear();
  message.focus();
});

load.ask();
