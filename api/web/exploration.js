/** The view of one exploration: what is known, drawn. It asks no service, so a report in a file uses it as well. */

import { remediesOf } from "./again.js";
import { renderAnswer } from "./answer.js";
import { stateBadge } from "./badge.js";
import { confidenceChart, frontChart, heatMap, importanceChart, memoryChart, throughputChart, timelineChart } from "./charts.js";
import { copyable, nextCommands } from "./copy.js";
import { el, throttle } from "./dom.js";
import * as format from "./format.js";
import { Log } from "./log.js";
import { Notes } from "./notes.js";
import { ParallelView } from "./parallel.js";
import { TrialsTable, withMeshes } from "./trials_table.js";
import { confidenceOver, withLimit } from "./trial_figures.js";
import { renderWaiting } from "./waiting.js";

const FINAL = new Set(["succeeded", "failed", "cancelled"]);
const DRAW_MILLISECONDS = 250;

export const isFinal = (exploration) => FINAL.has(exploration.state);

const CHARTS = [
  ["Throughput by micro-batch", throughputChart,
    "A band, or a bar, spans two standard errors, each way, of the noisiest part that the trial timed."],
  ["Throughput against memory", frontChart, "The line joins candidates that fit and that no other beats in both."],
  ["Memory by part", memoryChart, "The candidate recommended so far. The reserve is for fragmentation, the runtime's context and a margin."],
  ["Confidence over time", confidenceChart, "A number at a dot is a new micro_batch_size."],
  ["Recomputation by micro-batch", heatMap,
    `The fastest tokens/s that was tried. * is ${format.PREDICTED}. ✕ is ${format.OVER}.`],
  ["What mattered", importanceChart,
    "How much of the differences in speed each choice explains by itself: the share of the variance of log speed over all " +
    "candidates that fit, measured or predicted. Shares overlap where choices exclude each other, and leave out what choices do together."],
  ["Where the time went", timelineChart, "What the seconds of each trial went to."],
];

/** When the search of one that runs ends. */
function untilOf({ state, request }) {
  if (state !== "running" || !request) return "";
  const { confidence_target: target, max_seconds: most, max_trials: number } = request.budget;
  return `, until confidence ${target}, ${format.number(most)} s of trials, or ${number} trials`;
}

/** Shows an exploration in `root`. `actions` are elements for its header, such as a button; `saveNotes` takes a text. */
export class ExplorationView {
  constructor(root, actions = [], saveNotes = null) {
    this.known = null;
    this.variant = null;
    this.title = el("h1", { tabindex: "-1" });
    this.isLinked = actions.length > 0; // a report in a file has no other explorations to link to
    this.state = el("p", { class: "state" });
    this.labels = el("p", { class: "labels" });
    this.source = el("p", { class: "source" });
    this.trouble = el("p", { class: "trouble", role: "alert" });
    this.answer = el("section", { class: "card", "aria-labelledby": "answer-title" });
    this.waiting = el("section", { class: "card", "aria-labelledby": "waiting-title" });
    this.remedies = el("section", { class: "card", "aria-labelledby": "remedies-title" });
    this.variants = el("select", { onchange: () => this.#choose(this.variants.value) });
    this.variantLabel = el("label", { class: "variant", hidden: true }, "Charts of the variant with ", this.variants);
    this.figures = CHARTS.map(([name, draw, note]) => {
      const body = el("div", { class: "chart" });
      const root = el("figure", { class: "card" }, el("figcaption", {}, el("h2", {}, name), el("p", { class: "quiet" }, note)), body);
      return { root, body, draw };
    });
    this.next = el("section", { class: "card", "aria-labelledby": "next-title", hidden: !this.isLinked },
      el("h2", { id: "next-title" }, "Next"));
    this.notes = new Notes(saveNotes);
    this.parallel = new ParallelView();
    this.log = new Log();
    this.trials = new TrialsTable();
    this.trialsCard = el("section", { class: "card", "aria-labelledby": "trials-title" }, el("h2", { id: "trials-title" }, "Trials"), this.trials.root);
    root.replaceChildren(
      el("header", { class: "page-head" }, el("div", {}, this.title, this.state, this.labels, this.source), el("div", { class: "actions" }, actions)),
      this.trouble,
      this.waiting,
      this.answer,
      this.remedies,
      this.next,
      this.notes.root,
      this.variantLabel,
      (this.charts = el("div", { class: "charts" }, this.figures.map((figure) => figure.root))),
      this.parallel.root,
      el("section", { class: "card", "aria-labelledby": "log-title" }, el("h2", { id: "log-title" }, "Log"),
        this.log.summary, this.log.filters, this.log.list),
      this.trialsCard,
    );
    this.draw = throttle(() => this.#draw(), DRAW_MILLISECONDS);
    this.sizes = new ResizeObserver(this.draw);
    this.sizes.observe(root);
  }

  /** Show what is known: at once, so that nothing empty is seen first, and later once for several calls. */
  update(exploration, trials, events) {
    const isFirst = this.known === null;
    this.known = { exploration, trials, events };
    if (isFirst) this.#draw();
    else this.draw();
  }

  /** Stop watching the size of the window. */
  close() {
    this.sizes.disconnect();
  }

  #choose(variant) {
    this.variant = variant;
    this.draw();
  }

  #draw() {
    if (this.known === null || !this.title.isConnected) return;
    const { exploration, events } = this.known;
    const trials = withLimit(this.known.trials, exploration.recommendation);
    this.#drawHead(exploration, trials);
    this.#drawAnswer(exploration);
    this.#drawWaiting(exploration, trials);
    this.#drawRemedies(exploration);
    this.notes.update(exploration.notes);
    if (this.isLinked) this.#drawNext(exploration);
    const best = this.#drawVariants(exploration, trials);
    const shown = trials.filter((trial) => format.variant(trial.measurement.candidate) === this.variant);
    const answered = exploration.answer?.variants.find((one) => format.variant(one) === this.variant);
    const common = {
      trials: shown,
      best,
      all: exploration.answered_from ? [] : trials,
      events,
      startedAt: exploration.started_at,
      finishedAt: exploration.finished_at,
      importance: answered?.importance,
      steps: exploration.answered_from ? [] : confidenceOver(events, exploration.started_at, this.variant),
      target: exploration.request?.budget.confidence_target ?? null,
    };
    for (const { root, body, draw } of this.figures) {
      const hadFocus = body.contains(document.activeElement);
      const made = draw({ ...common, width: Math.max(260, Math.floor(body.clientWidth)) });
      root.hidden = !made && isFinal(exploration);
      body.replaceChildren(...[made ?? el("p", { class: "quiet" }, "Nothing to show yet.")].flat());
      if (hadFocus) body.querySelector("[tabindex]")?.focus({ preventScroll: true });
    }
    this.parallel.update(shown, best);
    this.log.update(events, exploration.recommendation, isFinal(exploration));
    this.trialsCard.hidden = trials.length === 0;
    this.#drawTrials(trials, events);
  }

  /**
   * Renew the table if it lacks a trial, the mesh of one, which an event may name later, or whether one fits, which the
   * recommendation says.
   */
  #drawTrials(trials, events) {
    const described = withMeshes(trials, events);
    const shown = this.trials.trials;
    const isShown = described.length === shown.length && described.every((trial, index) => trial.mesh === shown[index].mesh && trial.isOver === shown[index].isOver);
    if (!isShown) this.trials.update(described);
  }

  /** Show the answer, anew only if it is another, so that nothing folds or loses the focus under a reader. */
  #drawAnswer(exploration) {
    const text = JSON.stringify([exploration.text, exploration.recommendation, exploration.answer !== null, exploration.state]);
    if (this.answerText === text) return;
    this.answerText = text;
    const details = this.answer.querySelector("details");
    const hadFocus = details?.contains(document.activeElement);
    const title = exploration.answer || (isFinal(exploration) && !exploration.text) ? "Answer" : "Best so far";
    this.answer.replaceChildren(el("h2", { id: "answer-title" }, title), ...renderAnswer(exploration, details?.open));
    if (hadFocus) this.answer.querySelector("summary")?.focus({ preventScroll: true });
  }

  #drawHead(exploration, trials) {
    this.title.textContent = exploration.model;
    const facts = [
      exploration.owner && exploration.owner !== "local" && `owner ${exploration.owner}`,
      `submitted ${format.moment(exploration.created_at)}`,
      exploration.started_at && `started ${format.moment(exploration.started_at)}`,
      exploration.finished_at && `ended ${format.moment(exploration.finished_at)}`,
      `all times in ${format.ZONE}`,
    ];
    const cancelled = exploration.cancel_requested && !isFinal(exploration) ? " (being cancelled)" : "";
    this.state.replaceChildren(
      stateBadge(exploration, null, cancelled),
      ` ${trials.length} trials${untilOf(exploration)} · ${facts.filter(Boolean).join(" · ")} · id `,
      el("code", {}, exploration.id),
    );
    this.labels.replaceChildren(...format.labels(exploration.labels).map((text) => el("span", { class: "label" }, text)));
    this.#drawSource(exploration.answered_from);
    const trouble = exploration.answer ? "" : exploration.error ?? (exploration.state === "queued" ? null : exploration.waiting_reason) ?? ""; // an answer says more
    if (this.trouble.textContent !== trouble) this.trouble.textContent = trouble;
  }

  /** Show what one waits for that is queued, and nothing else of one that has no trial yet. */
  #drawWaiting(exploration, trials) {
    const waits = exploration.state === "queued";
    this.waiting.hidden = !waits;
    if (waits) this.waiting.replaceChildren(...renderWaiting(exploration));
    this.answer.hidden = this.charts.hidden = this.notes.root.hidden = waits && trials.length === 0;
    this.next.hidden = !this.isLinked || this.answer.hidden || nextCommands(exploration).length === 0;
  }

  /** Offer each change after which something would fit as a new request, filled in. */
  #drawRemedies({ id, ...exploration }) {
    const remedies = this.isLinked ? remediesOf(exploration) : [];
    this.remedies.hidden = remedies.length === 0;
    if (this.remedies.childElementCount > 0 || remedies.length === 0) return;
    const links = remedies.map(({ change }, number) => el("a", { class: "button", href: `#/submit/${id}/${number}` }, `Submit with ${change}`));
    this.remedies.replaceChildren(
      el("h2", { id: "remedies-title" }, "Submit with a change"),
      el("p", { class: "quiet" },
        links.length > 1 ? "Any one of these is predicted to fit. Each opens the form with this request, changed."
          : "This is predicted to fit. It opens the form with this request, changed."),
      el("p", { class: "actions" }, links),
    );
  }

  /** Offer the commands that follow, anew only if they are others, so that none moves under a pointer. */
  #drawNext(exploration) {
    const commands = nextCommands(exploration);
    const text = commands.flat().join("\n");
    if (this.nextText === text) return;
    this.nextText = text;
    const about = (path, name) => el("a", { href: `docs#${path}` }, name);
    this.next.replaceChildren(
      el("h2", { id: "next-title" }, "Next"),
      ...commands.map(([why, command]) => copyable(command, why)),
      el("p", { class: "quiet" }, "What the figures mean: ", about("schema-Recommendation", "recommendation"), ", ",
        about("schema-Trial", "trial"), ", ", about("schema-ExplorationRequest", "request"), ". What else a program can ask for: ",
        about("get-/v1/explorations/{exploration_id}/recommendation", "the REST API"), "."),
    );
  }

  /** Say where an answer comes from that was not measured for this exploration. */
  #drawSource(source) {
    if (!source || this.source.childElementCount > 0) return;
    const name = el("code", {}, source.exploration);
    const link = this.isLinked ? el("a", { href: `#/explorations/${source.exploration}` }, name) : name;
    this.source.replaceChildren(
      "Answered from exploration ", link, `, measured ${format.moment(source.measured_at)} for the same request on the same hardware and versions. It has the trials. `,
      el("code", {}, "fresh: true"), " in the request measures again.",
    );
  }

  /** Offer the variants that have trials, and return the recommendation of the chosen one, if it is known. */
  #drawVariants(exploration, trials) {
    const main = exploration.recommendation;
    const variants = [...new Set(trials.map((trial) => format.variant(trial.measurement.candidate)))];
    this.variant ??= (main && format.variant(main.candidate)) ?? variants[0] ?? null;
    this.variantLabel.hidden = variants.length < 2;
    if (this.variants.childElementCount !== variants.length) {
      this.variants.replaceChildren(...variants.map((name) => el("option", { value: name, selected: name === this.variant }, name)));
    }
    const answered = exploration.answer?.variants.find((variant) => format.variant(variant) === this.variant);
    if (answered) return answered.recommendation;
    return main && format.variant(main.candidate) === this.variant ? main : null;
  }
}
