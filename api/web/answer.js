/** The answer of an exploration, or the best so far. */

import { el } from "./dom.js";
import * as format from "./format.js";

/** Return the elements of the answer; `exploration` is what the service shows of one. */
export function renderAnswer(exploration) {
  const answer = exploration.answer;
  const main = answer?.variants[0];
  const best = answer ? main.recommendation : exploration.recommendation;
  const others = answer && answer.variants.length > 1 ? [variantTable(answer.variants)] : [];
  if (best) return [headline(best, exploration), provisionalNote(best, exploration), rows(best, exploration), ...others];
  if (answer) return [nothingFits(main), ...others];
  return [el("p", { class: "quiet" }, "There is nothing to recommend yet.")];
}

/** Say that a search has ended below the confidence that was asked for. */
function provisionalNote(best, exploration) {
  const target = exploration.request?.budget.confidence_target ?? 0;
  const isBelow = exploration.answer !== null && best.confidence < target;
  const text = `Provisional: confidence ${best.confidence} is below ${target}, which was asked for. Another candidate may be better.`;
  return el("p", { hidden: !isBelow }, text);
}

function headline(best, exploration) {
  const { candidate } = best;
  const provisional = exploration.answer === null;
  const figure = (label, value, detail) =>
    el("div", { class: "figure" }, el("dt", {}, label), el("dd", {}, el("strong", {}, value), detail && el("span", {}, detail)));
  const tolerance = exploration.request?.tolerance;
  const within = tolerance === undefined ? "out of 100" : `out of 100 that it is within ${Number((100 * tolerance).toFixed(2))}% of the best`;
  return el(
    "dl",
    { class: "headline" },
    figure(provisional ? "best micro_batch_size so far" : "best micro_batch_size", candidate.micro_batch_size,
      format.settings(candidate)),
    figure("expect per device", format.rate(format.expected(best)),
      isOwnCode(candidate) ? "measured in whole steps of its own code"
        : best.whole_model ? "the whole model ran at that speed" : "composed of measured blocks; no whole model has confirmed it"),
    figure("against the base", format.ratio(best.performance, best), best.plan ? baseOfPlan(best) : format.describe(best.base)),
    figure("confidence", best.confidence, within),
  );
}

const isOwnCode = (candidate) => candidate.attention_backend === "own";

const baseOfPlan = (best) =>
  `${format.mesh(best.plan.base_mesh)} micro_batch_size=${best.base.micro_batch_size} recompute=${best.base.recompute}`;

function rows(best, exploration) {
  const role = (name) => best.alternatives.find((other) => other.role === name);
  const list = el("dl", { class: "rows" });
  const row = (label, text) => list.append(el("div", {}, el("dt", {}, label), el("dd", {}, text)));
  const { request, report } = exploration;
  if (request) row("measured", measured(request, report?.parts));
  if (report) row("device", `${report.hardware.device_name}, ${format.bytes(report.hardware.memory_bytes)}`);
  const whole = best.whole_model;
  if (whole && !isOwnCode(best.candidate)) {
    const shorter = whole.step_error < 0 ? "shorter" : "longer";
    const lower = whole.peak_error < 0 ? "lower" : "higher";
    row("composed", `its blocks compose a step that is ${format.percent(Math.abs(whole.step_error))} ${shorter} than that ` +
      `of the whole model, and a peak that is ${format.percent(Math.abs(whole.peak_error))} ${lower}`);
  }
  if (best.texts) {
    const { texts } = best;
    const padded = `${format.percent(texts.padding_share, 0)} of the computed tokens are padding; peaks: ` +
      `${format.bytes(texts.expected_peak_bytes)} of a micro-batch in the mean, at most ${format.bytes(texts.high_peak_bytes)} ` +
      `of 99.9% of them; a chance of ${format.percent(texts.out_of_memory_probability)} that an epoch runs out of memory`;
    row("texts", `${texts.batching}; ${texts.padding_share < 1e-6 ? "every row is full" : padded}`);
  }
  if (best.dropped_share != null) {
    row("capacity factor", `${best.candidate.capacity_factor}: experts drop ${format.percent(best.dropped_share)} of the token-expert pairs under this routing`);
  }
  row("step", format.seconds(whole ? whole.step_seconds : best.step_seconds));
  if (best.plan) planRows(best.plan, row);
  batchRows(best, request, row);
  row("peak memory", isOwnCode(best.candidate)
    ? format.bytes(whole ? whole.measurement.peak_bytes : best.measured_peak_bytes)
    : whole
    ? `${format.bytes(whole.measurement.peak_bytes)} in the whole model, ${format.bytes(best.measured_peak_bytes)} composed`
    : `${format.bytes(best.measured_peak_bytes)} composed, ${format.bytes(best.predicted_peak_bytes)} predicted`);
  row("with reserve", `${format.bytes(best.required_bytes)} of ${format.bytes(best.memory_limit_bytes)}`);
  const over = (label, other) => {
    if (!other) return;
    const same = JSON.stringify(other.candidate) === JSON.stringify(best.candidate);
    const what = same ? ": it is the recommended one" : ` over ${format.describe(other.candidate)}${format.predicted(other.predicted)}`;
    row(label, `${format.ratio(other.ratio, best)}${what}`);
  };
  over("largest that fits", role("largest_without_recompute") ?? role("largest_micro_batch"));
  over("stock best", role("stock"));
  if (role("untiled")) row("without tiling", format.tiling(best, role("untiled")));
  over("whatever the batch", role("undivided"));
  if (role("runner_up")) {
    const rival = role("runner_up");
    const speed = rival.whole_model ? `${format.rate(rival.whole_model.tokens_per_second)} as a whole model` : format.words(rival.outcome);
    row("runner-up", `${format.describe(rival.candidate)}: ${speed}`);
  }
  if (request) row("allocator", request.allocator);
  for (const note of best.notes) row("note", note.text);
  return list;
}

function measured(request, parts) {
  const name = [request.target ?? "bexp", parts?.target_version].filter(Boolean).join(" ");
  const executions = request.executions?.join(" or ") ?? request.execution;
  return [name, parts?.class_name, request.mode, executions].filter(Boolean).join(", ");
}

/** The mesh, what the time of its devices goes to, and the other meshes. */
function planRows(plan, row) {
  row("mesh", `${format.mesh(plan.mesh)} on ${format.number(plan.mesh.tensor * plan.mesh.pipeline * plan.mesh.data)} devices`);
  row("all devices", format.rate(plan.tokens_per_second));
  row("time", `${format.percent(plan.compute_share)} computation, ${format.percent(plan.exchange_share)} exchange, ` +
    `${format.percent(plan.bubble_share)} bubble`);
  if (plan.mesh.pipeline > 1) row("layers of each stage", `${plan.layers_per_stage.join(" ")}; rank ${plan.fullest_rank} is the fullest`);
  if (plan.picture) {
    const { lines, ranks, seconds } = plan.picture;
    const text = lines.map((line, i) => `${String(ranks[i]).padStart(4)}  ${line}`).join("\n");
    row(`the first ${format.seconds(seconds)}`, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pipeline" },
      el("pre", {}, text), "F forward, B backward, . waits; small letters: every second micro-batch"));
  }
  const others = [
  ];
  for (const [label, other] of others) {
    row(label, `${other.gain.toFixed(2)}x over ${format.mesh(other.mesh)} ${format.describe(other.candidate)}${format.predicted(other.predicted)}`);
  }
}

function batchRows(best, request, row) {
  const role = (name) => best.alternatives.find((other) => other.role === name);
  const asked = request?.batch_size ? `batch_size ${request.batch_size}` : "the batch_size";
  const steps = (count) => `${count} accumulation step${count === 1 ? "" : "s"}`;
  const other = role("dividing");
  if (other) {
    const same = JSON.stringify(other.candidate) === JSON.stringify(best.candidate);
    row(`for ${asked}`, `micro_batch_size ${other.candidate.micro_batch_size} in ${steps(other.grad_accum_steps)}` +
      (same ? "" : `, ${format.slower(1 - 1 / other.ratio, best.candidate.micro_batch_size)}, confidence ${other.confidence}`));
  } else if (best.grad_accum_steps !== null) {
    row(`for ${asked}`, steps(best.grad_accum_steps));
  } else if (best.nearest_batch_sizes.length > 0) {
    row("batch", `${asked} does not divide; the nearest that do: ${best.nearest_batch_sizes.join(" and ")}`);
  }
}

function nothingFits(variant) {
  return el(
    "div",
    {},
    el("p", { class: "trouble" }, format.sentence(variant.reason ?? "no candidate fits: all of them failed")),
    variant.remedies.length > 0 && el("p", {}, "Any one of these changes is predicted to make it fit. The first one is preferred."),
    el("ol", {}, variant.remedies.map((change) =>
      el("li", {}, `${change.change}: peak ${format.bytes(change.predicted_peak_bytes)}, ${format.bytes(change.required_bytes)} with reserve`))),
  );
}

/** Variants are separate models; those with a capacity factor show their memory and what they drop, too. */
function variantTable(variants) {
  const drops = variants.some((variant) => variant.capacity_factor != null);
  const onlyIf = (...cells) => (drops ? cells : []);
  const head = ["num_query_groups", ...onlyIf("capacity_factor"), "parameters", "micro_batch_size", "tokens/s", "confidence",
    ...onlyIf("peak memory", "dropped")];
  const cells = (variant) => {
    const best = variant.recommendation;
    const figures = best ? [best.candidate.micro_batch_size, format.number(format.expected(best)), best.confidence,
      ...onlyIf(format.bytes(format.expectedPeak(best)), format.percent(best.dropped_share ?? 0))]
      : [variant.reason ?? "nothing fits", "", "", ...onlyIf("", "")];
    return [variant.num_query_groups, ...onlyIf(variant.capacity_factor ?? "none"), format.number(variant.num_parameters), ...figures];
  };
  const compared = drops ? "num_query_groups and capacity_factor" : "num_query_groups";
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Variants" },
    el("table", { class: "data" },
      el("caption", {}, `Variants by ${compared} (separate models, not ranked)`),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, variants.map((variant) => el("tr", {}, cells(variant).map((text) => el("td", {}, text)))))),
  );
}
