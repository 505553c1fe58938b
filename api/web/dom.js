/** Elements of HTML and SVG, made without markup strings, so that no text of a service is ever parsed as markup. */

const SVG = "http://www.w3.org/2000/svg";

/** Return an HTML element. Attributes that start with `on` are listeners; null and false leave an attribute out. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Return an SVG element. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a function that runs `task` at most once in `milliseconds`, and once more if it was asked for meanwhile. */
export function throttle(task, milliseconds) {
  let timer = null;
  let last = -Infinity;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => {
      timer = null;
      last = performance.now();
      task();
    }, Math.max(0, last + milliseconds - performance.now()));
  };
}
