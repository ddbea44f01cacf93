// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Tables of links, operations, modules, memory and strategies.

const HOPS = { within: "Within groups", between: "Between groups" };
const MODULES = 12; // shown at first
const WORTH = 0.05; // of a step: less is no reason to change a strategy
const TIE = 1.03; // strategies within this of the fastest are as fast: the planner takes the smallest

function swatched(hop, text) {
  return hop in HOPS ? el("span", {}, el("span", { class: `swatch fill-${hop}`, "aria-hidden": "true" }), text) : text;
}

function ratio(value, of) {
  return isNumber(value) && of > 0 ? `${(value / of).toFixed(2)} ×` : "–";
}

// A bar beside numbers that say the same: for eyes only.
function bar(share, kind) {
  const made = el("span", { class: `fill fill-${kind}` });
  made.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, made);
}

// Only columns in which some row has a number.
function known(rows, columns) {
  return columns.filter(([value]) => value === null || rows.some((row) => isNumber(value(row)))).map(([, column]) => column);
}

function drawHops(report) {
  const rows = report.hops ?? [];
  if (!rows.length) return;
  const [nbytes, formula] = [(row) => row.bytes, (row) => row.formula_bytes];
  const [rate, probed] = [(row) => row.rate, (row) => row.probed_rate];
  const [exposed, predicted] = [(row) => row.exposed, (row) => row.predicted_exposed];
  fill("hops", table("Links in a step", known(rows, [
    [null, { head: "Link", header: true, value: (row) => swatched(row.hop, HOPS[row.hop] ?? row.hop) }],
    [nbytes, quantity("Received", rows, nbytes, BYTES)],
    [formula, quantity("Formula", rows, formula, BYTES)],
    [formula, { head: "of formula", number: true, value: (row) => ratio(row.bytes, row.formula_bytes) }],
    [null, quantity("Busy", rows, (row) => row.busy, SECONDS)],
    [null, quantity("Exposed", rows, exposed, SECONDS)],
    [predicted, quantity("Predicted exposed", rows, predicted, SECONDS)],
    [rate, quantity("Rate", rows, rate, RATES)],
    [probed, quantity("Probed", rows, probed, RATES)],
    [probed, { head: "of probed", number: true, value: (row) => ratio(row.rate, row.probed_rate) }],
  ]), rows));
}

function drawOperations(report) {
  const rows = report.operations ?? [];
  if (!rows.length) return;
  const counts = rows.map((row) => row.count).filter(isNumber);
  const digits = counts.every(Number.isInteger) ? 0 : 1;
  const most = Math.max(...rows.map((row) => row.exposed ?? 0));
  fill("operations", table("Operations in a step", [
    { head: "Operation", header: true, value: (row) => el("code", { class: "name" }, row.name) },
    { head: "Link", kind: "whole", value: (row) => swatched(row.hop, HOPS[row.hop] ?? row.hop ?? "") },
    { head: "Count", number: true, value: (row) => (isNumber(row.count) ? grouped(row.count, digits) : "–") },
    quantity("Received", rows, (row) => row.bytes, BYTES),
    quantity("Busy", rows, (row) => row.busy, SECONDS),
    quantity("Exposed", rows, (row) => row.exposed, SECONDS),
    { head: "", kind: "bars", value: (row) => bar(row.exposed / most, row.hop) },
  ], rows));
}

function drawModules(report) {
  const rows = (report.modules ?? []).filter((row) => row.exposed > 0);
  if (!rows.length) return;
  const step = sum((report.parts ?? []).map((part) => part.seconds));
  const columns = [
    { head: "Module", header: true, value: (row) => el("code", { class: "name" }, row.module || "(the model itself)") },
    quantity("Exposed", rows, (row) => row.exposed, SECONDS),
    { head: "Of the step", number: true, value: (row) => (step > 0 ? percent(row.exposed / step) : "–") },
    { head: "", kind: "bars", value: (row) => bar(row.exposed / rows[0].exposed, "other") },
  ];
  fill("modules", shortened(table("Modules by exposed time", columns, rows), MODULES));
}

function drawMemory(report) {
  const rows = report.memory ?? [];
  if (!rows.length) return;
  const formula = (row) => row.formula;
  const total = rows.every((row) => isNumber(row.formula)) ? sum(rows.map(formula)) : null;
  const every = [...rows, { state: "Sum", bytes: sum(rows.map((row) => row.bytes)), formula: total }];
  fill("memory", table("Model states of a rank", known(every, [
    [null, { head: "State", header: true, value: (row) => row.state.charAt(0).toUpperCase() + row.state.slice(1) }],
    [null, quantity("Held", every, (row) => row.bytes, BYTES)],
    [formula, quantity("Formula", every, formula, BYTES)],
    [formula, { head: "of formula", number: true, value: (row) => ratio(row.bytes, row.formula) }],
  ]), every, (row) => (row.state === "Sum" ? "total" : null)));
}

function drawChoices(report) {
  const rows = report.choices ?? [];
  if (!rows.length) return;
  const most = Math.max(...rows.map((row) => row.step));
  const now = rows.find((row) => row.now);
  const section = fill("choices", table("Predicted step under each strategy", [
    { head: "Strategy", header: true, value: choiceName },
    { head: "", kind: "bars", value: (row) => bar(row.step / most, row.now ? "now" : "choice") },
    quantity("Step", rows, (row) => row.step, SECONDS),
    { head: "Against now", number: true, value: (row) => (now ? ratio(row.step, now.step) : "–") },
    quantity("Busy within", rows, (row) => row.within, SECONDS),
    quantity("Busy between", rows, (row) => row.between, SECONDS),
    quantity("Between", rows, (row) => row.bytes_between, BYTES),
    quantity("States", rows, (row) => row.gb * 1e9, BYTES),
    { head: "Keys", value: keysButton },
  ], rows, (row) => (row.now ? "now" : row.fits === false ? "unfit" : null)));
  section.querySelector(".snippet button").addEventListener("click", copySnippet);
  showBest(rows, now);
}

function choiceName(row) {
  const mark = row.now ? el("span", { class: "badge" }, "now") : null;
  const unfit = row.fits === false ? el("span", { class: "badge" }, "does not fit") : null;
  return el("span", {}, el("span", { class: "name" }, row.strategy), mark, unfit);
}

// The section of ds_config that makes a strategy run, or null for a name that is not known here.
function keysOf(name) {
  const [first, ...more] = name.split(" + ");
  const stage = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"].indexOf(first);
  const added = { LoCo: { zeropp_loco_param: {} }, updates: { paro_quantized_updates: {} } };
  if ((stage < 0 && !/^[NIG]{3}$/.test(first)) || more.some((one) => !(one in added))) return null;
  const zero = stage < 0 ? { paro_strategy: first } : { stage };
  return { zero_optimization: Object.assign(zero, ...more.map((one) => added[one])) };
}

function keysButton(row) {
  if (!keysOf(row.strategy)) return "";
  const made = el("button", { type: "button", "aria-label": `Show the keys of ${row.strategy}` }, "Show");
  made.addEventListener("click", () => {
    showKeys(row.strategy, `The keys of ${row.strategy}, in ds_config:`);
    document.getElementById("setting").scrollIntoView({ block: "nearest" });
  });
  return made;
}

// As the findings choose: what crosses as it is comes first, since the other changes the training.
function showBest(rows, now) {
  const fitting = rows.filter((row) => row.fits !== false && !row.strategy.includes(" + "));
  const quickest = Math.min(...fitting.map((row) => row.step));
  const close = fitting.filter((row) => row.step <= TIE * quickest).sort((a, b) => a.gb - b.gb || a.step - b.step);
  const best = close[0];
  if (!best || best.now) return;
  const worth = !now || best.step < (1 - WORTH) * now.step;
  const gain = now ? `, predicted ${seconds(best.step)} instead of ${seconds(now.step)}` : "";
  if (worth) showKeys(best.strategy, `To try ${best.strategy}${gain}, set in ds_config:`);
}

function showKeys(name, words) {
  const keys = keysOf(name);
  if (!keys) return;
  const setting = document.getElementById("setting");
  document.getElementById("setting-of").textContent = words;
  setting.querySelector("code").textContent = JSON.stringify(keys).replaceAll(":", ": ").replaceAll(",", ", ");
  const plain = name.startsWith("ZeRO") || name === "DDP";
  setting.querySelector("[role=status]").textContent = plain ? "And remove paro_strategy." : "";
  setting.hidden = false;
}

async function copySnippet(event) {
  const code = event.target.parentElement.querySelector("code");
  const status = document.querySelector("#setting [role=status]");
  getSelection().selectAllChildren(code); // remains where the clipboard is forbidden
  try {
    await navigator.clipboard.writeText(code.textContent);
    status.textContent = "Copied.";
  } catch {
    status.textContent = "Selected: copy it with the keyboard.";
  }
}
