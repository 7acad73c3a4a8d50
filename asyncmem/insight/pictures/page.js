// Draws a report: one object of data in, pictures and tables out. No text of a program is ever read as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const redraws = []; // what each picture does when the page's width, a zoom or the search has changed
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const redraw = () => redraws.forEach(one => one());

// -- text ------------------------------------------------------------------------------------------------------------

function size(bytes) {
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 5), value = bytes / 1024 ** power;
  return `${Number.isInteger(value) ? value : value.toFixed(2)} ${SIZES[power]}`;
}

function duration(seconds) {
  if (seconds === 0) return "0 s";
  for (const [below, scale, unit] of [[1e-6, 1e9, "ns"], [1e-3, 1e6, "µs"], [1, 1e3, "ms"], [60, 1, "s"]])
    if (+seconds.toPrecision(3) < below) return `${+(seconds * scale).toPrecision(3)} ${unit}`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
  return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
}

const share = part => `${+(part * 100).toFixed(1)}%`;
const count = number => number.toLocaleString("en");
const colour = name => `var(--${name})`;

// -- elements --------------------------------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const swatch = name => make("i", {style: `background: ${colour(name)}`});

function section(id, heading, ...children) {
  const found = make("section", {id}, make("h2", {}, heading), ...children);
  main.append(found);
  return found;
}

const tip = make("div", {id: "tip", hidden: ""});

function showTip(event, rows) {
  const cells = rows.map(([mark, name, value]) =>
    make("tr", {}, make("td", {}, mark ? swatch(mark) : ""), make("td", {}, name), make("td", {}, value ?? "")));
  tip.replaceChildren(make("table", {}, ...cells));
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width < innerWidth ? event.clientX + 14 : event.clientX - width - 14;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(Math.min(event.clientY + 14, innerHeight - height - 8), 4)}px`;
}

const hideTip = () => { tip.hidden = true; };

// -- axes and zoom ---------------------------------------------------------------------------------------------------

const margin = () => (innerWidth < 600 ? 70 : 108);

function ticks(start, end, most, base) {
  const rough = (end - start) / most, power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const step = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map(one => one * power).find(one => one >= rough);
  const found = [];
  for (let at = Math.ceil(start / step); at * step <= end; at += 1) found.push(at * step);
  return found;
}

function axisBelow(svg, view, y, spell, base) {
  for (const at of ticks(view.start, view.end, Math.max(view.width / 110, 2), base)) {
    const x = view.x(at);
    svg.append(draw("line", {class: "axis", x1: x, x2: x, y1: 0, y2: y}));
    svg.append(draw("text", {x, y: y + 16, "text-anchor": "middle"}, spell(at)));
  }
}

// What part of an axis a picture shows. Dragging a range zooms in, a double click shows the whole again.
class View {
  constructor(end) { this.whole = Math.max(end, 1e-9); this.reset(); }
  reset() { this.start = 0; this.end = this.whole; }
  get left() { return margin(); }
  fit(svg) { this.width = Math.max(svg.clientWidth - this.left - 14, 50); }
  x(value) { return this.left + (value - this.start) / (this.end - this.start) * this.width; }
  at(x) { return this.start + (x - this.left) / this.width * (this.end - this.start); }
  follow(svg) {
    let from = null;
    const place = event => event.clientX - svg.getBoundingClientRect().left;
    const box = draw("rect", {y: 0, height: "100%", fill: colour("accent"), opacity: 0.15});
    svg.addEventListener("pointerdown", event => { from = place(event); });
    addEventListener("pointermove", event => {
      if (from === null || Math.abs(place(event) - from) < 5) return;
      fill(box, {x: Math.min(from, place(event)), width: Math.abs(place(event) - from)}, []);
      svg.append(box);
    });
    addEventListener("pointerup", event => {
      if (from === null) return;
      const [low, high] = [from, place(event)].sort((one, other) => one - other).map(one => this.at(one));
      const dragged = Math.abs(place(event) - from) >= 5;
      from = null;
      if (!dragged) return;
      this.start = Math.max(low, 0);
      this.end = Math.min(Math.max(high, this.start + this.whole * 1e-6), this.whole);
      redraw();
    });
    svg.addEventListener("dblclick", () => { this.reset(); redraw(); });
  }
}

const views = {time: new View(data.timeline.seconds)};

// -- the header ------------------------------------------------------------------------------------------------------

let searched = "";

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

function header() {
  const media = matchMedia("(prefers-color-scheme: dark)");
  setTheme(media.matches ? "dark" : "light");
  media.addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
  const links = [["timeline", "Timeline"], ["memory", "Memory"], ["lines", "Lines"], ["leaks", "Leaks"], ["waits", "Waits"]];
  const search = make("input", {
    type: "search", placeholder: "Find a frame", "aria-label": "Find a frame",
    oninput: () => { searched = search.value.trim().toLowerCase(); redraw(); },
  });
  const reset = () => { Object.values(views).forEach(one => one.reset()); redraw(); };
  const other = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  document.body.prepend(make("nav", {}, ...links.map(([id, name]) => make("a", {href: `#${id}`}, name)), search,
    make("button", {id: "reset", onclick: reset}, "Reset zoom"),
    make("button", {id: "theme", onclick: other}, "Light / dark")));
  document.body.append(tip);
  main.append(make("dl", {}, ...data.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])));
  if (data.note) main.append(make("p", {class: "note"}, data.note));
  main.append(make("div", {class: "cards"}, ...data.cards.map(one =>
    make("a", {class: one.bad ? "card bad" : "card", href: `#${one.to}`, onclick: () => one.name === "Peak" && showMap(0)},
      one.name, make("b", {}, one.value), make("span", {}, one.text)))));
}

// -- the timeline ----------------------------------------------------------------------------------------------------

const lastBefore = (times, at) => { // the moment that holds then
  let low = 0, high = times.length;
  while (low < high) { const middle = (low + high) >> 1; if (times[middle] <= at) low = middle + 1; else high = middle; }
  return Math.max(low - 1, 0);
};

function timeline() {
  const {timeline: shown, marks} = data, view = views.time, hidden = new Set();
  if (!shown.records) { section("timeline", "Live bytes over time", make("p", {}, "Nothing was recorded.")); return; }
  const svg = draw("svg", {height: 430, role: "img", "aria-label": "Live bytes over time, by tag"});
  const peak = lastBefore(shown.times, shown.peak), atPeak = shown.bands.map(one => one.bytes[peak]);
  const most = Math.max(...shown.live, 1), reserved = Math.max(...shown.reserved, 0), plot = 290, row = 24;
  let top = most;
  for (const line of [reserved, shown.limit]) if (line > top && line <= most * 2.5) top = line;
  top *= 1.06;
  const y = bytes => plot - bytes / top * (plot - 22);
  const above = line => (line > top ? " (above)" : "");
  const bands = shown.bands.map((one, at) => at);

  function columns() { // one a pixel: of all that holds in it, the moment when most was live
    const found = [];
    let at = lastBefore(shown.times, view.start);
    for (let pixel = 0; pixel < view.width; pixel += 1) {
      const end = view.at(view.left + pixel + 1);
      let best = at;
      while (at + 1 < shown.times.length && shown.times[at + 1] < end) {
        at += 1;
        if (shown.live[at] > shown.live[best]) best = at;
      }
      found.push(best);
    }
    return found;
  }

  function drawBands() {
    const moments = columns(), below = moments.map(() => 0);
    for (const band of bands) {
      if (hidden.has(band)) continue;
      const bytes = shown.bands[band].bytes, lower = below.map(y);
      moments.forEach((moment, at) => { below[at] += bytes[moment]; });
      let path = `M${view.left},${y(below[0])}`;
      below.forEach((one, at) => { path += `V${y(one)}H${view.left + at + 1}`; });
      for (let at = lower.length - 1; at >= 0; at -= 1) path += `V${lower[at]}H${view.left + at}`;
      svg.append(draw("path", {class: "band", d: `${path}Z`, fill: colour(shown.bands[band].colour)}));
    }
  }

  function drawLines() {
    let path = "";
    shown.reservedTimes.forEach((time, at) => {
      const x = Math.min(Math.max(view.x(time), view.left), view.left + view.width);
      path += at ? `H${x}V${y(shown.reserved[at])}` : `M${x},${y(shown.reserved[at])}`;
    });
    const frame = {fill: "none", "stroke-width": 2};
    if (reserved <= top) svg.append(draw("path", {...frame, d: path, stroke: colour("reserved")}));
    if (shown.limit > top) return;
    const d = `M${view.left},${y(shown.limit)}h${view.width}`;
    svg.append(draw("path", {...frame, d, stroke: colour("limit"), "stroke-dasharray": "7 4"}));
  }

  function drawPeak() {
    const x = view.x(shown.peak);
    if (x < view.left || x > view.left + view.width) return;
    const right = x < view.left + view.width - 130;
    svg.append(draw("a", {class: "peak", href: "#memory", onclick: () => showMap(0)},
      draw("path", {d: `M${x - 6},${y(most) - 13}h12l-6,10z`}),
      draw("text", {x: x + (right ? 10 : -10), y: y(most) - 5, "text-anchor": right ? "start" : "end"}, `peak ${size(most)}`)));
  }

  function drawMarks() {
    marks.forEach((mark, at) => {
      const name = mark.name.replace(" ", "-");
      const middle = plot + 34 + at * row + row / 2;
      svg.append(draw("text", {x: view.left - 8, y: middle + 4, "text-anchor": "end"}, mark.name));
      svg.append(draw("line", {class: "axis", x1: view.left, x2: view.left + view.width, y1: middle, y2: middle}));
      mark.starts.forEach((start, number) => {
        const end = mark.ends[number];
        if (end < view.start || start > view.end) return;
        const left = Math.max(view.x(start), view.left), right = Math.min(view.x(end), view.left + view.width);
        const x = Math.max(left - Math.max(4 - (right - left), 0) / 2, view.left);
        const rows = [[name, mark.name, `${count(mark.counts[number])} times`], ["", "from", duration(start)],
          ["", "until", duration(end)], ["", "bytes", size(mark.nbytes[number])],
          ["", "longest", duration(mark.longest[number])]];
        svg.append(draw("rect", {
          class: "mark", x, y: middle - 7, width: Math.max(right - left, 4), height: 14, fill: colour(name),
          onpointermove: event => { event.stopPropagation(); showTip(event, rows); },
        }));
      });
    });
  }

  const cross = draw("line", {class: "axis", y1: 0, y2: plot, "pointer-events": "none"});
  svg.addEventListener("pointermove", event => {
    const x = event.clientX - svg.getBoundingClientRect().left, time = view.at(x);
    if (time < view.start || time > view.end) { hideTip(); return; }
    const pixel = Math.min(Math.floor(x - view.left), Math.floor(view.width) - 1), moment = columns()[pixel];
    const rows = bands.map(one => [shown.bands[one].colour, shown.bands[one].name, shown.bands[one].bytes[moment]])
      .filter(one => one[2]).sort((one, other) => other[2] - one[2]).map(([mark, name, bytes]) => [mark, name, size(bytes)]);
    fill(cross, {x1: x, x2: x}, []);
    svg.append(cross);
    showTip(event, [["", "after", duration(Math.max(shown.times[moment], view.at(view.left + pixel)))],
      ["", "live", size(shown.live[moment])], ...rows,
      ["reserved", "reserved", size(shown.reserved[lastBefore(shown.reservedTimes, time)])]]);
  });
  svg.addEventListener("pointerleave", () => { hideTip(); cross.remove(); });

  const legend = make("ul", {class: "legend"});
  function entry(band) {
    const {name, colour: mark} = shown.bands[band];
    const toggle = () => { if (!hidden.delete(band)) hidden.add(band); render(); };
    return make("li", {}, make("button", {class: hidden.has(band) ? "off" : "", "aria-pressed": !hidden.has(band),
      onclick: toggle}, swatch(mark), make("span", {}, name), make("em", {}, size(atPeak[band]))));
  }
  const rule = (name, kind, text) => make("li", {}, make("button", {disabled: ""},
    make("i", {class: `rule ${kind}`, style: `border-color: ${colour(name)}`}), make("span", {}, name), make("em", {}, text)));

  function render() {
    view.fit(svg);
    svg.replaceChildren();
    axisBelow(svg, view, plot, duration, 10);
    for (const at of ticks(0, top, 5, 2)) {
      svg.append(draw("line", {class: "axis", x1: view.left, x2: view.left + view.width, y1: y(at), y2: y(at)}));
      svg.append(draw("text", {x: view.left - 8, y: y(at) + 4, "text-anchor": "end"}, size(at)));
    }
    drawBands();
    drawLines();
    drawPeak();
    drawMarks();
    const sorted = [...bands].sort((one, other) => atPeak[other] - atPeak[one]);
    legend.replaceChildren(...sorted.map(entry), rule("reserved", "", size(reserved) + above(reserved)),
      rule("limit", "dashed", size(shown.limit) + above(shown.limit)));
  }
  section("timeline", "Live bytes over time", make("p", {}, "Bands are tags; the legend has their bytes at the peak, and " +
    "hides a band with a click. Drag to zoom in, double-click to zoom out. Each column has the most of its moment, so no " +
    "peak is lost."), svg, legend);
  view.follow(svg);
  redraws.push(render);
}

// -- the map of memory -----------------------------------------------------------------------------------------------

let showMap = () => {};

function memory() {
  const svg = draw("svg", {role: "img", "aria-label": "Segments and the buffers in them"}), said = make("p");
  const longest = Math.max(...data.maps.flatMap(one => one.rows.map(segment => segment[2])), 1);
  const view = views.memory = new View(longest), row = 24;
  let shown = 0;
  const buttons = data.maps.map((one, at) => make("button", {onclick: () => showMap(at)}, one.name));

  function render() {
    const {rows, blocks} = data.maps[shown], height = rows.length * row;
    buttons.forEach((one, at) => one.setAttribute("aria-pressed", at === shown));
    said.textContent = rows.length ? data.maps[shown].said : "There were no segments then. Memory by pages never has any.";
    svg.setAttribute("height", rows.length ? height + 26 : 0);
    svg.replaceChildren();
    if (!rows.length) return;
    view.fit(svg);
    const end = view.left + view.width, bound = x => Math.min(Math.max(x, view.left), end);
    axisBelow(svg, view, height, size, 2);
    rows.forEach((segment, at) => {
      const x = bound(view.x(0)), width = Math.max(bound(view.x(segment[2])) - x, 1), y = at * row + 2;
      svg.append(draw("rect", {class: "segment", x, y, width, height: row - 4, fill: colour("segment")}));
      const label = draw("text", {x: view.left - 8, y: y + 15, "text-anchor": "end"});
      label.textContent = margin() < 100 ? size(segment[2]) : `${segment[0].slice(0, 7)} ${size(segment[2])}`;
      svg.append(label);
    });
    const paths = new Map(); // by colour and opacity: what is held in part is pale
    for (const [at, left, right, bytes, , , name] of blocks) {
      const x = bound(view.x(left)), width = bound(view.x(right)) - x;
      if (right < view.start || left > view.end) continue;
      const held = Math.max(Math.ceil(bytes / Math.max(right - left, 1) * 4) / 4, 0.25), key = `${name} ${held}`;
      const wide = Math.max(width > 4 ? width - 1 : width, 0.75);
      paths.set(key, `${paths.get(key) ?? ""}M${x},${at * row + 2}h${wide}v${row - 4}h${-wide}z`);
    }
    for (const [key, d] of paths) {
      const [name, held] = key.split(" ");
      svg.append(draw("path", {class: "blocks", d, fill: colour(name), opacity: held, "pointer-events": "none"}));
    }
  }

  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = Math.floor((event.clientY - box.top) / row);
    const {rows, blocks} = data.maps[shown], segment = rows[at], byte = view.at(event.clientX - box.left);
    if (!segment || byte < 0 || byte > segment[2]) { hideTip(); return; }
    const near = (view.end - view.start) / view.width;
    const block = blocks.find(one => one[0] === at && one[1] <= byte && byte < Math.max(one[2], one[1] + near));
    const inside = block ? [[block[6], block[5], `${size(block[3])} in ${count(block[4])}`], ["", "from", size(block[1])]]
      : [["segment", "hole", ""]];
    showTip(event, [...inside, ["", "segment", `${size(segment[2])} of pool ${segment[0]}`], ["", "address", segment[1]],
      ["", "there since", duration(segment[3])], ["", "held", size(segment[4])], ["", "largest hole", size(segment[5])]]);
  });
  svg.addEventListener("pointerleave", hideTip);
  showMap = at => { shown = at; render(); };
  section("memory", "Memory", make("p", {}, "Rows are segments, with buffers in the colours of their tags. Pale is held in " +
    "part, blank is a hole. Drag to zoom in."), make("div", {class: "switch"}, ...buttons), said, svg);
  view.follow(svg);
  redraws.push(render);
}

// -- icicles ---------------------------------------------------------------------------------------------------------

function icicle(name, root, spell, counted) {
  const svg = draw("svg", {class: "icicle", "data-name": name}), row = 24, found = make("p", {class: "found"});
  const whole = {...root, name: "all", above: null};
  let focus = whole;
  views[name] = {reset: () => { focus = whole; }};
  const link = cell => cell.calls.forEach(one => { one.above = cell; link(one); });
  link(whole);
  const hit = cell => searched !== "" && cell.name.toLowerCase().includes(searched);
  const depth = cell => 1 + Math.max(0, ...cell.calls.map(depth));
  const hitWeight = cell => (hit(cell) ? cell.weight : cell.calls.reduce((sum, one) => sum + hitWeight(one), 0));

  function drawCell(cell, level, left, width, above) {
    if (width < 0.5) return;
    const letters = Math.floor((width - 10) / 6.6), text = cell.short;
    const label = text.length <= letters ? text : letters >= 4 ? `${text.slice(0, letters - 1)}…` : "";
    const zoom = () => { focus = focus === cell ? cell.above : cell; hideTip(); render(); };
    svg.append(draw("g", {
      class: `cell${hit(cell) ? " hit" : ""}${above ? " above" : ""}`, tabindex: 0, "data-frame": cell.name, onclick: zoom,
      onkeydown: event => event.key === "Enter" && zoom(),
      onpointermove: event => showTip(event, [[cell.colour, cell.name], ["", spell(cell.weight), share(cell.weight / whole.weight)],
        ["", counted, count(cell.requests)]]),
    }, draw("rect", {x: left, y: level * row, width: width > 4 ? width - 1 : width, height: row - 1, rx: width > 8 ? 2 : 0,
      fill: colour(cell.colour)}), draw("text", {x: left + 5, y: level * row + 16,
      style: `fill: var(--on-${cell.colour}, var(--on-tag))`}, label)));
  }

  function drawBelow(cell, level, left, scale) {
    for (const one of cell.calls) {
      drawCell(one, level, left, one.weight * scale, false);
      drawBelow(one, level + 1, left, scale);
      left += one.weight * scale;
    }
  }

  function render() {
    const width = svg.clientWidth, way = [];
    for (let cell = focus; cell !== whole; cell = cell.above) way.unshift(cell);
    svg.setAttribute("height", (way.length + depth(focus) - 1) * row);
    svg.classList.toggle("searched", searched !== "");
    svg.replaceChildren();
    way.forEach((cell, level) => drawCell(cell, level, 0, width, cell !== focus));
    drawBelow(focus, way.length, 0, width / focus.weight);
    const weight = hitWeight(whole);
    found.textContent = searched ? `${share(weight / whole.weight)} in frames with “${searched}”: ${spell(weight)}` : "";
  }
  svg.addEventListener("pointerleave", hideTip);
  redraws.push(render);
  return [svg, found];
}

function lines() {
  const heading = "Lines at the peak";
  if (!data.peak.weight) { section("lines", heading, make("p", {}, "Nothing was live.")); return; }
  section("lines", heading, make("p", {}, `${size(data.peak.weight)} in ${count(data.peak.requests)} buffers live. Each line ` +
    "lies below the one that called it, as wide as its bytes, in the colour of the tag that has most of them. Click a line " +
    "to zoom in, and again to zoom out."), ...icicle("peak", data.peak, size, "buffers"));
}

// -- tables ----------------------------------------------------------------------------------------------------------

// Columns are [name, value of a row to sort by, element of a row, left]. A click on a name sorts, another one reverses.
function sortable(rows, columns, first = 0) {
  const body = make("tbody"), heads = columns.map(([name, , , left]) => make("th", {scope: "col", class: left ? "left" : ""},
    make("button", {onclick: () => sort(columns.findIndex(one => one[0] === name))}, name)));
  let by = 0, down = true;
  function sort(at) {
    down = at === by && body.children.length ? !down : !columns[at][3];
    by = at;
    const value = columns[at][1], sign = down ? -1 : 1;
    const order = [...rows].sort((one, other) => sign * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0));
    heads.forEach((one, number) => {
      if (number === at) one.setAttribute("aria-sort", down ? "descending" : "ascending");
      else one.removeAttribute("aria-sort");
    });
    body.replaceChildren(...order.map(row => make("tr", {}, ...columns.map(([, , show, left]) =>
      make("td", left ? {class: "left"} : {}, ...[show(row)].flat())))));
  }
  sort(first);
  return make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
}

const tagged = (name, mark) => make("span", {class: "tag"}, swatch(mark), name);

function leaks() {
  const {known, rows} = data.leaks;
  if (!known || !rows.length) {
    section("leaks", "Leaks", make("p", {}, known ? "All that was allocated was freed."
      : "What was never freed is not known: the end of the records is missing."));
    return;
  }
  section("leaks", "Leaks", make("p", {}, `${size(data.leaked.weight)} in ${count(data.leaked.requests)} buffers ` +
    "allocated while it was recorded, and still live at the end."),
  sortable(rows, [
    ["bytes", row => row[0], row => size(row[0])],
    ["buffers", row => row[1], row => count(row[1])],
    ["oldest", row => row[2], row => duration(row[2])],
    ["tags", row => row[3].map(one => one[0]).join(), row => row[3].map(one => tagged(...one)), true],
    ["line", row => row[5], row => row[4]
      ? [row[5], make("span", {class: "outlived"}, ` outlived its pool: ${count(row[4])}`)] : row[5], true],
  ]), make("h3", {}, "By calls"), ...icicle("leaks", data.leaked, size, "buffers"));
}

function waits() {
  const {tags, priorities, classes} = data.waits;
  if (!classes.length) { section("waits", "Waits", make("p", {}, "No request waited for memory.")); return; }
  const figures = from => [
    ["waited", row => row[from + 1], row => duration(row[from + 1])],
    ["waits", row => row[from], row => count(row[from])],
    ["longest", row => row[from + 2], row => duration(row[from + 2])],
    ["given up", row => row[from + 3], row => count(row[from + 3])],
  ];
  const most = Math.max(...classes.map(one => one[1]));
  const bars = classes.flatMap(([below, number]) => [make("span", {}, `< ${duration(below)}`),
    make("div", {}, make("i", {style: `width: ${number / most * 75}%`}), count(number))]);
  section("waits", "Waits", make("p", {}, `${duration(data.waited.weight)} in ${count(data.waited.requests)} waits for others ` +
    "to free memory."),
  make("div", {class: "pair"},
    make("div", {}, make("h3", {}, "By tag"),
      sortable(tags, [["tag", row => row[1], row => tagged(row[1], row[0]), true], ...figures(2)], 1)),
    make("div", {}, make("h3", {}, "By priority"),
      sortable(priorities, [["priority", row => +row[0], row => row[0]], ...figures(1)]))),
  make("h3", {}, "By how long they took"), make("div", {class: "bars"}, ...bars),
  make("h3", {}, "By calls"), ...icicle("waits", data.waited, duration, "waits"));
}

header();
timeline();
memory();
lines();
leaks();
waits();
redraw();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
document.documentElement.dataset.drawn = "";
