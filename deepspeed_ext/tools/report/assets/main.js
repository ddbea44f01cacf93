// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// Draws the report that the page carries, section by section. A section without data stays hidden.

// Colors are those of the style sheet, which knows the scheme; canvases need them as values.
function readPaints(paints) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const solid = (name) => ({ color: color(name), ink: color(`on-${name}`) });
  const hatched = (name) => ({ ...solid(name), hatch: hatching(color("hatch")) });
  return Object.assign(paints, {
    text: color("text"),
    dim: color("dim"),
    grid: color("grid"),
    gap: color("surface"),
    forward: solid("compute"),
    backward: solid("backward"),
    update: solid("update"),
    other: solid("other"),
    copy: solid("copy"),
    wait: { within: hatched("within"), between: hatched("between"), unknown: hatched("wait") },
    link: {
      within: { reduce: solid("within"), gather: solid("within-gather"), copy: solid("copy") },
      between: { reduce: solid("between"), gather: solid("between-gather"), copy: solid("copy") },
    },
  });
}

function hatching(color) {
  const tile = el("canvas", { width: "6", height: "6" });
  const context = tile.getContext("2d");
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  for (const x of [-6, 0, 6]) {
    context.moveTo(x, 6);
    context.lineTo(x + 6, 0);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}

function drawFacts(report) {
  const { training = {}, steps = {} } = report;
  addTerms("facts", [
    ["Ranks", ranksWords(training)],
    ["Parameters", parametersWords(training)],
    ["Micro-steps", isNumber(training.accumulation) ? String(training.accumulation) : null],
    ["Recorded", recordedWords(steps)],
    ["Unrecorded", unrecordedWords(steps)],
  ]);
  document.getElementById("group-note").textContent =
    training.groups > 1
      ? "A group is a node, unless paro_group_size is set."
      : "There is one group of ranks, so nothing is sent between groups.";
}

function ranksWords({ ranks, groups, group_size: size }) {
  if (!isNumber(ranks)) return null;
  return groups > 1 ? `${grouped(ranks)} in ${grouped(groups)} groups of ${size}` : grouped(ranks);
}

function parametersWords({ parameters, trainable, dtype }) {
  if (!isNumber(parameters)) return null;
  const frozen = isNumber(trainable) && trainable < parameters ? `${rounded(trainable)} trainable` : null;
  return [rounded(parameters), frozen, dtype].filter(Boolean).join(", ");
}

function rounded(count) {
  if (count >= 1e9) return `${grouped(count / 1e9, 2)} billion`;
  return count >= 1e6 ? `${grouped(count / 1e6, 1)} million` : grouped(count);
}

function recordedWords({ first, seconds: taken = [] }) {
  if (!taken.length) return null;
  const numbers = taken.length > 1 ? `steps ${first}–${first + taken.length - 1}` : `step ${first}`;
  return `${numbers}, ${seconds(sum(taken) / taken.length)} on average`;
}

function unrecordedWords({ undisturbed, overhead }) {
  if (!isNumber(undisturbed)) return null;
  if (!isNumber(overhead)) return `${seconds(undisturbed)} a step`;
  return `${seconds(undisturbed)} a step; recording cost ${overhead > 0 ? percent(overhead) : "nothing measurable"}`;
}

function drawMade(report) {
  const made = report.made ?? {};
  const hosts = made.hosts ?? [];
  const named =
    hosts.length > 4 ? `${hosts.slice(0, 3).join(", ")} and ${grouped(hosts.length - 3)} more` : hosts.join(", ");
  const versions = Object.entries(made.versions ?? {});
  addTerms("made", [
    ["Made", made.when],
    ["Script", made.script],
    ["Device", made.device],
    ["Hosts", named],
    ...versions,
  ]);
}

function addTerms(id, terms) {
  const shown = terms.filter(([, text]) => text);
  document
    .getElementById(id)
    .append(...shown.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text))));
}

// The verdict has the first findings already.
function drawFindings(report) {
  const left = (report.findings ?? []).filter((one) => !(report.paragraph ?? "").includes(one));
  if (!left.length) return;
  const section = document.getElementById("findings");
  section.querySelector("ol").append(...left.map((one) => el("li", {}, one)));
  section.hidden = false;
}

function redrawWhenColorsChange(paints, drawn) {
  const again = () => {
    readPaints(paints);
    drawn.forEach((one) => one.draw());
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  // Paper is light. Media queries change only after canvases have been printed, so an attribute says it.
  const printing = (on) => () => {
    document.documentElement.toggleAttribute("data-printing", on);
    again();
  };
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
}

function main() {
  const report = JSON.parse(document.getElementById("report").textContent);
  const paints = readPaints({});
  for (const draw of [
    drawFacts,
    drawParts,
    drawFindings,
    drawHops,
    drawOperations,
    drawModules,
    drawMemory,
    drawChoices,
    drawMade,
  ])
    draw(report);
  const drawn = [...drawTimelines(report, paints), ...drawRanks(report, paints)];
  drawn.forEach((one) => one.draw());
  redrawWhenColorsChange(paints, drawn);
  document.documentElement.dataset.drawn = drawn.length;
}

main();
