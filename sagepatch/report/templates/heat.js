// The heat map: the errors of each layer in each measured step, its cells walked by arrow keys, and
// its picture as a PNG file. Every text enters the page as text.

const METRICS = {
  cosine: { words: "1 - cosine", error: (m) => 1 - number(m.cosine), worst: 1 - facts.bound },
  rel_l1: { words: "relative L1", error: (m) => number(m.rel_l1), worst: errorBound(facts.bound) },
  norm_ratio: { words: "|norm ratio - 1|", error: (m) => Math.abs(number(m.norm_ratio) - 1), worst: errorBound(facts.bound) },
};
const WORDED_STEPS = 14; // with more columns the cells hold colours only
const MOST_ROWS = 80; // with more layers the map scrolls in a box of its own

// The part of the bound that an error uses, 0 to 1, as opacity of the hottest colour.
const heatOf = (error, worst) => 0.85 * Math.min(1, Math.max(0, Number.isNaN(error) ? 1 : error / worst));
const short = (error) => (Number.isNaN(error) ? "inf" : error < 1e-9 ? "0" : error.toExponential(0));

// The kernel that the heat map shows of a layer in a step, and its errors there: null where it is
// exact, or was not measured.
function shown(layer, index) {
  const wanted = $("heat-kernel").value;
  const at = facts.steps[index].at;
  const variant = wanted !== "runs" ? wanted : at === null ? layer.runs[0].variant : variantAt(layer.runs, at);
  return { variant, errors: layer.steps[variant]?.[index] ?? null };
}

// Text for those who hear the page, not for the eye.
const unseen = (text) => (text ? [make("span", { class: "unseen" }, text)] : []);

function drawHeat() {
  const metric = METRICS[$("heat-metric").value];
  const roomy = facts.steps.length <= WORDED_STEPS;
  const head = make("tr", {}, make("th", { scope: "col" }, LAYER_OF), make("th", { scope: "col", class: "kernel" }, "runs"));
  for (const { name } of facts.steps) {
    const [word, rest] = roomy || !/^(step|call) /.test(name) ? ["", name] : [name.slice(0, 5), name.slice(5)];
    head.append(make("th", { scope: "col", class: "n" }, ...unseen(word), rest));
  }
  $("heat").tHead.replaceChildren(head);
  const body = $("heat").tBodies[0];
  body.replaceChildren();
  for (const layer of facts.layers) {
    const row = make("tr", {}, make("th", { scope: "row" }, nameOf(layer.site)));
    row.append(make("td", { class: `kernel ${mainTier(layer.runs)}` }, worded(layer.runs)));
    facts.steps.forEach((_, index) => {
      const { variant, errors: found } = shown(layer, index);
      const cell = make("td", { role: "gridcell", tabindex: -1, class: tierOf(variant), "data-step": index, "data-site": layer.site });
      if (found === null) {
        cell.classList.add("none");
        cell.append(...(roomy ? [variant === facts.exact ? "exact" : "-"] : unseen(variant === facts.exact ? "exact" : "not measured")));
      } else {
        const error = metric.error(found);
        cell.style.backgroundColor = `rgba(var(--hot), ${heatOf(error, metric.worst).toFixed(3)})`;
        cell.classList.toggle("over", !(error <= metric.worst));
        cell.append(...(roomy ? [short(error)] : unseen(short(error))));
      }
      row.append(cell);
    });
    body.append(row);
  }
  const first = body.querySelector('[role="gridcell"]');
  if (first) first.tabIndex = 0;
  $("heat").parentElement.classList.toggle("tall", facts.layers.length > MOST_ROWS);
  $("heat-legend").textContent =
    (roomy ? "" : `Columns: ${facts.steps[0].name} to ${facts.steps.at(-1).name}. `) +
    `${metric.words}, worst head. Hottest and "!": more than a threshold of ${facts.bound} admits (${metric.worst.toExponential(1)}).`;
}

function select(cell) {
  for (const old of $("heat").querySelectorAll('td[tabindex="0"]')) old.tabIndex = -1;
  for (const old of $("heat").querySelectorAll('[aria-selected="true"]')) old.removeAttribute("aria-selected");
  cell.tabIndex = 0;
  cell.setAttribute("aria-selected", "true");
  const layer = facts.layers.find((one) => one.site === cell.dataset.site);
  const step = facts.steps[cell.dataset.step].name;
  const { variant, errors: found } = shown(layer, Number(cell.dataset.step));
  drawHeads(found);
  if (found === null) {
    const why = variant === facts.exact ? `runs exact attention: ${layer.reason}` : "was not measured";
    $("heat-detail").textContent = `${layer.site}, ${step}: ${why}.`;
    return;
  }
  $("heat-detail").textContent =
    `${layer.site}, ${step}, ${variant}: cosine ${number(found.cosine).toFixed(5)} in head ${found.worst_head}, ` +
    `relative L1 ${number(found.rel_l1).toFixed(4)}, norm ratio ${number(found.norm_ratio).toFixed(4)}; ` +
    `measured on ${layer.measured_on[variant]} of ${plural(layer.prompts, "prompt")}.`;
}

// One bar a head: how far its cosine is from 1, against what the threshold admits.
function drawHeads(found) {
  const cosines = found?.heads ?? [];
  $("heads").replaceChildren();
  $("heads-words").textContent = cosines.length > 1 ? `1 - cosine of its ${cosines.length} heads:` : "";
  cosines.forEach((cosine, head) => {
    const error = 1 - number(cosine);
    const cell = make("span", {}, `${head}: ${short(error)}`);
    cell.style.backgroundColor = `rgba(var(--hot), ${heatOf(error, METRICS.cosine.worst).toFixed(3)})`;
    $("heads").append(cell);
  });
}

const cellOf = (event) => event.target.closest('[role="gridcell"]');

function walk(event) {
  const cell = cellOf(event);
  if (!cell) return;
  const rows = [...$("heat").tBodies[0].rows];
  const across = [...cell.parentElement.cells].indexOf(cell);
  const down = rows.indexOf(cell.parentElement);
  const first = 2; // behind the layer's name and what it runs
  const last = first + facts.steps.length - 1;
  const [toRow, toCell] = {
    ArrowLeft: [down, across - 1], ArrowRight: [down, across + 1], ArrowUp: [down - 1, across],
    ArrowDown: [down + 1, across], Home: [down, first], End: [down, last],
  }[event.key] ?? [-1, -1];
  const target = toCell >= first ? rows[toRow]?.cells[toCell] : null;
  if (!target) return;
  event.preventDefault();
  select(target);
  target.focus();
}

// The heat map as a picture of its own: names, steps, colours, on the page's own paper.
function savePng() {
  const metric = METRICS[$("heat-metric").value];
  const style = getComputedStyle(document.body);
  const hot = style.getPropertyValue("--hot");
  const [wide, tall, top, scale] = [30, 18, 44, 2];
  const canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d");
  const font = "12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
  pen.font = font;
  const names = facts.layers.map((layer) => layer.site.slice(SHARED.length));
  const left = 24 + Math.max(...[...names, LAYER_OF].map((name) => pen.measureText(name).width));
  canvas.width = scale * Math.max(520, left + wide * facts.steps.length + 12);
  canvas.height = scale * (top + tall * facts.layers.length + 34);
  pen.scale(scale, scale);
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = style.color;
  pen.font = font;
  pen.fillText(document.title, 12, 18);
  pen.fillText(LAYER_OF, 12, top - 6);
  // "step 12" and "12.5 %" are as wide as their number.
  facts.steps.forEach((step, index) => pen.fillText(step.name.match(/[\d.]+/)[0], left + wide * index + 2, top - 6));
  facts.layers.forEach((layer, row) => {
    const y = top + tall * row;
    pen.fillStyle = style.color;
    pen.fillText(names[row], 12, y + 13);
    facts.steps.forEach((_, index) => {
      const found = shown(layer, index).errors;
      pen.fillStyle = found === null ? "rgba(128, 128, 128, 0.15)" : `rgba(${hot}, ${heatOf(metric.error(found), metric.worst)})`;
      pen.fillRect(left + wide * index, y, wide - 1, tall - 1);
    });
  });
  pen.fillStyle = style.color;
  pen.fillText(`${metric.words}; hottest: ${metric.worst.toExponential(1)} and more; grey: exact, or not measured`, 12, top + tall * facts.layers.length + 22);
  canvas.toBlob((blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: "sagepatch-heat-map.png" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  });
}
