/** Figures and candidates as text for a person. */

const GIB = 2 ** 30;
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

/** Bytes in the largest binary unit in which the number is at least 1. */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? whole.format(size) : size.toFixed(1)}\u00a0${units[unit]}`;
}

export const gib = (count) => count / GIB;

export const number = (value) => (Math.abs(value) >= 100 ? whole : tenths).format(value);

/** The unit of a trial's or an answer's rates: the service names only another one than tokens. */
export const unit = ({ rate_unit: named }) => `${named ?? "tokens"}/s`;

export const rate = (value, of = {}) => `${number(value)}\u00a0${unit(of)}`;

/** Seconds in one unit, so that those of a table compare. */
export const seconds = (value) => (value > 0 && value < 0.005 ? "<0.01" : value.toFixed(2)) + "\u00a0s";

/** The time between two moments: `45 s`, `12 min`, `3 h 05 min`. The second one may be null: now. */
export function duration(from, to) {
  const passed = Math.max(0, (to === null ? Date.now() : Date.parse(to)) - Date.parse(from)) / 1000;
  if (passed < 100) return `${Math.round(passed)}\u00a0s`;
  const minutes = Math.round(passed / 60);
  if (minutes < 100) return `${minutes}\u00a0min`;
  return `${Math.floor(minutes / 60)}\u00a0h\u00a0${String(minutes % 60).padStart(2, "0")}\u00a0min`;
}

/** Whether a search has ended below the confidence that was asked for. */
export const isProvisional = ({ state, confidence, confidence_target }) =>
  state === "succeeded" && confidence !== null && confidence < confidence_target;

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;

/** The probability of one of two: that of the likelier one is floored, as a confidence is, and no certainty. */
export function likely(probability) {
  const score = Math.min(99, Math.floor(100 * Math.max(probability, 1 - probability)));
  return `${probability >= 0.5 ? score : 100 - score}%`;
}

const HOURS = { hourCycle: "h23" };
const local = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", ...HOURS }); // slow to make
const timeAlone = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", ...HOURS });

/** The zone of all times of the page. */
export const ZONE = local.resolvedOptions().timeZone;

/** The local date and time of an ISO timestamp. */
export const moment = (iso) => local.format(new Date(iso));

const thisYear = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", ...HOURS });
const anotherYear = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });

/** The local day of an ISO timestamp in few letters: with the time in this year, else with the year. */
export function day(iso) {
  const date = new Date(iso);
  return (date.getFullYear() === new Date().getFullYear() ? thisYear : anotherYear).format(date);
}

/** The local time of an ISO timestamp without its date. */
export const clock = (iso) => timeAlone.format(new Date(iso));

/** The UTC time of an ISO timestamp, as the service writes it in BEXP lines. */
export const gmt = (iso) => `${new Date(iso).toISOString().slice(11, 19)} GMT`;

export const words = (name) => name.replaceAll("_", " ");

/** Fields of a candidate that are named in another way than `name=value`. */
const NAMED = new Set([
  ...["micro_batch_size", "bta_tile", "recompute", "attention_backend", "expert_backend", "settings"],
  ...["context_parallel_size", "context_parallel_layout", "num_query_groups", "capacity_factor"],
]);

/** Return the text of `Candidate.describe` without the size of the micro-batch. */
export function settings(candidate) {
  const parts = [];
  if (!isWhole(candidate)) {
    parts.push(`bta_tile=${candidate.bta_tile ?? "off"}`, `recompute=${candidate.recompute}`);
    parts.push(`attention=${candidate.attention_backend}`);
  }
  if (candidate.expert_backend !== null) parts.push(`experts=${candidate.expert_backend}`);
  if (candidate.context_parallel_layout !== null) {
    parts.push(`context_parallel=${candidate.context_parallel_size}:${candidate.context_parallel_layout}`);
  }
  for (const [name, value] of Object.entries(candidate)) {
    if (!NAMED.has(name) && value !== null) parts.push(`${name}=${value}`);
  }
  if (candidate.settings !== null) parts.push(candidate.settings);
  return parts.join(" ");
}

export const describe = (candidate) => `micro_batch_size=${candidate.micro_batch_size} ${settings(candidate)}`.trim();

/** What `Variant.describe` returns: it tells the models of one exploration apart. */
export const variant = ({ num_query_groups, capacity_factor }) =>
  `num_query_groups=${num_query_groups}` + (capacity_factor == null ? "" : `,capacity_factor=${capacity_factor}`);

/** Whether the model is measured whole, so that its own code chooses the rest. */
export const isWhole = (candidate) => candidate.attention_backend === "own";

/** The tokens/s to expect of one device: those of the whole model if it was run, else the composed ones. */
export const expected = (best) => best.whole_model?.tokens_per_second ?? best.tokens_per_second;

/** What `Recommendation.expected_peak_bytes` returns. */
export const expectedPeak = (best) => best.whole_model?.measurement.peak_bytes ?? best.measured_peak_bytes;

/** What `Trial.peak_bytes` and `Trial.is_predicted` return: the peak as measured, else as predicted. */
export const peak = (trial) => trial.measured_peak_bytes ?? trial.predicted_peak_bytes ?? null;
export const isPredicted = (trial) => trial.measured_peak_bytes == null;
export const PREDICTED = "predicted in part";
export const predicted = (isPart) => (isPart ? `, ${PREDICTED}` : "");
export const OVER = "above the limit with its reserve";

/** What `Mesh.describe` returns. */
export function mesh(of) {
  const stages = of.virtual_stages > 1 ? `, ${of.virtual_stages} stages a rank` : "";
  const schedule = of.schedule === null ? "" : ` (${of.schedule}${stages})`;
  const mode = of.shadowed_experts > 0 ? ` (${of.shadowed_experts} shadowed)`
    : of.overlap_degree > 1 ? ` (overlapped in ${of.overlap_degree} chunks)` : "";
  const expert = of.expert > 1 ? ` expert=${of.expert}${mode}` : "";
  return `tensor=${of.tensor} pipeline=${of.pipeline}${schedule}${expert} data=${of.data} sharding=${of.sharding}`;
}

/** Labels as `key=value`. */
export const labels = (given) => Object.entries(given).map(([key, value]) => `${key}=${value}`);
