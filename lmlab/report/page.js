// Makes the report's tables sortable and filterable and its curves answer the pointer. The page is whole without it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (what, inside = document) => [...inside.querySelectorAll(what)];
  const make = (tag, attributes = {}, ...content) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...content);
    return node;
  };
  const draw = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  // ---------------------------------------------------------------- sorting

  // Numbers before words, both ways round; what is missing comes last, both ways round.
  const place = (cell) => {
    if (!cell || cell.classList.contains("missing")) return { kind: 2 };
    if (cell.dataset.v !== undefined) return { kind: 0, value: Number(cell.dataset.v) };
    return { kind: 1, value: cell.textContent };
  };
  const compare = (a, b, sign) => {
    if (a.kind !== b.kind) return a.kind - b.kind;
    if (a.kind === 0) return sign * (a.value - b.value);
    return a.kind === 1 ? sign * a.value.localeCompare(b.value, undefined, { numeric: true }) : 0;
  };
  const sortable = (table) => {
    const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
        heads.forEach((other) => other.setAttribute("aria-sort", other === head ? next : "none"));
        const sign = next === "ascending" ? 1 : -1;
        const keyed = original.map((row) => [place(row.cells[column]), row]);
        if (next !== "none") keyed.sort((a, b) => compare(a[0], b[0], sign));
        body.append(...keyed.map((pair) => pair[1]), ...all("tr.none", body));
      });
    });
  };

  // ---------------------------------------------------------------- filtering

  const same = (wanted, found) => {
    const word = found.trim().toLowerCase();
    return word === wanted || (wanted !== "" && word !== "" && Number(wanted) === Number(word));
  };
  // What `key` stands for in a row: a column's key or title, whole or after its last dot or slash, or an axis of the arm.
  const valuesOf = (row, heads, key) => {
    const named = (name) => name.toLowerCase() === key || name.toLowerCase().split(/[./]/).pop() === key;
    const found = [];
    heads.forEach((head, i) => {
      if (!named(head.dataset.key) && !named(head.textContent)) return;
      const cell = row.cells[i];
      found.push(cell.textContent, cell.dataset.v ?? "", ...(cell.dataset.is?.split(" ") ?? []));
    });
    const arm = row.dataset.arm === undefined ? {} : data.arms[row.dataset.arm];
    return found.concat(Object.keys(arm).filter(named).map((name) => arm[name]));
  };
  const matches = (row, heads, word) => {
    const without = word.startsWith("-"), text = without ? word.slice(1) : word;
    const at = text.indexOf("="), found = at > 0 ? valuesOf(row, heads, text.slice(0, at)) : [];
    const hit = found.length ? found.some((value) => same(text.slice(at + 1), value)) : row.textContent.toLowerCase().includes(text);
    return hit !== without;
  };
  const filterable = (table, changed) => {
    const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells], name = table.dataset.name;
    const input = make("input", {
      type: "search", "aria-label": `filter ${name}`, placeholder: "filter: word  key=value  -word", spellcheck: "false", autocomplete: "off",
    });
    const count = make("output", { "aria-live": "polite" });
    const none = make("tr", { class: "none", hidden: "" }, make("td", { colspan: heads.length, class: "faint" }, "No row matches."));
    table.tBodies[0].append(none);
    table.parentNode.before(make("div", { class: "filter" }, input, count));
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter((word) => word !== "" && word !== "-");
      rows.forEach((row) => { row.hidden = !words.every((word) => matches(row, heads, word)); });
      const shown = rows.filter((row) => !row.hidden);
      none.hidden = shown.length > 0;
      count.textContent = words.length ? `${shown.length} of ${rows.length}` : "";
      changed(rows, shown);
    };
    input.addEventListener("input", apply);
    input.addEventListener("keydown", (event) => { if (event.key === "Escape") { input.value = ""; apply(); } });
  };

  // ---------------------------------------------------------------- arms, wherever they are shown

  const off = new Set(), dim = new Set();
  const marks = new Map();
  for (const node of all(".arm, .legend li")) {
    const arm = Number(node.dataset.arm);
    marks.set(arm, (marks.get(arm) || []).concat(node));
  }
  const repaint = () => marks.forEach((nodes, arm) => nodes.forEach((node) => {
    node.classList.toggle("off", off.has(arm) && node.tagName !== "LI");
    node.classList.toggle("dim", dim.has(arm));
  }));
  const light = (arm) => {
    all(".lines").forEach((lines) => lines.classList.toggle("pick", arm !== null));
    all(".arm.lit, tr.lit").forEach((node) => node.classList.remove("lit"));
    if (arm !== null) all(`.arm[data-arm="${arm}"], tr[data-arm="${arm}"]`).forEach((node) => node.classList.add("lit"));
  };
  const lights = (node) => {
    node.addEventListener("pointerenter", () => light(node.dataset.arm));
    node.addEventListener("pointerleave", () => light(null));
    node.addEventListener("focusin", () => light(node.dataset.arm));
    node.addEventListener("focusout", () => light(null));
  };
  const legend = document.querySelector(".legend");
  if (legend) {
    legend.classList.add("live");
    all("li", legend).forEach((item) => {
      const arm = Number(item.dataset.arm), button = make("button", { type: "button", "aria-pressed": "true" });
      button.append(...item.childNodes);
      item.append(button);
      lights(item);
      button.addEventListener("click", () => {
        if (!off.delete(arm)) off.add(arm);
        button.setAttribute("aria-pressed", String(!off.has(arm)));
        repaint();
      });
    });
  }
  all("tbody tr[data-arm]").forEach(lights);

  // ---------------------------------------------------------------- which figure is shown

  const figures = all("figure");
  const view = { metric: figures[0]?.dataset.metric, x: figures[0]?.dataset.x };
  const switches = make("div", { class: "switches" });
  const show = () => {
    figures.forEach((figure) => { figure.hidden = figure.dataset.metric !== view.metric || figure.dataset.x !== view.x; });
    all("button", switches).forEach((b) => b.setAttribute("aria-pressed", String(view[b.dataset.of] === b.value)));
  };
  const choice = (of, label, name) => {
    const seen = new Map(figures.map((figure) => [figure.dataset[of], figure.dataset[name]]));
    if (seen.size < 2) return;
    const group = make("div", { class: "switch", role: "group", "aria-label": label });
    seen.forEach((text, value) => {
      const button = make("button", { type: "button", "data-of": of }, text);
      button.value = value;
      button.addEventListener("click", () => { view[of] = value; show(); });
      group.append(button);
    });
    switches.append(group);
  };
  choice("metric", "what is drawn", "metricName");
  choice("x", "against what", "xName");
  document.querySelector(".beside")?.before(switches);
  if (figures.length) show();

  // ---------------------------------------------------------------- values under the pointer

  const loss = (value) => (Math.abs(value) < 1e4 ? value.toPrecision(5) : value.toExponential(3));
  const amount = (value) => {
    if (value < 1e10) return value.toLocaleString("en", { maximumSignificantDigits: 7 }).replaceAll(",", "\u202f");
    return value.toExponential(3).replace("e+", " × 10^");
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return x - xs[low] <= xs[high] - x ? low : high;
  };
  const MOST = 12; // rows of the box: with more arms, those nearest to the pointer

  figures.forEach((figure, index) => {
    const { x: [x0, x1], y: [y0, y1], lines } = data.figures[index];
    const frame = figure.querySelector(".frame"), plot = figure.querySelector(".plot");
    const tip = make("div", { class: "tip", role: "status", hidden: "" });
    const cross = draw("line", { class: "cross", y1: 0, y2: "100%", visibility: "hidden" });
    const dots = draw("g", {});
    figure.append(tip);
    plot.append(cross, dots);
    frame.tabIndex = 0;
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "values along the curve: arrow keys");
    const live = () => lines.filter((line) => !off.has(line.arm) && !dim.has(line.arm));
    const across = (x) => (x - x0) / (x1 - x0), down = (y) => (y1 - y) / (y1 - y0);

    // Every arm's own point nearest to x; none where the arm has ended before, or has not begun.
    const at = (x) => live().flatMap((line) => {
      const xs = data.pool[line.x], i = nearest(xs, x), y = data.pool[line.y][i];
      const outside = x < xs[0] ? xs[0] - x : x - xs[xs.length - 1];
      if (y === null || outside > 0.02 * (x1 - x0)) return [];
      const spread = line.low === undefined ? null : [data.pool[line.low][i], data.pool[line.high][i]];
      return [{ arm: line.arm, x: xs[i], y, spread }];
    });
    // The x of the point that is nearest to the pointer, of any arm.
    const snap = (x) => {
      let best = null;
      live().forEach((line) => {
        const xs = data.pool[line.x], found = xs[nearest(xs, x)];
        if (best === null || Math.abs(found - x) < Math.abs(best - x)) best = found;
      });
      return best;
    };
    const row = (point) => {
      const item = legend.querySelector(`li[data-arm="${point.arm}"]`);
      const known = point.spread !== null && point.spread.every((value) => value !== null);
      return make("tr", { "data-arm": point.arm },
        make("td", {}, item.querySelector(".swatch").cloneNode(true), item.querySelector("span").textContent),
        make("td", {}, loss(point.y)), make("td", {}, known ? `${loss(point.spread[0])}…${loss(point.spread[1])}` : ""));
    };
    let current = null;
    const clear = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); current = null; };
    const tell = (x, pointerY) => {
      const points = x === null ? [] : at(x);
      if (!points.length) { clear(); return; }
      current = x;
      let shown = points;
      if (points.length > MOST) {
        const gap = (point) => Math.abs(down(point.y) - pointerY);
        shown = [...points].sort((a, b) => gap(a) - gap(b)).slice(0, MOST);
      }
      shown.sort((a, b) => b.y - a.y);
      const rest = points.length - shown.length;
      const rows = make("tbody", {}, ...shown.map(row));
      tip.replaceChildren(make("div", { class: "faint" }, `${figure.dataset.xName} ${amount(x)}`), make("table", {}, rows),
        ...(rest ? [make("div", { class: "faint" }, `and ${rest} more`)] : []));
      cross.setAttribute("x1", `${100 * across(x)}%`);
      cross.setAttribute("x2", `${100 * across(x)}%`);
      cross.setAttribute("visibility", "visible");
      dots.replaceChildren(...shown.filter((point) => down(point.y) >= 0).map((point) => {
        const look = marks.get(point.arm).find((node) => node.tagName === "g").classList[1];
        return draw("circle", { class: `dot ${look}`, r: 4, cx: `${100 * across(point.x)}%`, cy: `${100 * down(point.y)}%` });
      }));
      tip.hidden = false;
      const box = plot.getBoundingClientRect(), outer = figure.getBoundingClientRect();
      const left = box.left - outer.left + across(x) * box.width;
      const wanted = across(x) < 0.5 ? left + 14 : left - tip.offsetWidth - 14;
      tip.style.left = `${Math.max(4, Math.min(wanted, outer.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${box.top - outer.top + 6}px`;
    };
    const followed = (event) => {
      const box = plot.getBoundingClientRect();
      const x = x0 + ((event.clientX - box.left) / box.width) * (x1 - x0);
      tell(snap(Math.max(x0, Math.min(x1, x))), (event.clientY - box.top) / box.height);
    };
    frame.addEventListener("pointermove", followed);
    frame.addEventListener("pointerdown", followed);
    frame.addEventListener("pointerleave", clear);
    frame.addEventListener("blur", clear);
    frame.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], edge = { Home: 0, End: -1 }[event.key];
      if (event.key === "Escape") { clear(); return; }
      if (step === undefined && edge === undefined) return;
      event.preventDefault();
      const xs = [...new Set(live().flatMap((line) => data.pool[line.x]))].sort((a, b) => a - b);
      if (!xs.length) return;
      const now = current === null ? (step === -1 ? xs.length : -1) : xs.indexOf(current);
      tell(edge === undefined ? xs[Math.max(0, Math.min(xs.length - 1, now + step))] : xs.at(edge), 0.5);
    });
  });

  // ---------------------------------------------------------------- joined

  all("table[data-name]").forEach((table) => {
    sortable(table);
    filterable(table, (rows, shown) => {
      if (table.dataset.name !== "arms") return;
      dim.clear();
      rows.filter((row) => !shown.includes(row) && row.dataset.arm).forEach((row) => dim.add(Number(row.dataset.arm)));
      repaint();
    });
  });
  // Paper shows all of it.
  window.addEventListener("beforeprint", () => all("details.fold").forEach((node) => { node.open = true; }));
})();
