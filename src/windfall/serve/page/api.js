// Requests to the server: JSON, streams of events, errors, and the API key.

const KEY = "windfall-api-key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** The JSON object at this path. */
export async function getJson(path, signal) {
  const answer = await send(path, { signal });
  return answer.json();
}

/** The objects of a stream of server-sent events; an event with an error is raised. */
export async function* stream(path, body, signal) {
  const answer = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const found = JSON.parse(data);
    if (found.error) throw new ApiError(found.error.message);
    yield found;
  }
  throw new ApiError("the server closed the connection before the end of the answer");
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached");
  }
  if (!answer.ok) throw await asError(answer);
  return answer;
}

async function asError(answer) {
  let message = `the server answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not an error of the API, such as one of a proxy
  }
  return new ApiError(message, answer.status);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
