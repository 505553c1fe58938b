/** The form that submits an exploration. */

import { copyable } from "./copy.js";
import { el } from "./dom.js";
import { remediesOf, requestText } from "./again.js";
import { getExploration, Problem, readOpenApi, submitExploration } from "./service.js";

/**
 * The fields below the document. Each has the option of the command, the field of a request that it stands for, the
 * fields whose faults belong to it, its label, and the function that turns its text into a value.
 */
const FIELDS = [
  { option: "batch-size", field: "batch_size", label: "Batch size", help: "sequences of an optimizer step, over all devices", value: number },
  { option: "seq-length", field: "model.seq_length", faults: /seq_length$/, label: "Sequence length", help: "tokens", value: number },
  { option: "trainer", field: "trainer", label: "Trainer", help: "who will run the answer", isChoice: true },
  { option: "max-seconds", field: "budget.max_seconds", label: "Time budget, minutes", help: "of all trials together", value: (text) => number(text, 60) },
];

let kept = null; // what was given when the service asked for a token; the form is made anew after the login

/** A number in decimals, times `factor`. What is none is sent as a text, to be refused: YAML reads `0100` as 64, `1:30` as 90. */
function number(text, factor = 1) {
  return Number.isFinite(Number(text)) ? String(factor * Number(text)) : JSON.stringify(text);
}

/** Show the form. With an `id` it has the request of that exploration, changed by its remedy number `choice` if there is one. */
export function showSubmit(root, signal, shell, id = "", choice = null) {
  document.title = "Submit · bexp";
  const title = el("h1", { tabindex: "-1" }, "Submit an exploration");
  const text = el("textarea", {
    id: "document", rows: "16", spellcheck: "false", autocapitalize: "off", "aria-describedby": "document-help errors",
  });
  const file = el("input", { id: "file", type: "file", accept: ".json,.yaml,.yml" });
  const errors = el("div", { id: "errors", class: "trouble", role: "alert" });
  const button = el("button", { type: "submit", class: "primary" }, "Submit");
  const example = el("button", { type: "button" }, "Fill in an example");
  const next = el("div", {});
  const origin = el("p", { class: "quiet", role: "status" });
  const inputs = FIELDS.map(fieldOf);
  const controls = [text, ...inputs.map((input) => input.control)];
  const before = kept;
  kept = null;
  const restore = (control) => before && (control.value = before[controls.indexOf(control)]);
  const form = el(
    "form",
    { class: "card", onsubmit: submit, oninput: showCommand },
    el("label", { for: "document" }, "A config.json, or a request"),
    el("p", { id: "document-help", class: "quiet" },
      "Paste it or drop a file here, as JSON or YAML: a Hugging Face config.json, a ",
      el("a", { href: "docs#schema-ExplorationRequest" }, "request of bexp"), ", or a Cerebras configuration. ",
      "Fields of a request may stand next to those of a config.json; the fields below replace them."),
    text,
    errors,
    el("p", { class: "actions" }, el("label", { for: "file" }, "or choose a file"), file, example),
    el("div", { class: "fields" }, inputs.map((input) => input.root)),
    el("p", {}, button),
  );
  const command = el("section", { class: "card", "aria-labelledby": "command-title" },
    el("h2", { id: "command-title" }, "The same in a terminal"), next);
  root.replaceChildren(el("header", { class: "page-head" }, title), origin, form, command);
  title.focus({ preventScroll: true });
  controls.forEach(restore);
  showCommand();

  const described = readOpenApi(signal);
  described.then(({ components }) => {
    const select = inputs.find((input) => input.isChoice).control;
    select.append(...components.schemas.TrainerName.enum.map((name) => el("option", {}, name)));
    restore(select);
    showCommand();
  }).catch((error) => shell.report(error, signal));
  if (id !== "" && before === null) {
    const lock = (isLocked) => [...form.elements].forEach((one) => (one.disabled = isLocked));
    lock(true);
    origin.replaceChildren("Loading the request…");
    fillAgain(() => lock(false)).catch((error) => shell.report(error, signal));
  }
  example.addEventListener("click", async () => {
    const { paths } = await described;
    take(paths["/v1/explorations"].post.requestBody.content["application/yaml"].example);
  });
  file.addEventListener("change", async () => {
    if (file.files.length > 0) take(await file.files[0].text());
  });
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    form.classList.add("dropping");
  });
  form.addEventListener("dragleave", () => form.classList.remove("dropping"));
  form.addEventListener("drop", async (event) => {
    form.classList.remove("dropping");
    const [dropped] = event.dataTransfer.files;
    if (!dropped) return; // dropped text goes where the browser puts it
    event.preventDefault();
    take(await dropped.text());
  });

  /** Fill in the request of an earlier exploration. */
  async function fillAgain(unlock) {
    const [exploration, { components }] = await Promise.all([getExploration(id, signal), described]);
    const remedy = choice === null ? null : remediesOf(exploration)[choice];
    origin.replaceChildren("The request of ", el("a", { href: `#/explorations/${id}` }, exploration.model, " ", el("code", {}, id)),
      remedy ? `, with ${remedy.change}.` : ".");
    unlock();
    take(requestText(exploration.request, remedy, components.schemas));
    text.setSelectionRange(0, 0);
    text.scrollTop = 0;
  }

  function take(given) {
    text.value = given;
    text.focus();
  }

  function given() {
    return inputs.filter((input) => input.text !== "").map((input) => ({ ...input, sent: input.value?.(input.text) ?? input.text }));
  }

  function showCommand() {
    next.replaceChildren(copyable(["bexp submit config.json", ...given().map(({ option, sent }) => `--${option} ${sent}`)].join(" "), "with what stands above as config.json"));
  }

  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    errors.replaceChildren();
    for (const input of inputs) input.refuse([]);
    try {
      const exploration = await submitExploration(text.value, given().map(({ field, sent }) => [field, sent]));
      if (!signal.aborted) location.hash = `#/explorations/${exploration.id}`;
    } catch (error) {
      if (error.isUnauthorized) kept = controls.map((control) => control.value);
      if (!(error instanceof Problem) || error.isUnauthorized) shell.report(error, signal);
      else refuse(error);
    } finally {
      button.disabled = false;
    }
  }

  /** Show each error next to its field; errors of fields that stand in the document are shown below it. */
  function refuse(error) {
    let rest = error.problem.errors ?? [];
    for (const input of inputs) {
      const own = rest.filter(({ field }) => input.text !== "" && input.faults.test(field ?? ""));
      input.refuse(own.map(({ message }) => message));
      rest = rest.filter((one) => !own.includes(one));
    }
    const items = rest.map(({ field, message }) => el("li", {}, field && el("code", {}, field), field && ": ", message));
    if (rest.length > 0 || !error.problem.errors) errors.replaceChildren(el("p", {}, error.message), items.length > 0 ? el("ul", {}, items) : "");
    text.setAttribute("aria-invalid", String(rest.length > 0));
    form.querySelector('[aria-invalid="true"]')?.focus();
  }
}

/** A field with its label, its help and its error. */
function fieldOf(described) {
  const { option, field, label, help, isChoice } = described;
  const attributes = { id: option, "aria-describedby": `${option}-help ${option}-error` };
  const control = isChoice
    ? el("select", attributes, el("option", { value: "" }, "as the document says"))
    : el("input", { ...attributes, inputmode: "numeric", autocomplete: "off", placeholder: "as the document says" });
  const error = el("p", { id: `${option}-error`, class: "trouble", role: "alert" });
  return {
    faults: new RegExp(`^${field}$`),
    ...described,
    control,
    root: el("div", {}, el("label", { for: option }, label), control, el("p", { id: `${option}-help`, class: "quiet" }, help), error),
    get text() {
      return control.value.trim();
    },
    refuse(messages) {
      error.textContent = messages.join("; ");
      control.setAttribute("aria-invalid", String(messages.length > 0));
    },
  };
}
