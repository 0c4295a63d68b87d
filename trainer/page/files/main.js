// Puts the page together: which run, which panels are in sight, and what has changed.

import { follow, get, run as runApi } from "./api.js";
import { Attempts } from "./attempts.js";
import { audit } from "./audit.js";
import { reward, signal, stability, time } from "./charts.js";
import { compare } from "./compare.js";
import { empty, failure, fill, h } from "./dom.js";
import { evals } from "./evals.js";
import { examples } from "./examples.js";
import { keys } from "./keys.js";
import { select } from "./plots.js";
import { records } from "./records.js";
import { format, parse } from "./route.js";
import { Series } from "./series.js";
import { Steps } from "./steps.js";
import { verdict } from "./verdict.js";

const PANELS = ["verdict", "steps", "reward", "signal", "stability", "time", "examples", "attempts", "audit", "compare", "evals", "records"];
const ORDER_OF_WORK = ["verdict", "steps", "reward"]; // loaded at once; the others when in sight
const FOLLOW_THE_ADDRESS = ["steps", "attempts", "compare", "evals"]; // the others show the whole run
const byId = (id) => document.getElementById(id);

class App {
  route = {};
  runs = [];
  server = null;
  overview = null;
  groups = { step: null, split: "train", list: [] };
  arrived = false;
  #panels = {};
  #reasons = new Map(); // panel -> why it must be drawn again
  #seen = new Set(ORDER_OF_WORK);
  #busy = new Set();
  #key = "";

  async start() {
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) this.#seen.add(entry.target.id);
        else if (!ORDER_OF_WORK.includes(entry.target.id)) this.#seen.delete(entry.target.id);
      }
      this.#work();
    }, { rootMargin: "400px" });
    addEventListener("hashchange", () => {
      if (JSON.stringify(parse(location.hash)) !== JSON.stringify(this.route)) this.#moved();
    });
    byId("run-choice").addEventListener("change", (event) => {
      const [project, name] = JSON.parse(event.target.value);
      location.hash = format({ project, name });
    });
    await this.#list();
    PANELS.forEach((id) => observer.observe(byId(id)));
    follow((change) => this.#changed(change), (state) => this.#state(state));
    setInterval(() => this.#panels.verdict?.update(), 10_000); // its times are relative
  }

  /** Change the address; null takes a part away. */
  go(patch) {
    location.hash = format({ ...this.route, ...patch });
    this.#moved(); // now: the browser's event comes later, and a second key may come before it
  }

  /** Change the address and show the attempts. */
  open(patch) {
    this.go(patch);
    requestAnimationFrame(() => this.reveal("attempts"));
  }

  reveal(panel) {
    byId(`${panel}-title`).focus({ preventScroll: true });
    hold(byId(panel));
  }

  moveGroup(by) {
    const { list } = this.groups;
    const at = list.findIndex((group) => group.id === this.route.group);
    const next = list[at < 0 ? 0 : Math.min(list.length - 1, Math.max(0, at + by))];
    if (next) this.go({ step: this.groups.step, group: next.id, attempt: null });
  }

  turnColour() {
    this.#panels.attempts?.tokens.turn();
  }

  async #list() {
    try {
      const wanted = parse(location.hash);
      const entering = wanted.project ? this.#moved() : null; // beside the list: a link names its run
      const { runs, server } = await get("runs");
      this.runs = runs;
      this.server = server;
      const newest = [...runs].sort((one, other) => stamp(other.updated) - stamp(one.updated))[0];
      this.#choices(wanted.project ? wanted : newest);
      if (entering) await entering;
      else if (newest) history.replaceState(null, "", format(newest)), await this.#moved();
      else this.#nothing();
    } catch (error) {
      fill(byId("verdict").querySelector(".body"), failure(error));
    }
  }

  #nothing() {
    fill(byId("verdict").querySelector(".body"), empty("There is no run yet.", "Start one with `trainer finetune CONFIG`, or register a model with an ART client: it appears here by itself."));
  }

  #choices(current) {
    fill(byId("run-choice"), this.runs.map((run) => h("option", {
      value: JSON.stringify([run.project, run.name]), selected: run.project === current?.project && run.name === current?.name,
    }, `${run.project} / ${run.name}`)));
  }

  async #moved() {
    const before = this.route;
    this.route = parse(location.hash);
    if (!this.route.project) return;
    const key = JSON.stringify([this.route.project, this.route.name]);
    if (key !== this.#key) await this.#enter(key);
    else {
      this.#need("route");
      if (before.group === undefined && this.route.group !== undefined) this.reveal("attempts"); // a link was pasted
    }
    select(this.route.step ?? null);
  }

  async #enter(key) {
    this.#key = key;
    this.get = runApi(this.route.project, this.route.name);
    this.series = new Series(this.get);
    this.overview = null;
    const body = Object.fromEntries(PANELS.map((id) => [id, byId(id).querySelector(".body")]));
    Object.values(body).forEach((element) => fill(element));
    this.steps = new Steps(body.steps, this);
    this.#panels = {
      verdict: verdict(body.verdict, this), steps: this.steps, reward: reward(body.reward, this), signal: signal(body.signal, this),
      stability: stability(body.stability, this), time: time(body.time, this), examples: examples(body.examples, this),
      attempts: new Attempts(body.attempts, this), audit: audit(body.audit, this), compare: compare(body.compare, this), evals: evals(body.evals, this), records: records(body.records, this),
    };
    document.title = `${this.route.name} · ${this.route.project}`;
    this.#choices(this.route);
    await this.#overview();
    this.#need("run");
    if (this.route.group !== undefined) setTimeout(() => this.reveal("attempts"), 300);
    setTimeout(() => { this.arrived = true; }, 1500);
  }

  async #overview() {
    try {
      this.overview = await this.get("");
      const found = this.overview.verdict;
      byId("newest").textContent = `step ${found.step}${found.steps_planned ? ` of ${found.steps_planned}` : ""}`;
    } catch (error) {
      fill(byId("verdict").querySelector(".body"), failure(error));
    }
  }

  async #changed(change) {
    const known = this.runs.some((run) => run.project === change.project && run.name === change.name);
    if (!known || !this.#key) await this.#list();
    if (change.project !== this.route.project || change.name !== this.route.name) return;
    this.series.changed();
    const [, listed] = await Promise.all([this.#overview(), get("runs").catch(() => null)]);
    if (listed) this.server = listed.server;
    this.#need("changed");
  }

  #state(state) {
    const chip = byId("connection");
    const live = this.server?.live ?? true;
    chip.textContent = state === "lost" ? "Connection lost; trying again" : live ? "Live" : "Files";
    chip.className = `chip ${state === "lost" ? "lost" : live ? "live" : ""}`;
    if (state === "live" && this.#lost) {
      this.series?.changed();
      this.#list().then(() => this.#need("changed"));
    }
    this.#lost = state === "lost";
  }

  #lost = false;

  #need(reason) {
    for (const id of reason === "route" ? FOLLOW_THE_ADDRESS : PANELS) this.#reasons.set(id, (this.#reasons.get(id) ?? new Set()).add(reason));
    this.#work();
  }

  /** Draw each panel in sight that has a reason, one run of it at a time. */
  #work() {
    for (const id of PANELS) {
      const reasons = this.#reasons.get(id);
      const panel = this.#panels[id];
      if (!reasons || !panel || this.#busy.has(id)) continue;
      const wanted = byId(id).contains(document.activeElement) || (id === "attempts" && this.route.group !== undefined) || (id === "evals" && this.route.eval !== undefined);
      if (!this.#seen.has(id) && !wanted) continue;
      if ((id === "compare" || id === "attempts") && this.#busy.has("steps")) continue; // they read its list
      this.#reasons.delete(id);
      this.#busy.add(id);
      const key = this.#key;
      Promise.resolve(panel.update(reasons)).catch((error) => fill(byId(id).querySelector(".body"), failure(error))).finally(() => {
        this.#busy.delete(id);
        if (key !== this.#key) this.#reasons.set(id, new Set(["run"]));
        byId(id).dataset.ready = this.#key;
        this.#work();
      });
    }
  }
}

/** Scroll to `panel`, and stay there while panels above it load and grow, until the reader moves. */
function hold(panel) {
  const observer = new ResizeObserver(() => panel.scrollIntoView());
  const moves = ["wheel", "touchstart", "pointerdown", "keydown"];
  const end = () => {
    observer.disconnect();
    moves.forEach((name) => removeEventListener(name, end));
  };
  panel.scrollIntoView();
  observer.observe(document.querySelector("main"));
  moves.forEach((name) => addEventListener(name, end, { passive: true }));
  setTimeout(end, 3000);
}

function stamp(time) {
  return typeof time === "number" ? time : Date.parse(time ?? "") / 1000 || 0;
}

const app = new App();
document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-panel]");
  if (!link) return;
  event.preventDefault();
  app.reveal(link.dataset.panel);
});
const themeButton = byId("theme");
const named = () => { themeButton.textContent = globalThis.theme.current() === "dark" ? "Light" : "Dark"; };
themeButton.addEventListener("click", () => globalThis.theme.toggle());
addEventListener("themechange", named);
named();
keys(app, PANELS);
app.start();
