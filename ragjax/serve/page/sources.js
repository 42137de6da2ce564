/* Sources of an answer: its passages with their places, and the document that one stands in. */

import { json } from "./api.js";
import { counted, find, h, say } from "./dom.js";

const placeOf = ({ page, heading }) => [page && `page ${page}`, heading].filter(Boolean).join(" · ");

/** The text of a passage without the title that it begins with. */
const excerpt = ({ text, title }) => (title && text.startsWith(title) ? text.slice(title.length) : text).trim();

/**
 * The numbered list of an answer's sources, those that earlier questions alone had found folded. A click opens the
 * document at the passage, unless the request brought it.
 */
export function sourceList({ sources, segments }) {
  if (!sources.length) return null;
  const entry = (source) => {
    const facts = [placeOf(source), source.score !== null && `similarity ${source.score.toFixed(2)}`].filter(Boolean).join(" · ");
    const opened = { ...source, passage: Number(segments[source.segment]?.id.match(/#(\d+)$/)?.[1] ?? -1) };
    return h(
      "li",
      {},
      source.knowledge === null ? source.filename : h("button", { type: "button", class: "link", onclick: () => openDocument(opened) }, source.filename),
      h("span", { class: "facts" }, ` ${facts}`),
      source.text ? h("p", { class: "excerpt" }, excerpt(source)) : null,
    );
  };
  const [earlier, found] = [sources.filter((source) => source.earlier), sources.filter((source) => !source.earlier)];
  return h(
    "section",
    { class: "sources", "aria-label": "Sources" },
    h("h4", {}, "Sources"),
    h("ol", {}, found.map(entry)),
    earlier.length ? h("details", { open: !found.length }, h("summary", {}, `${counted(earlier.length, "passage")} of earlier turns`), h("ol", { start: found.length + 1 }, earlier.map(entry))) : null,
  );
}

/**
 * Show a document's passages in their order. `text`, or else the number `passage`, says which one is cited: it is
 * marked, and the document opens at it.
 */
export async function openDocument({ knowledge, file_id, filename, text = "", passage = -1, ...place }) {
  const [dialog, shown, status] = [find("reader"), find("reader-text"), find("reader-status")];
  find("reader-title").textContent = filename;
  shown.replaceChildren();
  say(status, "Opening …");
  if (!dialog.open) dialog.showModal();
  try {
    const address = ["v1", "vector_stores", knowledge, "files", file_id, "content"].map(encodeURIComponent).join("/");
    const { data } = await json(address);
    const same = text ? data.findIndex((one) => one.text.trim() === text.trim()) : -1;
    const cited = same >= 0 ? same : passage;
    const passages = data.map((one, i) => h("p", { class: i === cited ? "passage cited" : "passage", "aria-current": i === cited ? "true" : null }, one.text.trim()));
    // where one stands is said where it changes
    const places = data.map((one, i) => (i && placeOf(one) === placeOf(data[i - 1]) ? "" : placeOf(one)));
    shown.replaceChildren(...passages.flatMap((one, i) => (places[i] ? [h("p", { class: "facts place" }, places[i]), one] : [one])));
    const count = counted(data.length, "passage");
    const where = [`Passage ${cited + 1} of ${data.length}, marked, is what the answer drew on`, placeOf(place)].filter(Boolean).join(" · ");
    say(status, !data.length ? "The document has no passages yet." : passages[cited] ? where : count);
    passages[cited]?.scrollIntoView({ block: "center" });
    shown.focus({ preventScroll: true });
  } catch (error) {
    say(status, error.message, "error");
  }
}

export function initReader() {
  const dialog = find("reader");
  find("reader-close").addEventListener("click", () => dialog.close());
  // a click beside the document closes it
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}
