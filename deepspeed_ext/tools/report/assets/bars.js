// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// The stacked bars of a step, measured and predicted, and the table that says the same in figures.

const PARTS = {
  compute: ["Compute", "forward and backward, without waits"],
  within: ["Exposed within groups", "waits for transfers inside a group"],
  between: ["Exposed between groups", "waits for transfers between groups"],
  update: ["Update", "the optimizer's step"],
  other: ["Other", "copies into buckets, the data loader, the script, waits for late ranks"],
};

function drawParts(report) {
  const rows = report.parts ?? [];
  if (!rows.some((row) => isNumber(row.seconds))) return;
  const predicted = rows.some((row) => isNumber(row.predicted));
  const totals = [sum(rows.map((row) => row.seconds)), sum(rows.map((row) => row.predicted))];
  const scale = scaleOf(totals, SECONDS);
  const stacks = document.getElementById("stacks");
  stacks.append(stack("Measured", rows, (row) => row.seconds, totals, scale));
  if (predicted) stacks.append(stack("Predicted", rows, (row) => row.predicted, [totals[1], totals[0]], scale));
  document.getElementById("parts").append(partsTable(rows, totals, predicted));
  document.getElementById("step").hidden = false;
}

// Both bars have one scale: the longer one, of `total` and `other`, is as wide as the page.
function stack(title, rows, value, [total, other], scale) {
  const figure = (number) => `${scaled(number, scale)} ${scale.unit}`;
  const said = rows.map((row) => `${nameOf(row.part)} ${figure(value(row))}`).join(", ");
  const bar = el("div", { class: "stack", role: "img", "aria-label": `${title}: ${said}` });
  for (const row of rows.filter((one) => value(one) > 0)) {
    const label = `${nameOf(row.part)} ${figure(value(row))}`;
    const part = el("div", { class: `part fill-${row.part}`, title: label });
    part.append(el("span", { class: "long" }, label), el("span", { class: "short" }, figure(value(row))));
    part.style.width = `${(100 * value(row)) / Math.max(total, other)}%`;
    bar.append(part);
  }
  return el(
    "div",
    { class: "stack-row" },
    el("span", { class: "stack-title" }, title),
    bar,
    el("span", { class: "stack-total" }, figure(total)),
  );
}

function nameOf(part) {
  return PARTS[part]?.[0] ?? part;
}

function partsTable(rows, [measured, predicted], hasPredicted) {
  const all = [...rows, { part: "sum", seconds: measured, predicted: hasPredicted ? predicted : null }];
  const scale = scaleOf(
    all.flatMap((row) => [row.seconds, row.predicted]),
    SECONDS,
  );
  const column = (head, value) => ({ head: `${head} (${scale.unit})`, number: true, value });
  const columns = [
    { head: "Part", header: true, value: (row) => partCell(row.part) },
    column("Measured", (row) => scaled(row.seconds, scale)),
    { head: "Share", number: true, value: (row) => percent(row.seconds / measured) },
  ];
  if (hasPredicted) {
    columns.push(column("Predicted", (row) => scaled(row.predicted, scale)));
    columns.push(column("Difference", (row) => difference(row, scale)));
  }
  columns.push({ head: "Meaning", kind: "words", value: (row) => PARTS[row.part]?.[1] ?? "" });
  return table("Parts of a step", columns, all, (row) => (row.part === "sum" ? "total" : null));
}

function partCell(part) {
  if (part === "sum") return "Whole step";
  return el(
    "span",
    { class: "whole" },
    el("span", { class: `swatch fill-${part}`, "aria-hidden": "true" }),
    nameOf(part),
  );
}

function difference(row, scale) {
  if (!isNumber(row.seconds) || !isNumber(row.predicted)) return "–";
  const shown = (row.seconds - row.predicted) / scale.size;
  const sign = Math.abs(shown) < 0.5 * 10 ** -scale.digits ? "" : shown > 0 ? "+" : "−";
  return sign + grouped(Math.abs(shown), scale.digits);
}
