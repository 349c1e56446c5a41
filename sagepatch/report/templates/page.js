// What moves in the page: the threshold slider, and two plans side by side.

const TICKS = [0.9, 0.99, 0.999, 0.9999, 0.99999];

let solved = planAt(facts.threshold);
// Plans beside the two that are always there, by name: those written into the page, those opened.
const opened = new Map(Object.entries(facts.plans).map(([name, entries]) => [name, planOf(name, Object.entries(entries))]));

function planOf(name, entries) {
  return {
    name,
    runs: new Map(entries.map(([site, { runs }]) => [site, runs])),
    why: new Map(entries.map(([site, { why }]) => [site, why])),
  };
}

function planNamed(name) {
  if (name === "slider") return solved;
  if (name === "exact") return { name: "exact everywhere", runs: new Map() };
  if (name.startsWith("plan:")) return opened.get(name.slice(5));
  return {
    name: "the plan in force",
    runs: new Map(facts.layers.map((one) => [one.site, one.runs])),
    why: new Map(facts.layers.map((one) => [one.site, one.reason])),
  };
}

function drawLevels() {
  $("levels").replaceChildren();
  for (const [index, stop] of facts.stops.entries()) {
    const { counts } = summed(planAt(stop));
    const parts = TIERS.filter((tier) => counts[tier]).map((tier) => {
      const part = make("s", { class: tier });
      part.style.flex = counts[tier];
      return part;
    });
    const bar = make("i", { "data-stop": index }, ...parts);
    bar.addEventListener("click", () => moveTo(stop));
    $("levels").append(bar);
  }
  $("ticks").replaceChildren();
  for (const [index, stop] of facts.stops.entries()) {
    if (!TICKS.includes(stop)) continue;
    const tick = make("span", {}, String(stop));
    tick.style.left = `${(100 * (index + 0.5)) / facts.stops.length}%`;
    $("ticks").append(tick);
  }
}

function moveTo(threshold) {
  solved = planAt(threshold);
  const stop = facts.stops.reduce(
    (best, one, index) => (Math.abs(one - threshold) < Math.abs(facts.stops[best] - threshold) ? index : best), 0);
  $("stop").value = stop;
  $("stop").setAttribute("aria-valuetext", String(threshold));
  $("threshold").value = String(threshold);
  $("threshold").removeAttribute("aria-invalid");
  for (const bar of $("levels").children) bar.classList.toggle("here", Number(bar.dataset.stop) === stop);
  $("outcome").textContent = `At ${threshold}: ${inWords(solved)}.`;
  compare();
}

function typed() {
  const text = $("threshold").value.trim();
  const threshold = Number(text);
  if (text === "" || !Number.isFinite(threshold)) {
    $("threshold").setAttribute("aria-invalid", "true");
    $("outcome").textContent = "A threshold is a number, usually 0.99 to 1.";
    return;
  }
  moveTo(threshold);
}

// --- two plans ---------------------------------------------------------------------------------

function compare() {
  const [a, b] = [planNamed($("plan-a").value), planNamed($("plan-b").value)];
  const body = $("two").tBodies[0];
  body.replaceChildren();
  let differing = 0;
  for (const layer of facts.layers) {
    const pair = [a, b].map((plan) => partsOf(plan, layer));
    const differs = worded(pair[0]) !== worded(pair[1]);
    differing += differs;
    if (!differs && $("differing").checked) continue;
    const row = make("tr", { class: differs ? "changed" : null });
    row.append(make("th", { scope: "row" }, nameOf(layer.site)));
    for (const parts of pair) row.append(make("td", { class: mainTier(parts) }, worded(parts)));
    for (const parts of pair) row.append(make("td", { class: "n" }, cosineOf(layer, parts)?.toFixed(5) ?? "-"));
    if (facts.timed) {
      for (const parts of pair) {
        const us = usOf(layer, parts);
        row.append(make("td", { class: "n" }, us === null ? "-" : us.toFixed(0)));
      }
    }
    row.append(make("td", { class: "why" }, b.why?.get(layer.site) ?? a.why?.get(layer.site) ?? ""));
    body.append(row);
  }
  const same = `The two plans are the same in all ${plural(facts.layers.length, "layer")}.`;
  $("two").parentElement.hidden = !body.rows.length;
  $("verdict").textContent = differing
    ? `${plural(differing, "layer")} of ${facts.layers.length} differ. A: ${inWords(a)}. B: ${inWords(b)}.`
    : same;
}

// The parts of an entry of a plan file, with its ranges where it has some.
function partsIn(entry) {
  if (!entry.ranges?.length) return everywhere(String(entry.variant));
  return entry.ranges.map((one) => ({ start: Number(one.start), end: Number(one.end), variant: String(one.variant) }));
}

async function openPlan() {
  const file = $("open").files[0];
  if (!file) return;
  try {
    const entries = JSON.parse(await file.text()).entries;
    const known = new Set(facts.layers.map((layer) => layer.site));
    const plan = planOf(file.name, entries.map((one) => [String(one.site), { runs: partsIn(one), why: String(one.reason) }]));
    const strange = [...plan.runs.keys()].filter((site) => !known.has(site));
    if (strange.length) throw new Error(`it names ${plural(strange.length, "layer")} that this model has not`);
    opened.set(file.name, plan);
    for (const id of ["plan-a", "plan-b"]) {
      if (![...$(id).options].some((option) => option.value === `plan:${file.name}`)) {
        $(id).append(make("option", { value: `plan:${file.name}` }, file.name));
      }
    }
    $("plan-b").value = `plan:${file.name}`;
    compare();
  } catch (error) {
    $("verdict").textContent = `${file.name} is no plan for this model: ${error.message}.`;
  }
}

// --- begin -------------------------------------------------------------------------------------

$("stop").max = facts.stops.length - 1;
$("two").tHead.rows[0].cells[0].textContent = LAYER_OF;
$("by-step").checked = facts.by_step;
drawLevels();
$("stop").addEventListener("input", () => moveTo(facts.stops[$("stop").value]));
$("threshold").addEventListener("change", typed);
$("by-step").addEventListener("change", () => {
  drawLevels();
  moveTo(Number($("threshold").value));
});
for (const id of ["plan-a", "plan-b", "differing"]) $(id).addEventListener("change", compare);
$("open").addEventListener("change", openPlan);
for (const id of ["heat-metric", "heat-kernel"]) $(id).addEventListener("change", drawHeat);
$("heat").addEventListener("keydown", walk);
$("heat").addEventListener("focusin", (event) => cellOf(event) && select(cellOf(event)));
$("heat").addEventListener("click", (event) => cellOf(event)?.focus());
$("png").addEventListener("click", savePng);
drawHeat();
moveTo(facts.threshold);
