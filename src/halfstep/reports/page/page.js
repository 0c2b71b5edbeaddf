"use strict";
(() => {
  const root = document.documentElement, by = (id) => document.getElementById(id);
  const data = JSON.parse(by("data").textContent), states = new Map();
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const short = (text, most) => (text.length > most ? `${text.slice(0, Math.floor(0.45 * most))}…${text.slice(text.length - Math.floor(0.55 * most))}` : text);
  const several = data.runs.length > 1, narrow = () => window.innerWidth < 700;
  const element = (tag, values, ...children) => {
    const made = Object.assign(document.createElement(tag), values);
    made.append(...children);
    return made;
  };

  // ---- theme: the system's, or the one chosen; the choice is kept where the browser lets a file keep something
  const themes = ["system", "light", "dark"];
  let theme = "system";
  try { theme = localStorage.getItem("halfstep-theme") || "system"; } catch { theme = "system"; }
  const setTheme = (value) => {
    theme = themes.includes(value) ? value : "system";
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    by("theme").textContent = `Theme: ${theme}`;
  };
  by("theme").hidden = false;
  setTheme(theme);
  by("theme").addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]);
    try { localStorage.setItem("halfstep-theme", theme); } catch { /* a browser that keeps nothing for files: the choice lasts for this visit */ }
    drawAll();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  // ---- events: shown when their kind is ticked, their run chosen and every word searched for is in them
  const filters = by("filters");
  if (filters) {
    filters.hidden = false;
    const lines = [...document.querySelectorAll(".events li")].map((line) => [line, line.textContent.replace(/\s+/g, " ").replace(/(\d),(?=\d{3})/g, "$1").toLowerCase()]);
    const apply = () => {
      const kinds = new Set([...filters.querySelectorAll("[name=kind]:checked")].map((box) => box.value));
      const words = by("query").value.toLowerCase().trim().replace(/\s+/g, " "), run = by("run") ? by("run").value : "";
      let shown = 0;
      for (const [line, text] of lines) {
        const hit = kinds.has(line.dataset.kind) && (!run || line.dataset.run === run) && text.includes(words);
        line.hidden = !hit;
        shown += hit;
      }
      by("shown").textContent = shown === lines.length ? `${shown} events` : `${shown} of ${lines.length} events`;
    };
    filters.addEventListener("input", apply);
    filters.addEventListener("submit", (event) => event.preventDefault());
    by("clear").addEventListener("click", () => {
      filters.querySelectorAll("[name=kind]").forEach((box) => { box.checked = true; });
      by("query").value = "";
      if (by("run")) by("run").value = "";
      apply();
    });
  }

  // ---- charts
  const styled = (trace) => {
    const { role, run, place, quiet, kind } = trace.meta, own = colour(`run${(several || typeof place === "string" ? run : place) % 6}`), made = { ...trace, showlegend: false };
    if (role === "event") {
      const tone = colour(kind === "skipped" ? "bad" : "watch");
      return { ...made, marker: { color: tone, size: 9, symbol: kind === "skipped" ? "x" : "triangle-left", line: { color: own, width: several ? 2 : 0 } } };
    }
    if (role === "bad") {
      const symbol = { nan: "x", inf: "triangle-up", "-inf": "triangle-down" }[kind];
      return { ...made, line: { color: colour("bad"), width: 5 }, marker: { color: colour("bad"), size: 10, symbol, line: { color: own, width: several ? 2 : 0 } } };
    }
    const dash = several && place ? "dot" : "solid";
    return { ...made, opacity: quiet && role === "line" ? 0.4 : 1, line: { ...trace.line, color: own, dash, width: quiet && role === "line" ? 1 : 2 }, marker: { color: own, size: 5 } };
  };
  const axis = (more) => ({ gridcolor: colour("grid"), linecolor: colour("rule"), tickcolor: colour("rule"), zeroline: false, automargin: true, ...more,
    title: { standoff: 8, ...(more && more.title), font: { size: 12, color: colour("soft") } } });
  const frame = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 12, color: colour("soft") },
    margin: { l: 52, r: 12, t: 10, b: 44 }, showlegend: false, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("soft"), font: { color: colour("ink"), size: 12 } }, ...more });
  const config = { displayModeBar: false, responsive: true, displaylogo: false };

  const lines = (name, chart, state) => {
    const hidden = (trace) => state.hidden.has(groupOf(trace));
    const traces = chart.data.map((trace) => ({ ...styled(trace), visible: hidden(trace) ? false : true }));
    const y = axis(chart.layout.yaxis);
    if (state.log) y.type = "log";
    if (y.type === "log") Object.assign(y, { tickformat: ".2~g", nticks: 6 }, chart.layout.yaxis.tickvals ? { tickformat: "" } : {});
    return [traces, frame({ hovermode: several ? "x" : "x unified", xaxis: axis({ ...chart.layout.xaxis, nticks: narrow() ? 5 : 10 }), yaxis: y,
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } })];
  };
  const groupOf = (trace) => `${trace.meta.run}/${trace.meta.place}/${trace.meta.role === "bad" ? "bad" : ""}`;

  const FLOOR = -4, TICKS = [-4, -3, -2, -1, 0], SAID = ["0", "0.1 %", "1 %", "10 %", "100 %"];
  const percent = (v) => (v === null ? "not measured" : v === 0 ? "0 %" : `${Number((100 * v).toPrecision(3))} %`);
  const heat = (name, chart, state) => {
    const view = chart.views[state.view], hue = view.measure === "overflow" ? "fire" : "heat", at = view.x.map((_, i) => i);
    const most = narrow() ? 20 : 34, rows = view.y.length, every = Math.max(1, Math.ceil(view.x.length / (narrow() ? 4 : 10)));
    const ticks = at.filter((i) => i % every === 0);
    const z = view.z.map((row) => row.map((v) => (v === null ? null : v > 0 ? Math.max(FLOOR, Math.log10(v)) : FLOOR)));
    const text = view.z.map((row) => row.map(percent));
    const map = { type: "heatmap", x: at, y: view.y.map((_, i) => i), z, text, customdata: view.z.map((row, i) => row.map((_, j) => [view.y[i], view.x[j]])),
      zmin: FLOOR, zmax: 0, xgap: view.x.length < 80 ? 1 : 0, ygap: 1, hovertemplate: "%{customdata[0]}<br>step %{customdata[1]}: %{text}<extra></extra>", hoverongaps: false,
      colorscale: [0, 1, 2, 3, 4].map((i) => [i / 4, colour(hue + i)]),
      colorbar: { orientation: "h", thickness: 10, len: narrow() ? 1 : 0.7, x: 0, xanchor: "left", y: 1, yanchor: "bottom", tickvals: TICKS, ticktext: SAID, outlinewidth: 0, ticks: "" } };
    const bad = { type: "scatter", mode: "markers", x: view.bad.map(([j]) => j), y: view.bad.map(([, i]) => i), marker: { symbol: "x", size: 8, color: colour("bad"), line: { width: 1, color: colour("panel") } },
      text: view.bad.map(([j, i]) => `${view.y[i]}, step ${view.x[j]}: values that are not finite`), hovertemplate: "%{text}<extra></extra>", showlegend: false };
    by(`plot-${name}`).style.height = `${Math.max(220, 17 * rows + 130)}px`;
    return [[map, bad], frame({ margin: { l: 40, r: 12, t: 44, b: 48 }, hovermode: "closest",
      xaxis: axis({ ...chart.layout.xaxis, tickvals: ticks, ticktext: ticks.map((i) => String(view.x[i])), showgrid: false }),
      yaxis: axis({ autorange: "reversed", showgrid: false, tickvals: view.y.map((_, i) => i), ticktext: view.y.map((text) => short(text, most)), tickfont: { size: 11 } }) })];
  };

  const bars = (name, chart) => {
    const most = Math.max(1, ...chart.data.flatMap((trace) => trace.x)), units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = Math.min(4, Math.floor(Math.log2(most) / 10)), unit = 2 ** (10 * power), rough = most / unit / (narrow() ? 3 : 6);
    const nice = 10 ** Math.floor(Math.log10(rough)), step = nice * [1, 2, 5, 10].find((m) => m * nice >= rough);
    const ticks = Array.from({ length: Math.ceil(most / unit / step) + 1 }, (_, i) => i * step);
    const traces = chart.data.map((trace, i) => ({ ...trace, showlegend: false, visible: !states.get(name).hidden.has(groupOf(trace)), marker: { color: colour(`run${i}`) } }));
    return [traces, frame({ barmode: "group", bargap: 0.35, hovermode: "closest", margin: { l: 60, r: 16, t: 6, b: 40 },
      xaxis: axis({ tickvals: ticks.map((t) => t * unit), ticktext: ticks.map((t) => `${Number(t.toPrecision(4))} ${units[power]}`), title: { text: "" } }),
      yaxis: axis({ autorange: "reversed", showgrid: false }) })];
  };
  const makers = { lines, heat, bars };

  const draw = (name) => {
    const [traces, layout] = makers[data.charts[name].kind](name, data.charts[name], states.get(name));
    return Plotly.react(by(`plot-${name}`), traces, layout, config);
  };
  const drawAll = () => { if (window.Plotly) for (const name of states.keys()) { controls(name); draw(name); } };

  // ---- a legend of buttons, and the choices of a chart
  const controls = (name) => {
    const chart = data.charts[name], state = states.get(name), box = by(`controls-${name}`), had = box.contains(document.activeElement) ? [...box.querySelectorAll("button,input")].indexOf(document.activeElement) : -1;
    box.replaceChildren();
    if (chart.views && chart.views.length > 1) {
      box.append(...chart.views.map((view, i) => element("label", { className: "chip" },
        element("input", { type: "radio", name: `view-${name}`, checked: i === state.view, onchange: () => { state.view = i; state.at = null; controls(name); draw(name); } }), view.title)));
    }
    if (chart.views && chart.views[state.view].note) box.append(element("p", { className: "quiet", textContent: `Drawn: ${chart.views[state.view].note}.` }));
    const groups = new Map((chart.data || []).filter((t) => t.meta.role !== "trend").map((t) => [groupOf(t), t]));
    if (groups.size > 1) {
      for (const [group, trace] of groups) {
        const { run, place, role } = trace.meta, swatch = element("span", { className: "swatch" });
        swatch.style.background = role === "bad" ? colour("bad") : role === "event" ? colour(trace.meta.kind === "skipped" ? "bad" : "watch") : colour(`run${(several && role !== "bar" ? run : role === "bar" ? run : place) % 6}`);
        const named = role === "bad" ? trace.name.replace(/: [^:]*$/, ": not finite") : trace.name;
        const button = element("button", { type: "button", onclick: () => { if (!state.hidden.delete(group)) state.hidden.add(group); controls(name); draw(name); } }, swatch, named);
        button.setAttribute("aria-pressed", String(!state.hidden.has(group)));
        box.append(button);
      }
    }
    if (chart.log) {
      const button = element("button", { type: "button", textContent: "logarithmic", onclick: () => { state.log = !state.log; controls(name); draw(name); } });
      button.setAttribute("aria-pressed", String(state.log));
      button.style.textDecoration = "none";
      box.append(button);
    }
    if (had >= 0) { const again = box.querySelectorAll("button,input")[had]; if (again) again.focus(); }
  };

  // ---- reading a chart by keyboard
  const say = (name, text) => { by(`reading-${name}`).textContent = text; };
  const plain = (v) => (typeof v === "number" ? Number(v.toPrecision(5)).toLocaleString("en") : String(v));
  const seen = (name) => by(`plot-${name}`).data.map((trace, i) => [trace, i]).filter(([trace]) => trace.visible !== false && trace.x && trace.x.length);
  const readLines = (name, state, dx, dy, end) => {
    const found = seen(name);
    if (!found.length) return;
    const at = state.at || { trace: 0, point: -1 };
    at.trace = (at.trace + dy + found.length) % found.length;
    const [trace, curve] = found[at.trace], xs = trace.x;
    let point = end === "Home" ? 0 : end === "End" ? xs.length - 1 : dy ? nearest(xs, at.x) : Math.min(xs.length - 1, Math.max(0, at.point + dx));
    while (xs[point] === null || trace.y[point] === null) { const next = point + (dx < 0 || end === "End" ? -1 : 1); if (next < 0 || next >= xs.length) return; point = next; }
    state.at = { trace: at.trace, point, x: xs[point] };
    Plotly.Fx.hover(by(`plot-${name}`), [{ curveNumber: curve, pointNumber: point }], trace.yaxis === "y2" ? ["xy2"] : ["xy"]);
    const bar = trace.orientation === "h";
    say(name, ["bad", "event"].includes(trace.meta.role) ? trace.text[point] : bar ? `${trace.name}, ${trace.y[point]}: ${trace.customdata[point]}` : `${trace.name}, step ${plain(xs[point])}: ${plain(trace.y[point])}`);
  };
  const nearest = (xs, x) => { let best = 0; xs.forEach((v, i) => { if (v !== null && Math.abs(v - x) < Math.abs(xs[best] - x)) best = i; }); return best; };
  const readHeat = (name, state, dx, dy, end) => {
    const view = data.charts[name].views[state.view], at = state.at || { i: 0, j: -dx };
    const clip = (v, n) => Math.min(n - 1, Math.max(0, v));
    state.at = { i: clip(at.i + dy, view.y.length), j: end === "Home" ? 0 : end === "End" ? view.x.length - 1 : clip(at.j + dx, view.x.length) };
    const { i, j } = state.at;
    Plotly.Fx.hover(by(`plot-${name}`), [{ curveNumber: 0, pointNumber: [i, j] }]);
    const bad = view.bad.some(([a, b]) => a === j && b === i) ? ", values that are not finite" : "";
    say(name, `${view.y[i]}, step ${plain(view.x[j])}: ${percent(view.z[i][j])}${bad}`);
  };
  const zoom = (name, factor) => {
    const plot = by(`plot-${name}`), range = plot._fullLayout.xaxis.range.map(Number), state = states.get(name);
    const middle = state.at && state.at.x !== undefined ? state.at.x : (range[0] + range[1]) / 2, half = ((range[1] - range[0]) / 2) * factor;
    return Plotly.relayout(plot, { "xaxis.range": [middle - half, middle + half] });
  };
  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, 0, "Home"], End: [0, 0, "End"] };
  const listen = (name) => {
    const plot = by(`plot-${name}`), kind = data.charts[name].kind, state = states.get(name);
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (MOVES[event.key]) (kind === "heat" ? readHeat : readLines)(name, state, ...MOVES[event.key]);
      else if (event.key === "+" || event.key === "=") zoom(name, 0.5);
      else if (event.key === "-") zoom(name, 2);
      else if (event.key === "0" || event.key === "Escape") { Plotly.Fx.unhover(plot); Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": kind === "lines" ? true : "reversed" }); say(name, ""); }
      else return;
      event.preventDefault();
    });
  };

  // ---- plotly is unpacked and run; where a browser cannot, sentences and tables stand for themselves
  const unpack = async () => {
    const text = atob(by("plotly").textContent), packed = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i += 1) packed[i] = text.charCodeAt(i); // a tenth of the time of Uint8Array.from
    const source = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    document.head.append(element("script", { textContent: source }));
  };
  const begin = async () => {
    for (const name of Object.keys(data.charts)) states.set(name, { view: 0, log: false, hidden: new Set(), at: null });
    if (!states.size) { root.dataset.ready = "yes"; return; }
    await unpack();
    for (const name of states.keys()) {
      controls(name);
      await draw(name);
      listen(name);
      await new Promise((done) => setTimeout(done));
    }
    root.dataset.ready = "yes";
  };
  begin().catch((error) => {
    console.error(error);
    document.querySelectorAll(".plot").forEach((plot) => { plot.style.cssText = "min-height:0;height:auto"; plot.textContent = "This browser could not draw the chart; the sentence above and the table below have its numbers."; });
    root.dataset.ready = "failed";
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); } });
})();
