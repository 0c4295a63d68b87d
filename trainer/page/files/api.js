// The JSON API, this page's only source. See docs/page.md.

export class ApiError extends Error {
  constructor(message, hint, status) {
    super(message);
    this.hint = hint;
    this.status = status;
  }
}

/** GET `path` under `api/`; `query` leaves out what is null. */
export async function get(path, query = {}, signal) {
  const url = new URL(`api/${path}`, document.baseURI);
  url.hash = "";
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  let response;
  try {
    response = await fetch(url, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.", "The page goes on when it is back.");
  }
  let body;
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The server's answer (${response.status}) is not JSON.`);
  }
  if (!response.ok) {
    const { message, hint } = body.error ?? {};
    throw new ApiError(message ?? `The server answered ${response.status}.`, hint, response.status);
  }
  return body;
}

/** The API of one run. */
export function run(project, name) {
  const root = `runs/${encodeURIComponent(project)}/${encodeURIComponent(name)}`;
  return (path, query, signal) => get(path ? `${root}/${path}` : root, query, signal);
}

/** Follow changes: `onchange({project, name, step})`, `onstate("live" | "lost")`. */
export function follow(onchange, onstate) {
  const source = new EventSource(new URL("api/events", document.baseURI.split("#")[0]));
  source.addEventListener("open", () => onstate("live"));
  source.addEventListener("error", () => onstate("lost"));
  source.addEventListener("changed", (event) => {
    try {
      onchange(JSON.parse(event.data));
    } catch { /* not ours */ }
  });
  addEventListener("pagehide", () => source.close());
}

/** Keeps only the newest of several calls: an older one is cancelled. */
export function newest() {
  let controller;
  return async (call) => {
    controller?.abort();
    controller = new AbortController();
    const mine = controller;
    try {
      const value = await call(mine.signal);
      return mine === controller ? value : undefined;
    } catch (error) {
      if (mine !== controller || error.name === "AbortError") return undefined;
      throw error;
    }
  };
}
