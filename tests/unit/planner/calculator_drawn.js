// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// All figures of all cases in one frame; then, in each: both schemes, other inputs, a fragment of them, a wrong one.
(window, document) => {
  const figures = (one) => {
    return [one.total_seconds, one.compute_seconds, one.total_memory, one.volume.intra, one.volume.inter];
  };
  const found = CASES.map((settings) => {
    const made = window.plan(settings);
    const rows = Object.fromEntries([...made.predictions, ...made.plain].map((one) => [one.name, figures(one)]));
    return { rows, choice: made.choice && figures(made.choice), words: window.verdict(made) };
  });
  const style = (selector) => window.getComputedStyle(document.querySelector(selector));
  const colors = () => [style("section").backgroundColor, style("input").color, style(".curve.plain").stroke];
  const schemes = [colors()];
  const dark = [...document.styleSheets[0].cssRules].find((rule) => rule.media?.mediaText.includes("dark"));
  dark.media.mediaText = "screen";
  schemes.push(colors());
  const read = () => ({
    words: document.querySelector(".verdict").textContent, lines: document.querySelectorAll("figure .curve").length,
    rows: document.querySelectorAll("tbody tr").length, command: document.querySelector("#command").textContent,
    keys: document.querySelector("#keys").textContent, hash: window.location.hash,
    shown: !document.querySelector("#strategies").hidden,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
  const type = (name, text) => {
    const input = document.querySelector(`#input-${name}`);
    input.value = text;
    input.dispatchEvent(new window.InputEvent("input", { bubbles: true }));
  };
  const states = [read()];
  type("params", "70B"); type("trained", "10"); states.push(read());
  window.history.replaceState(null, "", "#nodes=1&params=1e9");
  window.dispatchEvent(new window.HashChangeEvent("hashchange")); states.push(read());
  type("tokens", "many"); states.push(read());
  return { found, schemes, states };
}
