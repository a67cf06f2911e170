// The timeline of a step on a canvas into which one can zoom: by buttons, by keys, by dragging, by the wheel with Ctrl.

// Kinds of passes, and of what follows them.
const PASSES = ["forward", "backward", "backward of weights", "gradient reduction", "optimizer step"];

// Appends the timeline to a card. `timeline` has the rows of passes, `after` the spans behind them as {kind, start, ms}.
function draw_timeline({ body, say }, timeline, step_ms, after) {
  const LEFT = 60, AXIS = 18, GAP = 2;

  // A row's passes: a letter for each stage and kind, before it how many ticks the rank waits, behind it, between a colon and a semicolon, a micro-batch that is not the next.
  function unpacked({ rank, letters, passes }) {
    const next = letters.map(() => 0);
    const of_letter = (letter) => {
      const code = letter.codePointAt(0);
      return code < 0xc0 ? code - 65 : code - 0xc0 + 26;
    };
    const row = { rank, letters, letter: [], micro_batch: [], start: [], end: [] };
    let now = 0;
    for (const [, waits, letter, named] of passes.matchAll(/(\d*)([^\d:;])(?::(\d+);)?/gu)) {
      const index = of_letter(letter);
      now += Number(waits) * timeline.tick_ms;
      row.letter.push(index);
      row.micro_batch.push(named === undefined ? next[index] : Number(named));
      next[index] = row.micro_batch.at(-1) + 1;
      row.start.push(now);
      now += letters[index].ms;
      row.end.push(now);
    }
    row.stages = [...new Set(letters.map((letter) => letter.stage))].sort((a, b) => a - b);
    return row;
  }

  const rows = timeline.rows.map(unpacked);
  const height = rows.length > 100 ? 8 : rows.length > 32 ? 12 : rows.length > 16 ? 16 : 20;
  const bar = element("div", { class: "zoom", role: "toolbar", "aria-label": "Zoom of the timeline" });
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline of the step. Plus and minus zoom, arrows move, 0 shows the whole step." });
  const where = element("span");
  const view = { from: 0, to: step_ms };
  // So near that a pass fills the picture.
  const longest = Math.max(...rows.flatMap((row) => row.letters.map((letter) => letter.ms)), step_ms * 1e-6);
  const nearest = Math.min(step_ms, Math.max(longest, step_ms * 1e-6));

  function time(ms, span = ms) {
    if (span >= 1e5) return `${(ms / 1000).toFixed(0)} s`;
    if (span >= 1000) return `${(ms / 1000).toFixed(2)} s`;
    if (span >= 1) return `${ms.toFixed(span < 10 ? 2 : 1)} ms`;
    return `${(ms * 1000).toFixed(1)} µs`;
  }

  function show(from, to) {
    const span = Math.min(Math.max(to - from, nearest), step_ms);
    view.from = Math.min(Math.max((from + to - span) / 2, 0), step_ms - span);
    view.to = view.from + span;
    draw();
  }
  function zoom(factor, at = (view.from + view.to) / 2) {
    const span = Math.min(Math.max((view.to - view.from) * factor, nearest), step_ms);
    const share = (at - view.from) / (view.to - view.from);
    show(at - share * span, at - share * span + span);
  }
  function move(share) {
    const by = share * (view.to - view.from);
    const from = Math.min(Math.max(view.from + by, 0), step_ms - (view.to - view.from));
    show(from, from + view.to - view.from);
  }

  for (const [name, title, act] of [
    ["+", "Zoom in (+)", () => zoom(0.5)],
    ["−", "Zoom out (−)", () => zoom(2)],
    ["←", "Earlier (←)", () => move(-0.3)],
    ["→", "Later (→)", () => move(0.3)],
    ["whole step", "The whole step (0)", () => show(0, step_ms)],
  ]) {
    const button = element("button", { type: "button", title }, name);
    button.onclick = act;
    bar.append(button);
  }
  bar.append(where);
  const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1),
    PageUp: () => move(-0.9), PageDown: () => move(0.9), 0: () => show(0, step_ms), Home: () => move(-1e9), End: () => move(1e9) };
  canvas.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  };

  const width = () => canvas.clientWidth;
  const scale = () => (width() - LEFT) / (view.to - view.from);
  const x_of = (ms) => LEFT + (ms - view.from) * scale();
  const ms_of = (x) => view.from + (x - LEFT) / scale();

  // The first pass of a row that ends behind a moment.
  function first_after(row, ms) {
    let low = 0, high = row.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] > ms) high = middle; else low = middle + 1;
    }
    return low;
  }

  function draw() {
    if (width() === 0) return;
    const ratio = window.devicePixelRatio || 1;
    const tall = rows.length * (height + GAP) + AXIS;
    canvas.style.height = `${tall}px`;
    canvas.width = Math.round(width() * ratio);
    canvas.height = Math.round(tall * ratio);
    const paint = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const css = (name) => style.getPropertyValue(name).trim();
    const colors = ["--a", "--b", "--c", "--d", "--e"].map(css), [grid, soft, card, line] = ["--grid", "--soft", "--card", "--line"].map(css);
    paint.scale(ratio, ratio);
    paint.font = `${Math.min(11, height)}px system-ui, sans-serif`;
    paint.textBaseline = "middle";
    const every = Math.ceil(13 / (height + GAP));
    rows.forEach((row, index) => {
      const y = index * (height + GAP);
      paint.fillStyle = soft;
      if (index % every === 0) paint.fillText(timeline.ranks > 1 ? `rank ${row.rank}` : "each rank", 0, y + height / 2 + 0.5);
      paint.fillStyle = grid;
      paint.fillRect(LEFT, y, width() - LEFT, height);
      draw_row(paint, row, y, colors, card);
      for (const { start, ms, kind } of after) {
        const [from, to] = [Math.max(x_of(start), LEFT), Math.min(x_of(start + ms), width())];
        paint.fillStyle = colors[kind];
        if (to > from) paint.fillRect(from, y, to - from, height);
      }
    });
    paint.textAlign = "center";
    const bottom = tall - AXIS;
    for (const at of ticks(view.from, view.to, width() / 110)) {
      const x = x_of(at);
      paint.fillStyle = line;
      paint.fillRect(x, 0, 0.5, bottom + 3);
      paint.fillStyle = soft;
      if (x > LEFT + 10 && x < width() - 24) paint.fillText(time(at, view.to - view.from > 1000 ? 1000 : Math.max(view.to - view.from, 1)), x, bottom + 10);
    }
    const is_whole = view.from === 0 && view.to === step_ms;
    where.textContent = is_whole ? `all of ${time(step_ms)}` : `${time(view.from, view.to)} to ${time(view.to)} of ${time(step_ms)}`;
    canvas.dataset.from = view.from;
    canvas.dataset.to = view.to;
  }

  function draw_row(paint, row, y, colors, card) {
    const begin = first_after(row, view.from);
    let end = begin;
    while (end < row.start.length && row.start[end] < view.to) end += 1;
    if (end === begin) return;
    let worked = 0;
    for (let pass = begin; pass < end; pass += 1) worked += row.end[pass] - row.start[pass];
    if ((worked * scale()) / (end - begin) < 2.5) return draw_shares(paint, row, begin, end, y, colors);
    paint.save();
    paint.textAlign = "center";
    for (let pass = begin; pass < end; pass += 1) {
      const letter = row.letters[row.letter[pass]];
      const from = Math.max(x_of(row.start[pass]), LEFT), to = Math.min(x_of(row.end[pass]), width());
      // Of several stages on a rank the later ones are paler.
      const chunk = row.stages.indexOf(letter.stage) / Math.max(1, row.stages.length - 1);
      paint.globalAlpha = 1 - 0.4 * chunk;
      paint.fillStyle = colors[letter.kind];
      paint.fillRect(from, y, Math.max(to - from - 0.8, 0.4), height);
      paint.globalAlpha = 1;
      const name = String(row.micro_batch[pass]);
      if (height >= 12 && to - from > 7 * name.length + 6) {
        paint.fillStyle = card;
        paint.fillText(name, (from + to) / 2, y + height / 2 + 0.5);
      }
    }
    paint.restore();
  }

  // Passes too short to be seen: how much of each column the rank is at which kind of them, one above the other.
  function draw_shares(paint, row, begin, end, y, colors) {
    const COLUMN = 2, columns = Math.ceil((width() - LEFT) / COLUMN) + 1, kinds = 3;
    const shares = new Float64Array(columns * kinds);
    for (let pass = begin; pass < end; pass += 1) {
      let from = (Math.max(x_of(row.start[pass]), LEFT) - LEFT) / COLUMN;
      const to = (Math.min(x_of(row.end[pass]), width()) - LEFT) / COLUMN, kind = row.letters[row.letter[pass]].kind;
      while (from < to) {
        const column = Math.floor(from), until = Math.min(to, column + 1);
        shares[column * kinds + kind] += until - from;
        from = until > from ? until : to;
      }
    }
    for (let kind = 0; kind < kinds; kind += 1) {
      paint.fillStyle = colors[kind];
      for (let column = 0; column < columns; column += 1) {
        let above = 0;
        for (let other = 0; other < kind; other += 1) above += shares[column * kinds + other];
        const share = shares[column * kinds + kind];
        if (share > 0.005) paint.fillRect(LEFT + column * COLUMN, y + above * height, COLUMN, share * height);
      }
    }
  }

  // Says what is under the pointer.
  function read(event) {
    const box = canvas.getBoundingClientRect(), at = ms_of(event.clientX - box.left);
    const row = rows[Math.floor((event.clientY - box.top) / (height + GAP))];
    if (row === undefined || event.clientX - box.left < LEFT) { say(); return; }
    const who = timeline.ranks > 1 ? `rank ${row.rank}` : "each rank";
    const pass = first_after(row, at);
    const next = after.find(({ start, ms }) => at >= start && at <= start + ms);
    if (pass < row.start.length && row.start[pass] <= at) {
      const { stage, kind, ms } = row.letters[row.letter[pass]];
      const of_stage = row.stages.length > 1 || timeline.ranks > 1 ? ` in stage ${stage}` : "";
      say(`${who}: ${PASSES[kind]} of micro-batch ${row.micro_batch[pass]}${of_stage}, ${time(ms)}, from ${time(row.start[pass])}`);
    } else {
      say(next ? `${who}: ${PASSES[next.kind]}, ${time(next.ms)}` : `${who}: waiting at ${time(at)}`);
    }
  }

  let held = null;
  canvas.onpointerdown = (event) => {
    held = { x: event.clientX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    read(event);
    if (held === null || event.buttons === 0) return;
    const by = (event.clientX - held.x) / scale();
    const from = Math.min(Math.max(held.from - by, 0), step_ms - (held.to - held.from));
    show(from, from + held.to - held.from);
  };
  canvas.onpointerup = () => { held = null; };
  canvas.onpointerleave = () => say();
  canvas.ondblclick = (event) => zoom(0.4, ms_of(event.clientX - canvas.getBoundingClientRect().left));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.004), ms_of(event.clientX - canvas.getBoundingClientRect().left));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      move((event.deltaX || event.deltaY) / width());
    }
  }, { passive: false });

  body.append(bar, canvas);
  canvas.dataset.passes = rows.reduce((sum, row) => sum + row.start.length, 0);
  canvas.dataset.end = Math.max(...rows.map((row) => row.end.at(-1) ?? 0));
  // plan.html#ms=120-180 shows that stretch of the step.
  const named = /^#ms=([\d.]+)-([\d.]+)$/.exec(location.hash);
  if (named) show(Number(named[1]), Number(named[2])); else draw();
  on_resize(body, draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
