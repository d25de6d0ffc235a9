// The settings of a request.

import { byId } from "./dom.js";

const MAX_SEED = 2 ** 32;

/** The fields of a request, and whether plain decoding is measured after it. A random seed is chosen here, so that the
 * text can be generated again. */
export function readSettings() {
  const temperature = byId("temperature").valueAsNumber;
  const seed = byId("seed").value === "" ? randomSeed() : byId("seed").valueAsNumber;
  const policy = byId("policy").value;
  return {
    request: {
      temperature,
      max_tokens: byId("max-tokens").valueAsNumber,
      ...(temperature > 0 ? { seed } : {}),
      ...(policy ? { policy } : {}),
    },
    measures: byId("always-measure").checked,
  };
}

/** Offer these policies. */
export function offerPolicies({ policy, policies }) {
  const box = byId("policy"), chosen = box.value;
  const options = [new Option(`the server's (${policy})`, "")];
  for (const name of policies) options.push(new Option(name === "none" ? "none: plain decoding" : name, name));
  if (box.options.length === options.length && box.options[0].text === options[0].text) return;
  box.replaceChildren(...options);
  box.value = chosen;
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED;
}
