// Plans and what they come to, from the facts in the page. A plan is { name, runs: site -> parts,
// why: site -> text }, parts being [{ start, end, variant }] from the first step of the schedule (0)
// to the last (1). Changes nothing in the page.

const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const TIERS = ["fast", "safe", "exact"];
const tierOf = (variant) => facts.kernels[variant]?.tier ?? "exact";
const times = (value) => `${value.toFixed(2)}x`;
const percent = (part) => `${+(100 * part).toFixed(1)} %`;
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

// An element with attributes and children; strings become text.
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// The module path that all layers' names begin with, its last dot included.
const SHARED = (() => {
  const paths = facts.layers.map((layer) => layer.site.split(".").slice(0, -1));
  const same = paths[0].findIndex((part, index) => paths.some((path) => path[index] !== part));
  const parts = facts.layers.length < 2 ? [] : paths[0].slice(0, same < 0 ? paths[0].length : same);
  return parts.map((part) => `${part}.`).join("");
})();
const LAYER_OF = SHARED ? `layer of ${SHARED.slice(0, -1)}` : "layer";

// A layer's name without what all names begin with; a narrow column breaks it after its dots.
function nameOf(site) {
  const made = make("code");
  for (const part of site.slice(SHARED.length).split(/(?<=\.)/)) made.append(part, make("wbr"));
  return made;
}

function planAt(threshold) {
  const solved = facts.layers.map((layer) => [layer.site, solve(layer, threshold, $("by-step").checked, facts)]);
  return {
    name: `threshold ${threshold}`,
    runs: new Map(solved.map(([site, { parts }]) => [site, parts])),
    why: new Map(solved.map(([site, { why }]) => [site, why])),
  };
}

const everywhere = (variant) => [{ start: 0, end: 1, variant }];
const partsOf = (plan, layer) => plan.runs.get(layer.site) ?? everywhere(facts.exact);
const variantAt = (parts, at) => (parts.find((part) => at < part.end) ?? parts.at(-1)).variant;
const candidateOf = (cell, variant) => cell.candidates.find((one) => one.variant === variant) ?? null;

// What a layer runs, in words: one kernel, or what runs up to which place of the schedule.
function worded(parts) {
  if (parts.length === 1) return parts[0].variant;
  return parts.map((part) => `${part.variant} to ${percent(part.end)}`).join(", ");
}

// The tier that a layer counts as: that of the quantised kernel which runs in most of the schedule,
// exact where none does.
function mainTier(parts) {
  const lengths = new Map();
  for (const { start, end, variant } of parts) {
    if (variant !== facts.exact) lengths.set(variant, (lengths.get(variant) ?? 0) + Math.round(1e6 * (end - start)));
  }
  const [most] = [...lengths].sort((a, b) => b[1] - a[1]);
  return most === undefined ? "exact" : tierOf(most[0]);
}

// Microseconds of one call of a layer, the mean over the schedule's steps; null where that was not timed.
function usOf(layer, parts) {
  let [sum, weight] = [0, 0];
  for (const cell of layer.cells) {
    const variant = variantAt(parts, cell.start);
    const us = variant === facts.exact ? layer.us_exact : (layer.us[variant] ?? null);
    if (cell.share > 0 && us === null) return null;
    sum += cell.share * us;
    weight += cell.share;
  }
  return weight > 0 ? sum / weight : null;
}

// The lowest cosine of what a layer runs, in the worst head; null where it runs exact throughout.
function cosineOf(layer, parts) {
  const found = layer.cells.map((cell) => candidateOf(cell, variantAt(parts, cell.start))?.cosine ?? null);
  const known = found.filter((cosine) => cosine !== null);
  return known.length ? Math.min(...known) : null;
}

// What a plan comes to: layers by tier, the predicted error, and gains where times are known.
function summed(plan) {
  const counts = { fast: 0, safe: 0, exact: 0 };
  let [squares, exact, chosen, now] = [0, 0, 0, 0];
  let timed = true;
  for (const layer of facts.layers) {
    const parts = partsOf(plan, layer);
    counts[mainTier(parts)] += 1;
    for (const cell of layer.cells) {
      squares += (candidateOf(cell, variantAt(parts, cell.start))?.error ?? 0) ** 2;
    }
    if (layer.us_exact === null || layer.calls === 0) continue;
    const [us, current] = [usOf(layer, parts), usOf(layer, layer.runs)];
    if (us === null || current === null) timed = false;
    exact += layer.us_exact * layer.calls;
    chosen += us * layer.calls;
    now += current * layer.calls;
  }
  const gain = timed && chosen > 0 ? exact / chosen : null;
  const rest = facts.run_us === null ? null : facts.run_us - now;
  const runGain = gain === null || rest === null || rest < 0 ? null : (rest + exact) / (rest + chosen);
  return { counts, error: Math.sqrt(squares), gain, runGain };
}

function inWords(plan) {
  const { counts, error, gain, runGain } = summed(plan);
  const parts = [`${counts.fast} fast, ${counts.safe} safe, ${counts.exact} exact`];
  parts.push(`predicted error of the output ${(100 * error).toFixed(1)} %`);
  if (gain !== null) parts.push(`attention ${times(gain)}`);
  if (runGain !== null) parts.push(`whole run ${times(runGain)} (predicted)`);
  return parts.join("; ");
}
