/** An exploration again: its request without what is usual anyway, and with a change that is predicted to help. */

/** The changes after which something would fit, the preferred one first; none if there is an answer. */
export const remediesOf = ({ recommendation, answer }) =>
  (recommendation ? [] : answer?.variants.find(({ remedies }) => remedies?.length > 0)?.remedies ?? []);

/** Return the request as a text to edit. `schemas` are those of the OpenAPI document, which have the defaults. */
export function requestText(request, remedy, schemas) {
  const changed = { ...request, ...remedy?.settings };
  delete changed.notices; // they are of what was written before
  return JSON.stringify(withoutDefaults(changed, { $ref: "#/components/schemas/ExplorationRequest" }, schemas), null, 2);
}

/** Leave out the fields that have their defaults. Where the document states none, it is empty for a map, and else null. */
function withoutDefaults(value, schema, schemas) {
  const known = (schema?.$ref ?? schema?.anyOf?.find(({ $ref }) => $ref)?.$ref)?.split("/").at(-1);
  const { properties } = schemas[known] ?? {};
  if (!properties || value === null || typeof value !== "object" || Array.isArray(value)) return value;
  const rest = (one, name) => (one === undefined ? nothing(properties[name]) : withoutDefaults(one, properties[name], schemas));
  const isUsual = ([name, one]) => canonical(rest(one, name)) === canonical(rest(properties[name]?.default, name));
  return Object.fromEntries(Object.entries(value).filter((field) => !isUsual(field)).map(([name, one]) => [name, rest(one, name)]));
}

const nothing = (schema) => (schema?.additionalProperties ? {} : null);

/** A text that is equal for equal values, in whatever order their fields are. */
const canonical = (value) => JSON.stringify(value, (_, one) =>
  (one && typeof one === "object" && !Array.isArray(one) ? Object.fromEntries(Object.entries(one).sort()) : one));
