/* Calls of the server. Addresses are relative, so the page also works behind a proxy that adds a prefix. */

const KEY = "ragjax-key";
const BROKEN = "The connection broke off in the midst of the answer.";

/** The API key of this tab, until it is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused, in its own words. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
  }
}

/** The server does not answer, or went away in the midst of an answer. */
export class Unreachable extends Error {
  constructor(message = "The server does not answer. Check that it is running and that you are online.") {
    super(message);
  }
}

/** What a browser says of a lost connection becomes Unreachable; that the caller stopped a request stays so. */
const lost = (message) => (error) => {
  throw error.name === "AbortError" ? error : new Unreachable(message);
};

/** A response that is no error. Raises Refused and Unreachable. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined && !(body instanceof FormData)) {
    headers["content-type"] = "application/json";
    body = JSON.stringify(body);
  }
  const response = await fetch(path, { method, headers, body, signal, cache: "no-store" }).catch(lost());
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const refused = new Refused(response.status, told?.error);
  if (refused.status === 401) document.dispatchEvent(new CustomEvent("key-wanted"));
  throw refused;
}

export const json = async (path, options) => (await call(path, options)).json();

/** The data of server-sent events, parsed, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(lost(BROKEN));
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/**
 * One question, answered as a stream. `said` gets each new piece of text, and `cited` the passages before the first;
 * the result is the whole text, the account `rag` and the token counts. Raises what `call` does, also for an error in
 * the midst of the stream.
 */
export async function ask(body, said, signal, cited = () => {}) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true, include_sources: true } };
  const response = await call("v1/chat/completions", { method: "POST", body: asked, signal });
  let [text, rag, usage, reason] = ["", null, null, null];
  for await (const event of events(response)) {
    if (event.error) throw new Refused(response.status, event.error);
    const choice = event.choices[0];
    if (choice?.delta?.content) {
      text += choice.delta.content;
      said(choice.delta.content);
    }
    if (event.rag?.segments) rag = event.rag;
    else if (event.rag) cited(event.rag.sources);
    usage = event.usage ?? usage;
    reason = choice?.finish_reason ?? reason;
  }
  if (!rag) throw new Unreachable(BROKEN);
  return { text, rag, usage, reason };
}
