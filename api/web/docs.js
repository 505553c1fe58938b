/** A page of the REST API, made of the service's own OpenAPI document. */

import { el } from "./dom.js";

const main = document.getElementById("main");

/** Return a schema with the name of what it refers to. */
function nameOf(schema) {
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return [el("a", { href: `#schema-${name}` }, name)];
  }
  const options = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (options) return options.flatMap((option, index) => [...(index > 0 ? [" or "] : []), ...nameOf(option)]);
  if (schema.type === "array") return ["list of ", ...nameOf(schema.items ?? {})];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  return [schema.type ?? "any"];
}

function table(head, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") },
    el("table", { class: "data" },
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", {}, rows.map(([first, ...rest]) =>
        el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell)))))),
  );
}

function examples(content = {}) {
  return Object.entries(content).flatMap(([type, { schema, example }]) => [
    el("p", {}, el("code", {}, type), schema ? [": ", ...nameOf(schema)] : ""),
    example !== undefined && el("pre", { tabindex: "0" }, typeof example === "string" ? example : JSON.stringify(example, null, 2)),
  ]);
}

function operation(path, method, described) {
  const parameters = (described.parameters ?? []).map((parameter) => [
    el("code", {}, parameter.name), parameter.in, nameOf(parameter.schema ?? {}),
    `${parameter.required ? "Required. " : ""}${parameter.description ?? ""}`,
  ]);
  const body = described.requestBody;
  const responses = Object.entries(described.responses).map(([status, response]) =>
    el("details", {}, el("summary", {}, `${status} ${response.description ?? ""}`), examples(response.content)));
  return el(
    "details",
    { id: `${method}-${path}` },
    el("summary", {}, el("code", {}, el("span", { class: "method" }, method.toUpperCase()), path), ` ${described.summary ?? ""}`),
    (described.description ?? "").split("\n\n").map((text) => el("p", {}, text)),
    parameters.length > 0 && [el("h3", {}, "Parameters"), table(["name", "in", "type", "meaning"], parameters)].flat(),
    body && [el("h3", {}, "Body"), el("p", {}, body.description ?? ""), ...examples(body.content)],
    el("h3", {}, "Responses"),
    responses,
  );
}

function schema(name, described) {
  const required = new Set(described.required ?? []);
  const rows = Object.entries(described.properties ?? {}).map(([field, one]) => [
    el("code", {}, field), nameOf(one), required.has(field) ? "yes" : "no", one.description ?? "",
  ]);
  return el(
    "details",
    { id: `schema-${name}` },
    el("summary", {}, el("code", {}, name)),
    el("p", {}, described.description ?? ""),
    rows.length > 0 ? table(["field", "type", "required", "meaning"], rows) : el("p", {}, nameOf(described)),
  );
}

/** Open what the address names, with everything around it. */
function openNamed() {
  const section = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let node = section; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  section?.scrollIntoView();
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the service answered ${response.status}`);
  const document_ = await response.json();
  const byTag = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      const tag = described.tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), operation(path, method, described)]);
    }
  }
  main.replaceChildren(
    el("h1", {}, `${document_.info.title} ${document_.info.version}`),
    ...document_.info.description.split("\n\n").map((text) => el("p", {}, text)),
    ...[...byTag].map(([tag, operations]) => el("section", { class: "card", "aria-label": tag }, el("h2", {}, tag), operations)),
    el("section", { class: "card", "aria-label": "Schemas" }, el("h2", {}, "Schemas"),
      Object.entries(document_.components.schemas).map(([name, described]) => schema(name, described))),
  );
  openNamed();
}

addEventListener("hashchange", openNamed);
show().catch((error) => main.replaceChildren(el("p", { class: "trouble", role: "alert" }, `The API's description cannot be read: ${error.message}.`)));
