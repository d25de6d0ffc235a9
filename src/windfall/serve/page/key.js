// Asks for the API key.

import { key } from "./api.js";
import { byId } from "./dom.js";

const dialog = byId("key-dialog");

/** Ask for a key; `then()` is called when one is given. */
export function askForKey(then) {
  if (dialog.open) return;
  byId("key-note").textContent = key.get()
    ? "The server does not accept this key."
    : "The key is kept until this tab is closed.";
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    key.set(byId("key").value.trim());
    byId("key").value = "";
    dialog.close();
    then();
  };
  dialog.showModal();
}
