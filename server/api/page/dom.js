// Small helpers. Text from the server is only ever set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Set text only when it differs: a selection in unchanged text stays.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows that stay in place from frame to frame: one per key, made once by `make`, in the order of `keys`.
export function keyed(parent, keys, make) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const rows = keys.map((key) => {
    const row = known.get(key) ?? make(key);
    row.dataset.key = key;
    return row;
  });
  if (rows.length !== parent.children.length || rows.some((row, index) => parent.children[index] !== row)) {
    parent.replaceChildren(...rows);
  }
  return rows;
}

export const count = (value) => Math.round(value).toLocaleString("en");
export const rate = (value) => (value < 99.95 ? value.toFixed(1) : count(value));
export const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(value < 0.9995 ? 1 : 0)} %`);

export function byteRate(value) {
  if (value >= 999.5e6) return `${(value / 1e9).toFixed(2)} GB/s`;
  if (value >= 999.5e3) return `${(value / 1e6).toFixed(0)} MB/s`;
  return `${(value / 1e3).toFixed(0)} kB/s`;
}
