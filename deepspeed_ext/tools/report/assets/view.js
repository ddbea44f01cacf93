// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// The stretch of time that all timelines show, and the buttons that change it.

class View {
  constructor(most) {
    this.most = most;
    this.listeners = [];
    [this.from, this.to] = [0, most];
  }

  show(from, to) {
    const width = Math.min(this.most, Math.max(to - from, this.most / 1e5));
    this.from = Math.min(Math.max(0, from), this.most - width);
    this.to = this.from + width;
    this.listeners.forEach((listener) => listener());
  }

  zoom(factor, center = (this.from + this.to) / 2) {
    this.show(center - (center - this.from) / factor, center + (this.to - center) / factor);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  whole() {
    this.show(0, this.most);
  }
}

function addToolbar(toolbar, view) {
  const button = (text, name, action) => {
    const made = el("button", { type: "button", "aria-label": name, title: name }, text);
    made.addEventListener("click", action);
    return made;
  };
  const range = el("output", {});
  const say = () => {
    const scale = scaleOf([view.most], SECONDS);
    scale.digits = Math.min(
      6,
      Math.max(scale.digits, Math.ceil(1.5 - Math.log10((view.to - view.from) / scale.size))),
    );
    range.textContent = `${scaled(view.from, scale)} to ${scaled(view.to, scale)} ${scale.unit}`;
  };
  toolbar.append(
    button("−", "Zoom out", () => view.zoom(1 / 2)),
    button("+", "Zoom in", () => view.zoom(2)),
    button("←", "Move left", () => view.move(-0.25)),
    button("→", "Move right", () => view.move(0.25)),
    button("Whole step", "Show the whole step", () => view.whole()),
    range,
  );
  view.listeners.push(say);
  say();
}
