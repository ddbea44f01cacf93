// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// The seconds of a step over the rate of the link between nodes. Both axes are logarithmic.

const SHOWN = ["ZeRO-1", "ZeRO-2", "ZeRO-3", "III", "NIG", "IIG"]; // and the choice
const POINTS = 80;
const MARGIN = { left: 58, right: 12, top: 10, bottom: 40 };

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function classOf(row, chosen) {
  const known = SHOWN.includes(row.name) || row.plain;
  return `of-${known ? row.name : "other"}${row.plain ? " plain" : ""}${row.name === chosen ? " choice" : ""}`;
}

// Rows of a plan at a rate that are drawn, whichever rate that is.
function rowsAt(settings, rate, names) {
  const { plain, predictions } = plan({ ...settings, inter_gbps: rate });
  return [...plain, ...predictions].filter((row) => names.includes(row.name));
}

// From 1 to 4,000 Gbit/s, or further where the entered rate is outside.
function rateSpan(rate) {
  return [Math.min(1, rate / 4), Math.max(4000, rate * 4)];
}

function logScale([from, to], [start, end]) {
  const [a, b] = [Math.log(from), Math.log(to)];
  return (value) => start + ((Math.log(value) - a) / (b - a)) * (end - start);
}

// 1, 2 and 5 times powers of ten; powers alone where that would be many.
function ticks([from, to]) {
  const steps = Math.log10(to / from) > 2 ? [1] : [1, 2, 5];
  const powers = Array.from({ length: 32 }, (_, i) => i - 12);
  const all = powers.flatMap((power) => steps.map((step) => Number(`${step}e${power}`)));
  return all.filter((tick) => tick >= from * 0.999 && tick <= to * 1.001);
}

function drawCurve(settings, result) {
  const { plain, predictions, fits, choice } = result;
  const names = [...plain, ...predictions]
    .filter((row) => fits(row) && (SHOWN.includes(row.name) || row === choice))
    .map((row) => row.name);
  const section = document.getElementById("curve");
  section.hidden = !names.length || settings.nodes === 1;
  if (section.hidden) return;
  const figure = section.querySelector("figure");
  const [width, height] = [figure.clientWidth, 340];
  const span = rateSpan(settings.inter_gbps);
  const rates = Array.from({ length: POINTS + 1 }, (_, i) => span[0] * (span[1] / span[0]) ** (i / POINTS));
  const columns = rates.map((rate) => rowsAt(settings, rate, names));
  const all = columns.flatMap((rows) => rows.map((row) => row.total_seconds));
  const seconds = [Math.min(...all) / 1.15, Math.max(...all) * 1.15];
  const x = logScale(span, [MARGIN.left, width - MARGIN.right]);
  const y = logScale(seconds, [height - MARGIN.bottom, MARGIN.top]);
  const drawing = svg("svg", {
    width,
    height,
    role: "img",
    "aria-label": "Seconds over Gbit/s: the table has the figures",
  });
  drawing.append(...axes(span, seconds, x, y, { width, height }));
  const here = svg("path", { class: "here" });
  const lines = names.map((name, i) => {
    const points = columns.map((rows, at) => `${x(rates[at]).toFixed(1)} ${y(rows[i].total_seconds).toFixed(1)}`);
    return svg("path", { class: `curve ${classOf(columns[0][i], choice.name)}`, d: `M${points.join("L")}` });
  });
  // The wide one is behind the others, and dashed ones before them, since many coincide.
  const depth = (line) => (line.matches(".choice") ? 0 : line.matches(".plain") ? 2 : 1);
  drawing.append(here, ...lines.sort((a, b) => depth(a) - depth(b)));
  figure.replaceChildren(drawing);
  const show = (rate) => {
    here.setAttribute("d", `M${x(rate)} ${MARGIN.top}V${height - MARGIN.bottom}`);
    showLegend(rowsAt(settings, rate, names), rate, choice.name);
  };
  const rateOf = (event) => {
    const share = (event.offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    return span[0] * (span[1] / span[0]) ** Math.min(1, Math.max(0, share));
  };
  drawing.addEventListener("pointermove", (event) => show(rateOf(event)));
  drawing.addEventListener("pointerleave", () => show(settings.inter_gbps));
  show(settings.inter_gbps);
}

function axes(span, seconds, x, y, { width, height }) {
  const bottom = height - MARGIN.bottom;
  const tick = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 12 });
  return [
    ...ticks(span).flatMap((rate) => [
      svg("path", { class: "grid", d: `M${x(rate)} ${MARGIN.top}V${bottom}` }),
      svg("text", { x: x(rate), y: bottom + 16, "text-anchor": "middle" }, tick(rate)),
    ]),
    ...ticks(seconds).flatMap((value) => [
      svg("path", { class: "grid", d: `M${MARGIN.left} ${y(value)}H${width - MARGIN.right}` }),
      svg("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, `${tick(value)} s`),
    ]),
    svg("text", { x: width - MARGIN.right, y: height - 6, "text-anchor": "end" }, "Gbit/s between nodes, per node"),
  ];
}

function showLegend(rows, rate, chosen) {
  const line = (row) =>
    svg(
      "svg",
      { width: 26, height: 4, "aria-hidden": "true" },
      svg("path", { class: `curve ${classOf(row, chosen)}`, d: "M0 2H26" }),
    );
  const entries = rows
    .sort((a, b) => a.total_seconds - b.total_seconds)
    .map((row) => {
      const label = el(
        "span",
        row.name === chosen ? { class: "choice" } : {},
        `${hyphenated(row.name)} ${seconds(row.total_seconds)}`,
      );
      return el("span", { class: "key" }, line(row), label);
    });
  const at = el("span", {}, `At ${Number(rate.toPrecision(3)).toLocaleString("en-US")} Gbit/s:`);
  document.querySelector("#curve .legend").replaceChildren(at, ...entries);
}
