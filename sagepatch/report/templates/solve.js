// A plan from the table in the page: the rules of sagepatch/calibration/choose.py and solve.py on
// the same doubles, so that every threshold gives the plan that Python gives. Touches no document.
"use strict";

// What stands as null in the table was not finite: it compares as false, as NaN does in Python.
const number = (value) => (value === null ? NaN : value);

const errorBound = (threshold) => Math.sqrt(2 * Math.max(0, 1 - threshold));

// Why a candidate is not admissible at a threshold, null when it is.
function refusal(candidate, threshold) {
  if (!candidate.finite) return "not finite";
  if (threshold <= 0) return null;
  const bound = errorBound(threshold);
  const [cosine, l1, norm] = [candidate.cosine, candidate.rel_l1, candidate.norm_ratio].map(number);
  if (!(cosine >= threshold)) {
    const where = `head ${candidate.worst_head}, ${candidate.worst_place}`;
    return `cosine ${cosine.toFixed(5)} < ${threshold} (${where})`;
  }
  if (!(l1 <= bound)) return `relative L1 ${l1.toFixed(4)} > ${bound.toFixed(4)}`;
  if (!(Math.abs(norm - 1) <= bound)) {
    return `norm ratio ${norm.toFixed(4)}, off by more than ${bound.toFixed(4)}`;
  }
  return null;
}

// Whether a kernel is so much faster than exact attention that a plan takes it.
const pays = (us, exact, facts) => us <= exact - facts.least_gain * exact;

// The fastest admissible candidate of a layer in a part of the schedule, exact attention included:
// its name, why, and the other admissible ones, best first.
function choose(layer, threshold, facts) {
  const exact = (why, others = []) => ({ variant: facts.exact, why, others });
  if (layer.unseen) return exact(layer.unseen);
  if (!layer.candidates.length) return exact(facts.none_serves);
  const refused = new Map(layer.candidates.map((one) => [one, refusal(one, threshold)]));
  const rank = (one) => facts.kernels[one.variant].rank;
  const admissible = layer.candidates
    .filter((one) => refused.get(one) === null)
    .sort((a, b) => rank(a) - rank(b));
  if (!admissible.length) {
    const listed = layer.candidates.map((one) => `${one.variant}: ${refused.get(one)}`);
    return exact(`no kernel is accurate enough: ${listed.join("; ")}`);
  }
  let best = null;
  for (const one of admissible) {
    if (layer.us_exact === null) {
      best = best ?? one;
    } else if (one.us !== null && (best === null || one.us < best.us)) {
      best = one;
    }
  }
  if (layer.us_exact !== null && (best === null || !pays(best.us, layer.us_exact, facts))) {
    const host = best !== null && best.by_host ? " of the host" : "";
    const shown = best === null ? "none was timed" : `${best.variant} takes ${best.us.toFixed(0)} us${host}`;
    const faster = best !== null && best.us < layer.us_exact;
    const won = faster ? "too little is gained" : "exact is fastest";
    const why = `${won}: ${layer.us_exact.toFixed(0)} us, ${shown}`;
    return exact(why, admissible.map((one) => one.variant));
  }
  const merit =
    layer.us_exact === null
      ? "first by tier, nothing timed"
      : `${(layer.us_exact / best.us).toFixed(2)}x exact`;
  const better = layer.candidates.filter((one) => refused.get(one) !== null && rank(one) < rank(best));
  const why = [
    `cosine ${best.cosine.toFixed(5)} in the worst head (${best.worst_place}), ${merit}`,
    ...better.map((one) => `${one.variant} refused: ${refused.get(one)}`),
  ].join("; ");
  const others = admissible.filter((one) => one !== best).map((one) => one.variant);
  return { variant: best.variant, why, others };
}

// What a layer runs in each part of the schedule, equal neighbours as one; without `byStep` it runs
// one kernel throughout.
function solve(layer, threshold, byStep, facts) {
  const parts = [];
  const why = [];
  for (const cell of byStep ? layer.cells : layer.whole) {
    const choice = choose(cell, threshold, facts);
    const last = parts.at(-1);
    if (last?.variant === choice.variant) {
      last.end = cell.end;
      continue;
    }
    parts.push({ start: cell.start, end: cell.end, variant: choice.variant });
    why.push(choice.why);
  }
  const told = why.map((text, index) => `to ${+(100 * parts[index].end).toFixed(1)} %: ${text}`);
  return { parts, why: why.length === 1 ? why[0] : told.join(" | ") };
}
