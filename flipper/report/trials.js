"use strict";
(() => {
  const data = JSON.parse(document.getElementById("trial-data").textContent);
  const PAGE = 25;
  const part = document.getElementById("trial-part");
  const axes = data.axes.length;
  const kind = (at) => Object.values(data.cells).every((cell) => cell[at] === null || typeof cell[at] === "number") ? "number" : "text";
  const columns = [data.columns[0], ...data.axes.map((name, at) => [name, kind(at)]), ...data.columns.slice(1)];
  const names = { 2: data.texts, 3: data.outcomes, 8: data.texts };

  // A row's value in a column of the table: cell, its axes, then the rest.
  const value = (row, column) => {
    if (column > 0 && column <= axes) return data.cells[row[0]][column - 1];
    const at = column === 0 ? 0 : column - axes;
    return at in names && row[at] !== null ? names[at][row[at]] : row[at];
  };
  const NUMBERS = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };
  const number = (item) => (item in NUMBERS ? NUMBERS[item] : item);
  const shown = (item) => {
    if (item === null || item === undefined) return "\u2013";
    if (typeof item !== "number") return String(item);
    if (!Number.isFinite(item)) return Number.isNaN(item) ? "NaN" : item > 0 ? "\u221e" : "\u2212\u221e";
    const size = Math.abs(item);
    if (item !== 0 && (size < 1e-4 || (size >= 1e6 && !Number.isSafeInteger(item)))) {
      const [mantissa, power] = item.toExponential(2).split("e");
      const raised = [...power].map((sign) => "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[sign] || (sign === "-" ? "\u207b" : ""));
      return mantissa.replace("-", "\u2212") + " \u00d7 10" + raised.join("");
    }
    return (Number.isInteger(item) ? String(item) : String(+item.toPrecision(4))).replace("-", "\u2212");
  };

  const make = (tag, text, attributes) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, given] of Object.entries(attributes || {})) element.setAttribute(name, given);
    return element;
  };

  const state = { column: 0, down: false, page: 0, words: [], chosen: {}, open: new Set() };
  let rows = data.rows;

  // Numbers by size, texts by alphabet with numbers in them by size; what is missing stands last either way.
  const collator = new Intl.Collator("en", { numeric: true });
  const missing = (item) => item === null || item === undefined || Number.isNaN(item);
  const compare = (a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const order = typeof a === "number" && typeof b === "number" ? a - b : collator.compare(a, b);
    return (Number.isNaN(order) ? 0 : order) * (state.down ? -1 : 1);
  };
  const harm = (row) => data.groups[data.outcomes[row[3]]];
  const text = (row) => {
    const faults = row[12].map((fault) => data.tensors[fault[0]] + " bit " + fault[2].join(" "));
    return [...columns.map((_, column) => value(row, column)), harm(row), ...faults].join(" ").toLowerCase();
  };
  const texts = new Map();
  const search = (row) => {
    if (!texts.has(row)) texts.set(row, text(row));
    return texts.get(row);
  };

  const choose = () => {
    rows = data.rows.filter((row) =>
      Object.entries(state.chosen).every(([column, wanted]) =>
        column === "group" ? (harm(row) === "benign") === (wanted === "benign") : String(value(row, +column)) === wanted) &&
      state.words.every((word) => search(row).includes(word)));
    const key = (row) => number(value(row, state.column));
    rows = rows.map((row) => [key(row), row]).sort((a, b) => compare(a[0], b[0])).map((pair) => pair[1]);
    state.page = 0;
    show();
  };

  const head = make("tr");
  head.append(make("th", data.detail, { scope: "col" }));
  columns.forEach(([name, kind], column) => {
    const cell = make("th", undefined, { scope: "col", "aria-sort": "none", ...(kind === "number" && { class: "n" }) });
    const button = make("button", name, { type: "button" });
    button.addEventListener("click", () => {
      state.down = state.column === column && !state.down;
      state.column = column;
      choose();
    });
    cell.append(button);
    head.append(cell);
  });

  const faults = (row) => {
    const cell = make("td", undefined, { colspan: columns.length + 1, class: "fault" });
    if (row[13] !== null) cell.append(make("p", "Ended with: " + data.texts[row[13]]));
    if (row[12].length) {
      const table = make("table");
      const top = make("tr");
      for (const name of ["tensor", "element", "bits", "before", "after"]) top.append(make("th", name, { scope: "col" }));
      table.append(top);
      for (const [tensor, element, bits, before, after] of row[12]) {
        const line = make("tr");
        for (const item of [data.tensors[tensor], String(element), bits.join(", "), shown(before), shown(after)]) {
          line.append(make("td", item));
        }
        table.append(line);
      }
      cell.append(table);
      const more = row[10] - row[12].length;
      if (more > 0) cell.append(make("p", "and " + more + " more faults; the command below makes them again."));
    }
    const measured = data.measured.map((name, at) => [name, row[14][at]]).filter(([, item]) => item !== null);
    if (measured.length) cell.append(make("p", measured.map(([name, item]) => name + ": " + shown(number(item))).join("; ")));
    const command = data.command.replace("{cell}", row[0]).replace("{trial}", row[1]);
    cell.append(make("code", command));
    const line = make("tr");
    line.append(cell);
    return line;
  };

  const body = make("tbody");
  const show = () => {
    head.querySelectorAll("th[aria-sort]").forEach((cell, column) =>
      cell.setAttribute("aria-sort", column !== state.column ? "none" : state.down ? "descending" : "ascending"));
    const first = state.page * PAGE;
    const lines = [];
    for (const row of rows.slice(first, first + PAGE)) {
      const line = make("tr");
      const opener = make("td");
      line.append(opener);
      columns.forEach(([name, kind], column) => {
        const cell = make("td", undefined, kind === "number" ? { class: "n" } : {});
        if (name === "outcome") {
          const mark = make("span", "", { class: "mark", "aria-hidden": "true" });
          mark.style.background = "var(--fig-" + value(row, column) + ")";
          cell.append(mark);
        }
        cell.append(shown(number(value(row, column))));
        line.append(cell);
      });
      const open = state.open.has(row);
      const button = make("button", open ? "hide" : "show", {
        type: "button", class: "open", "aria-expanded": open, "aria-label": data.detail + " of cell " + row[0] + " trial " + row[1],
      });
      button.addEventListener("click", () => {
        const now = !state.open.delete(row);
        if (now) state.open.add(row);
        button.textContent = now ? "hide" : "show";
        button.setAttribute("aria-expanded", now);
        if (now) line.after(faults(row));
        else line.nextSibling.remove();
      });
      opener.append(button);
      lines.push(line);
      if (open) lines.push(faults(row));
    }
    body.replaceChildren(...lines);
    const count = rows.length ? first + 1 + "\u2013" + Math.min(first + PAGE, rows.length) + " of " + rows.length : "no";
    told.textContent = count + " trials" + (rows.length < data.rows.length ? " (of " + data.rows.length + " in all)" : "");
    back.disabled = first === 0;
    on.disabled = first + PAGE >= rows.length;
  };

  const controls = make("div", undefined, { class: "controls", role: "search" });
  const field = (name, element) => {
    const label = make("label", name);
    label.append(element);
    controls.append(label);
    return element;
  };
  const selection = (name, key, options) => {
    const select = field(name, make("select"));
    select.append(make("option", "all", { value: "" }));
    for (const option of options) select.append(make("option", option, { value: option }));
    select.addEventListener("change", () => {
      if (select.value === "") delete state.chosen[key];
      else state.chosen[key] = select.value;
      choose();
    });
  };
  const input = field("Search (words, a tensor, \u201cbit 30\u201d)", make("input", undefined, { type: "search" }));
  input.addEventListener("input", () => {
    state.words = input.value.toLowerCase().split(/\s+(?=(?:[^"]*"[^"]*")*[^"]*$)/).map((word) => word.replace(/"/g, "")).filter(Boolean);
    choose();
  });
  selection("harmful", "group", ["benign", "harmful"]);
  const distinct = (column) => [...new Set(data.rows.map((row) => String(value(row, column))))].sort(collator.compare);
  selection("outcome", String(3 + axes), data.outcomes.filter((name) => distinct(3 + axes).includes(name)));
  data.axes.forEach((name, at) => {
    const options = distinct(at + 1);
    if (options.length > 1 && options.length <= 40) selection(name, String(at + 1), options);
  });
  if (distinct(2 + axes).length > 1) selection("training seed", String(2 + axes), distinct(2 + axes));

  const pages = make("div", undefined, { class: "pages" });
  const back = make("button", "Previous", { type: "button" });
  const on = make("button", "Next", { type: "button" });
  const told = make("span", "", { role: "status", "aria-live": "polite" });
  back.addEventListener("click", () => { state.page -= 1; show(); });
  on.addEventListener("click", () => { state.page += 1; show(); });
  pages.append(back, on, told);

  const table = make("table", undefined, { id: "trial-table" });
  table.append(make("caption", "Trials; a column's heading sorts by it. Of each trial this page keeps the first " + data.shown + " faults."));
  const top = make("thead");
  top.append(head);
  table.append(top, body);
  const scroll = make("div", undefined, { class: "table", tabindex: "0", role: "region", "aria-label": "Table of trials" });
  scroll.append(table);
  part.replaceChildren(controls, pages, scroll);
  choose();
})();
