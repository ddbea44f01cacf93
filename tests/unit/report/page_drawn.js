// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Looks first, then acts: zooms by a key, a button and the wheel, drags, points, chooses a bar and a strategy.
(window, document) => {
  const all = (selector, value) => [...document.querySelectorAll(selector)].map(value);
  const shown = (selector) => document.querySelector(selector)?.textContent ?? null;
  const painted = (canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(new Uint32Array(pixels.buffer)).size;
  };
  const found = {
    drawn: document.documentElement.dataset.drawn, title: document.title,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    sections: all("main > section[id]:not([hidden]):not(#verdict)", (one) => one.id),
    parts: all(".stack", (bar) => [...bar.children].map((one) => one.getBoundingClientRect().width)),
    spans: all(".timeline canvas", (one) => Number(one.dataset.spans)), colors: all("canvas", painted),
    ranks: all("#ranks tbody tr", (row) => row.cells[0].textContent),
    now: shown("tr.now .name"), setting: shown("#setting:not([hidden]) code"),
    findings: all("#findings li", (one) => one.textContent),
    images: document.querySelectorAll("img").length, scripts: document.scripts.length, range: [], said: [],
  };
  const [canvas] = document.querySelectorAll(".timeline canvas");
  if (!canvas) return found;
  canvas.scrollIntoView();
  canvas.setPointerCapture = () => {}; // there is no pointer
  const box = canvas.getBoundingClientRect();
  const range = () => found.range.push(shown(".toolbar output"));
  const key = (name) => canvas.dispatchEvent(new window.KeyboardEvent("keydown", { key: name, bubbles: true }));
  const at = (type, x, y) => {
    canvas.dispatchEvent(new window.PointerEvent(type, { clientX: box.left + x, clientY: box.top + y }));
  };
  range();
  key("+"); range();
  key("0"); range();
  document.querySelector("[aria-label='Zoom in']").click(); range();
  at("pointerdown", 300, 50); at("pointermove", 200, 50); at("pointerup", 200, 50); range();
  key("0");
  at("pointermove", 2, 62); found.said.push(shown("#tip:not([hidden])"));
  document.querySelector("[aria-label='Show the keys of N-I-G + LoCo']")?.click();
  found.said.push(shown("#setting code"));
  return found;
}
