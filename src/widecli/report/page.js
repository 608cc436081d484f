"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // Light or dark: the system's choice until the button says otherwise.
  document.querySelector("button.theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + "px";
  };
  const hide = () => { tip.style.display = "none"; };

  for (const mark of document.querySelectorAll("[data-tip]")) {
    mark.addEventListener("pointermove", (event) => show(mark.dataset.tip, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(mark.dataset.tip, box.right, box.top);
    });
    mark.addEventListener("blur", hide);
  }

  // Heat maps: one listener each; the cell under the pointer follows from its place.
  for (const svg of document.querySelectorAll("svg.heat")) {
    const data = JSON.parse(svg.nextElementSibling.textContent);
    const [left, top, width, height] = svg.dataset.cell.split(",").map(Number);
    svg.addEventListener("pointermove", (event) => {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const column = Math.floor((place.x - left) / width), row = Math.floor((place.y - top) / height);
      const value = data.values[row] && data.values[row][column];
      if (value === undefined || value === null) return hide();
      show(`${data.y} ${data.rows[row]}, ${data.x} ${data.columns[column]}\n${data.label}: ${value}`, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
  }

  // Sort by a column: numbers by value, empty cells last whichever way.
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[index].dataset.v ?? row.cells[index].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }
})();
