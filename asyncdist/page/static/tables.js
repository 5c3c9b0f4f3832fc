// Tables whose cells are text: what ranks call themselves is never read as HTML.

export function fillTable(table, columns, rows) {
  if (!table.tHead) {
    const head = table.createTHead().insertRow();
    for (const [label] of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = label;
      head.append(cell);
    }
    table.createTBody();
    table.createCaption();
  }
  table.tHead.hidden = !rows.length;
  setText(table.caption, rows.length ? "" : table.dataset.empty);
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, number) => {
    const line = body.rows[number] ?? emptyLine(body, columns);
    columns.forEach(([, text, style], place) => {
      const cell = line.cells[place];
      setText(cell, text(row));
      const name = style ? style(row) : "";
      if (cell.className !== name) cell.className = name;
    });
  });
}

function emptyLine(body, columns) {
  const line = body.insertRow();
  columns.forEach(([label], place) => {
    const cell = document.createElement(place ? "td" : "th");
    if (!place) cell.scope = "row";
    cell.dataset.label = label;
    line.append(cell);
  });
  return line;
}

export function setText(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;  // a screen reader hears changes only
}

export const seconds = (s) => s == null ? "" : s < 1 ? `${Math.round(s * 1000)} ms` : s < 120 ? `${s.toFixed(1)} s` : `${Math.round(s / 60)} min`;

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}
