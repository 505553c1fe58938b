/** The REST API and its event streams. Paths are relative to the page, so that a prefix before the service works. */

const TOKEN = "bexp-token";
const LAST_CODE = 401; // codes from here on end an exploration
const SILENCE_MILLISECONDS = 45_000; // the service sends comments more often than this

/** The bearer token, kept for this tab until it is closed. */
export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

/** The service refused a request; `problem` is its RFC 9457 document. */
export class Problem extends Error {
  constructor(status, problem, path = "") {
    super(problem.detail ?? problem.title ?? `The service answered ${status}.`);
    this.status = status;
    this.problem = problem;
    this.path = path;
  }

  /** Whether the service asks for a token, or does not accept the one that was sent. */
  get isUnauthorized() {
    return this.status === 401;
  }

  /** The id that no exploration has, or null. */
  get unknownId() {
    if (this.problem.type !== "urn:bexp:problem:unknown-exploration") return null;
    return decodeURIComponent(/^explorations\/([^/?]+)/.exec(this.path)[1]);
  }

  /** Whether the same request may succeed later. */
  get isTemporary() {
    return this.status === 429 || this.status >= 500;
  }
}

async function send(path, { headers = {}, ...options } = {}) {
  const secret = token.get();
  const authorization = secret === null ? {} : { Authorization: `Bearer ${secret}` };
  const response = await fetch(`v1/${path}`, { cache: "no-cache", ...options, headers: { ...authorization, ...headers } });
  if (response.ok) return response;
  throw new Problem(response.status, await response.json().catch(() => ({})), path);
}

async function json(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  return (await send(path, { ...options, headers })).json();
}

const one = (id) => `explorations/${encodeURIComponent(id)}`;

export const listExplorations = (query, signal) => json(`explorations?${new URLSearchParams(query)}`, { signal });

export const getExploration = (id, signal) => json(one(id), { signal });

export const listWorkers = (signal) => json("workers", { signal });

export const cancelExploration = (id) => json(`${one(id)}/cancel`, { method: "POST" });

export const resumeExploration = (id) => json(`${one(id)}/resume`, { method: "POST" });

export const writeNotes = (id, text) =>
  json(`${one(id)}/notes`, { method: "PUT", body: JSON.stringify({ text }), headers: { "Content-Type": "application/json" } });

export const deleteExploration = (id) => send(one(id), { method: "DELETE" });

/** Return how likely the answer of exploration `b` is faster than that of `a`. */
export const compareExplorations = (a, b, signal) => json(`${one(a)}/comparison?${new URLSearchParams({ other: b })}`, { signal });

/** Return the answer in a format of a training framework, as a blob, the name of its file, and what it has no place for. */
export async function exportAnswer(id, format, signal) {
  const query = new URLSearchParams({ format });
  const response = await send(`${one(id)}/recommendation?${query}`, { signal });
  const named = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "");
  const notes = response.headers.get("Bexp-Export-Note") ?? "";
  return { blob: await response.blob(), name: named?.[1] ?? `bexp-${format}.txt`, notes };
}

/** Submit a document, which is JSON if it starts with a brace, and YAML otherwise; `fields` replace those it has. */
export const submitExploration = (text, fields = []) =>
  json(`explorations?${new URLSearchParams(fields.map(([name, value]) => ["set", `${name}=${value}`]))}`, {
    method: "POST",
    body: text,
    headers: { "Content-Type": text.trimStart().startsWith("{") ? "application/json" : "application/yaml" },
  });

/** What the service says of itself. */
export const readOpenApi = async (signal) => (await fetch("openapi.json", { cache: "no-cache", signal })).json();

/** Return the trials that were stored after `cursor`, and the cursor for the next call. */
export async function readTrials(id, cursor, signal) {
  const trials = [];
  for (;;) {
    const query = new URLSearchParams({ limit: 1000, ...(cursor === null ? {} : { cursor }) });
    const page = await json(`${one(id)}/trials?${query}`, { signal });
    trials.push(...page.items);
    cursor = page.end_cursor;
    if (page.next_cursor === null) return { trials, cursor };
  }
}

/**
 * Yield lists of events, each event once, to the one that ends the exploration. A broken stream is opened again, later
 * each time; `onState` is called with whether the stream is open, and else with the error. A hidden tab holds none: a
 * browser has six connections to a service for all of its tabs. Throws a `Problem` if the service refuses.
 */
export async function* followEvents(id, signal, onState) {
  let seq = 0;
  let delay = 500;
  let hasEnded = false;
  while (!signal.aborted) {
    if (document.hidden) await change(document, "visibilitychange", signal);
    if (signal.aborted) return;
    let fault = null;
    try {
      for await (const events of streamOnce(id, seq, signal)) {
        onState(true);
        delay = 500;
        const fresh = events.filter((event) => event.seq > seq);
        if (fresh.length === 0) continue;
        seq = fresh.at(-1).seq;
        hasEnded = fresh.at(-1).code >= LAST_CODE;
        yield fresh;
      }
      if (hasEnded) return; // the service closes the stream of one that has ended; one that was resumed goes on
    } catch (error) {
      if (signal.aborted) return;
      if (document.hidden) continue;
      if (error instanceof Complete) return;
      if (error instanceof Problem && !error.isTemporary) throw error;
      fault = error;
    }
    onState(false, fault);
    await pause(delay, signal);
    delay = Math.min(10_000, 2 * delay);
  }
}

class Complete extends Error {}

/** Wait for an event of `target`; the wait ends early if `signal` is aborted. */
const change = (target, name, signal) => new Promise((resolve) => {
  target.addEventListener(name, resolve, { once: true, signal });
  signal.addEventListener("abort", resolve, { once: true });
});

/** Yield the events of one connection, in lists as they arrive. `EventSource` cannot send a token. */
async function* streamOnce(id, after, signal) {
  const silence = new AbortController();
  let timer = null;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MILLISECONDS);
  };
  wait();
  const leave = () => document.hidden && silence.abort();
  document.addEventListener("visibilitychange", leave);
  try {
    const response = await send(`${one(id)}/events`, {
      signal: AbortSignal.any([signal, silence.signal]),
      headers: { Accept: "text/event-stream", ...(after > 0 ? { "Last-Event-ID": String(after) } : {}) },
    });
    if (response.status === 204) throw new Complete();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      wait();
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield blocks.map(dataOf).filter((data) => data !== "").map((data) => JSON.parse(data));
    }
  } finally {
    document.removeEventListener("visibilitychange", leave);
    clearTimeout(timer);
    silence.abort();
  }
}

/** The data of a server-sent event (WHATWG HTML, 9.2). */
function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

/** Wait; the wait ends early if `signal` is aborted. */
export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
