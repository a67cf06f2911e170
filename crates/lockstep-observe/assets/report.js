// Draws the report of a run.

// A chart of series over steps: {name, color, x, y, lo, hi, dots, thin, bars}. Missing values are null.
function chart(title, series, { format = plain, height = 210, wide = false, zero = false, marks = [], note } = {}) {
  series = series.filter((one) => one.y.some((value) => value !== null));
  if (series.length === 0) return;
  const lead = series.find((one) => !one.thin) ?? series[0];
  const rest = lead.summary ?? `${format(lead.y.findLast((value) => value !== null))} at the end`;
  const { body, say } = card(title, { wide, note, rest });
  const values = series.flatMap((one) => [...one.y, ...(one.lo ?? []), ...(one.hi ?? [])]).filter((value) => value !== null);
  let low = Math.min(...values), high = Math.max(...values);
  const log = !zero && low > 0 && high / low > 50;
  if (zero) low = Math.min(0, low);
  if (low === high) { low -= Math.abs(low) * 0.05 || (zero ? 0 : 1); high += Math.abs(high) * 0.05 || 1; }
  else if (!log) { const room = (high - low) * 0.05; if (!zero) low -= room; high += room; }
  const steps = series.flatMap((one) => one.x);
  const first = Math.min(...steps, ...data.series.loss.x.slice(0, 1)), last = Math.max(...steps, ...data.series.loss.x.slice(-1));
  drawing(body, height, (svg, width) => {
    const labels = log ? powers(low, high) : ticks(low, high, 4);
    const left = 14 + 6.6 * Math.max(...labels.map((value) => format(value).length));
    const top = 6, bottom = height - 22, right = width - 10;
    const x = scale(first, last === first ? first + 1 : last, left, right), y = scale(low, high, bottom, top, log);
    for (const value of labels) {
      shape(svg, "line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) });
      shape(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
    }
    const whole = ticks(first, last, width / 80).filter(Number.isInteger);
    for (const step of whole.length > 0 ? whole : [first]) {
      shape(svg, "text", { x: x(step), y: height - 6, "text-anchor": x(step) > right - 24 ? "end" : "middle" }, count(step));
    }
    shape(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    for (const one of series) draw_series(svg, one, x, y, bottom, (right - left) / Math.max(1, last - first + 1));
    for (const step of marks) shape(svg, "line", { x1: x(step), x2: x(step), y1: bottom - 7, y2: bottom, stroke: "var(--bad)", "stroke-width": 2 });
    const cursor = shape(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const step = first + ((event.clientX - box.left - left) / (right - left)) * (last - first);
      const near = (one) => one.x.reduce((best, at, index) => (Math.abs(at - step) < Math.abs(one.x[best] - step) ? index : best), 0);
      const parts = series.map((one) => [one, near(one)]);
      const at = parts[0][0].x[parts[0][1]];
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
      cursor.setAttribute("visibility", "visible");
      say(`step ${at}: ` + parts.map(([one, index]) =>
        `${series.length > 1 ? one.name + " " : ""}${format(one.y[index])}${one.x[index] !== at ? ` (step ${one.x[index]})` : ""}`).join(", "));
    };
    svg.onpointermove = show;
    svg.onpointerdown = show;
    svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); say(); };
  });
  if (series.length > 1 || marks.length > 0) {
    legend(body, [...series.map((one) => [one.name, one.color, one.thin ? 0.45 : 1]), ...(marks.length > 0 ? [["skipped steps", "var(--bad)"]] : [])]);
  }
}

function draw_series(svg, one, x, y, bottom, pitch) {
  const known = one.x.map((step, index) => [x(step), one.y[index] === null ? null : y(one.y[index]), index]);
  if (one.bars) {
    for (const [at, value] of known) {
      if (value !== null) shape(svg, "rect", { x: at - Math.max(1, Math.min(4, pitch / 2)), y: value, width: Math.max(2, Math.min(8, pitch)), height: Math.max(0, bottom - value), fill: one.color });
    }
    return;
  }
  // A run of known values is a line; a single one would not be seen.
  const runs = [[]];
  for (const point of known) {
    if (point[1] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  for (const run of runs.filter((run) => run.length > 0)) {
    if (one.lo) {
      const edge = (bound) => run.map(([at, , index]) => `${at.toFixed(1)},${y(bound[index]).toFixed(1)}`);
      shape(svg, "polygon", { points: [...edge(one.hi), ...edge(one.lo).reverse()].join(" "), fill: one.color, opacity: 0.18 });
    }
    if (run.length > 1) {
      shape(svg, "polyline", {
        points: run.map(([at, value]) => `${at.toFixed(1)},${value.toFixed(1)}`).join(" "), fill: "none", stroke: one.color,
        "stroke-width": one.thin ? 1 : 1.8, "stroke-linejoin": "round", opacity: one.thin ? 0.55 : 1,
      });
    }
    if (one.dots || run.length === 1) for (const [at, value] of run) shape(svg, "circle", { cx: at, cy: value, r: 2.6, fill: one.color });
  }
}

// The categories of a ledger, the greatest first.
const is_category = ([name, size]) => name !== "peak" && name !== "process_pss" && name !== "total" && size > 0;
const categories = (memory) => Object.entries(memory).filter(is_category).sort((a, b) => b[1] - a[1]);
const sum_of = (memory) => categories(memory).reduce((sum, [, size]) => sum + size, 0);

// A category has the same colour everywhere.
const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "communication", "workspace", "snapshot", "cached"];
const CATEGORY_COLORS = ["--a", "--e", "--c", "--d", "--g", "--f", "--b", "--h"].map((name) => `var(${name})`);
const category_color = (category) => CATEGORY_COLORS[CATEGORIES.indexOf(category)] ?? "var(--g)";

// What was predicted of something, and how far what was booked is from it.
function beside(predicted, booked) {
  if (predicted === undefined) return "not predicted";
  const off = booked - predicted;
  return off === 0 ? "as predicted" : `${bytes(predicted)} (${off > 0 ? "+" : "\u2212"}${bytes(Math.abs(off))})`;
}

const category_label = (name) => swatch(category_color(name), name);

function memory() {
  if (!data.memory) return;
  const parts = categories(data.memory);
  const peak = Math.max(sum_of(data.memory), data.memory.peak ?? 0);
  if (peak === 0) return;
  const predicted = data.memory_beside?.predicted ?? {};
  const is_predicted = Object.keys(predicted).length > 0;
  const { body } = card("Memory by category", { rest: `peak ${bytes(peak)}` + (is_predicted ? `, ${bytes(predicted.total)} predicted` : "") });
  body.append(stack(parts.map(([name, size]) => [size, category_color(name), `${name}: ${bytes(size)}`]), { whole: peak }));
  table(body, ["", "booked", "of the peak", is_predicted && "predicted"],
    parts.map(([name, size]) => [category_label(name), bytes(size), percent(size / peak), beside(predicted[name], size)]));
}

// The predicted step beside the median of the measured ones.
function prediction() {
  const made = data.usual_step;
  if (!made) return;
  const plan = data.run?.predicted;
  const { body } = card("Predicted and measured", { rest: `median of ${made.steps} steps` });
  const waits = (plan?.exposed_ms ?? 0) + (plan?.bubble_ms ?? 0);
  const rows = [
    ["a step", plan?.step_ms, made.step_ms, ms],
    ["of it computing", plan?.compute_ms, made.step_ms - made.exposed_ms - made.disk_ms, ms],
    ["of it waiting for other ranks", plan && waits, made.exposed_ms, ms],
    ["of it waiting for the disk", plan?.disk_ms, made.disk_ms, ms],
    ["memory, most of any rank", made.predicted_bytes, made.booked_bytes, bytes],
  ].filter(([, predicted, measured]) => measured !== null && measured !== undefined && (predicted || measured));
  const off = (predicted, measured) => (predicted === measured ? "as predicted" : predicted ? `${measured >= predicted ? "+" : "\u2212"}${percent(Math.abs(measured / predicted - 1))}` : "");
  table(body, ["", "predicted", "measured", "measured is"],
    rows.map(([name, predicted, measured, format]) => [name, format(predicted), format(measured), off(predicted, measured)]));
  note(body, plan ? `Predicted for ${plan.cluster}; lockstep plan --calibrate learns from this run.`
    : "No time was predicted. On one machine, with nothing on disk, that takes lockstep bench machine, or lockstep plan --calibrate, which learns from a run.");
}

function memory_by_rank() {
  const ranks = data.memory_by_rank?.length ? data.memory_by_rank : [data.memory];
  const { predicted_by_rank: predicted = [], processes = [] } = data.memory_beside ?? {};
  if (!data.memory || (ranks.length === 1 && processes.length === 0)) return;
  const of_rank = predicted.length ? predicted : [data.memory_beside?.predicted];
  const is_predicted = Boolean(of_rank[0]?.total);
  const most = Math.max(...ranks.map((memory) => memory.peak ?? 0));
  const names = categories(data.memory).map(([name]) => name);
  const sum = (list) => list.reduce((sum, one) => sum + one, 0);
  const of_processes = processes.length ? `; processes have ${bytes(sum(processes.map(([pss]) => pss)))}, ledgers said ${bytes(sum(processes.map(([, ledger]) => ledger)))} then` : "";
  const { body } = card("Memory by rank", { wide: true, rest: `${bytes(sum(ranks.map((memory) => memory.peak ?? 0)))} in all at their peaks${of_processes}` });
  const bar = (memory, rank) => element("td", { style: "width:100%;min-width:60px" }, stack(names.map((name) =>
    [memory[name] ?? 0, category_color(name), `${name}: ${bytes(memory[name])}; ${beside(of_rank[rank]?.[name], memory[name])}`]), { whole: most, thin: true }));
  table(body, ["", "", "peak", is_predicted && "booked", is_predicted && "predicted", processes.length > 0 && "process (PSS)"], ranks.map((memory, rank) =>
    [`rank ${rank}`, bar(memory, rank), bytes(memory.peak), bytes(sum_of(memory) - (memory.cached ?? 0)), bytes(of_rank[rank]?.total), bytes(processes[rank]?.[0])]));
  if (!is_predicted || ranks.length === 1) { legend(body, names.map((name) => [name, category_color(name)])); return; }
  // Every category of every rank; what is not as predicted says so.
  const cell = (booked = 0, predicted) => {
    const is_off = predicted !== undefined && predicted !== booked;
    return element("td", is_off ? { class: "bad" } : {}, bytes(booked), is_off ? element("div", {}, beside(predicted, booked)) : null);
  };
  table(body, ["booked", ...ranks.map((_, rank) => `rank ${rank}`)], names.map((name) => [category_label(name),
    ...ranks.map((memory, rank) => cell(memory[name], name === "cached" ? undefined : of_rank[rank]?.[name] ?? 0))]), { named: true });
  note(body, body.querySelector(".bad") ? "Where something is not as predicted, what was predicted stands below it; what is cached is not predicted." : "All as predicted; what is cached is not predicted.");
}

// A row for each layer, a cell for each expert: the darker, the more tokens have chosen it.
function expert_load() {
  const layers = data.expert_load;
  if (!layers?.length) return;
  const share = (counts, count) => (count * counts.length) / Math.max(1, counts.reduce((sum, other) => sum + other, 0));
  const most = Math.max(2, ...layers.flatMap((counts) => counts.map((count) => share(counts, count))));
  const { body } = card("Load of experts", { wide: true, rest: `last shown step; darkest: ${most.toPrecision(3)} times the even share` });
  const cell = (counts, count, expert) => element("div", {
    style: `flex:1;min-width:2px;background:color-mix(in srgb, var(--c) ${((100 * share(counts, count)) / most).toFixed(1)}%, transparent)`,
    title: `expert ${expert}: ${count} slots, ${share(counts, count).toPrecision(3)} times the even share`,
  });
  const row = (counts) => element("td", { style: "width:100%;min-width:60px" },
    element("div", { class: "stack thin" }, ...counts.map((count, expert) => cell(counts, count, expert))));
  table(body, ["layer", ""], layers.map((counts, layer) => [String(layer), row(counts)]));
}

// The kinds of operation in the order of their time, each with the color that it has in every picture.
const kinds = new Map();
const rows = data.profile?.roofline?.rows;
for (const row of Array.isArray(rows) ? rows : []) {
  const kind = row.operation;
  if (!kinds.has(kind)) kinds.set(kind, kinds.size < 6 ? COLORS[kinds.size] : "var(--g)");
}
const color_of = (kind) => kinds.get(kind) ?? (kind === "communication" ? "var(--soft)" : "var(--g)");

function operations() {
  const found = data.profile?.roofline;
  if (!found) return;
  const { limits } = found;
  const roofs = limits ? [["f32", limits.f32_gflops * 1e9], ...(limits.bf16_gflops > limits.f32_gflops * 1.05 ? [["bf16", limits.bf16_gflops * 1e9]] : [])] : [];
  const one = card("Roofline", {
    wide: true,
    note: `Where the time of step ${data.profile.step} went: operations cover ${percent(found.covered_ms / found.step_ms)} of its ${ms(found.step_ms)}.` +
      (limits ? ` With every operation at the machine's limit it would take ${ms(found.limit_ms)}.` : ""),
    rest: limits ? [`memory ${rate(limits.memory_gb_per_s * 1e9, "B/s")}`, ...roofs.map(([name, peak]) => `${name} ${rate(peak, "FLOP/s")}`)].join(", ") : "",
  });
  if (limits) {
    roofline(one, found.rows.map((row) => ({
      ...row, seconds: row.ms / 1e3, color: color_of(row.operation),
      words: `${row.operation} ${row.pass ?? ""}: ${rate(row.gflops * 1e9, "FLOP/s")}, ${percent(row.of_limit)} of the limit, ${percent(row.share)} of the step`,
    })), roofs, limits.memory_gb_per_s * 1e9);
  }
  table(one.body, ["operation", "pass", "time", "share", limits && "of limit", limits && "bound", "FLOP/s", "B/s", "FLOPs", "bytes", "calls"], found.rows.map((row) => [
    swatch(color_of(row.operation), row.operation), row.pass ?? "", ms(row.ms),
    element("td", { class: "bar" }, element("i", { style: `width:${100 * row.share}%` }), element("span", {}, percent(row.share))),
    row.bytes ? percent(row.of_limit) : "", row.bytes ? row.bound : "", row.flops ? count(row.gflops * 1e9) : "", row.bytes ? count(row.gb_per_s * 1e9) : "",
    row.flops ? count(row.flops) : "", row.bytes ? count(row.bytes) : "", String(row.calls),
  ]), { left: ["pass", "bound"] });
}

function timeline() {
  const profile = data.profile;
  if (!profile?.spans?.length) return;
  const step_ms = profile.roofline.step_ms;
  const { body, say } = card(`Timeline of step ${profile.step}`, { wide: true, rest: `${ms(step_ms)}; touch a part to read it` });
  const lanes = ["forward", "recompute", "backward", "step", "ranks"].filter((lane) => profile.spans.some((span) => span.lane === lane));
  const row = 30;
  drawing(body, lanes.length * row + 24, (svg, width, height) => {
    const left = width < 500 ? 62 : 74, x = scale(0, step_ms, left, width - 6);
    lanes.forEach((lane, index) => shape(svg, "text", { x: left - 8, y: index * row + 19, "text-anchor": "end" }, lane));
    time_axis(svg, x, step_ms, 0, width, height);
    for (const span of profile.spans) {
      const part = shape(svg, "rect", {
        x: x(span.start_ms), y: lanes.indexOf(span.lane) * row + 4, width: Math.max(0.4, x(span.start_ms + span.ms) - x(span.start_ms)), height: row - 8, fill: color_of(span.kind),
      });
      touch(part, () => say(`${span.name}: ${ms(span.ms)} at ${ms(span.start_ms)}`));
    }
    svg.onpointerleave = () => say();
  });
  const seen = new Set(profile.spans.map((span) => span.kind));
  legend(body, [...kinds].filter(([kind, color]) => seen.has(kind) && color !== "var(--g)").concat([["everything else", "var(--g)"]], seen.has("communication") ? [["between ranks", "var(--soft)"]] : []));
}

// Who is where: a column for each stage of a pipeline, a row for each replica, and in a cell the ranks that share them.
function mesh() {
  const { layout } = data;
  if (!Array.isArray(layout?.ranks) || layout.ranks.length < 2) return;
  const degree = Object.fromEntries(layout.axes), names = layout.axes.map(([name]) => name);
  const used = layout.axes.filter(([, size]) => size > 1);
  const at = (rank, name) => layout.ranks[rank].coordinates[names.indexOf(name)];
  const { body, say } = card("Who holds what", { wide: true, rest: used.map(([name, size]) => `${name} ${size}`).join(" × ") });
  const across = degree.context * degree.tensor, rows = degree.replicate * degree.shard;
  const columns = degree.pipeline;
  const inner = across * Math.ceil(layout.ranks.length / (across * rows * columns));
  const tall = 34, gap = 10;
  const bottom = columns > 1 ? 12 : 0;
  drawing(body, rows * (tall + gap) + bottom, (svg, width, height) => {
    const left = rows > 1 ? 74 : 4, cell = Math.min((width - left) / columns - gap, inner * 110), box = cell / inner;
    for (let row = 0; row < rows && rows > 1; row += 1) shape(svg, "text", { x: left - 10, y: row * (tall + gap) + tall / 2 + 4, "text-anchor": "end" }, `replica ${row}`);
    for (let stage = 0; stage < columns && columns > 1; stage += 1) {
      shape(svg, "text", { x: left + stage * (cell + gap) + cell / 2, y: height - 5, "text-anchor": "middle" }, cell < 90 ? String(stage) : `pipeline rank ${stage}`);
    }
    layout.ranks.forEach((holds, rank) => {
      const stage = at(rank, "pipeline"), row = at(rank, "replicate") * degree.shard + at(rank, "shard");
      const within = at(rank, "context") * degree.tensor + at(rank, "tensor");
      const x = left + stage * (cell + gap) + within * box, y = row * (tall + gap);
      const part = shape(svg, "rect", { x: x + 1, y: y + 1, width: Math.max(1, box - 2), height: tall - 2, rx: 3, fill: color(stage), opacity: within % 2 ? 0.72 : 0.92 });
      if (box > 26) shape(svg, "text", { class: "in", x: x + box / 2, y: y + tall / 2 + 4 }, box > 58 ? `rank ${rank}` : String(rank));
      touch(part, () => say(`rank ${rank}: ${used.map(([name]) => `${name} ${at(rank, name)}`).join(", ")}; ${held(holds)}`));
    });
    svg.onpointerleave = () => say();
  });
  const splits = layout.ranks.some((holds) => holds.split > 0);
  table(body, ["rank", ...used.map(([name]) => name), "holds", "elements", splits && "tensors split, whole", "weights", "gradients", "optimizer"],
    layout.ranks.map((holds, rank) => [swatch(color(at(rank, "pipeline")), `rank ${rank}`), ...used.map(([name]) => String(at(rank, name))), held(holds),
      count(holds.elements), `${holds.split}, ${holds.whole}`, bytes(holds.parameters), bytes(holds.gradients), bytes(holds.optimizer)]), { left: ["holds"] });
}

function held(holds) {
  const stages = Object.fromEntries(data.layout.axes).pipeline > 1;
  return holds.stages.map(({ stage, holds: what }) => (stages ? `stage ${stage}: ${what}` : what)).join("; ");
}

// A step of a pipeline as its ranks made it, and below as its schedule promises it.
const PASSES = {
  F: ["forward", "--a"], B: ["backward", "--b"], I: ["backward for inputs", "--b"], W: ["backward for weights", "--c"], U: ["gradient norm, optimizer step", "--g"],
};
function pipelines() {
  const found = data.pipelines;
  if (!found?.pipelines?.length) return;
  const { body, say, rest } = card(`Pipeline in step ${found.step}, ${found.schedule}`, { wide: true });
  const kinds = (one) => new Set(one.measured.rows.flat().map(([kind]) => kind));
  let shown = 0;
  const host = element("div", {});
  if (found.pipelines.length > 1) {
    const choice = element("select", {}, ...found.pipelines.map(({ ranks }, index) => element("option", { value: index }, `ranks ${ranks.join(", ")}`)));
    choice.onchange = () => { shown = Number(choice.value); draw(); };
    body.append(element("p", {}, `One of ${found.of} pipelines: `, choice));
  }
  body.append(host);
  const draw = () => {
    host.replaceChildren();
    const one = found.pipelines[shown];
    const both = [["measured", one.measured], ["simulated", one.simulated]];
    const all_ms = Math.max(...both.map(([, step]) => step.step_ms));
    rest(both.map(([name, step]) => `${name} ${ms(step.step_ms)}, bubble ${percent(step.bubble)}`).join("; "));
    const tall = one.ranks.length > 16 ? 14 : 24, title = 20, block = title + one.ranks.length * tall + 6;
    drawing(host, 2 * block + 22, (svg, width, height) => {
      const left = 62, x = scale(0, all_ms, left, width - 6);
      time_axis(svg, x, all_ms, title - 4, width, height);
      both.forEach(([name, step], which) => {
        const top = which * block;
        shape(svg, "text", { class: "name", x: left, y: top + 13 }, `${name}: ${ms(step.step_ms)}, bubble ${percent(step.bubble)}`);
        step.rows.forEach((row, index) => {
          const y = top + title + index * tall, stages = [...new Set(row.filter(([kind]) => kind !== "U").map(([, stage]) => stage))].sort((a, b) => a - b);
          shape(svg, "text", { x: left - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, `rank ${one.ranks[index]}`);
          shape(svg, "rect", { x: left, y: y + 1, width: Math.max(0, x(step.step_ms) - left), height: tall - 2, fill: "var(--grid)", opacity: 0.6 });
          for (const [kind, stage, micro_batch, start, length] of row) {
            const [what, fill] = PASSES[kind], wide = x(start + length) - x(start);
            const part = shape(svg, "rect", {
              x: x(start), y: y + 1, width: Math.max(0.5, wide - (wide > 4 ? 0.8 : 0)), height: tall - 2, fill: `var(${fill})`,
              opacity: kind === "U" ? 0.8 : 1 - (0.45 * stages.indexOf(stage)) / stages.length,
            });
            const of_micro_batch = kind === "U" ? "" : ` of micro-batch ${micro_batch}${stages.length > 1 ? `, stage ${stage}` : ""}`;
            touch(part, () => say(`rank ${one.ranks[index]}, ${name}: ${what}${of_micro_batch}, ${ms(length)} at ${ms(start)}`));
            if (kind !== "U" && tall > 20 && wide > 7 + 6 * String(micro_batch).length) shape(svg, "text", { class: "in", x: x(start) + wide / 2, y: y + tall / 2 + 4 }, micro_batch);
          }
        });
      });
      svg.onpointerleave = () => say();
    });
    const seen = kinds(one), stages = one.measured.rows[0].filter(([kind]) => kind === "F").map(([, stage]) => stage);
    const entries = Object.entries(PASSES).filter(([kind]) => seen.has(kind) && !(kind === "I" && seen.has("B")));
    legend(host, [...entries.map(([kind, [name, color]]) => [kind === "B" && seen.has("I") ? "backward, whole or for inputs" : name, `var(${color})`]), ["waiting", "var(--grid)"]]);
    host.append(element("p", {}, "Numbers are micro-batches." + (new Set(stages).size > 1 ? " Fainter: later stages of a rank." : "") +
      " Simulated: the same lists, with passes that take what they took on average, and messages that take no time."));
  };
  draw();
}

function skipped() {
  if (data.totals.skipped === 0) return;
  const { body } = card("Skipped steps", {
    wide: true, note: "Their loss or gradient was not finite, or far beyond the usual; the weights were left as they were.", rest: `${data.totals.skipped} of ${data.totals.steps}`,
  });
  const more = data.totals.skipped - data.skipped.length;
  body.append(element("p", { class: "bad" }, `steps ${data.skipped.join(", ")}${more > 0 ? ` and ${more} more` : ""}`));
}

function configuration() {
  const settings = data.run?.settings;
  if (!Array.isArray(settings)) return;
  const { body } = card("Configuration", { wide: true, rest: "highlighted: not the default" });
  const sections = new Map();
  for (const { key, value, origin } of settings) {
    const [section, ...rest] = String(key).split(".");
    if (!sections.has(section)) sections.set(section, []);
    const text = value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    sections.get(section).push(element("div", origin === "default" ? {} : { class: "set", title: String(origin) },
      element("dt", {}, rest.join(".")), element("dd", {}, text)));
  }
  body.append(element("div", { class: "settings" }, ...[...sections].map(([name, rows]) =>
    element("div", {}, element("h3", {}, `[${name}]`), element("dl", {}, ...rows)))));
}

function totals() {
  const { totals } = data;
  const found = [
    [totals.loss, plain, "training loss, smoothed"], [totals.eval_loss, plain, "evaluation loss"], [totals.steps, String, totals.planned ? `of ${totals.planned} steps` : "steps"],
    [totals.accuracy, percent, "training accuracy, smoothed"], [totals.eval_accuracy, percent, "evaluation accuracy"],
    [totals.amount_seen, count, `${totals.unit} seen`], [totals.seconds, seconds, "in steps"], [totals.amount_per_s, count, `${totals.unit}/s, median`],
    [totals.flops_per_s, (value) => rate(value, "FLOP/s"), "model FLOPs, median"], [totals.mfu, percent, "of the devices' peak (MFU), median"], [totals.peak_bytes, bytes, "peak memory"],
    [totals.ranks, String, "ranks"], [totals.comm_bytes, bytes, "sent by a rank in a step"], [totals.comm_share, percent, "waiting for other ranks"],
    [totals.stall_share, percent, "waiting for checkpoints"], [totals.data_share, percent, "waiting for data"], [totals.skipped, String, "skipped steps"],
    [totals.rollbacks || null, String, "times gone back to earlier weights"],
  ];
  return tiles(found.filter(([value]) => value !== null && value !== undefined)
    .map(([value, format, name]) => [format(value), name, name === "skipped steps" && value > 0]));
}

page.replaceChildren(header(data.title, ...data.lines.map((line) => element("p", {}, line))), totals(), cards, element("footer", {}, data.footer));
const { loss, smoothed, eval_loss, lr, grad_norm, amount_per_s, accuracy, eval_accuracy, mfu, stall, expert_imbalance, comm_busy, comm_exposed } = data.series;
chart("Loss", [
  { name: "training", color: "var(--a)", thin: true, ...loss }, { name: "smoothed", color: "var(--a)", ...smoothed },
  { name: "evaluation", color: "var(--b)", dots: true, ...eval_loss },
], { wide: true, height: 300, marks: data.skipped });
chart("Accuracy", [{ name: "smoothed", color: "var(--a)", ...accuracy }, { name: "evaluation", color: "var(--b)", dots: true, ...eval_accuracy }], { format: percent });
chart("Learning rate", [{ name: "learning rate", color: "var(--c)", ...lr }], { zero: true });
chart("Gradient norm, before clipping", [{ name: "norm", color: "var(--d)", ...grad_norm }]);
chart("Throughput", [{ name: `${data.totals.unit}/s`, color: "var(--f)", ...amount_per_s, summary: `${count(data.totals.amount_per_s)} ${data.totals.unit}/s, median` }], { format: count, zero: true });
chart("Model FLOPs utilization", [{ name: "MFU", color: "var(--f)", ...mfu, summary: `${percent(data.totals.mfu ?? 0)}, median` }], {
  format: percent, zero: true, note: `Model FLOP/s, recomputation not counted, of the devices' peak of ${rate(data.run?.peak_flops_per_s, "FLOP/s")} (${data.run?.peak_source ?? "unknown"}).`,
});
chart("Balance of experts", [{ name: "most chosen", color: "var(--c)", ...expert_imbalance }], {
  format: (times) => `${times.toPrecision(3)}x`, zero: true, note: "How many times its even share the most chosen expert of any layer has.",
});
part(expert_load);
part(prediction);
part(memory);
part(memory_by_rank);
chart("Between ranks", [{ name: "busy", color: "var(--c)", ...comm_busy }, { name: "exposed", color: "var(--b)", ...comm_exposed }], {
  format: ms, zero: true, wide: true, height: 150, note: "Milliseconds of a step in which the first rank talked to others or waited for them (busy), and those of them in which it computed nothing (exposed).",
});
chart("Checkpoint stalls", [{ name: "stall", color: "var(--e)", bars: true, ...stall, summary: `${seconds(data.totals.stall_seconds)} in all` }], { format: ms, zero: true, wide: true, height: 150 });
for (const draw of [mesh, pipelines, operations, timeline, skipped, configuration]) part(draw);
