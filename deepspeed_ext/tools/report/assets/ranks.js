// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// All ranks: how long each of them waits, how waits are distributed, and the ranks that the others wait for.

const LISTED = 10;
const FEW = 16; // ranks: of so many or fewer all are listed, and there is nothing to draw
const PLOT = 120; // height in pixels
const BINS = 32;

function drawRanks(report, paints) {
  const rows = report.ranks ?? [];
  if (!rows.length) return [];
  document.getElementById("ranks").hidden = false; // before drawing: what is hidden has no width
  const byWaiting = [...rows].sort((a, b) => a.waiting - b.waiting);
  const listed = rows.length > FEW ? byWaiting.slice(0, LISTED) : byWaiting;
  document.querySelector("#ranks .listed").append(ranksTable(rows, listed));
  if (rows.length <= FEW) return [];
  const made = [
    new Scatter(rows, listed, paints),
    new Histogram(
      byWaiting.map((row) => row.waiting),
      paints,
    ),
  ];
  document.querySelector("#ranks .plots").append(...made.map((one) => one.element));
  made.forEach((one) => new ResizeObserver(() => one.draw()).observe(one.canvas));
  return made;
}

function ranksTable(rows, listed) {
  const count = grouped(rows.length);
  const caption =
    listed.length < rows.length
      ? `The ${LISTED} of ${count} ranks with the shortest waits`
      : "Ranks, the shortest wait first";
  const hosts = new Set(rows.map((row) => row.host));
  const both = (row) => [bar(row.compute / row.step, "compute"), bar(row.waiting / row.step, "wait")];
  return table(
    caption,
    [
      { head: "Rank", header: true, value: (row) => String(row.rank) },
      ...(hosts.size > 1 ? [{ head: "Host", value: (row) => el("span", { class: "name" }, row.host ?? "") }] : []),
      quantity("Step", listed, (row) => row.step, SECONDS),
      quantity("Compute", listed, (row) => row.compute, SECONDS),
      quantity("Waiting", listed, (row) => row.waiting, SECONDS),
      {
        head: "",
        kind: "bars",
        value: (row) =>
          el("span", { class: "bar", "aria-hidden": "true" }, ...both(row).flatMap((one) => [...one.children])),
      },
    ],
    listed,
  );
}

function plot(caption, words, ends) {
  const canvas = el("canvas", { role: "img", "aria-label": words });
  canvas.style.height = `${PLOT}px`;
  const below = el("p", { class: "ends" }, ...ends.map((end) => el("span", {}, end)));
  return { canvas, element: el("figure", {}, el("figcaption", {}, caption), canvas, below) };
}

// A dot for each rank, and a larger one for those that are listed: a mean over neighbors would hide them.
class Scatter {
  constructor(rows, listed, paints) {
    this.rows = [...rows].sort((a, b) => a.rank - b.rank);
    this.listed = new Set(listed);
    this.paints = paints;
    const waits = rows.map((row) => row.waiting);
    [this.least, this.most] = [Math.min(...waits), Math.max(...waits)];
    const range = `${seconds(this.least)} (bottom) to ${seconds(this.most)} (top)`;
    const ends = [`rank ${this.rows[0].rank}`, range, `rank ${this.rows[rows.length - 1].rank}`];
    Object.assign(
      this,
      plot("Waiting by rank; large dots are in the table", `Waiting of ${grouped(rows.length)} ranks, ${range}`, ends),
    );
    this.canvas.dataset.ranks = rows.length;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => showTip(null));
  }

  draw() {
    const context = sharpContext(this.canvas, PLOT);
    const place = (row, i) => [
      4 + (i / (this.rows.length - 1)) * (this.canvas.clientWidth - 8),
      PLOT - 6 - ((row.waiting - this.least) / (this.most - this.least || 1)) * (PLOT - 12),
    ];
    context.fillStyle = this.paints.wait.unknown.color;
    const dot = this.rows.length > 1000 ? 1.5 : 3;
    this.rows.forEach((row, i) => {
      const [x, y] = place(row, i);
      context.fillRect(x - dot / 2, y - dot / 2, dot, dot);
    });
    context.fillStyle = this.paints.forward.color;
    this.rows.forEach((row, i) => {
      if (!this.listed.has(row)) return;
      context.beginPath();
      context.arc(...place(row, i), 4, 0, 2 * Math.PI);
      context.fill();
    });
  }

  // Of the ranks within 3 pixels, the one that waits least.
  point(event) {
    const at = ((event.offsetX - 4) / (this.canvas.clientWidth - 8)) * (this.rows.length - 1);
    const around = Math.max(0.5, (3 / this.canvas.clientWidth) * this.rows.length);
    const some = this.rows.slice(Math.max(0, Math.round(at - around)), Math.max(0, Math.round(at + around)) + 1);
    if (!some.length) return showTip(null);
    const row = some.reduce((least, one) => (one.waiting < least.waiting ? one : least));
    showTip(
      [
        `Rank ${row.rank}${row.host ? ` on ${row.host}` : ""}`,
        `compute ${seconds(row.compute)}`,
        `waiting ${seconds(row.waiting)}`,
      ],
      event,
    );
  }
}

class Histogram {
  constructor(sorted, paints) {
    this.paints = paints;
    const [least, most] = [sorted[0], sorted[sorted.length - 1]];
    this.counts = new Array(BINS).fill(0);
    for (const value of sorted)
      this.counts[Math.min(BINS - 1, Math.floor(((value - least) / (most - least || 1)) * BINS))]++;
    const ends = [seconds(least), `median ${seconds(sorted[sorted.length >> 1])}`, seconds(most)];
    Object.assign(this, plot("How many ranks wait for how long", `Waiting: least ${ends.join(", ")} at most`, ends));
  }

  draw() {
    const context = sharpContext(this.canvas, PLOT);
    const width = this.canvas.clientWidth / BINS;
    const most = Math.max(...this.counts);
    context.fillStyle = this.paints.wait.unknown.color;
    this.counts.forEach((count, i) => {
      const height = count ? Math.max(2, (count / most) * PLOT) : 0; // a rank apart must be seen
      context.fillRect(i * width, PLOT - height, width - 1, height);
    });
  }
}
