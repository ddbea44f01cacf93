// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Reads the inputs, and shows what a plan says: a sentence, the curve, and a table. The fragment keeps the inputs.

const GIGABYTES = BYTES.filter(([name]) => name !== "TB"); // and less
const SCALES = { K: 1e3, M: 1e6, B: 1e9, T: 1e12 };

function readNumber(text) {
  return /^\s*\d*\.?\d+(e[+-]?\d+)?\s*$/i.test(text) ? Number(text) : NaN;
}

function readAmount(text) {
  const value = readNumber(text);
  return value > 0 && value < Infinity ? value : NaN;
}

function readWhole(text) {
  const value = readAmount(text);
  return Number.isInteger(value) && value <= 1e6 ? value : NaN;
}

// 7000000000, 7e9 or 7B, as the command line reads it.
function readCount(text) {
  const [, digits, suffix] = /^(.*?)([KMBT]?)\s*$/i.exec(text);
  const value = Math.trunc(readAmount(digits) * (SCALES[suffix.toUpperCase()] ?? 1));
  return value >= 1 ? value : NaN;
}

function readPercent(text) {
  const value = readNumber(text);
  return value <= 100 ? value : NaN;
}

function readLimit(text) {
  return text.trim() === "" ? null : readAmount(text);
}

// Names are those of the command's options, but for `trained`.
const INPUTS = [
  { name: "nodes", label: "Nodes", initial: "4", read: readWhole, wanted: "a whole number" },
  { name: "ranks-per-node", label: "GPUs per node", initial: "8", read: readWhole, wanted: "a whole number" },
  { name: "intra-gbps", label: "Gbit/s within a node, per GPU", initial: "2400", read: readAmount },
  { name: "inter-gbps", label: "Gbit/s between nodes, per node", initial: "100", read: readAmount },
  {
    name: "memory-gb",
    label: "GB for model states, per GPU",
    initial: "60",
    read: readLimit,
    wanted: "one, or nothing",
  },
  { name: "params", label: "Parameters", initial: "7B", read: readCount, wanted: "a number such as 7e9 or 7B" },
  { name: "trained", label: "Trained, in %", initial: "100", read: readPercent, wanted: "0 to 100" },
  { name: "accumulation", label: "Micro-batches per step", initial: "8", read: readWhole, wanted: "a whole number" },
  { name: "tokens", label: "Tokens per GPU and micro-batch", initial: "4096", read: readCount },
  { name: "tflops", label: "TFLOP/s that a GPU achieves", initial: "400", read: readAmount },
];

function field(name) {
  return document.getElementById(`input-${name}`);
}

function makeInputs() {
  const made = INPUTS.map(({ name, label, initial }) =>
    el(
      "label",
      {},
      label,
      el("input", { id: `input-${name}`, value: initial, autocomplete: "off", spellcheck: "false" }),
    ),
  );
  document.getElementById("inputs").append(...made);
}

function readFragment() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const { name, initial } of INPUTS) field(name).value = kept.get(name) ?? initial;
}

function keepInFragment() {
  const kept = new URLSearchParams(INPUTS.map(({ name }) => [name, field(name).value.trim()]));
  history.replaceState(null, "", `#${kept}`);
}

// The values of all inputs by name, and a message for each that is no such value.
function readInputs() {
  const values = {};
  const problems = [];
  for (const { name, label, read, wanted = "a number above 0" } of INPUTS) {
    values[name] = read(field(name).value);
    const wrong = Number.isNaN(values[name]);
    field(name).setAttribute("aria-invalid", wrong);
    if (wrong) problems.push(`“${label}” needs ${wanted}.`);
  }
  return { values, problems };
}

function settingsOf(values) {
  return {
    nodes: values.nodes,
    ranks_per_node: values["ranks-per-node"],
    intra_gbps: values["intra-gbps"],
    inter_gbps: values["inter-gbps"],
    params: values.params,
    trainable: Math.round((values.params * values.trained) / 100),
    accumulation: values.accumulation,
    tokens: values.tokens,
    tflops: values.tflops,
    budget: values["memory-gb"] === null ? null : values["memory-gb"] * 1e9,
  };
}

function called({ name, plain }) {
  return plain ? `plain ${name}` : name === "III" ? "I-I-I (HSDP)" : hyphenated(name);
}

function verdict(result) {
  const { plain, predictions, fits, choice } = result;
  if (!choice) {
    const least = predictions.reduce((a, b) => (b.total_memory < a.total_memory ? b : a));
    const needed = `${called(least)} needs the least memory, ${bytes(least.total_memory)} on each GPU`;
    return `No strategy fits: ${needed}. Use more GPUs, or offload.`;
  }
  const { total_seconds: taken, total_memory: memory } = choice;
  const rival = compared(result);
  if (rival && !(rival.ties && rival.total_memory > memory)) {
    const itself = `${called(choice)}, the best strategy, ${seconds(taken)}`;
    return `You gain nothing here: ${called(rival)} takes ${seconds(rival.total_seconds)} per step, and ${itself}.`;
  }
  if (rival) {
    const less = bytes(rival.total_memory - memory);
    const both = `${called(choice)} is as fast as ${called(rival)}, ${seconds(taken)} per step`;
    return `${both}, in ${less} less memory on each GPU.`;
  }
  const quickest = plain.filter(fits).reduce((a, b) => (b.total_seconds < a.total_seconds ? b : a));
  const times = grouped(quickest.total_seconds / taken, quickest.total_seconds < 10 * taken ? 2 : 0);
  return (
    `${called(choice)} takes ${seconds(taken)} per step, ${called(quickest)} ${seconds(quickest.total_seconds)}: ` +
    `you gain a factor of ${times}, with ${bytes(memory)} of model states on each GPU.`
  );
}

// The keys of the row to use: of a plain stage where a strategy gains nothing.
function keysOf(result, rows) {
  const rival = compared(result);
  const plain = rival && !(rival.ties && rival.total_memory > result.choice.total_memory);
  const zero = plain
    ? { stage: Object.values(PLAIN).indexOf(rival.name) }
    : { stage: rows[result.choice.strategy].stage, paro_strategy: result.choice.strategy };
  return JSON.stringify({ zero_optimization: zero }).replaceAll(":", ": ").replaceAll(",", ", ");
}

function commandOf(settings) {
  const trainable = settings.trainable < settings.params ? [`--trainable ${settings.trainable}`] : [];
  const options = INPUTS.filter(({ name }) => name !== "trained" && field(name).value.trim());
  const words = options.map(({ name }) => `--${name} ${field(name).value.trim()}`);
  return ["python -m deepspeed_ext plan", ...words, ...trainable];
}

function showVerdict(result, settings, rows) {
  document.querySelector(".verdict").textContent = verdict(result);
  const words = commandOf(settings).flatMap((one) => [el("span", { class: "whole" }, one), " "]);
  document.getElementById("command").replaceChildren(...words.slice(0, -1)); // lines break between options only
  document.getElementById("setting").hidden = !result.choice;
  if (result.choice) document.getElementById("keys").textContent = keysOf(result, rows);
}

function showTable({ plain, predictions, fits, choice }, rows) {
  const all = [...plain, ...predictions].sort(
    (a, b) => a.total_seconds - b.total_seconds || a.total_memory - b.total_memory,
  );
  const badge = (text) => el("span", { class: "badge" }, text);
  const columns = [
    {
      head: "Strategy",
      header: true,
      value: (row) =>
        el(
          "span",
          { class: "whole" },
          hyphenated(row.name),
          row === choice ? badge("choice") : null,
          fits(row) ? null : badge("too large"),
        ),
    },
    ...quantities(all, SECONDS, [
      ["Step", (row) => row.total_seconds],
      ["Waits", (row) => Math.max(0, row.total_seconds - row.compute_seconds)],
    ]),
    quantity("Memory", all, (row) => row.total_memory, GIGABYTES),
    ...quantities(all, GIGABYTES, [
      ["Within a node", (row) => row.volume.intra],
      ["Between nodes", (row) => row.volume.inter],
    ]),
    {
      head: "Known as",
      kind: "words",
      value: (row) => (row.plain ? "plain" : rows[row.strategy].known_as),
    },
  ];
  const classOf = (row) => (row === choice ? "now" : fits(row) ? null : "unfit");
  const shown = table("Seconds, memory and bytes of each strategy", columns, all, classOf);
  document.querySelector("#strategies > div").replaceChildren(shown);
}

function show() {
  const rows = JSON.parse(document.getElementById("rows").textContent);
  const { values, problems } = readInputs();
  for (const id of ["curve", "strategies", "setting"]) document.getElementById(id).hidden = problems.length > 0;
  if (problems.length) {
    document.querySelector(".verdict").textContent = problems.join(" ");
    return;
  }
  const settings = settingsOf(values);
  const result = plan(settings);
  showVerdict(result, settings, rows);
  drawCurve(settings, result);
  showTable(result, rows);
}

function main() {
  makeInputs();
  readFragment();
  show();
  document.getElementById("inputs").addEventListener("input", () => {
    keepInFragment();
    show();
  });
  addEventListener("hashchange", () => {
    readFragment();
    show();
  });
  addEventListener("resize", show);
}

main();
