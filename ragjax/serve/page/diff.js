/* Two texts, word by word: what both have, and what one has alone. */

/** Cells of the table of common words, at most; longer texts differ as a whole between what they begin and end with. */
const CELLS = 4e6;

const words = (text) => text.match(/\s*\S+|\s+$/g) ?? [];

/** Which words of `a` and `b` belong to their longest common subsequence. */
function common(a, b) {
  const [n, m] = [a.length, b.length];
  const [inA, inB] = [new Array(n).fill(false), new Array(m).fill(false)];
  if (n * m > CELLS) return [inA, inB];
  const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      table[i][j] = a[i].trim() === b[j].trim() ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < n && j < m; ) {
    if (a[i].trim() === b[j].trim()) [inA[i++], inB[j++]] = [true, true];
    else if (table[i + 1][j] >= table[i][j + 1]) i++;
    else j++;
  }
  return [inA, inB];
}

function joined(parts, kept) {
  const runs = [];
  parts.forEach((part, i) => {
    if (runs.length && runs.at(-1).same === kept[i]) runs.at(-1).text += part;
    else runs.push({ text: part, same: kept[i] });
  });
  return runs;
}

/** Runs of both texts, each `{text, same}`; joined they are the texts. */
export function diff(left, right) {
  const [a, b] = [words(left), words(right)];
  let [begin, end] = [0, 0];
  while (begin < Math.min(a.length, b.length) && a[begin].trim() === b[begin].trim()) begin++;
  while (end < Math.min(a.length, b.length) - begin && a.at(-1 - end).trim() === b.at(-1 - end).trim()) end++;
  const [inA, inB] = common(a.slice(begin, a.length - end), b.slice(begin, b.length - end));
  const around = (middle) => [...new Array(begin).fill(true), ...middle, ...new Array(end).fill(true)];
  return [joined(a, around(inA)), joined(b, around(inB))];
}
