// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Which spans of a lane share a row, and which one is at a time. A span: [begin, end, name, kind, bytes, module].

const [BEGIN, END, NAME, KIND, NBYTES, MODULE] = [0, 1, 2, 3, 4, 5];

function byBegin(spans) {
  return [...spans].sort((a, b) => a[BEGIN] - b[BEGIN] || b[END] - a[END]);
}

// A row for each depth: a span is one row below the span that it lies in.
function nestedRows(spans) {
  const rows = [];
  const open = [];
  for (const span of byBegin(spans)) {
    while (open.length && open[open.length - 1] <= span[BEGIN]) open.pop();
    (rows[open.length] ??= []).push(span);
    open.push(span[END]);
  }
  return rows;
}

// The first row in which nothing is left at the time: spans of a row do not overlap.
function sideBySide(spans) {
  const rows = [];
  for (const span of byBegin(spans)) {
    const free = rows.find((row) => row[row.length - 1][END] <= span[BEGIN]);
    if (free) free.push(span);
    else rows.push([span]);
  }
  return rows;
}

// The place in a row of the first span that ends after a time.
function firstAfter(row, time) {
  let [low, high] = [0, row.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row[middle][END] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The span of a row at a time, or one as near as the tolerance: a short span is narrower than a pointer.
function spanAt(row, time, tolerance) {
  const exact = row[firstAfter(row, time)];
  if (exact && exact[BEGIN] <= time) return exact;
  const near = row[firstAfter(row, time - tolerance)];
  return near && near[BEGIN] <= time + tolerance ? near : null;
}

function spanWords(span) {
  return [
    span[NAME],
    `${seconds(span[END] - span[BEGIN])}, from ${seconds(span[BEGIN])} on`,
    isNumber(span[NBYTES]) ? bytes(span[NBYTES]) : null,
    span[MODULE] ? `module ${span[MODULE]}` : null,
  ].filter((word) => word !== null);
}
