/** What the charts show of trials. Nothing here draws. */

import * as format from "./format.js";

/** Every recomputation policy without a number, in the order of the service. */
const POLICIES = [
  "none",
  "selective",
  "activations",
  "qkv",
  "experts",
  "projections",
  "partial_25",
  "partial_50",
  "partial_75",
  "full",
  "offload",
];

/** The colour and shape of a policy, the same in every chart. Those with a number share the last two, by kind. */
export function policyIndex(policy) {
  if (policy.startsWith("layers_")) return POLICIES.length;
  if (policy.startsWith("groups_")) return POLICIES.length + 1;
  return Math.max(0, POLICIES.indexOf(policy));
}

const numberOf = (policy) => Number(policy.split("_")[1] ?? 0);

/** The distinct policies in the order of the service; those with a number follow by it. */
export const policiesOf = (policies) =>
  [...new Set(policies)].sort((a, b) => policyIndex(a) - policyIndex(b) || numberOf(a) - numberOf(b));

/**
 * The largest peak that fits with its reserve, or null while nothing is known to fit.
 *
 * What a candidate requires grows with its peak along a line. The recommended one and the alternative whose peak is
 * farthest from its own are on that line.
 */
export function peakLimit(best) {
  if (!best) return null;
  const distance = (one) => one.measured_peak_bytes - best.measured_peak_bytes;
  const far = best.alternatives.reduce((a, b) => (Math.abs(distance(b)) > Math.abs(distance(a)) ? b : a), best);
  const slope = Math.abs(distance(far)) < 2 ** 20 ? 1 : (far.required_bytes - best.required_bytes) / distance(far); // bytes are rounded
  return best.measured_peak_bytes + (best.memory_limit_bytes - best.required_bytes) / slope;
}

/** The trials, each with `isOver`: whether it ran, and yet its peak does not fit with its reserve. */
export function withLimit(trials, best) {
  const limit = peakLimit(best);
  const isOver = (trial) => trial.measurement.outcome === "ok" && limit !== null && format.peak(trial) > limit;
  return trials.map((trial) => ({ ...trial, isOver: isOver(trial) }));
}

/** The points of trials that ran: speed, peak, and how uncertain the timing is. */
export function pointsOf(trials) {
  const points = [];
  for (const trial of trials) {
    const { measurement } = trial;
    if (measurement.outcome !== "ok" || trial.tokens_per_second === null) continue;
    const { candidate } = measurement;
    points.push({
      number: trial.number,
      candidate,
      policy: candidate.recompute,
      index: policyIndex(candidate.recompute),
      microBatch: candidate.micro_batch_size,
      tokensPerSecond: trial.tokens_per_second,
      rate_unit: trial.rate_unit,
      peakBytes: format.peak(trial),
      isPredicted: format.isPredicted(trial),
      isWholeModel: trial.kind === "whole_model",
      isOver: trial.isOver === true,
      interval: 2 * relativeError(measurement),
    });
  }
  return points;
}

/**
 * The standard error of what a trial timed, as a share of it.
 *
 * A step is a weighted sum of the components. Whatever the weights, the relative error of a sum is at most the largest
 * relative error of its terms, so that one is taken.
 */
export function relativeError(measurement) {
  const whole = measurement.whole_model;
  if (whole !== null) return whole.micro_step_seconds > 0 ? whole.standard_error_seconds / whole.micro_step_seconds : 0;
  const errors = measurement.components
    .filter((timed) => timed.device_seconds > 0)
    .map((timed) => timed.standard_error_seconds / timed.device_seconds);
  return Math.max(0, ...errors);
}

/** The latest point of each candidate, those of whole models before composed ones. */
export function latestByCandidate(points) {
  const latest = new Map();
  for (const point of points) {
    const key = JSON.stringify(point.candidate);
    if (point.isWholeModel || !latest.get(key)?.isWholeModel) latest.set(key, point);
  }
  return [...latest.values()];
}

export const fitting = (points) => points.filter((point) => !point.isOver);

/** The points that fit and that no other which fits beats in both speed and peak, from the smallest to the fastest. */
export function paretoFront(points) {
  const front = [];
  let fastest = -Infinity;
  for (const point of fitting(points).sort((a, b) => a.peakBytes - b.peakBytes || b.tokensPerSecond - a.tokensPerSecond)) {
    if (point.tokensPerSecond <= fastest) continue;
    fastest = point.tokensPerSecond;
    front.push(point);
  }
  return front;
}

/** The fastest point of each policy and micro-batch, by policy, each in the order of the micro-batch. */
export function fastestByPolicy(points) {
  const fastest = new Map();
  for (const point of points) {
    const key = `${point.policy} ${point.microBatch}`;
    if (!(fastest.get(key)?.tokensPerSecond >= point.tokensPerSecond)) fastest.set(key, point);
  }
  const policies = policiesOf([...fastest.values()].map((point) => point.policy));
  const series = new Map(policies.map((policy) => [policy, []]));
  for (const point of [...fastest.values()].sort((a, b) => a.microBatch - b.microBatch)) {
    series.get(point.policy).push(point);
  }
  return series;
}

/** For each policy and micro-batch that was tried: the fastest point, one that fits if any does, or how the trial failed. */
export function heatCells(trials) {
  const cells = new Map();
  for (const { measurement } of trials) {
    const { candidate, outcome } = measurement;
    const key = `${candidate.recompute} ${candidate.micro_batch_size}`;
    if (outcome !== "ok" && !cells.has(key)) cells.set(key, { outcome });
  }
  const all = latestByCandidate(pointsOf(trials));
  for (const [policy, points] of [...fastestByPolicy(all), ...fastestByPolicy(fitting(all))]) {
    for (const point of points) cells.set(`${policy} ${point.microBatch}`, { point });
  }
  return cells;
}

/** The confidence after each recommendation of a variant, with the seconds since the exploration started. */
export function confidenceOver(events, startedAt, variant) {
  const zero = Date.parse(startedAt ?? events[0]?.at);
  return events
    .filter(({ data }) => data.recommendation && format.variant(data.recommendation.candidate) === variant)
    .map((event) => ({
      seconds: Math.max(0, (Date.parse(event.at) - zero) / 1000),
      confidence: event.data.recommendation.confidence,
      microBatch: event.data.recommendation.candidate.micro_batch_size,
      at: event.at,
    }));
}

/** The phases of a trial in the order in which it spends them; `rest` is what is left of its seconds. */
export const PHASES = ["start", "build", "warm-up", "measure", "whole model", "rest"];

const STARTED = 102;

/**
 * When each trial ran, in seconds since the search began, and what it spent its seconds on: `spans`; and the seconds of
 * all of them by phase, with those in which none ran as `idle`: `sums`, as pairs.
 *
 * A trial ended with its event, and began its seconds before. A recording is replayed faster than it was measured, so
 * that a trial has less time than its phases, or would have begun before the search: then trials stand end to end with
 * the seconds of their phases, and no idle time is known.
 */
export function timelineOf(trials, events, startedAt, finishedAt) {
  const second = (iso) => Date.parse(iso) / 1000;
  const zero = second(events.find(({ code }) => code === STARTED)?.at ?? startedAt);
  const ends = new Map(events.filter(({ data }) => data.trial !== undefined).map(({ at, data }) => [data.trial, second(at) - zero]));
  const ended = trials.filter(({ number }) => ends.has(number)).sort((a, b) => a.number - b.number);
  const isShort = (seconds, room) => seconds > 1.05 * room + 0.05;
  const isReplayed = ended.some(({ number, seconds, measurement }) =>
    isShort(insideOf(measurement.phases), seconds) || isShort(seconds, ends.get(number)));
  let next = 0;
  const spans = ended.map((trial) => {
    const phases = phasesOf(trial, isReplayed);
    const seconds = phases.reduce((sum, each) => sum + each, 0);
    const start = isReplayed ? next : Math.max(0, ends.get(trial.number) - seconds);
    next = start + seconds;
    return { trial, start, seconds, phases };
  });
  const end = isReplayed ? next : second(finishedAt ?? events.at(-1)?.at ?? startedAt) - zero;
  const sums = PHASES.map((phase, index) => [phase, spans.reduce((sum, { phases }) => sum + phases[index], 0)]);
  const spent = sums.filter(([, seconds]) => seconds > 0);
  if (!isReplayed) spent.push(["idle", Math.max(0, end - covered(spans))]);
  return { spans, sums: spent, end, isReplayed };
}

const insideOf = ({ build, warm_up: warmUp, timed, messaging }) => build + warmUp + timed + messaging;

/** Seconds by phase, which add up to those of the trial: its process may have started before the trial began. */
function phasesOf({ kind, seconds, measurement: { phases } }, isReplayed) {
  const room = Math.max(0, seconds - insideOf(phases));
  const start = isReplayed ? phases.process_start : Math.min(room, phases.process_start);
  const timed = kind === "whole_model" ? [0, phases.timed] : [phases.timed, 0];
  return [start, phases.build, phases.warm_up, ...timed, phases.messaging + (isReplayed ? 0 : room - start)];
}

/** The seconds in which at least one trial ran. */
function covered(spans) {
  let [total, until] = [0, 0];
  for (const { start, seconds } of [...spans].sort((a, b) => a.start - b.start)) {
    total += Math.max(0, start + seconds - Math.max(start, until));
    until = Math.max(until, start + seconds);
  }
  return total;
}

/** What candidates choose in more than one way: names of fields with their values, in the order of an axis. */
export function varyingOf(points) {
  const names = points.length === 0 ? [] : Object.keys(points[0].candidate);
  return names.map((name) => [name, valuesOf(name, points.map(({ candidate }) => candidate[name] ?? null))])
    .filter(([, values]) => values.length > 1);
}

function valuesOf(name, given) {
  const distinct = [...new Set(given)];
  if (name === "recompute") return policiesOf(distinct);
  const isNumber = distinct.every((value) => value === null || typeof value === "number");
  const compare = isNumber ? (a, b) => a - b : (a, b) => String(a).localeCompare(String(b));
  return distinct.sort((a, b) => (b === null) - (a === null) || compare(a, b)); // what is left out comes first
}
