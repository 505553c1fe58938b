/** A report in one file: the view of an exploration with what was stored when the report was written. */

import { ExplorationView } from "./exploration.js";

const { exploration, trials, events } = JSON.parse(document.getElementById("report").textContent);
new ExplorationView(document.getElementById("main")).update(exploration, trials, events);
