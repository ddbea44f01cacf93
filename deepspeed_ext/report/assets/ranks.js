// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// All ranks: a strip in their order, how their waits are distributed, and those that the others wait for.

const LISTED = 10;
const STRIP = 120; // height in pixels
const BINS = 32;
const FEW = 16; // ranks: of fewer, a distribution says nothing

function drawRanks(report, paints) {
  const rows = report.ranks ?? [];
  if (!rows.length) return [];
  document.getElementById("ranks").hidden = false; // before drawing: what is hidden has no width
  const slowest = [...rows].sort((a, b) => a.waiting - b.waiting).slice(0, LISTED);
  const caption = rows.length > LISTED ? `The ${LISTED} of ${grouped(rows.length)} ranks that wait least` : "Ranks, those that wait least first";
  const hosts = new Set(rows.map((row) => row.host));
  document.querySelector("#ranks .listed").append(table(caption, [
    { head: "Rank", header: true, value: (row) => String(row.rank) },
    ...(hosts.size > 1 ? [{ head: "Host", value: (row) => row.host }] : []),
    quantity("Step", slowest, (row) => row.step, SECONDS),
    quantity("Compute", slowest, (row) => row.compute, SECONDS),
    quantity("Waiting", slowest, (row) => row.waiting, SECONDS),
    { head: "", kind: "bars", value: (row) => el("span", { class: "bar", "aria-hidden": "true" },
      ...bar(row.compute / row.step, "compute").children, ...bar(row.waiting / row.step, "wait").children) },
  ], slowest));
  const made = [new Strip(rows, paints)];
  if (rows.length >= FEW) made.push(new Histogram(rows.map((row) => row.waiting), paints));
  document.querySelector("#ranks .strips").append(...made.map((one) => one.element));
  made.forEach((one) => new ResizeObserver(() => one.draw()).observe(one.canvas));
  return made;
}

function ordered(values) {
  return Float64Array.from(values.filter(isNumber)).sort();
}

class Strip {
  constructor(rows, paints) {
    this.rows = [...rows].sort((a, b) => a.rank - b.rank);
    this.paints = paints;
    this.most = rows.reduce((most, row) => Math.max(most, row.compute + row.waiting), 0);
    const compute = ordered(rows.map((row) => row.compute));
    const words = `Compute of ${grouped(rows.length)} ranks: ${seconds(compute[0])} to ${seconds(compute[compute.length - 1])}`;
    this.canvas = el("canvas", { role: "img", "aria-label": words });
    this.canvas.style.height = `${STRIP}px`;
    this.canvas.dataset.ranks = rows.length;
    const legend = ["compute", "wait"].map((kind) => el("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }));
    this.element = el("figure", {}, el("figcaption", {}, "By rank: ", legend[0], "compute, above it ", legend[1], "waiting"),
      this.canvas, el("p", { class: "ends" }, el("span", {}, `rank ${this.rows[0].rank}`), el("span", {}, `height: ${seconds(this.most)}`), el("span", {}, `rank ${this.rows[this.rows.length - 1].rank}`)));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => showTip(null));
  }

  // A column of at least a pixel shows the rank of its ranks that waits least: means would hide it.
  columns() {
    const count = Math.min(this.rows.length, Math.max(1, Math.floor(this.canvas.clientWidth)));
    return Array.from({ length: count }, (_, i) => {
      const some = this.rows.slice(Math.floor((i * this.rows.length) / count), Math.floor(((i + 1) * this.rows.length) / count));
      return some.reduce((least, row) => (row.waiting < least.waiting ? row : least));
    });
  }

  draw() {
    const context = sharpContext(this.canvas, STRIP);
    const shown = this.columns();
    const width = this.canvas.clientWidth / shown.length;
    const gap = width > 3 ? 1 : 0;
    shown.forEach((row, i) => {
      const [compute, waiting] = [row.compute, row.waiting].map((value) => (value / this.most) * STRIP);
      context.fillStyle = this.paints.forward.color;
      context.fillRect(i * width, STRIP - compute, width - gap, compute);
      for (const paint of [this.paints.wait.unknown.color, this.paints.wait.unknown.hatch]) {
        context.fillStyle = paint;
        context.fillRect(i * width, STRIP - compute - waiting, width - gap, waiting);
      }
    });
  }

  point(event) {
    const shown = this.columns();
    const at = Math.floor((event.offsetX / this.canvas.clientWidth) * shown.length);
    const row = shown[Math.min(Math.max(at, 0), shown.length - 1)];
    const words = [`Rank ${row.rank}${row.host ? ` on ${row.host}` : ""}`, `compute ${seconds(row.compute)}`, `waiting ${seconds(row.waiting)}`];
    showTip(words, event);
  }
}

class Histogram {
  constructor(values, paints) {
    this.paints = paints;
    const sorted = ordered(values);
    const [least, most] = [sorted[0], sorted[sorted.length - 1]];
    this.counts = new Array(BINS).fill(0);
    for (const value of sorted) this.counts[Math.min(BINS - 1, Math.floor(((value - least) / (most - least || 1)) * BINS))]++;
    const middle = seconds(sorted[sorted.length >> 1]);
    const words = `Waiting: least ${seconds(least)}, median ${middle}, most ${seconds(most)}`;
    this.canvas = el("canvas", { role: "img", "aria-label": words });
    this.canvas.style.height = `${STRIP}px`;
    this.element = el("figure", {}, el("figcaption", {}, "How many ranks wait for how long"), this.canvas,
      el("p", { class: "ends" }, el("span", {}, seconds(least)), el("span", {}, `median ${middle}`), el("span", {}, seconds(most))));
  }

  draw() {
    const context = sharpContext(this.canvas, STRIP);
    const width = this.canvas.clientWidth / BINS;
    const most = Math.max(...this.counts);
    context.fillStyle = this.paints.dim;
    this.counts.forEach((count, i) => {
      const height = count ? Math.max(2, (count / most) * STRIP) : 0; // one rank apart must be seen
      context.fillRect(i * width, STRIP - height, width - 1, height);
    });
  }
}
