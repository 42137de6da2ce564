/* Elements and numbers. Text becomes text nodes only, so nothing in a document, title or answer can run. */

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, given] of Object.entries(value)) element.style.setProperty(key, given);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. `on…`: listeners; `vars`: style properties; false and null leave an attribute or child out. */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

export const find = (id) => document.getElementById(id);

/** Say something in a status line; errors stand out, and are told at once. */
export function say(status, text, kind = "") {
  status.className = `status ${kind}`;
  status.setAttribute("role", kind === "error" ? "alert" : "status");
  status.textContent = text;
}

const whole = new Intl.NumberFormat("en");

/** 12,345 */
export const count = (number) => whole.format(Math.round(number));

/** "1 token", "7 tokens" */
export const counted = (number, noun, plural = `${noun}s`) => `${count(number)} ${number === 1 ? noun : plural}`;

/** Milliseconds as they are read: 0.58 ms, 66 ms, 1.24 s. */
export function milliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(2)} ms`;
}

/** A share in percent; never 100 % or 0 % of what is neither. */
export function percent(part, all) {
  if (!all) return "–";
  const share = (100 * part) / all;
  const shown = share > 99 && share < 100 ? 99 : share > 0 && share < 1 ? 1 : Math.round(share);
  return `${shown} %`;
}

export function bytes(number) {
  if (number >= 2 ** 30) return `${(number / 2 ** 30).toFixed(2)} GiB`;
  if (number < 2 ** 10) return `${number} B`;
  return number >= 2 ** 20 ? `${(number / 2 ** 20).toFixed(1)} MiB` : `${(number / 2 ** 10).toFixed(0)} KiB`;
}

/** Arrow keys, Home and End move among items of which one is in the tab order. `chosen(i)` is told where to. */
export function roving(items, chosen) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  items.forEach((item, i) =>
    item.addEventListener("keydown", (event) => {
      let to = null;
      if (event.key in steps) to = (i + steps[event.key] + items.length) % items.length;
      if (event.key === "Home") to = 0;
      if (event.key === "End") to = items.length - 1;
      if (to === null) return;
      event.preventDefault();
      chosen(to);
      items[to].focus();
    }),
  );
}

let last = 0;

/** An id that no other element has. */
export const fresh = (prefix) => `${prefix}-${++last}`;
