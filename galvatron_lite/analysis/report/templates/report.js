"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const redraws = [];
  const redraw = () => redraws.forEach((draw) => draw());

  // Light and dark: what the system says, until the reader chooses.
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = document.querySelector(".theme");
  const tell = () => theme.setAttribute("aria-pressed", String(dark()));
  try { const kept = localStorage.getItem("galvatron-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* no storage */ }
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("galvatron-theme", root.dataset.theme); } catch { /* no storage */ }
    tell(); redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { tell(); redraw(); });
  tell();

  // What is folded is printed.
  let folded = [];
  addEventListener("beforeprint", () => { folded = all("details:not([open])"); folded.forEach((one) => { one.open = true; }); });
  addEventListener("afterprint", () => { folded.forEach((one) => { one.open = false; }); });

  // Several plans: one at a time.
  const tabs = all("[role=tab]");
  const choose = (tab, focus) => {
    for (const one of tabs) {
      const own = one === tab;
      one.setAttribute("aria-selected", String(own));
      one.tabIndex = own ? 0 : -1;
      document.getElementById(one.getAttribute("aria-controls")).hidden = !own;
    }
    if (focus) tab.focus();
    redraw();
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(tabs[(to + tabs.length) % tabs.length], true);
    });
  });

  const MEMORY = ["context", "parameters", "optimizer", "gradients", "activations", "communication", "temporary"];
  const PLACES = [6, 0, 2, 1, 3, 5, 4];
  const KINDS = ["forward", "backward", "weight"];
  const SAID = ["forward", "backward", "gradients of weights"];
  const CLOSING = { communication: "sums of gradients", optimizer: "optimizer", host: "host work" };

  const written = (seconds) => {
    for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])
      if (Math.abs(seconds) >= factor) { const value = seconds / factor; return (value >= 100 ? value.toFixed(0) : +value.toPrecision(3)) + " " + unit; }
    return seconds === 0 ? "0 s" : (seconds * 1e6).toPrecision(2) + " µs";
  };
  const exactly = (seconds, step) => {
    const [factor, unit] = step >= 1 ? [1, "s"] : step >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    return (seconds / factor).toFixed(3) + " " + unit;
  };
  const size = (bytes) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (bytes < 1024) return bytes.toFixed(unit === "B" ? 0 : 1) + " " + unit; bytes /= 1024; }
    return bytes.toFixed(1) + " TiB";
  };
  const round = (rough) => {
    const unit = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].find((step) => step * unit >= rough * (1 - 1e-9)) * unit;
  };

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new DataView(await new Response(stream).arrayBuffer());
  };

  // The passes of each group: typed arrays of kind, stage, micro-batch, start, end, when it is free, memory.
  const unpack = (told, view) => {
    let at = 0;
    const plane = (count, read, bytes) => { const found = Array.from({ length: count }, (_, place) => read.call(view, at + place * bytes, true)); at += count * bytes; return found; };
    return told.groups.map((group) => {
      const count = group.count;
      const kinds = plane(count, view.getUint8, 1), steps = plane(count, view.getInt16, 2), gaps = plane(count, view.getInt32, 4);
      const during = plane(count, view.getUint16, 2), after = plane(count, view.getUint16, 2);
      const found = { ...group, kind: new Uint8Array(count), stage: new Uint16Array(count), microbatch: new Uint16Array(count),
        start: new Float64Array(count), end: new Float64Array(count), free: new Float64Array(count), during, after,
        most: Math.max(...[...new Set(during), ...new Set(after)].map((one) => told.levels[one].reduce((sum, part) => sum + part, 0))) };
      const last = {};
      let free = 0;
      for (let place = 0; place < count; place++) {
        const code = kinds[place], kind = code % 3, chunk = (code - kind) / 3;
        last[code] = (last[code] || 0) + steps[place];
        const [own, send] = group.times[chunk][kind];
        const start = free + gaps[place];
        free = start + own + send;
        found.kind[place] = kind; found.stage[place] = group.stages[chunk]; found.microbatch[place] = last[code];
        found.start[place] = start * told.tick; found.end[place] = (start + own) * told.tick; found.free[place] = free * told.tick;
      }
      return found;
    });
  };

  // The first place of an ascending array whose value is greater.
  const above = (values, wanted) => {
    let low = 0, high = values.length;
    while (low < high) { const middle = (low + high) >> 1; if (values[middle] > wanted) high = middle; else low = middle + 1; }
    return low;
  };

  const timeline = (box, told, groups) => {
    const canvas = box.querySelector("canvas.passes"), below = box.querySelector("canvas.memory"), readout = box.querySelector(".readout");
    const LEFT = 74, RIGHT = 10, AXIS = 22;
    const rows = groups.length;
    const row = [[8, 26], [16, 20], [32, 13], [64, 9], [Infinity, 6]].find(([most]) => rows <= most)[1];
    const state = { from: 0, to: told.span, group: groups.reduce((best, one, number) => one.most > groups[best].most ? number : best, 0), pass: -1 };
    const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
    const least = told.span / 20000;

    const fit = (target, height) => {
      const scale = window.devicePixelRatio || 1, width = target.clientWidth;
      target.style.height = height + "px";
      target.width = Math.round(width * scale); target.height = Math.round(height * scale);
      const paint = target.getContext("2d");
      paint.setTransform(scale, 0, 0, scale, 0, 0);
      paint.clearRect(0, 0, width, height);
      paint.font = "11px system-ui, sans-serif";
      return [paint, width];
    };
    const place = (width) => { const scale = (width - LEFT - RIGHT) / (state.to - state.from); return (seconds) => LEFT + (seconds - state.from) * scale; };
    const axis = (paint, width, y) => {
      const at = place(width), step = round((state.to - state.from) / 6);
      paint.fillStyle = colour("soft"); paint.strokeStyle = colour("soft"); paint.textAlign = "center";
      for (let value = Math.ceil(state.from / step - 1e-9) * step; value <= state.to * (1 + 1e-9); value += step) {
        const x = at(value);
        paint.fillRect(x, y, 1, 4);
        const words = Math.abs(value) < step / 2 ? "0" : (step < state.to / 50 ? exactly(value, told.span) : written(+value.toPrecision(6)));
        paint.textAlign = x > width - 46 ? "right" : "center";
        paint.fillText(words, x > width - 46 ? width : x, y + 16);
      }
    };

    const drawPasses = () => {
      if (!canvas.clientWidth) return;
      const height = rows * row + AXIS + 6;
      const [paint, width] = fit(canvas, height);
      const at = place(width), tall = row - Math.min(2, row / 4);
      paint.fillStyle = colour("ground");
      paint.fillRect(LEFT, 0, width - LEFT - RIGHT, rows * row + 2);
      paint.save(); paint.beginPath(); paint.rect(LEFT, 0, width - LEFT - RIGHT, rows * row + 2); paint.clip();
      const fills = KINDS.map(colour), sends = colour("soft"), mixed = colour("mixed"), once = { communication: colour("sums"), optimizer: colour("update"), host: colour("host") };
      groups.forEach((group, number) => {
        const y = number * row + 1;
        // Passes that are too narrow to be seen are drawn together.
        let since = 0, until = -1, alike = -1;
        const flush = () => { if (until > since) { paint.fillStyle = alike < 0 ? mixed : fills[alike]; paint.fillRect(since, y, until - since, tall); } until = -1; };
        for (let one = above(group.free, state.from); one < group.count && group.start[one] < state.to; one++) {
          const left = at(group.start[one]), right = at(group.end[one]), free = at(group.free[one]);
          if (free - left < 1.2) {
            if (until < 0 || left - until > 0.6) { flush(); since = left; alike = group.kind[one]; }
            if (alike !== group.kind[one]) alike = -1;
            until = free;
            continue;
          }
          flush();
          paint.fillStyle = fills[group.kind[one]];
          paint.fillRect(left, y, Math.max(right - left - (right - left > 3 ? 0.6 : 0), 0.4), tall);
          if (free - right > 0.3) { paint.fillStyle = sends; paint.fillRect(right, y + tall / 3, free - right, tall / 3); }
          if (right - left > 20 && tall > 10) { paint.fillStyle = "#101820"; paint.textAlign = "center"; paint.fillText(group.microbatch[one], (Math.max(left, LEFT) + Math.min(right, width - RIGHT)) / 2, y + tall / 2 + 4); }
        }
        flush();
        if (told.host) { paint.fillStyle = once.host; paint.fillRect(at(told.span - told.host), y, at(told.span) - at(told.span - told.host), tall); }
        for (const [name, start, end] of group.closing) { paint.fillStyle = once[name]; paint.fillRect(at(start), y, Math.max(at(end) - at(start), 0.4), tall); }
      });
      const group = groups[state.group], y = state.group * row + 1;
      if (state.pass >= 0) { paint.strokeStyle = colour("ink"); paint.lineWidth = 2; paint.strokeRect(at(group.start[state.pass]), y, Math.max(at(group.end[state.pass]) - at(group.start[state.pass]), 2), tall); }
      paint.restore();
      const every = [1, 2, 4, 8, 16, 32, 64].find((count) => count * row >= 11);
      paint.textAlign = "right";
      groups.forEach((one, number) => {
        if (number % every && number !== state.group) return;
        if (number !== state.group && Math.abs(number - state.group) * row < 11) return;
        paint.fillStyle = number === state.group ? colour("accent") : colour("soft");
        paint.fillText(one.stages.length === 1 ? "stage " + one.stages[0] : "group " + number, LEFT - 8, Math.max(number * row + row / 2 + 4, 9));
      });
      axis(paint, width, rows * row + 4);
    };

    const drawMemory = () => {
      if (!below.clientWidth) return;
      const height = 150, top = 18, low = height - AXIS;
      const [paint, width] = fit(below, height), at = place(width), group = groups[state.group];
      const levels = told.levels, most = Math.max(group.budget, group.most) * 1.06;
      const up = (low - top) / most;
      paint.fillStyle = colour("soft"); paint.textAlign = "left";
      paint.fillText("Memory of a device of " + label(group) + " (" + group.devices + ")", LEFT, 11);
      const base = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find((one) => most >= one), step = round(most / base / 3) * base;
      paint.textAlign = "right";
      for (let value = 0; value <= most; value += step) { const y = low - value * up; paint.fillStyle = colour("grid"); paint.fillRect(LEFT, y, width - LEFT - RIGHT, 1); paint.fillStyle = colour("soft"); paint.fillText(value ? size(value).replace(".0 ", " ") : "0", LEFT - 8, y + 4); }
      paint.save(); paint.beginPath(); paint.rect(LEFT, 0, width - LEFT - RIGHT, low); paint.clip();
      const fills = MEMORY.map((name) => colour("m-" + name));
      const bar = (from, to, level) => {
        const left = Math.max(Math.floor(at(from)), LEFT), right = Math.min(Math.ceil(at(to)), width - RIGHT);
        if (right <= left) return;
        let y = low;
        PLACES.forEach((part, place) => { const tall = level[part] * up; if (tall) { paint.fillStyle = fills[place]; paint.fillRect(left, y - tall, right - left, tall); y -= tall; } });
      };
      let first = Math.max(above(group.free, state.from) - 1, 0);
      if (first === 0) bar(0, group.start[0], group.resting);
      for (let one = first; one < group.count && group.start[one] < state.to; one++) {
        bar(group.end[one], one + 1 < group.count ? group.start[one + 1] : group.free[one], levels[group.after[one]]);
        bar(group.start[one], group.end[one], levels[group.during[one]]);
      }
      let end = group.free[group.count - 1];
      for (const [, start, stop, level] of group.closing) { bar(start, stop, level); end = stop; }
      bar(end, told.span, group.closing.length ? group.closing[group.closing.length - 1][3] : levels[group.after[group.count - 1]]);
      paint.restore();
      if (group.budget) { const y = low - group.budget * up; paint.strokeStyle = colour("alarm"); paint.setLineDash([6, 4]); paint.lineWidth = 1.5; paint.beginPath(); paint.moveTo(LEFT, y); paint.lineTo(width - RIGHT, y); paint.stroke(); paint.setLineDash([]); paint.fillStyle = colour("alarm"); paint.textAlign = "right"; paint.fillText("budget", width - RIGHT, y - 3); }
      axis(paint, width, low + 2);
    };
    const draw = () => { drawPasses(); drawMemory(); };
    redraws.push(draw);

    const label = (group) => "stage" + (group.stages.length > 1 ? "s " : " ") + group.stages.join(", ");
    // Where a pass is, by stage, kind and micro-batch: made when first asked for.
    let places;
    const placeOf = (stage, kind, microbatch) => {
      places = places || new Map(groups.flatMap((group) => [...group.kind].map((kind, place) =>
        [[group.stage[place], kind, group.microbatch[place]].join(), [group, place]])));
      return places.get([stage, kind, microbatch].join());
    };
    // The pass that sends what this one reads: the stage before for forward, behind for backward, its own at the ends.
    const sourceOf = (group, one) => {
      const stage = group.stage[one], number = group.microbatch[one];
      if (group.kind[one] === 0) return placeOf(stage - 1, 0, number);
      return group.kind[one] === 1 ? placeOf(stage + 1, 1, number) || placeOf(stage, 0, number) : placeOf(stage, 1, number);
    };
    const waits = (group, one) => {
      const before = one ? group.free[one - 1] : 0, idle = group.start[one] - before, source = sourceOf(group, one);
      if (idle > told.span * 1e-6 && source) {
        const [other, place] = source;
        return ` It waits ${written(idle)} for ${SAID[other.kind[place]]} of micro-batch ${other.microbatch[place]} on stage ${other.stage[place]}.`;
      }
      return one ? ` It starts when ${SAID[group.kind[one - 1]]} of micro-batch ${group.microbatch[one - 1]} on these devices ends.` : "";
    };
    const describe = (group, one) => {
      const bytes = told.levels[group.during[one]].reduce((sum, part) => sum + part, 0);
      const send = group.free[one] - group.end[one];
      return `Stage ${group.stage[one]} (${group.devices}), micro-batch ${group.microbatch[one]}: ${SAID[group.kind[one]]}, ` +
        `${exactly(group.start[one], told.span)} to ${exactly(group.end[one], told.span)} (${written(group.end[one] - group.start[one])})` +
        (send > told.span * 1e-7 ? `, then ${written(send)} of sending` : "") + `; ${size(bytes)} on a device at its worst moment.` + waits(group, one);
    };
    const say = (words) => { readout.textContent = words; };
    const look = (from, to) => {
      const wide = Math.min(Math.max(to - from, least), told.span);
      state.from = Math.min(Math.max(from, 0), told.span - wide); state.to = state.from + wide;
      draw();
    };
    const zoom = (factor, about) => look(about - (about - state.from) * factor, about + (state.to - about) * factor);
    const middle = () => state.pass >= 0 ? (groups[state.group].start[state.pass] + groups[state.group].end[state.pass]) / 2 : (state.from + state.to) / 2;
    const shift = (share) => look(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));
    const pick = (number, pass) => {
      state.group = number; state.pass = Math.min(Math.max(pass, 0), groups[number].count - 1);
      const group = groups[number], start = group.start[state.pass], end = group.end[state.pass];
      say(describe(group, state.pass));
      if (start < state.from || end > state.to) { const half = (state.to - state.from) / 2; look((start + end) / 2 - half, (start + end) / 2 + half); } else draw();
    };
    const actions = { in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), left: () => shift(-0.25), right: () => shift(0.25), all: () => look(0, told.span) };
    all("button", box).forEach((button) => button.addEventListener("click", () => actions[button.dataset.do]()));

    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const group = groups[state.group];
      const near = (number) => Math.max(above(groups[number].start, state.pass >= 0 ? group.start[state.pass] : state.from) - 1, 0);
      const keys = {
        ArrowRight: () => event.shiftKey ? shift(0.25) : pick(state.group, state.pass < 0 ? above(group.free, state.from) : state.pass + 1),
        ArrowLeft: () => event.shiftKey ? shift(-0.25) : pick(state.group, state.pass - 1),
        ArrowDown: () => { const to = Math.min(state.group + 1, rows - 1); pick(to, near(to)); },
        ArrowUp: () => { const to = Math.max(state.group - 1, 0); pick(to, near(to)); },
        "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.all, Home: () => pick(state.group, 0), End: () => pick(state.group, group.count - 1),
      };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });

    const under = (event) => {
      const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
      const seconds = state.from + (x - LEFT) / (frame.width - LEFT - RIGHT) * (state.to - state.from), number = Math.floor(y / row);
      return { seconds, number: number >= 0 && number < rows && x >= LEFT ? number : -1 };
    };
    const atHost = (seconds) => told.host && seconds >= told.span - told.host;
    const found = ({ seconds, number }) => {
      if (number < 0) return -1;
      const group = groups[number], one = above(group.start, seconds) - 1;
      return one >= 0 && seconds <= group.free[one] ? one : -1;
    };
    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from: state.from, to: state.to, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      if (held) {
        const by = (held.x - event.clientX) / (canvas.clientWidth - LEFT - RIGHT) * (held.to - held.from);
        if (Math.abs(event.clientX - held.x) > 3) held.moved = true;
        if (held.moved) look(held.from + by, held.to + by);
        return;
      }
      const spot = under(event), one = found(spot);
      if (one >= 0) say(describe(groups[spot.number], one));
      else if (spot.number >= 0) {
        const closing = groups[spot.number].closing.find(([, start, end]) => spot.seconds >= start && spot.seconds <= end);
        say(atHost(spot.seconds) ? `Host work that ends the step, ${written(told.host)}.` : closing ? `${label(groups[spot.number])}: ${CLOSING[closing[0]]}, once a step, ${written(closing[2] - closing[1])}.` : `${label(groups[spot.number])} waits at ${exactly(spot.seconds, told.span)}.`);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const moved = held && held.moved;
      held = null;
      if (moved) return;
      const spot = under(event), one = found(spot);
      if (spot.number >= 0) { state.group = spot.number; state.pass = one; if (one >= 0) say(describe(groups[spot.number], one)); draw(); }
    });
    canvas.addEventListener("pointercancel", () => { held = null; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      zoom(Math.exp(Math.sign(event.deltaY) * 0.18), under(event).seconds);
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => zoom(0.25, under(event).seconds));
    new ResizeObserver(draw).observe(box);
    draw();
    box.dataset.ready = "1";
    box.view = () => [state.from, state.to, state.group, state.pass];
  };

  const begin = async () => {
    for (const script of all("script.packed")) {
      const told = JSON.parse(script.textContent), box = document.querySelector(`.timeline[data-plan="${script.dataset.plan}"]`);
      try {
        timeline(box, told, unpack(told, await inflate(told.data)));
      } catch {
        // A browser without DecompressionStream: the tables below say the same.
        box.hidden = true;
        box.previousElementSibling.style.display = "block";
      }
    }
    if (tabs.length) choose(tabs[0]);
    root.dataset.ready = "1";
  };
  begin();
})();
