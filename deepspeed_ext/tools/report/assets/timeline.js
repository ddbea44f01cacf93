// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Timelines of ranks, on a canvas each, since a step may have 20,000 spans. All show the same stretch of time.

const LANES = { training: "Training", within: "Within groups", between: "Between groups", copies: "Copies" };
const AXIS = 22; // heights in pixels
const TITLE = 17;
const STEP_DOWN = 15; // from a span to one that lies in it
const ROW = 14;
const MOST_OF_LANE = 170; // a lane with many rows gets flat ones
const LABEL = { font: "11px system-ui, sans-serif", character: 6.4, least: 6 };

class Timeline {
  constructor(timeline, view, hopOf, paints) {
    Object.assign(this, { view, hopOf, paints, hovered: null, chosen: null, waiting: false });
    this.lanes = (timeline.lanes ?? []).filter((lane) => lane.spans.length).map(laidOut);
    this.spans = byBegin(this.lanes.flatMap((lane) => lane.spans));
    let top = AXIS;
    for (const lane of this.lanes) {
      lane.top = top + TITLE;
      top = lane.top + lane.height + 8;
    }
    this.height = top;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": `Timeline: ${titleOf(timeline)}` });
    this.canvas.dataset.spans = this.spans.length;
    this.canvas.style.height = `${this.height}px`;
    this.words = el("p", { class: "chosen", "aria-live": "polite" }, "No bar is chosen.");
    this.element = el(
      "figure",
      { class: "timeline" },
      el("figcaption", {}, titleOf(timeline)),
      this.canvas,
      this.words,
    );
    this.listen();
  }

  listen() {
    this.view.listeners.push(() => this.later());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    const on = (name, handler, options) => this.canvas.addEventListener(name, handler, options);
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("keydown", (event) => this.key(event));
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.point(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", () => (this.dragged = null));
    on("pointerleave", () => this.hover(null));
    on("dblclick", () => this.zoomToChosen());
    on("blur", () => this.hover(null));
  }

  // Drawing

  later() {
    if (this.waiting) return; // events come faster than frames
    this.waiting = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.waiting = false;
    const context = sharpContext(this.canvas, this.height);
    this.width = this.canvas.clientWidth;
    context.font = LABEL.font;
    context.textBaseline = "middle";
    this.drawAxis(context);
    for (const lane of this.lanes) this.drawLane(context, lane);
    for (const span of [this.hovered, this.chosen]) if (span) this.outline(context, span);
  }

  toX(time) {
    return ((time - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  toTime(x) {
    return this.view.from + (x / this.width) * (this.view.to - this.view.from);
  }

  drawAxis(context) {
    const { from, to } = this.view;
    const step = roundStep((to - from) / Math.max(2, this.width / 110));
    const scale = scaleOf([to], SECONDS);
    scale.digits = Math.max(0, Math.ceil(-Math.log10(step / scale.size) - 1e-9));
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = Math.round(this.toX(at)) + 0.5;
      context.fillStyle = this.paints.grid;
      context.fillRect(x - 0.5, AXIS - 6, 1, this.height - AXIS + 6);
      context.fillStyle = this.paints.dim;
      const label = `${scaled(at, scale)} ${scale.unit}`;
      if (x + 4 + context.measureText(label).width < this.width) context.fillText(label, x + 4, AXIS / 2);
    }
  }

  drawLane(context, lane) {
    context.fillStyle = this.paints.text;
    context.fillText(lane.title, 0, lane.top - TITLE / 2);
    lane.rows.forEach((row, depth) => {
      const [top, height] = lane.place(depth);
      this.drawRow(context, lane, row, lane.top + top, height);
    });
  }

  // Of the spans that share a pixel the longest one is drawn, and neighboring pixels that look the same as one bar:
  // so a row takes at most a bar per pixel, however many spans it has.
  drawRow(context, lane, row, top, height) {
    let [run, pixel] = [null, null];
    const end = () => {
      if (pixel && run && run.to === pixel.at && run.fill === pixel.fill) run.to++;
      else {
        if (run) this.fill(context, run.fill, run.from, run.to, top, height);
        run = pixel && { fill: pixel.fill, from: pixel.at, to: pixel.at + 1 };
      }
      pixel = null;
    };
    for (let i = firstAfter(row, this.view.from); i < row.length && row[i][BEGIN] < this.view.to; i++) {
      const [left, right] = [Math.max(0, this.toX(row[i][BEGIN])), Math.min(this.width, this.toX(row[i][END]))];
      const [at, width] = [Math.floor(left), right - left];
      if (width < 1 && pixel?.at === at && width <= pixel.width) continue;
      if (pixel?.at !== at) end();
      if (width < 1) pixel = { at, width, fill: this.fillOf(lane, row[i]) };
      else this.paint(context, lane, row[i], left, right, top, height);
    }
    end();
    end();
  }

  fill(context, { color, hatch }, left, right, top, height) {
    for (const style of hatch ? [color, hatch] : [color]) {
      context.fillStyle = style;
      context.fillRect(left, top, right - left, height);
    }
  }

  paint(context, lane, span, left, right, top, height) {
    const fill = this.fillOf(lane, span);
    this.fill(context, fill, left, right, top, height);
    if (right - left < 4) return;
    context.fillStyle = this.paints.gap;
    context.fillRect(right - 1, top, 1, height);
    if (lane.nested) context.fillRect(left, top, right - left, 1);
    if (height > 10) this.label(context, span, left, right, top + Math.min(height, STEP_DOWN) / 2, fill);
  }

  label(context, span, left, right, y, fill) {
    const room = Math.floor((right - left - 8) / LABEL.character);
    const whole = (span[KIND] === "forward" || span[KIND] === "backward" ? span[MODULE] : null) ?? span[NAME];
    if (room < Math.min(whole.length, LABEL.least)) return;
    const text = whole.length > room ? `${whole.slice(0, room - 1)}…` : whole;
    if (fill.hatch) {
      // which makes letters hard to read
      context.fillStyle = fill.color;
      context.fillRect(left + 2, y - 6, Math.min(context.measureText(text).width + 4, right - left - 4), 13);
    }
    context.fillStyle = fill.ink;
    context.fillText(text, left + 4, y + 0.5);
  }

  fillOf(lane, span) {
    if (span[KIND] === "wait") return this.paints.wait[this.hopOf(span[NAME])];
    if (lane.name === "within" || lane.name === "between")
      return this.paints.link[lane.name][span[KIND]] ?? this.paints.other;
    return this.paints[span[KIND]] ?? this.paints.other;
  }

  outline(context, span) {
    const lane = this.lanes.find((one) => one.spans.includes(span));
    const [top, height] = lane.place(lane.rows.findIndex((row) => row.includes(span)));
    const left = Math.max(1, this.toX(span[BEGIN]));
    const right = Math.min(this.width - 1, Math.max(this.toX(span[END]), left + 2));
    if (right < left) return; // out of view
    context.strokeStyle = this.paints.text;
    context.lineWidth = 2;
    context.strokeRect(left, lane.top + top, right - left, height);
  }

  // Pointer and keys

  at(event) {
    const x = event.offsetX;
    const lane = this.lanes.find((one) => event.offsetY >= one.top && event.offsetY < one.top + one.height);
    if (!lane) return null;
    const [time, tolerance] = [this.toTime(x), this.toTime(x + 2) - this.toTime(x)];
    for (let depth = lane.rows.length - 1; depth >= 0; depth--) {
      const [top, height] = lane.place(depth);
      const inside = event.offsetY - lane.top >= top && event.offsetY - lane.top < top + height;
      const span = inside ? spanAt(lane.rows[depth], time, tolerance) : null;
      if (span) return span;
    }
    return null;
  }

  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return; // the page scrolls past
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1; // per line, where the device counts lines
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.view.move((event.deltaX * pixels) / this.width);
    else this.view.zoom(Math.exp(-event.deltaY * pixels * 0.002), this.toTime(event.offsetX));
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.dragged = { x: event.offsetX, from: this.view.from, to: this.view.to, far: false };
  }

  point(event) {
    if (!this.dragged) return this.hover(this.at(event), event);
    const by = event.offsetX - this.dragged.x;
    this.dragged.far ||= Math.abs(by) > 3; // less is a click
    if (!this.dragged.far) return;
    this.hover(null);
    const time = (by / this.width) * (this.dragged.to - this.dragged.from);
    this.view.show(this.dragged.from - time, this.dragged.to - time);
  }

  release(event) {
    const clicked = this.dragged && !this.dragged.far;
    this.dragged = null;
    if (clicked) this.choose(this.at(event));
  }

  hover(span, event) {
    showTip(span ? spanWords(span) : null, event);
    if (span === this.hovered) return;
    this.hovered = span;
    this.later();
  }

  choose(span) {
    this.chosen = span;
    this.words.textContent = span ? spanWords(span).join(" · ") : "No bar is chosen.";
    if (span && (span[END] < this.view.from || span[BEGIN] > this.view.to)) {
      const half = (this.view.to - this.view.from) / 2;
      this.view.show(span[BEGIN] - half, span[BEGIN] + half);
    }
    this.later();
  }

  next(by) {
    const shown = this.spans.findIndex((span) => span[END] > this.view.from);
    const at = this.chosen ? this.spans.indexOf(this.chosen) + by : shown;
    this.choose(this.spans[Math.min(Math.max(at, 0), this.spans.length - 1)]);
  }

  zoomToChosen() {
    if (!this.chosen) return;
    const around = 0.25 * (this.chosen[END] - this.chosen[BEGIN]);
    this.view.show(this.chosen[BEGIN] - around, this.chosen[END] + around);
  }

  key(event) {
    const actions = {
      "+": () => this.view.zoom(1.5),
      "=": () => this.view.zoom(1.5),
      "-": () => this.view.zoom(1 / 1.5),
      ArrowLeft: () => this.view.move(-0.2),
      ArrowRight: () => this.view.move(0.2),
      0: () => this.view.whole(),
      Home: () => this.view.whole(),
      n: () => this.next(1),
      p: () => this.next(-1),
      Enter: () => this.zoomToChosen(),
      Escape: () => this.choose(null),
    };
    const action =
      event.ctrlKey || event.metaKey || event.altKey
        ? null
        : actions[event.key.length > 1 ? event.key : event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

function laidOut(lane) {
  const nested = lane.lane === "training";
  const rows = nested ? nestedRows(lane.spans) : sideBySide(lane.spans);
  const title = `${LANES[lane.lane] ?? lane.lane}`;
  const row = Math.max(1, Math.min(ROW, MOST_OF_LANE / rows.length));
  const height = nested ? STEP_DOWN * (rows.length - 1) + ROW + 4 : row * rows.length;
  // What lies in a span is drawn in its lower part; what runs beside it, below it.
  const place = (depth) =>
    nested ? [STEP_DOWN * depth, height - STEP_DOWN * depth] : [row * depth, row - (row > 4 ? 1 : 0)];
  return { name: lane.lane, spans: lane.spans, title, nested, rows, height, place };
}

function titleOf(timeline) {
  const why = {
    slowest: "the slowest rank: it waits least, and the others wait for it",
    fastest: "the fastest rank: it waits most",
  };
  const where = timeline.host ? ` on ${timeline.host}` : "";
  const who = `Rank ${timeline.rank}${where}, ${why[timeline.which] ?? timeline.which}.`;
  return `${who} Step ${timeline.step}, ${seconds(timeline.seconds)}.`;
}

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

// A canvas with a pixel for each of the screen's, cleared.
function sharpContext(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(canvas.clientWidth * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, height);
  return context;
}

function showTip(words, event) {
  const tip = document.getElementById("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.replaceChildren(...words.map((word, i) => el(i ? "div" : "strong", {}, word)));
  const left =
    event.clientX + 14 + tip.offsetWidth > window.innerWidth
      ? event.clientX - 14 - tip.offsetWidth
      : event.clientX + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 4)}px`;
}

// What waits are for is in their names; an operation of both hops does not say for which it was waited.
function hopFinder(operations) {
  const hops = new Map();
  for (const { name, hop } of operations) hops.set(name, hops.has(name) && hops.get(name) !== hop ? "unknown" : hop);
  return (name) => {
    const hop = hops.get(name.replace(/^wait for /, ""));
    return hop === "within" || hop === "between" ? hop : "unknown";
  };
}

function drawTimelines(report, paints) {
  const shown = (report.timelines ?? []).filter((one) => (one.lanes ?? []).some((lane) => lane.spans.length));
  if (!shown.length) return [];
  const section = document.getElementById("timelines");
  section.hidden = false; // before drawing: what is hidden has no width
  const ends = shown.flatMap((one) => one.lanes.flatMap((lane) => lane.spans.map((span) => span[END])));
  const view = new View(
    ends.reduce((most, end) => Math.max(most, end), Math.max(...shown.map((one) => one.seconds ?? 0))),
  );
  const hopOf = hopFinder(report.operations ?? []);
  const made = shown.map((one) => new Timeline(one, view, hopOf, paints));
  section.querySelector(".drawn").append(...made.map((one) => one.element));
  addToolbar(section.querySelector(".toolbar"), view);
  addLegend(section.querySelector(".legend"), shown);
  return made;
}

function addLegend(legend, timelines) {
  const lanes = timelines.flatMap((one) => one.lanes);
  const kinds = new Set(lanes.flatMap((lane) => lane.spans.map((span) => `${lane.lane} ${span[KIND]}`)));
  const rows = [
    ["training forward", "forward", "Forward"],
    ["training backward", "backward", "Backward"],
    ["training update", "update", "Update"],
    ["training wait", "wait", "Wait"],
    ["training other", "other", "Other"],
    ["within gather", "within-gather", "Gather within"],
    ["within reduce", "within", "Reduce within"],
    ["between gather", "between-gather", "Gather between"],
    ["between reduce", "between", "Reduce between"],
    ["copies copy", "copy", "Copy"],
  ];
  for (const [key, fill, name] of rows.filter(([key]) => kinds.has(key))) {
    legend.append(el("span", {}, el("span", { class: `swatch fill-${fill}`, "aria-hidden": "true" }), name));
  }
}
