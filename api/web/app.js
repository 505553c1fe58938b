/** The page: which view is shown, the login, and problems that any view can have. */

import { showComparison } from "./compare.js";
import { el } from "./dom.js";
import { showList } from "./list.js";
import { showExploration } from "./live.js";
import { listExplorations, pause, Problem, token } from "./service.js";
import { showSubmit } from "./submit.js";
import { showWorkers } from "./workers.js";

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const login = document.getElementById("login");
const loginField = document.getElementById("token");
const loginReason = document.getElementById("login-reason");
const logout = document.getElementById("logout");

const AGAIN_MILLISECONDS = 5_000;

let shown = new AbortController();
let mayPass = false; // whether what is said ends once the service answers

const shell = {
  /** Say whether the service answers, or why not. What it has refused stays said. */
  connection(isOpen, error = null) {
    if (!isOpen) say(`${error instanceof Problem ? error.message : "The connection is lost."} The page tries again.`, true);
    else if (mayPass) say("");
  },

  /** Forget what was said, because a person tries something else. */
  clear: () => say(""),

  /** Show the view again, from its beginning. */
  show: () => show(),

  /** Whether a failure may pass by itself. */
  isPassing: (error) => !(error instanceof Problem) || error.isTemporary,

  /** Show a failure of the view to which `signal` belongs. A refused token ends the view and asks for another. */
  report(error, signal) {
    if (signal.aborted) return;
    if (error instanceof Problem && error.isUnauthorized) askForToken();
    else if (error.unknownId) showMissing("No such exploration", `None has the id ${error.unknownId}.`);
    else if (error instanceof Problem) say(error.message, error.isTemporary);
    else say(`The service does not answer: ${error.message}`, true);
  },
};

/** End the view and show that there is nothing at this address. */
function showMissing(heading, text) {
  shown.abort();
  document.title = `${heading} · bexp`;
  const title = el("h1", { tabindex: "-1" }, heading);
  main.replaceChildren(el("header", { class: "page-head" }, title), el("p", {}, text, " ", el("a", { href: "#/" }, "List the explorations"), "."));
  title.focus({ preventScroll: true });
}

function say(text, isPassing = false) {
  mayPass = isPassing;
  if (notice.textContent !== text) notice.textContent = text;
}

/** End the view, so that nothing asks again with the same token, and open the login. */
function askForToken() {
  shown.abort();
  const had = token.get() !== null;
  token.clear();
  loginReason.textContent = had
    ? "The service does not accept this token. It may have been revoked or have expired. Enter another one."
    : "The service asks for a token. `bexp token create NAME` prints one.";
  say("Log in to see explorations.");
  logout.textContent = "Log in";
  logout.hidden = false;
  if (!login.open) login.showModal();
  loginField.focus();
}

async function show() {
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  say("");
  logout.textContent = "Log out";
  logout.hidden = token.get() === null;
  const [, page = "", id = "", choice = null] = location.hash.split("?")[0].split("/");
  for (const link of document.querySelectorAll("nav a[href^='#']")) {
    const isHere = link.getAttribute("href") === `#/${page}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (let isOver = false; !isOver && !signal.aborted; ) {
    main.replaceChildren();
    try {
      if (page === "explorations" && id) await showExploration(decodeURIComponent(id), main, signal, shell);
      else if (page === "compare") await showComparison(decodeURIComponent(id), main, signal, shell);
      else if (page === "submit") showSubmit(main, signal, shell, decodeURIComponent(id), choice);
      else if (page === "workers") await showWorkers(main, signal, shell);
      else if (page === "") await showList(main, signal, shell);
      else showMissing("No such page", "There is nothing at this address.");
      isOver = true;
    } catch (error) {
      shell.report(error, signal);
      isOver = signal.aborted || !shell.isPassing(error);
      if (!isOver) await pause(AGAIN_MILLISECONDS, signal);
    }
  }
}

login.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = loginField.value.trim();
  if (given === "") return;
  token.set(given);
  loginReason.textContent = "Checking…";
  try {
    await listExplorations({ limit: 1 });
  } catch (error) {
    token.clear();
    const refused = error instanceof Problem && error.isUnauthorized;
    loginReason.textContent = refused ? "The service does not accept this token." : error.message;
    loginField.select();
    return;
  }
  loginField.value = "";
  login.close();
  show();
});

logout.addEventListener("click", () => {
  token.clear();
  show();
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment of the address names the view
  main.focus();
});

addEventListener("hashchange", show);
show();
