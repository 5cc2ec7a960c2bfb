"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, text = "", kind = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const pairs = (values) => Object.entries(values).map(([k, v]) => `${k}=${v}`).join(" ");

// Light or dark: the system's choice until the button is pressed.
const root = document.documentElement;
root.classList.toggle("dark", location.hash === "#dark" || matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("theme").onclick = () => root.classList.toggle("dark");

for (const tabs of all(".tabs")) {
  const section = tabs.closest("section");
  tabs.onclick = (event) => {
    const name = event.target.dataset.show;
    if (name === undefined) return;
    for (const button of tabs.children) button.classList.toggle("on", button === event.target);
    for (const view of all(".view", section)) view.hidden = view.dataset.view !== name;
  };
}

// Sources, coloured by one pass over words; text enters the page as text only.
const TOKENS = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|(#\s*\w+)|("(?:[^"\\\n]|\\.)*")|\b(\d[\w.]*)\b|\b(alignas|auto|bool|break|case|char|const|constexpr|continue|do|double|else|enum|extern|float|for|if|inline|int|int32_t|int64_t|long|namespace|return|sizeof|static|static_cast|struct|switch|template|typedef|typename|uint16_t|uint32_t|uint64_t|uint8_t|unsigned|using|void|while)\b/g;
function colour(target, text) {
  target.textContent = "";
  let end = 0;
  for (const match of text.matchAll(TOKENS)) {
    target.append(text.slice(end, match.index));
    const kind = match[1] ? "c" : match[2] ? "m" : match[3] || match[4] ? "s" : "k";
    target.append(make("span", match[0], kind));
    end = match.index + match[0].length;
  }
  target.append(text.slice(end));
}
for (const button of all("button.source")) {
  button.onclick = () => {
    const code = button.closest("details").querySelector(".code");
    const again = code.dataset.of === button.dataset.source && !code.hidden;
    code.hidden = again;
    code.dataset.of = button.dataset.source;
    if (!again) colour(code, data.sources[button.dataset.source]);
  };
}

// Launches are many: a table is made when it is opened.
for (const plan of all("details.plan")) {
  plan.addEventListener("toggle", () => {
    const place = plan.querySelector(".launches");
    if (place.childElementCount) return;
    const table = make("table");
    data.plans[+plan.dataset.bucket].launches.forEach(([kernel, group, args], i) => {
      const row = table.insertRow();
      row.insertCell().textContent = i;
      row.insertCell().append(make("code", kernel));
      row.insertCell().textContent = group;
      row.insertCell().append(make("code", args.join(", ")));
    });
    place.append(table);
  });
}

// What a box holds.
const detail = document.getElementById("detail");
function section(title, ...children) {
  detail.append(make("h4", title), ...children);
}
function show(id) {
  detail.textContent = "";
  const group = data.groups[id];
  const isGroup = document.querySelector('.view[data-view="after"]').hidden === false;
  if (!isGroup || !group) {
    const line = isGroup ? undefined : data.nodes[id];
    detail.append(make("h3", id));
    const box = all(".box").find((b) => b.dataset.id === id && !b.closest(".view").hidden);
    detail.append(make("pre", line || box.querySelector(":scope > title").textContent, "code"));
    return;
  }
  detail.append(make("h3", id), make("div", `${group.kind} group, template ${group.template}`, "note"));
  section("nodes", make("pre", group.nodes.join("\n"), "code"));
  const symbols = [...new Set(Object.values(group.kernels))];
  for (const symbol of symbols) {
    const buckets = Object.keys(group.kernels).filter((b) => group.kernels[b] === symbol);
    section(`kernel ${symbol}, in ${buckets.join(", ")}`);
    detail.append(make("div", `numerics: ${pairs(data.numerics[symbol])}`, "note"));
    detail.append(make("div", `cost: ${data.costs[symbol]}`, "note"));
    detail.append(make("div", `schedule: ${pairs(data.schedules[symbol])}`, "note"));
    const fold = make("details"), code = make("pre", "", "code");
    fold.append(make("summary", "source"), code);
    fold.addEventListener("toggle", () => code.textContent || colour(code, data.sources[symbol]));
    detail.append(fold);
  }
  if (group.refusals.length) {
    section("templates asked before", make("pre", group.refusals.map((r) => `${r.template}: ${r.reason}`).join("\n"), "code"));
  }
}
function choose(box) {
  const svg = box.ownerSVGElement, id = box.dataset.id;
  for (const other of all(".box", svg)) other.classList.toggle("chosen", other === box);
  for (const edge of all(".edge", svg)) {
    edge.classList.toggle("lit", edge.dataset.from === id || edge.dataset.to === id);
  }
  show(id);
}

// Moving and zooming change the view box alone.
for (const svg of all("svg.graph")) {
  const whole = svg.getAttribute("viewBox").split(" ").map(Number);
  let at = [...whole], from = null, moved = false;
  const apply = () => svg.setAttribute("viewBox", at.join(" "));
  const scale = () => Math.max(at[2] / svg.clientWidth, at[3] / svg.clientHeight);
  const readable = () => {
    const height = whole[2] * svg.clientHeight / Math.max(svg.clientWidth, 1);
    at = [whole[0], whole[1], whole[2], Math.min(whole[3], Math.max(height, 200))];
    apply();
  };
  const zoom = (factor, x = at[0] + at[2] / 2, y = at[1] + at[3] / 2) => {
    at = [x - (x - at[0]) / factor, y - (y - at[1]) / factor, at[2] / factor, at[3] / factor];
    apply();
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    zoom(Math.exp(-event.deltaY / 500), point.x, point.y);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY, at[0], at[1]]; moved = false; });
  svg.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
    moved = moved || Math.abs(dx) + Math.abs(dy) > 4;
    at[0] = from[2] - dx * scale();
    at[1] = from[3] - dy * scale();
    apply();
  });
  for (const name of ["pointerup", "pointerleave"]) svg.addEventListener(name, () => { from = null; });
  svg.addEventListener("click", (event) => {
    const box = event.target.closest(".box");
    if (box && !moved) choose(box);
  });
  svg.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(event.target.closest(".box")); });
  svg.zoomBy = (factor) => (factor ? zoom(factor) : (at = [...whole], apply()));
  svg.start = readable;
}
const visible = () => all("svg.graph").find((svg) => !svg.closest(".view").hidden);
for (const button of all("[data-zoom]")) button.onclick = () => visible().zoomBy(+button.dataset.zoom);
document.querySelector('.tabs[data-for="graph"]').addEventListener("click", () => visible().start());
visible().start();
document.getElementById("find").oninput = (event) => {
  const text = event.target.value.toLowerCase();
  for (const box of all("svg.graph .box")) {
    box.classList.toggle("faded", text !== "" && !box.textContent.toLowerCase().includes(text));
  }
};
const first = document.querySelector('.view[data-view="after"] .box.contract');
if (first) choose(first);
