/** The page of one exploration: its view, kept current by the stream of its events. */

import { canGoOn } from "./copy.js";
import { el, throttle } from "./dom.js";
import { exportControl } from "./exports.js";
import { ExplorationView, isFinal } from "./exploration.js";
import {
  cancelExploration, deleteExploration, followEvents, getExploration, pause, readTrials, resumeExploration, writeNotes,
} from "./service.js";

const READ_MILLISECONDS = 700;
const AGAIN_MILLISECONDS = 5_000;

/** The end of a button's name, which a narrow page shows to screen readers alone. */
const long = (text) => el("span", { class: "long" }, ` ${text}`);

/** Show the exploration with this id until `signal` is aborted. `shell` shows problems. */
export async function showExploration(id, root, signal, shell) {
  const cancel = el("button", { type: "button", class: "danger", hidden: true }, "Cancel", long("the exploration"));
  const resume = el("button", { type: "button", hidden: true }, "Resume", long("the exploration"));
  const remove = el("button", { type: "button", class: "danger", hidden: true }, "Delete", long("the exploration"));
  const again = el("a", { class: "button", href: `#/submit/${encodeURIComponent(id)}` }, "Edit", long("and submit again"));
  const exports = exportControl(id, signal, shell);
  let [exploration, { trials, cursor }] = await Promise.all([getExploration(id, signal), readTrials(id, null, signal)]);
  const saveNotes = async (text) => {
    try {
      exploration = await writeNotes(id, text);
      show();
    } catch (error) {
      shell.report(error, signal);
      throw error;
    }
  };
  const view = new ExplorationView(root, [exports.root, again, cancel, resume, remove], saveNotes);
  signal.addEventListener("abort", () => view.close());
  document.title = `${exploration.model} · bexp`;
  const events = [];
  const show = () => {
    exports.offer(exploration.export_formats);
    cancel.hidden = isFinal(exploration) || exploration.cancel_requested;
    resume.hidden = !canGoOn(exploration);
    again.hidden = exploration.request === null;
    remove.hidden = !isFinal(exploration);
    view.update(exploration, trials, events);
  };

  let reading = Promise.resolve();
  const read = () => {
    reading = reading.then(async () => {
      const [now, stored] = await Promise.all([getExploration(id, signal), readTrials(id, cursor, signal)]);
      exploration = now;
      trials.push(...stored.trials);
      cursor = stored.cursor;
      show();
      shell.connection(true);
    });
    reading = reading.catch((error) => {
      shell.report(error, signal);
      if (shell.isPassing(error)) readAgain(); // no event may follow that would ask for it
    });
    return reading;
  };
  const readSoon = throttle(() => void read(), READ_MILLISECONDS);
  const readAgain = throttle(() => signal.aborted || void read(), AGAIN_MILLISECONDS);
  cancel.addEventListener("click", async () => {
    if (!confirm("Cancel this exploration? Its results so far are kept.")) return;
    try {
      exploration = await cancelExploration(id);
      show();
    } catch (error) {
      shell.report(error, signal);
    }
  });

  resume.addEventListener("click", async () => {
    try {
      await resumeExploration(id);
      if (!signal.aborted) shell.show();
    } catch (error) {
      shell.report(error, signal);
    }
  });

  remove.addEventListener("click", async () => {
    if (!confirm("Delete this exploration, with its log, trials and run reports? It cannot be undone.")) return;
    try {
      await deleteExploration(id);
      location.hash = "#/";
    } catch (error) {
      shell.report(error, signal);
    }
  });

  show();
  if (!root.contains(document.activeElement)) view.title.focus({ preventScroll: true }); // a reader may be faster
  void (async () => {
    while (!signal.aborted && exploration.state === "queued") { // no event says that its place has changed
      await pause(AGAIN_MILLISECONDS, signal);
      if (!signal.aborted && !document.hidden) await read();
    }
  })();
  for await (const fresh of followEvents(id, signal, shell.connection)) {
    events.push(...fresh);
    show();
    readSoon();
  }
  await read();
}
