// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Elements, and numbers with their units. All text goes in as text, so that no name in a report becomes markup.
"use strict";

const SECONDS = [
  ["s", 0.1, 1],
  ["ms", 1e-4, 1e-3],
  ["µs", 0, 1e-6],
]; // unit, from which value on, its size
const BYTES = [
  ["TB", 1e12, 1e12],
  ["GB", 1e9, 1e9],
  ["MB", 1e5, 1e6],
  ["kB", 1e3, 1e3],
  ["B", 0, 1],
];
const RATES = BYTES.map(([name, from, size]) => [`${name}/s`, from, size]);

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// The name of a strategy, which may have a suffix, as texts write it: N-I-G for NIG. Other names stay as they are.
function hyphenated(name) {
  return name.replace(/^([NIG])([NIG])([NIG])(?![\w-])/, "$1-$2-$3");
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// One unit and one number of decimals for all values of a column, so that they can be compared by eye: three digits of
// the largest, and one more where the smallest would have fewer than two.
function scaleOf(values, units) {
  const sizes = values.filter((value) => isNumber(value) && value !== 0).map(Math.abs);
  const [least, most] = [Math.min(...sizes), Math.max(0, ...sizes)];
  const [unit, , size] = units.find(([, from]) => most >= from);
  if (!sizes.length || unit === "B") return { unit, size, digits: 0 }; // whole bytes
  const wanted = 3 - Math.ceil(Math.log10(most / size)) + (least / most < 0.2 ? 1 : 0);
  return { unit, size, digits: Math.min(3, Math.max(0, wanted)) };
}

function scaled(value, scale) {
  if (!isNumber(value)) return "–";
  const least = 10 ** -scale.digits;
  const shown = value / scale.size;
  if (shown > 0 && shown < least / 2) return `<${least.toFixed(scale.digits)}`;
  return grouped(shown, scale.digits);
}

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function withUnit(value, units) {
  const scale = scaleOf([value], units);
  return isNumber(value) ? `${scaled(value, scale)} ${scale.unit}` : "–";
}

const seconds = (value) => withUnit(value, SECONDS);
const bytes = (value) => withUnit(value, BYTES);

function percent(share) {
  return !isNumber(share) ? "–" : share > 0 && share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(1)} %`;
}

function sum(values) {
  return values.filter(isNumber).reduce((total, value) => total + value, 0);
}

// A wide table scrolls in its own box, which the keyboard can reach. A column has a head and the value of a row; it
// may be of numbers, or the header of its rows.
function table(caption, columns, rows, classOf = () => null) {
  const head = columns.map((one) =>
    one.head ? el("th", { scope: "col", class: one.number ? "number" : null }, one.head) : el("td"),
  );
  const lines = rows.map((row) => {
    const cells = columns.map((one) => {
      const shown = one.value(row);
      const kind = { class: one.number ? "number" : (one.kind ?? null) };
      return one.header ? el("th", { scope: "row", ...kind }, shown) : el("td", kind, shown);
    });
    return el("tr", { class: classOf(row) }, ...cells);
  });
  const content = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)));
  content.append(el("tbody", {}, ...lines));
  return el("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, content);
}

// Columns of numbers in one unit, which their heads name. `of` tells `known` whether there are any.
function quantities(rows, units, columns) {
  const scale = scaleOf(
    rows.flatMap((row) => columns.map(([, of]) => of(row))),
    units,
  );
  return columns.map(([head, of]) => ({
    head: `${head} (${scale.unit})`,
    number: true,
    of,
    value: (row) => scaled(of(row), scale),
  }));
}

function quantity(head, rows, of, units) {
  return quantities(rows, units, [[head, of]])[0];
}

// The columns in which some row has a number, and those without numbers.
function known(rows, columns) {
  return columns.filter((column) => !column.of || rows.some((row) => isNumber(column.of(row))));
}

// Rows that are not kept appear when somebody asks for them.
function shortened(box, keeps) {
  const rest = [...box.querySelectorAll("tbody tr")].filter((_, i) => !keeps(i));
  if (rest.length < 3) return box; // a button takes as much room
  rest.forEach((row) => (row.hidden = true));
  const button = el("button", { type: "button", class: "more" }, `Show ${grouped(rest.length)} more`);
  button.addEventListener("click", () => {
    rest.forEach((row) => (row.hidden = false));
    button.remove();
    box.focus(); // the button had it
  });
  return el("div", {}, box, button);
}

// Show a section if it has something to show.
function fill(id, ...content) {
  const section = document.getElementById(id);
  const target = section.querySelector(":scope > div") ?? section;
  target.append(...content);
  section.hidden = false;
  return section;
}
