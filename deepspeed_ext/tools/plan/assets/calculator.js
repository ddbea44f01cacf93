// Copyright (c) deepspeed_ext contributors
// SPDX-License-Identifier: Apache-2.0
// The planner for a dense model in bf16 with Adam, on GPUs, in groups that are nodes. Pure. Names are those of the
// Python code, whose notes explain them: deepspeed_ext/strategy.py, planner/{closed_form,costs,rates,choice}.py.
// tests/unit/planner/test_calculator.py compares the two.

const LAYERS = 32;
const FORWARD = 1 / 3;
const [BUCKET, FETCHED] = [500e6, 50e6]; // elements
const [BUCKETS, LEAST_BUCKET] = [16, 2 ** 22];
const DDP_BUCKET = 25 * 2 ** 20; // bytes
const [WIDTH, OPTIMIZER_BYTES] = [2, 12]; // of a parameter; a gradient is as wide
const [FLOPS, FROZEN_FLOPS] = [6, 4];
const TIE = 0.03;
const PLACEMENTS = "NIG";
const STRATEGIES = "NNN NNI NNG NII NIG NGG INI ING III IIG IGG GNG GIG GGG".split(" ");
const PLAIN = { NNN: "DDP", NNG: "ZeRO-1", NGG: "ZeRO-2", GGG: "ZeRO-3" };

// Strategies: shards, and bytes that a rank receives

function shards(sizes, placement) {
  return { N: 1, I: sizes.group_size, G: sizes.ranks }[placement];
}

function redistribution_volume(sizes, source, target, nbytes) {
  const [coarse, fine] = [source, target].sort((a, b) => PLACEMENTS.indexOf(a) - PLACEMENTS.indexOf(b));
  const a = (sizes.group_size - 1) / sizes.group_size;
  const b = (sizes.groups - 1) / sizes.ranks;
  return {
    intra: coarse === "N" && fine !== "N" ? a * nbytes : 0,
    inter: fine === "G" && coarse !== "G" ? b * nbytes : 0,
  };
}

function phases([p, g, os], sizes, { parameters, gradients, updated }) {
  const sharded = p !== "N";
  const phase = (source, target, nbytes, each_micro_step, by_layer) => ({
    volume: redistribution_volume(sizes, source, target, nbytes),
    each_micro_step,
    by_layer,
  });
  return [
    phase(p, "N", parameters, 2, sharded), // gather parameters
    phase("N", g, gradients, 1, false), // reduce gradients
    phase(g, "G", gradients, 0, false), // reduce at the boundary
    phase("G", os, gradients, 0, false), // gather at the boundary
    phase(os, p, updated, 0, sharded), // gather updates
  ];
}

// The rates of links

function hop_latency(ranks, nodes) {
  if (ranks === 1) return 0;
  const step = 14e-6;
  const ring = 8.4e-6 + (ranks - nodes) * 3.4e-6 + (nodes - 1) * step;
  if (ranks !== nodes) return ring;
  return Math.min(ring, 8e-6 + ((31 - Math.clz32(ranks)) * step) / 3.5 + ranks * 2.8e-6);
}

function of_links(sizes, nodes, intra_gbps, inter_gbps) {
  const [gpu, node] = [(intra_gbps * 1e9) / 8, (inter_gbps * 1e9) / 8];
  const inter = nodes === 1 ? gpu : Math.min(gpu, node / sizes.group_size); // ranks share their node's link
  return {
    intra: { latency: hop_latency(sizes.group_size, 1), bandwidth: gpu },
    inter: { latency: hop_latency(sizes.groups, nodes), bandwidth: inter },
  };
}

function rate_seconds({ latency, bandwidth }, nbytes, messages) {
  return nbytes ? messages * latency + nbytes / bandwidth : 0;
}

// The model

// As Python's `round`: a half goes to the even number.
function round(value) {
  const up = Math.round(value);
  return up - value === 0.5 && up % 2 ? up - 1 : up;
}

function full_bucket(most, total) {
  return Math.min(most, Math.max(Math.ceil(total / BUCKETS), LEAST_BUCKET));
}

function of_size(params, trainable) {
  const states = { parameters: params * WIDTH, gradients: trainable * WIDTH, updated: trainable * WIDTH };
  const fetches = Math.max(1, Math.floor(params / FETCHED));
  return {
    states: { ...states, optimizer: trainable * OPTIMIZER_BYTES },
    trainable,
    fetches,
    layers: Math.min(fetches, LAYERS),
    bucket: full_bucket(BUCKET, trainable),
  };
}

// The closed form of a step, in seconds; Python also divides them among its parts

function sent_of(moves, at_once) {
  const sent = { on_links: { within: 0, between: 0 }, chained: 0, in_turn: !at_once };
  for (const { within, between } of moves) {
    sent.on_links.within += within;
    sent.on_links.between += between;
    sent.chained += at_once ? Math.max(within, between) : within + between;
  }
  return sent;
}

function pass(step, compute, gathers, waits = false) {
  const { on_links, chained } = sent_of([step.use], step.at_once);
  const seconds = Math.max(compute, on_links.within, on_links.between, (compute + chained) / 2);
  return compute + (gathers * (seconds - compute) + (waits ? chained : 0)) / step.layers;
}

function updated(step, forward) {
  const sent = sent_of([step.updates], step.at_once);
  const { units } = step.updates;
  if (step.overlap_updates) return overlapped(forward, sent, units);
  const longest = Math.max(sent.on_links.within, sent.on_links.between);
  return forward + longest + (sent.chained - longest) / units;
}

function backward(step, boundary) {
  const compute = pass(step, (1 - FORWARD) * step.compute, step.layers - 1);
  const moves = boundary ? [step.reduce, step.cross, step.back] : [step.reduce];
  const gathered = sent_of([step.use], step.at_once);
  return overlapped(compute, sent_of(moves, step.at_once), step.reduce.units, gathered, step.layers);
}

function overlapped(length, sent, units, gathered = { on_links: {}, chained: 0 }, layers = 1) {
  const stalled = gathered.chained ? stalls(length, sent, units, gathered, layers) : 0;
  const share = Math.max(0, 1 - 1 / layers - 1 / units);
  const waits = Object.entries(sent.on_links).map(([part, link]) => {
    if (!link) return 0;
    const ready = length / units;
    return ready + link + Math.max(0, sent.chained - link) / units - length + share * (gathered.on_links[part] ?? 0);
  });
  return length + Math.max(...waits, stalled + sent.chained / units);
}

function stalls(length, sent, units, gathered, layers) {
  const parts = Object.keys(sent.on_links).filter((part) => gathered.on_links[part]);
  const held = parts.map((part) => sent.on_links[part] / units);
  if (2 * units > layers) return 0;
  const hides = 3 * units > layers || !sent.in_turn;
  const ahead = Math.max(0, (2 * (length - gathered.chained)) / layers);
  const longest = hides ? Math.max(...held) : held.reduce((a, b) => a + b);
  return (units - 1) * Math.max(0, longest - ahead);
}

function step_seconds(step) {
  const forward = pass(step, FORWARD * step.compute, step.layers, true);
  const later = (step.accumulation - 1) * (forward + backward(step, false));
  return updated(step, forward) + later + backward(step, true);
}

// Costs of a strategy, or of the plain stage with these placements

function moves_of(found, model, bucket, hops) {
  const buckets = Math.max(1, round(model.trainable / bucket));
  const [use, reduce, cross, back, updates] = found.map(({ volume, by_layer }) => {
    const messages = by_layer ? model.fetches : buckets;
    const within = rate_seconds(hops.intra, volume.intra, messages);
    const between = rate_seconds(hops.inter, volume.inter, messages);
    return { within, between, units: Math.min(messages, model.layers) };
  });
  return { use, reduce, cross, back, updates };
}

function received(found, accumulation, hop) {
  return found.reduce((a, { volume, each_micro_step }) => a + volume[hop] * (each_micro_step * accumulation || 1), 0);
}

function predict(strategy, sizes, model, rates, plain = false) {
  const found = phases(strategy, sizes, model.states);
  const bucket = Math.min(model.bucket, plain && strategy === "NNN" ? DDP_BUCKET / WIDTH : BUCKET);
  const moves = moves_of(found, model, bucket, rates);
  const { layers, accumulation, compute } = model;
  const overlap = { at_once: plain, overlap_updates: strategy[0] !== "N" };
  const [p, g, os] = [...strategy].map((placement) => shards(sizes, placement));
  const { parameters, gradients, optimizer } = model.states;
  const transient = (4 * model.trainable) / os; // gradients in fp32, of the optimizer's step
  return {
    strategy,
    plain,
    name: plain ? PLAIN[strategy] : strategy,
    total_seconds: step_seconds({ ...moves, ...overlap, layers, accumulation, compute }),
    compute_seconds: accumulation * compute,
    total_memory: parameters / p + gradients / g + optimizer / os + transient,
    volume: { intra: received(found, accumulation, "intra"), inter: received(found, accumulation, "inter") },
  };
}

// The choice among strategies

function plan({ nodes, ranks_per_node, intra_gbps, inter_gbps, budget, ...trained }) {
  const { params, trainable, accumulation, tokens, tflops } = trained;
  const sizes = { ranks: nodes * ranks_per_node, group_size: ranks_per_node, groups: nodes };
  const rates = of_links(sizes, nodes, intra_gbps, inter_gbps);
  const flops = FROZEN_FLOPS * (params - trainable) + FLOPS * trainable;
  const model = { ...of_size(params, trainable), accumulation, compute: (flops * tokens) / (tflops * 1e12) };
  const fits = (one) => budget === null || one.total_memory <= budget;
  const predictions = STRATEGIES.map((name) => predict(name, sizes, model, rates));
  predictions.sort((a, b) => a.total_seconds - b.total_seconds || a.total_memory - b.total_memory);
  const plain = Object.keys(PLAIN).map((name) => predict(name, sizes, model, rates, true));
  return { predictions, plain, fits, choice: best(predictions.filter(fits)) };
}

function best(some) {
  const quickest = Math.min(...some.map((one) => one.total_seconds));
  const close = some.filter((one) => one.total_seconds <= (1 + TIE) * quickest);
  return close.sort((a, b) => a.total_memory - b.total_memory || a.total_seconds - b.total_seconds)[0] ?? null;
}

// The smallest plain stage that is at least as fast as the choice: null if none is.
function compared({ plain, fits, choice }) {
  const ties = (one) => Math.abs(one.total_seconds - choice.total_seconds) <= TIE * choice.total_seconds;
  const rivals = plain.filter((one) => fits(one) && (ties(one) || one.total_seconds < choice.total_seconds));
  rivals.sort((a, b) => a.total_memory - b.total_memory || a.total_seconds - b.total_seconds);
  return rivals.length ? { ...rivals[0], ties: ties(rivals[0]) } : null;
}
