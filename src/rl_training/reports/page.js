"use strict";
// Groups are shown and hidden by the buttons of their section.
for (const button of document.querySelectorAll("[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    const section = button.closest("section");
    for (const part of section.querySelectorAll(`[data-group="${button.dataset.toggle}"]`)) part.style.display = on ? "" : "none";
  });
}

// A pointer on a curve shows the values there.
const tip = document.getElementById("tip");
const show = (v) => { const a = Math.abs(v); return a >= 1000 ? Math.round(v).toLocaleString("en") : v.toFixed(a >= 10 ? 1 : 2); };

for (const plot of document.querySelectorAll("svg[data-hover]")) {
  const lines = JSON.parse(plot.parentElement.querySelector("script").textContent);
  const [left, top, right, bottom] = plot.dataset.box.split(" ").map(Number);
  const [low, high] = plot.dataset.x.split(" ").map(Number);
  const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cross.setAttribute("class", "cross");
  cross.setAttribute("y1", top);
  cross.setAttribute("y2", bottom);
  cross.style.display = "none";
  plot.append(cross);
  const hide = () => { tip.hidden = true; cross.style.display = "none"; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) * plot.viewBox.baseVal.width / box.width;
    if (at < left || at > right) return hide();
    const x = low + (at - left) / (right - left) * (high - low);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    cross.style.display = "";
    tip.replaceChildren();
    const head = document.createElement("strong");
    head.textContent = show(x);
    tip.append(head);
    lines.forEach((line) => {
      const part = plot.querySelector(`[data-group="${line.index}"]`);
      if (part.style.display === "none" || x < line.x[0] || x > line.x[line.x.length - 1]) return;
      let near = 0;
      line.x.forEach((v, k) => { if (Math.abs(v - x) < Math.abs(line.x[near] - x)) near = k; });
      const row = document.createElement("div");
      row.className = part.getAttribute("class");
      const dot = document.createElement("i");
      const text = document.createElement("span");
      const ends = line.low ? ` [${show(line.low[near])}, ${show(line.high[near])}]` : "";
      text.textContent = `${line.name}: ${show(line.y[near])}${ends}`;
      row.append(dot, text);
      tip.append(row);
    });
    tip.hidden = false;
    const size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - size.width - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - size.height - 8))}px`;
  });
  plot.addEventListener("pointerleave", hide);
}
document.documentElement.dataset.ready = "yes";
