// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Tables of links, operations, modules, memory and strategies.

const HOPS = { within: "Within groups", between: "Between groups" };
const SHOWN = 12; // rows, at first
const BEST = 5; // of strategies, with and without loss
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

function drawHops(report) {
  const rows = report.hops ?? [];
  if (!rows.length) return;
  const columns = [
    { head: "Link", header: true, value: (row) => swatched(row.hop, HOPS[row.hop] ?? row.hop) },
    ...quantities(rows, BYTES, [
      ["Received", (row) => row.bytes],
      ["Formula", (row) => row.formula_bytes],
    ]),
    {
      head: "of formula",
      number: true,
      of: (row) => row.formula_bytes,
      value: (row) => ratio(row.bytes, row.formula_bytes),
    },
    ...quantities(rows, SECONDS, [
      ["Busy", (row) => row.busy],
      ["Exposed", (row) => row.exposed],
      ["Predicted exposed", (row) => row.predicted_exposed],
    ]),
    ...quantities(rows, RATES, [
      ["Rate", (row) => row.rate],
      ["Probed", (row) => row.probed_rate],
    ]),
    {
      head: "of probed",
      number: true,
      of: (row) => row.probed_rate,
      value: (row) => ratio(row.rate, row.probed_rate),
    },
  ];
  fill("hops", table("Links in a step", known(rows, columns), rows));
}

function drawOperations(report) {
  const rows = report.operations ?? [];
  if (!rows.length) return;
  const counts = rows.map((row) => row.count).filter(isNumber);
  const digits = counts.every(Number.isInteger) ? 0 : 1;
  const most = Math.max(...rows.map((row) => row.exposed ?? 0));
  const columns = [
    { head: "Operation", header: true, value: (row) => el("code", { class: "name" }, row.name) },
    { head: "Link", kind: "whole", value: (row) => swatched(row.hop, HOPS[row.hop] ?? row.hop ?? "") },
    { head: "Count", number: true, value: (row) => (isNumber(row.count) ? grouped(row.count, digits) : "–") },
    quantity("Received", rows, (row) => row.bytes, BYTES),
    ...quantities(rows, SECONDS, [
      ["Busy", (row) => row.busy],
      ["Exposed", (row) => row.exposed],
    ]),
    { head: "", kind: "bars", value: (row) => bar(row.exposed / most, row.hop) },
  ];
  fill(
    "operations",
    shortened(table("Operations in a step", columns, rows), (i) => i < SHOWN),
  );
}

function drawModules(report) {
  const rows = (report.modules ?? []).filter((row) => row.exposed > 0);
  if (!rows.length) return;
  const step = sum((report.parts ?? []).map((part) => part.seconds));
  const columns = [
    {
      head: "Module",
      header: true,
      value: (row) => el("code", { class: "name" }, row.module || "(the model itself)"),
    },
    quantity("Exposed", rows, (row) => row.exposed, SECONDS),
    { head: "Of the step", number: true, value: (row) => (step > 0 ? percent(row.exposed / step) : "–") },
    { head: "", kind: "bars", value: (row) => bar(row.exposed / rows[0].exposed, "other") },
  ];
  fill(
    "modules",
    shortened(table("Modules by exposed time", columns, rows), (i) => i < SHOWN),
  );
}

function drawMemory(report) {
  const rows = report.memory ?? [];
  if (!rows.length) return;
  const total = rows.every((row) => isNumber(row.formula)) ? sum(rows.map((row) => row.formula)) : null;
  const every = [...rows, { state: "sum", bytes: sum(rows.map((row) => row.bytes)), formula: total }];
  const columns = [
    { head: "State", header: true, value: (row) => row.state.charAt(0).toUpperCase() + row.state.slice(1) },
    ...quantities(every, BYTES, [
      ["Held", (row) => row.bytes],
      ["Formula", (row) => row.formula],
    ]),
    { head: "of formula", number: true, of: (row) => row.formula, value: (row) => ratio(row.bytes, row.formula) },
  ];
  const classOf = (row) => (row.state === "sum" ? "total" : null);
  fill("memory", table("Model states of a rank", known(every, columns), every, classOf));
}

function drawChoices(report) {
  const rows = report.choices ?? [];
  if (!rows.length) return;
  const most = Math.max(...rows.map((row) => row.step));
  const now = rows.find((row) => row.now);
  const best = bestOf(rows);
  const columns = [
    { head: "Strategy", header: true, value: choiceName },
    { head: "", kind: "bars", value: (row) => bar(row.step / most, row.now ? "now" : "choice") },
    quantity("Step", rows, (row) => row.step, SECONDS),
    { head: "Against now", number: true, of: () => now?.step, value: (row) => ratio(row.step, now?.step) },
    ...quantities(rows, SECONDS, [
      ["Busy within", (row) => row.within],
      ["Busy between", (row) => row.between],
    ]),
    quantity("Between", rows, (row) => row.bytes_between, BYTES),
    quantity("Memory", rows, (row) => row.gb * 1e9, BYTES),
    { head: "Keys", value: keysButton },
  ];
  const classOf = (row) => (row.now ? "now" : row.fits === false ? "unfit" : null);
  const [exact, lossy] = [rows.filter((row) => !isLossy(row)), rows.filter(isLossy)];
  const kept = new Set([...exact.slice(0, BEST), ...lossy.slice(0, BEST), now, best]);
  const content = table("Predicted step under each strategy", known(rows, columns), rows, classOf);
  const section = fill(
    "choices",
    shortened(content, (i) => kept.has(rows[i])),
  );
  section.querySelector(".snippet button").addEventListener("click", copySnippet);
  suggest(best, now);
}

function isLossy(row) {
  return row.strategy.includes(" + ");
}

function choiceName(row) {
  const mark = row.now ? el("span", { class: "badge" }, "now") : null;
  const unfit = row.fits === false ? el("span", { class: "badge" }, "does not fit") : null;
  const known = keysOf(row.strategy) !== null; // such a name is short
  const name = el("span", { class: "name" }, hyphenated(row.strategy));
  return el("span", known ? { class: "whole" } : {}, name, mark, unfit);
}

// The section of ds_config that makes a strategy run, or null for a name that is not known here.
function keysOf(name) {
  const [first, ...more] = name.split(" + ");
  const stage = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"].indexOf(first);
  const added = { LoCo: { zeropp_loco_param: {} }, updates: { paro_quantized_updates: {} } };
  if ((stage < 0 && !/^[NIG]{3}$/.test(first)) || more.some((one) => !(one in added))) return null;
  const ofLetters = first[0] !== "N" ? 3 : first[1] !== "N" ? 2 : 1;
  const zero = stage < 0 ? { stage: ofLetters, paro_strategy: first } : { stage };
  return { zero_optimization: Object.assign(zero, ...more.map((one) => added[one])) };
}

function keysButton(row) {
  if (!keysOf(row.strategy)) return "";
  const made = el("button", { type: "button", "aria-label": `Show the keys of ${hyphenated(row.strategy)}` }, "Show");
  made.addEventListener("click", () => {
    showKeys(row.strategy, `The keys of ${hyphenated(row.strategy)}, in ds_config:`);
    document.getElementById("setting").scrollIntoView({ block: "nearest" });
  });
  return made;
}

// As the findings choose: among those that leave numbers as they are, for LoCo and updates change the training.
function bestOf(rows) {
  const fitting = rows.filter((row) => row.fits !== false && !isLossy(row));
  const quickest = Math.min(...fitting.map((row) => row.step));
  return fitting.filter((row) => row.step <= TIE * quickest).sort((a, b) => a.gb - b.gb || a.step - b.step)[0];
}

function suggest(best, now) {
  if (!best || best === now || (now && best.step >= (1 - WORTH) * now.step)) return;
  const gain = now ? `, predicted ${seconds(best.step)} instead of ${seconds(now.step)}` : "";
  showKeys(best.strategy, `To try ${hyphenated(best.strategy)}${gain}, set in ds_config:`);
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
