// Draws the page of a plan from the document of `lockstep plan --json`.

const { document: answer } = data;
const best = answer.ranking[0];
const step_ms = best.step_ms;

const plural = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
const dollars = (amount) => `$${Math.round(amount).toLocaleString("en")}`;
const tenths = (share) => percent(share, 1);
const degree = (axis) => best.mesh[axis] ?? 1;

// A figure of the document, as text that knows its place there.
function figure(pointer, format) {
  const value = pointer.split("/").slice(1).reduce((found, key) => found?.[key], answer) ?? null;
  return element("data", { value: JSON.stringify(value), "data-of": pointer }, format(value));
}

// The parts of the step of a plan of the ranking, for a bar.
function step_parts(index) {
  const parts_ms = answer.ranking[index].step_parts_ms;
  return data.plans[index].parts.map(([key, name], place) => [parts_ms[key], color(place), `${name} ${ms(parts_ms[key])}`]);
}

function heading() {
  const { workload } = answer, { mesh, schedule, recompute } = data.plans[0];
  const choices = [mesh, schedule, `ZeRO stage ${best.zero_stage}`, `micro-batches of ${best.micro_batch}`, `recompute ${recompute}`];
  const batch = `${plural(workload.global_batch, "sequence")} of ${plural(workload.seq_len, "token")} in a step, in ${workload.precision}`;
  return header(data.title,
    element("p", {}, `Predicted by lockstep ${data.lockstep}: ${choices.filter((choice) => choice !== null).join(", ")}`),
    element("p", {}, `${batch}, on ${plural(best.devices, best.devices === 1 ? "rank" : "device")}`),
    element("p", { class: "small" }, element("code", {}, data.command)),
    data.rejection && element("p", { class: "bad" }, element("b", {}, `This plan ${data.rejection}.`)));
}

function figures() {
  const of_best = (key, format) => figure(`/ranking/0/${key}`, format);
  const teraflops = (value) => rate(value * 1e12, "FLOP/s");
  const rank = largest(best);
  const { goodput, stalls_ms: { steps_between_saves: every } } = best;
  return tiles([
    [of_best("step_ms", ms), "a step"],
    [of_best("tokens_per_s", count), "tokens a second"],
    [of_best("tflops_per_device", teraflops), "a device, model"],
    [of_best("hardware_tflops_per_device", teraflops), "with recomputation"],
    [of_best("mfu", tenths), "MFU"],
    [of_best(`memory_by_stage/${rank}/total`, bytes), best.memory_by_stage.length > 1 ? `most memory: pipeline rank ${rank}` : "memory of each rank"],
    ...(best.price_per_hour === null ? [] : [[of_best("price_per_hour", dollars), "an hour"], [of_best("price_per_billion_tokens", dollars), "for 10⁹ tokens"]]),
    ...(every > 0 ? [[of_best("stalls_ms/of_a_save", ms), `for each save, one in ${every} steps`]] : []),
    ...(goodput ? [[of_best("goodput/share", tenths), `lasts, with a save every ${seconds(goodput.interval_s)}`]] : []),
  ]);
}

// The pipeline rank that books most; of equal ones the first.
function largest(plan) {
  const totals = plan.memory_by_stage.map(({ total }) => total);
  return totals.indexOf(Math.max(...totals));
}

// Nodes and their devices, coloured by pipeline rank, or without a pipeline by part of the batch.
function mesh() {
  const { nodes, count: all_nodes } = data.mesh;
  const stages = degree("pipeline"), tensor = degree("tensor");
  const of_a_stage = Math.max(1, Math.floor(best.devices / stages));
  const of_a_part = stages > 1 ? of_a_stage : tensor * degree("context");
  const part_name = stages > 1 ? "pipeline rank" : "part of the batch";
  const { body, say } = card("The mesh on the machines", { wide: true, rest: data.links });
  const shape_of = (width) => {
    const columns = width > 760 ? 4 : width > 400 ? 2 : 1, box = width / columns - 12;
    const across = ({ ranks: [from, to] }) => Math.max(1, Math.min(Math.ceil((to - from) / 2), Math.floor((box - 8) / 22)));
    const rows = Math.max(...nodes.map((node) => Math.ceil((node.ranks[1] - node.ranks[0]) / across(node)))), tall = rows > 2 ? 24 : 33;
    return { columns, box, across, tall, height: rows * tall + 34 };
  };
  const height = (width) => Math.ceil(nodes.length / shape_of(width).columns) * shape_of(width).height;
  drawing(body, height, (svg, width) => {
    const { columns, box, across: across_of, tall, height } = shape_of(width);
    nodes.forEach((node, place) => {
      const { number, ranks: [from, to], device } = node, across = across_of(node), cell = (box - 8) / across;
      const left = (place % columns) * (box + 12) + 1, top = Math.floor(place / columns) * height + 18;
      shape(svg, "text", { class: "name", x: left, y: top - 5 }, `node ${number}${device === null ? "" : `, ${device}`}`);
      shape(svg, "rect", { class: "axis", x: left, y: top, width: box, height: height - 26, fill: "none", rx: 4 });
      const x = (rank) => left + 4 + ((rank - from) % across) * cell, y = (rank) => top + 5 + Math.floor((rank - from) / across) * tall;
      for (let rank = from; rank < to; rank += 1) {
        const part = shape(svg, "rect", { x: x(rank) + 1, y: y(rank), width: cell - 2, height: tall - 3, fill: color(Math.floor(rank / of_a_part)) });
        if (cell > 7 * String(rank).length) shape(svg, "text", { class: "in", x: x(rank) + cell / 2, y: y(rank) + tall / 2 + 3 }, rank);
        touch(part, () => say(`rank ${rank}: pipeline rank ${Math.floor(rank / of_a_stage)}, tensor ${rank % tensor} of ${tensor}`));
      }
      // A tensor-parallel group is cut where a row of devices ends.
      for (let rank = from; rank < to && tensor > 1;) {
        const ends = [(Math.floor(rank / tensor) + 1) * tensor, from + (Math.floor((rank - from) / across) + 1) * across, to];
        const end = Math.min(...ends);
        shape(svg, "rect", { class: "frame", x: x(rank), y: y(rank) - 1, width: (end - rank) * cell, height: tall - 1, rx: 3 });
        rank = end;
      }
    });
    svg.onpointerleave = () => say();
  });
  const parts = [...new Set(nodes.flatMap(({ ranks: [from, to] }) =>
    Array.from({ length: to - from }, (_, device) => Math.floor((from + device) / of_a_part))))];
  const notes = [];
  if (best.devices <= of_a_part) legend(body, [["the whole model", color(0)]]);
  else if (parts.length <= COLORS.length) legend(body, parts.map((part) => [`${part_name} ${part}`, color(part)]));
  else notes.push(`A colour for each ${part_name}; after ${COLORS.length} they repeat.`);
  if (tensor > 1) notes.push("A frame: a tensor-parallel group.");
  if (all_nodes > nodes.length) notes.push(`${nodes.length} of ${all_nodes.toLocaleString("en")} nodes are drawn; the others are like these.`);
  if (notes.length > 0) note(body, notes.join(" "));
}

function step() {
  const parts = data.plans[0].parts, { gradients, update } = best.step_parts_ms;
  const [largest_ms, largest_name] = parts.map(([key, name]) => [best.step_parts_ms[key], name]).reduce((most, part) => (part[0] > most[0] ? part : most));
  const one = card("The step", { wide: true, rest: `${percent(largest_ms / step_ms)} of it is ${largest_name}` });
  one.body.append(stack(step_parts(0)), element("div", { class: "legend" }, ...parts.map(([key, name], index) =>
    element("span", {}, swatch(color(index), `${name} `), figure(`/ranking/0/step_parts_ms/${key}`, ms)))));
  const after = [[3, step_ms - update - gradients, gradients], [4, step_ms - update, update]]
    .map(([kind, start, ms]) => ({ kind, start, ms })).filter(({ ms }) => ms > 0);
  draw_timeline(one, data.timeline, step_ms, after);
  const kinds = new Set([...data.timeline.rows.flatMap((row) => row.letters.map(({ kind }) => kind)), ...after.map(({ kind }) => kind)]);
  legend(one.body, [...PASSES.map((name, kind) => [name, color(kind)]).filter((_, kind) => kinds.has(kind)), ["waiting", "var(--grid)"]]);
  const { rows, ranks } = data.timeline;
  note(one.body, "Zoom: buttons, + and − keys, Ctrl and the wheel, a double click. Drag or arrow keys: along the step. A number is that of a micro-batch. " +
    "Passes too short to be seen are drawn as shares of the time, one above the other." +
    (rows.length < ranks ? ` ${rows.length} of ${ranks} ranks of the pipeline are drawn.` : ""));
}

function traffic() {
  const { kinds, links, pipeline_rank, shared_links_ms } = answer.traffic;
  const { body } = card("Traffic of a rank", { wide: true, rest: links.join(", ") });
  if (kinds.length === 0) { note(body, "Nothing is sent."); return; }
  const used = links.map((_, level) => level).filter((level) => kinds.some((kind) => kind.bytes[level] > 0));
  for (const level of used) {
    const link_ms = (bytes) => bytes / (answer.cluster.links[level].gb_per_s * 1e6);
    const sum = kinds.reduce((sum, kind) => sum + kind.bytes[level], 0);
    body.append(element("div", { class: "link" }, element("span", {}, links[level]),
      stack(kinds.map((kind, index) => [link_ms(kind.bytes[level]), color(index), `${kind.sent} ${bytes(kind.bytes[level])}`]), { whole: step_ms, thin: true }),
      element("span", {}, `${bytes(sum)}, ${ms(link_ms(sum))} of ${ms(step_ms)}`)));
  }
  legend(body, kinds.map((kind, index) => [kind.sent, color(index)]));
  table(body, ["", "ranks", ...used.map((level) => links[level]), "total", "exposed", "overlapped"], kinds.map((kind, index) => {
    const of_kind = (key, format) => figure(`/traffic/kinds/${index}/${key}`, format);
    return [swatch(color(index), kind.sent), of_kind("ranks", String), ...used.map((level) => of_kind(`bytes/${level}`, bytes)),
      of_kind("busy_ms", ms), of_kind("exposed_ms", ms), of_kind("hidden", percent)];
  }), { named: true });
  if (shared_links_ms > 0) {
    body.append(element("p", {}, figure("/traffic/shared_links_ms", ms), " more are exposed: several collectives use the same links at once."));
  }
  note(body, "Bars: how long each link would take at its full rate, as a share of the step. A rank's bytes are means over its group." +
    (degree("pipeline") > 1 ? ` It is pipeline rank ${pipeline_rank}, which is busy longest. Waiting for messages is part of the waiting for other stages.` : ""));
}

function memory() {
  const curves = data.memory, ranks = answer.memory_over_time.length, capacity = best.capacity_bytes;
  if (curves.length === 0) return;
  const facts = curves.map(({ pipeline_rank }) => answer.memory_over_time[pipeline_rank]);
  const name = (rank) => (ranks > 1 ? `pipeline rank ${rank}` : "each rank");
  const { body, say } = card("Memory of a rank over the step", { wide: true, rest: `capacity of a rank: ${bytes(capacity)}` });
  const booked = Math.max(1, ...answer.memory_over_time.map(({ booked_bytes }) => booked_bytes));
  // A limit far above the curves would flatten them.
  const shows_limit = capacity <= 3 * booked;
  const most = 1.04 * (shows_limit ? Math.max(booked, capacity) : booked);
  drawing(body, 210, (svg, width, height) => {
    const left = 66, bottom = height - 22;
    const x = scale(0, step_ms, left, width - 6), y = scale(0, most, bottom, 8);
    const unit = 1024 ** Math.floor(Math.log(most) / Math.log(1024));
    for (const at of ticks(0, most / unit, 4)) {
      shape(svg, "line", { class: "grid", x1: left, x2: width - 6, y1: y(at * unit), y2: y(at * unit) });
      shape(svg, "text", { x: left - 6, y: y(at * unit) + 4, "text-anchor": "end" }, bytes(at * unit));
    }
    time_axis(svg, x, step_ms, 8, width, height);
    const level = (size, looks) => shape(svg, "line", { x1: left, x2: width - 6, y1: y(size), y2: y(size), ...looks });
    curves.forEach(({ pipeline_rank, points }, index) => {
      const { booked_bytes, peak_bytes, peak_ms } = facts[index];
      level(booked_bytes, { stroke: color(index), "stroke-opacity": 0.55, "stroke-dasharray": "2 3" });
      const path = points.map(([tick, ...sizes]) => `H${x(tick * data.timeline.tick_ms).toFixed(1)}` + sizes.map((size) => `V${y(size).toFixed(1)}`).join(""));
      const start = points.length > 0 ? points[0][1] : facts[index].standing_bytes;
      const curve = shape(svg, "path", { d: `M${x(0)} ${y(start).toFixed(1)}${path.join("")}H${x(step_ms).toFixed(1)}`, fill: "none", stroke: color(index), "stroke-width": 1.6 });
      const dot = shape(svg, "circle", { cx: x(peak_ms), cy: y(peak_bytes), r: 3.5, fill: color(index) });
      for (const part of [curve, dot]) touch(part, () => say(`${name(pipeline_rank)}: peak ${bytes(peak_bytes)} at ${ms(peak_ms)}, ${bytes(booked_bytes)} predicted`));
    });
    if (shows_limit) level(capacity, { stroke: "var(--bad)", "stroke-dasharray": "4 3" });
    level(0, { class: "axis" });
    svg.onpointerleave = () => say();
  });
  legend(body, [...curves.map(({ pipeline_rank }, index) => [name(pipeline_rank), color(index)]), ...(shows_limit ? [["capacity of a rank", "var(--bad)"]] : [])]);
  const categories = Object.keys(best.memory_by_stage[0]).filter((key) => key !== "total" && best.memory_by_stage.some((memory) => memory[key] > 0));
  table(body, ["", "constant", "peak", "at", "predicted", ...categories], curves.map(({ pipeline_rank: rank }) => {
    const over_time = (key, format) => figure(`/memory_over_time/${rank}/${key}`, format);
    return [name(rank), over_time("standing_bytes", bytes), over_time("peak_bytes", bytes), over_time("peak_ms", ms), over_time("booked_bytes", bytes),
      ...categories.map((category) => figure(`/ranking/0/memory_by_stage/${rank}/${category}`, bytes))];
  }), { named: true });
  note(body, "Lines: memory in use; the dot is the peak. Dotted: the predicted memory of the rank, with room for the saved activations of every " +
    "micro-batch in flight." +
    (curves.length < ranks ? ` ${curves.length} of ${ranks} ranks of the pipeline are drawn: the ends, the middle, and the one with most memory.` : ""));
}

// The rooflines of a micro-batch, one for each kind of device.
const MODEL_PASSES = ["forward", "recompute", "backward inputs", "backward weights"];
function rooflines() {
  answer.rooflines.forEach(({ device, pipeline_ranks: ranks, points, peak_flops_per_s: peak, bandwidth_bytes_per_s: bandwidth }, number) => {
    let title = "The roofline of a micro-batch";
    if (answer.rooflines.length > 1) {
      title += ` on ${device}`;
      if (degree("pipeline") > 1) title += ranks.length > 1 ? `: pipeline ranks ${ranks[0]} to ${ranks.at(-1)}` : `: pipeline rank ${ranks[0]}`;
    }
    const one = card(title, { wide: true, rest: device });
    const pass_color = (pass) => color(Math.max(0, MODEL_PASSES.indexOf(pass)));
    const words = ({ shape, name, pass }) => (shape ? `${shape_words(shape)}, ${pass}` : `${name} ${pass}`);
    roofline(one, points.map((point) => ({
      ...point, seconds: point.ms / 1e3, share: point.share_of_micro_batch, color: pass_color(point.pass), is_ring: point.shape === null,
      words: `${words(point)}: ${rate(point.flops_per_s, "FLOP/s")}, ${tenths(point.share_of_micro_batch)} of a micro-batch`,
    })), [["peak", peak]], bandwidth);
    const seen = MODEL_PASSES.filter((pass) => points.some((point) => point.pass === pass));
    legend(one.body, seen.map((pass) => [pass, pass_color(pass)]));
    table(one.body, ["task", "rows × inner × columns", "FLOP/byte", "achieved", "of the peak", "of its limit", "set by", "of a micro-batch"], points.map((point, index) => {
      const of_point = (key, format) => figure(`/rooflines/${number}/points/${index}/${key}`, format);
      const of_flops = (key, format) => (point.flops > 0 ? of_point(key, format) : "–");
      return [swatch(pass_color(point.pass), `${point.name} ${point.pass}`), point.shape ? shape_words(point.shape) : "",
        of_flops("intensity", (value) => (value < 10 ? value.toFixed(2) : value.toFixed(0))), of_flops("flops_per_s", (value) => rate(value, "FLOP/s")),
        of_flops("share_of_peak", tenths), of_point("share_of_limit", tenths), point.bound === "memory" ? "memory" : "the peak",
        of_point("share_of_micro_batch", tenths)];
    }), { named: true, shown: 10 });
    note(one.body, "Discs are matrix products, rings all other tasks; the larger, the longer a micro-batch is at them.");
  });
}

// Spaces that do not break.
const shape_words = ({ rows, inner, columns, count }) => `${count > 1 ? `${count} of ` : ""}${rows} × ${inner} × ${columns}`.replaceAll(" ", "\u00a0");

function ranking() {
  const { search } = answer;
  const note = search ? `${count(search.candidates)} plans, ${count(search.valued)} evaluated, in ${ms(search.ms)}` : "";
  const { body } = card("The best plans", { wide: true, rest: note });
  const slowest = Math.max(...answer.ranking.map((plan) => plan.step_ms));
  const columns = ["mesh", "ZeRO", "micro-batch", "schedule", "recompute", "step", "work", "exchanges", "bubble", "gradients", "tokens/s", "MFU", "memory"];
  table(body, columns, answer.ranking.map((plan, index) => {
    const of_plan = (key, format) => figure(`/ranking/${index}/${key}`, format);
    const { mesh, schedule, recompute } = data.plans[index];
    const total = `memory_by_stage/${largest(plan)}/total`;
    const is_bad = plan.fits === false;
    return [of_plan("mesh", () => mesh), of_plan("zero_stage", String), of_plan("micro_batch", String), schedule ?? "none", recompute,
      element("td", {}, of_plan("step_ms", ms), stack(step_parts(index), { whole: slowest, thin: true })),
      ...["work", "exchanges", "bubble", "gradients"].map((key) => of_plan(`step_parts_ms/${key}`, ms)),
      of_plan("tokens_per_s", count), of_plan("mfu", tenths),
      element("td", is_bad ? { class: "bad" } : {}, of_plan(total, bytes), " of ", of_plan("capacity_bytes", bytes))];
  }), { named: true });
}

function neighbours() {
  if (!answer.neighbours?.length) return;
  const { body } = card("Why not otherwise", { wide: true, rest: "each choice of the best plan made another way" });
  const change = (ratio) => (ratio === null ? "cannot be" : `${ratio < 1 ? "\u2212" : "+"}${Math.abs((ratio - 1) * 100).toFixed(1)} %`);
  table(body, ["change", "step", "why not"], answer.neighbours.map(({ change: what, reason }, index) =>
    [what, figure(`/neighbours/${index}/step_ratio`, change), reason]), { left: ["why not"], named: true });
}

page.replaceChildren(heading(), figures(), cards);
for (const draw of [mesh, step, traffic, memory, rooflines, ranking, neighbours]) part(draw);
