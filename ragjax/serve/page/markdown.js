/* Markdown of an answer as elements. Text becomes text nodes only: HTML in it is shown, not run, and no image is loaded. */

import { h } from "./dom.js";

/** Levels of lists, quotes and emphasis inside each other; what is deeper stays text. */
const DEEP = 6;
const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)/;
const CELLS = /^\|?(?: ?:?-+:? ?\|)+(?: ?:?-+:? ?)?$/;

/** Each repetition is bounded: a long answer without closing marks takes no longer than another. */
const INLINE = new RegExp(
  [
    String.raw`\\(?<literal>[!-\/:-@[-\x60{-~])`,
    String.raw`(?<!\x60)(?<ticks>\x60{1,3})(?!\x60)(?<code>.{1,1000}?)(?<!\x60)\k<ticks>(?!\x60)`,
    String.raw`(?<!\w)(?<mark>\*{1,3}|_{1,3}|~~)(?=[^\s*_~])(?<inner>.{0,1000}?[^\s*_~])\k<mark>(?![\w*_~])`,
    String.raw`!?\[(?<label>[^[\]]{0,500})\]\((?<to>[^\s()<>]{1,1000}(?:\([^\s()<>]{0,100}\))?)(?: "[^"]{0,200}")?\)`,
    String.raw`(?<bare>https?:\/\/[^\s<>"'\x60*()[\]]{1,1000}[^\s<>"'\x60*()[\].,;:!?])`,
  ].join("|"),
  "gs",
);

/** A link to another site, its host beside it where the text hides it; any other address stays text. */
function link(text, address) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!["http:", "https:"].includes(url?.protocol)) return text === address ? text : `${text} (${address})`;
  const shown = h("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" }, text);
  return text.includes(url.host) ? shown : [shown, h("span", { class: "facts" }, ` (${url.host})`)];
}

function inline(text, depth = 0) {
  if (depth > DEEP) return [text];
  const made = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const { literal, code, mark, inner, label, to, bare } = found.groups;
    made.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    if (literal) made.push(literal);
    else if (code) made.push(h("code", {}, code));
    else if (to) made.push(link(label || to, to));
    else if (bare) made.push(link(bare, bare));
    else if (mark.length === 3) made.push(h("strong", {}, h("em", {}, inline(inner, depth + 1))));
    else made.push(h(mark === "~~" ? "s" : mark.length === 2 ? "strong" : "em", {}, inline(inner, depth + 1)));
  }
  return [...made, text.slice(at)];
}

const indent = (line) => line.length - line.trimStart().length;
const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));

/** Lines from `at` on, as long as `belongs` holds. */
function run(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return lines.slice(at, end);
}

/** The list that begins at a line, and the line behind it. */
function list(lines, at, depth) {
  const [, { length: level }, mark] = ITEM.exec(lines[at]);
  const ordered = mark.length > 1;
  const isItem = (line) => {
    const item = ITEM.exec(line ?? "");
    return item && indent(line) <= level + 1 && item[2].length > 1 === ordered && !RULE.test(line);
  };
  const items = [];
  while (isItem(lines[at])) {
    const inside = (line, i) => (line.trim() ? indent(line) >= level + 2 : indent(lines[i + 1] ?? "") >= level + 2 && lines[i + 1].trim());
    const more = run(lines, at + 1, inside);
    const least = Math.min(...more.filter((line) => line.trim()).map(indent));
    items.push(h("li", {}, blocks([ITEM.exec(lines[at])[3], ...more.map((line) => line.slice(least))], depth + 1, true)));
    at += 1 + more.length;
    const next = at + run(lines, at, (line) => !line.trim()).length;
    if (isItem(lines[next])) at = next;
  }
  return [h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, items), at];
}

const cells = (line, tag) => h("tr", {}, line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => h(tag, {}, inline(cell.trim()))));

function table(rows) {
  const body = rows.slice(2).map((row) => cells(row, "td"));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, h("table", {}, h("thead", {}, cells(rows[0], "th")), h("tbody", {}, body)));
}

/** Elements of lines. `tight`: the first paragraph stands without one, as in an item of a list. */
function blocks(lines, depth, tight = false) {
  if (depth > DEEP) return [h("p", {}, lines.join("\n"))];
  const made = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const [fence, heading] = [FENCE.exec(line), HEADING.exec(line)];
    if (fence) {
      const code = run(lines, at + 1, (other) => !other.trim().startsWith(fence[1]));
      made.push(h("pre", { tabindex: 0 }, h("code", {}, code.join("\n"))));
      at += code.length + 2;
    } else if (heading) {
      made.push(h("h4", { class: `level-${heading[1].length}` }, inline(heading[2].trim())));
      at += 1;
    } else if (RULE.test(line)) {
      made.push(h("hr"));
      at += 1;
    } else if (QUOTE.test(line)) {
      const quoted = run(lines, at, (other) => QUOTE.test(other));
      made.push(h("blockquote", {}, blocks(quoted.map((other) => other.replace(QUOTE, "")), depth + 1)));
      at += quoted.length;
    } else if (ITEM.test(line)) {
      const [element, end] = list(lines, at, depth);
      made.push(element);
      at = end;
    } else if (line.includes("|") && CELLS.test((lines[at + 1] ?? "").trim())) {
      const rows = run(lines, at, (other) => other.includes("|"));
      made.push(table(rows));
      at += rows.length;
    } else if (line.trim()) {
      const text = run(lines, at, (other, i) => other.trim() && (i === at || !startsBlock(other)));
      made.push(tight && !made.length ? inline(text.join("\n")) : h("p", {}, inline(text.join("\n"))));
      at += text.length;
    } else at += 1;
  }
  return made;
}

/** The elements of a text in Markdown. */
export const markdown = (text) => blocks(text.replaceAll("\t", "    ").split("\n"), 0).flat();
