/* The cache, live: how full its tiers are, what its tree holds, what left, and what requests got of it. */

import { json, key } from "./api.js";
import { count, counted, find, h, milliseconds, percent, roving, say, svg } from "./dom.js";

/** Milliseconds between two looks, while the view is visible. */
const EVERY = 2000;
/** Levels of the tree that are drawn, and the least width of a node, a share of all. */
const [DEEP, THIN] = [12, 0.002];
const TIERS = { device: "Device", host: "Host memory", disk: "Disk", remote: "Shared cache" };
const NEAREST = { device: "on the device", host: "in host memory", disk: "on disk alone", "in-use": "in use now" };

const ago = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;

function tiers({ tiers: found, policy }) {
  const rows = Object.entries(found).map(([name, { tokens, used }]) =>
    h(
      "div",
      { class: "tier" },
      h("span", {}, TIERS[name]),
      used === null
        ? h("span", {})
        : h("span", { class: "gauge", role: "img", "aria-label": `${percent(used, 1)} full` }, h("span", { class: name, vars: { width: `${100 * used}%` } })),
      h("span", { class: "facts" }, [tokens === null ? null : counted(tokens, "token"), used === null ? null : `${percent(used, 1)} full`].filter(Boolean).join(" · ")),
    ),
  );
  return [h("div", { class: "head first" }, h("h3", {}, "Tiers"), h("span", { class: "facts" }, `policy ${policy}`)), rows];
}

/** A line over the last requests, oldest at the left. `values` are shares of the height. */
function chart(title, shown, values, kind) {
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(2)},${(30 - 28 * value).toFixed(2)}`);
  if (points.length === 1) points.push(`100,${points[0].split(",")[1]}`);
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", {}, title, h("strong", {}, shown)),
    svg(
      "svg",
      { viewBox: "0 0 100 31", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("line", { class: "base", x1: 0, x2: 100, y1: 30.5, y2: 30.5 }),
      svg("polyline", { class: `line ${kind}`, points: points.join(" ") }),
    ),
  );
}

const quantile = (values, share) => [...values].sort((a, b) => a - b)[Math.floor((values.length - 1) * share)];

/** The top of a scale of times: the slowest, unless it is far beyond nine of ten. */
const scale = (times) => Math.min(Math.max(...times), 3 * quantile(times, 0.9));

function requests({ requests: latest }) {
  const head = h("div", { class: "head first" }, h("h3", {}, "Requests"), h("span", { class: "facts" }, latest.length ? `the last ${count(latest.length)}` : "none yet"));
  if (!latest.length) return [head];
  const asked = [...latest].reverse();
  const sum = (name) => asked.reduce((total, one) => total + one[name], 0);
  const times = asked.map((one) => one.ttft);
  const top = scale(times);
  return [
    head,
    chart("Share of the prompt reused", percent(sum("reused"), sum("prompt_tokens")), asked.map((one) => one.reused / one.prompt_tokens), "share"),
    chart(`Time to the first token, 0 to ${milliseconds(top)}`, `median ${milliseconds(quantile(times, 0.5))}`, times.map((time) => Math.min(1, time / top)), "time"),
  ];
}

/** Where each node is drawn: left and width as shares, and its level; the largest first under each parent. */
export function icicle(holdings) {
  const children = new Map();
  for (const node of holdings) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const total = (children.get(null) ?? []).reduce((sum, node) => sum + node.below, 0);
  const placed = [];
  const place = (parent, left, level) => {
    for (const node of (children.get(parent) ?? []).sort((a, b) => b.below - a.below)) {
      const width = node.below / total;
      if (level < DEEP && width >= THIN) {
        placed.push({ node, left, width, level });
        place(node.id, left, level + 1);
      }
      left += width;
    }
  };
  place(null, 0, 0);
  return placed;
}

function inWords(node) {
  const where = node.tiers.map((tier) => TIERS[tier].toLowerCase()).join(", ") || "on its way";
  const made = node.method ? `${node.provenance}, ${node.method}` : node.provenance;
  const used = node.in_use ? "in use now" : `matched ${counted(node.hits, "time")}`;
  return `“${node.text}” · ${counted(node.tokens, "token")}, ${made} · ${where} · ${used}`;
}

export function initCache() {
  const [status, pause, tree, told] = ["status", "pause", "tree", "node"].map((name) => find(`cache-${name}`));
  let [timer, shown, paused, chosen] = [null, false, false, null];
  let refused = null; // the key that the server refused: it is not asked with again by itself

  const tell = (node) => {
    chosen = node.id;
    if (told.textContent !== inWords(node)) told.textContent = inWords(node);
  };

  const drawTree = ({ holdings }) => {
    const placed = icicle(holdings);
    const focused = tree.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    const levels = 1 + Math.max(-1, ...placed.map((one) => one.level));
    const nodes = placed.map(({ node, left, width, level }) =>
      h(
        "button",
        {
          type: "button",
          class: `${node.tiers[0] ?? ""} ${node.in_use ? "in-use" : ""}`,
          tabindex: -1,
          "data-id": node.id,
          "aria-label": inWords(node),
          vars: { left: `${100 * left}%`, width: `calc(${100 * width}% - 2px)`, top: `${level * 1.9}rem` },
          onclick: () => tell(node),
          onfocus: () => tell(node),
        },
        h("span", {}, node.hits ? h("strong", {}, `${count(node.hits)}× `) : null, node.text || "…"),
      ),
    );
    const at = Math.max(0, placed.findIndex(({ node }) => node.id === (focused ?? chosen)));
    if (nodes.length) nodes[at].tabIndex = 0;
    roving(nodes, (to) => nodes.forEach((node, i) => (node.tabIndex = i === to ? 0 : -1)));
    const box = h("div", { class: "icicle", role: "group", "aria-label": "Nodes of the tree", vars: { height: `${levels * 1.9}rem` } }, nodes);
    const colours = Object.entries(NEAREST).map(([kind, words]) => h("li", {}, h("span", { class: `swatch ${kind}` }), words));
    const legend = h("ul", { class: "legend", "aria-label": "Colours" }, colours, h("li", {}, "3× matched by three requests"));
    const none = h("p", { class: "facts" }, "Nothing is cached yet: ask something.");
    tree.replaceChildren(...(nodes.length ? [box, legend] : [none]));
    if (focused && nodes.length) nodes[at].focus({ preventScroll: true });
    const now = placed.find(({ node }) => node.id === chosen);
    if (now) tell(now.node);
    else told.textContent = nodes.length ? "Choose a node to see what it holds. A node stands under the context that it was computed on." : "";
  };

  const drawDepartures = ({ departures, policy }) => {
    const rows = departures.slice(0, 12).map(({ age, text, tokens, left, kept }) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, ago(age)),
        h("td", { class: "text" }, text),
        h("td", { class: "number" }, count(tokens)),
        h("td", {}, TIERS[left]),
        h("td", {}, kept ? `kept in ${TIERS[kept].toLowerCase()}`.replace("in disk", "on disk") : "gone"),
      ),
    );
    const head = ["", "Text", "Tokens", "Left", ""].map((name) => h("th", { scope: "col", class: name === "Tokens" ? "number" : "" }, name || h("span", { class: "unseen" }, "detail")));
    find("cache-departures").replaceChildren(
      h("div", { class: "head first" }, h("h3", {}, "Left lately"), h("span", { class: "facts" }, `by the policy ${policy}`)),
      rows.length ? h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)) : h("p", { class: "facts" }, "Nothing had to leave."),
    );
  };

  const look = async () => {
    clearTimeout(timer);
    const used = key.get();
    if (!shown || paused || document.hidden || used === refused) return;
    try {
      const seen = await json("v1/cache");
      find("cache-tiers").replaceChildren(...tiers(seen).flat());
      find("cache-requests").replaceChildren(...requests(seen));
      const most = seen.nodes > seen.holdings.length ? `, the ${count(seen.holdings.length)} largest shown` : "";
      find("cache-count").textContent = `${counted(seen.nodes, "node")}${seen.whole ? "" : " at least"}${most}`;
      drawTree(seen);
      drawDepartures(seen);
      if (status.textContent) say(status, "");
    } catch (error) {
      if (error.status === 401) refused = used;
      if (status.textContent !== error.message) say(status, error.message, "error");
    }
    clearTimeout(timer);
    timer = setTimeout(look, EVERY);
  };

  const lookAgain = () => {
    refused = null;
    look();
  };

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    lookAgain();
  });
  document.addEventListener("visibilitychange", look);
  document.addEventListener("offered", () => refused !== null && lookAgain());
  document.addEventListener("view", ({ detail }) => {
    shown = detail === "cache";
    lookAgain();
  });
}
