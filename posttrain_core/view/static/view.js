// posttrain view: charts that follow a run, keys, and what is said of a token. Pages work without it, but for charts.
"use strict";

const POLL_MS = 5000;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// --- charts ---

const touched = matchMedia("(pointer: coarse)").matches;

function themed(layout) {
  const ink = style("--ink"), line = style("--line"), soft = style("--soft");
  const axis = { gridcolor: line, linecolor: line, tickcolor: line, color: soft, fixedrange: touched };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    hoverlabel: { bgcolor: style("--panel"), bordercolor: line, font: { color: ink } },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    shapes: (layout.shapes || []).map((each) => ({ ...each, line: { ...each.line, color: soft } })),
    autosize: true,
    dragmode: touched ? false : "zoom", // a finger scrolls the page
  };
}

function figureElement(holder, place) {
  let figure = holder.querySelectorAll("figure")[place];
  if (!figure) {
    figure = document.createElement("figure");
    figure.append(document.createElement("figcaption"), document.createElement("div"));
    figure.lastChild.className = "plot";
    holder.append(figure);
  }
  return figure;
}

async function draw(figure, chart) {
  const [caption, plot] = figure.children;
  const words = document.createElement("small");
  words.textContent = chart.summary;
  caption.replaceChildren(chart.title, words);
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${chart.title}. ${chart.summary}`);
  plot.hidden = chart.data.length === 0;
  figure.chart = chart;
  if (plot.hidden) return;
  await Plotly.react(plot, chart.data, themed(chart.layout), { displayModeBar: false, responsive: true, scrollZoom: false });
  if (chart.links && !plot.listening) {
    plot.listening = true;
    plot.on("plotly_click", (event) => {
      const [row, column] = event.points[0].pointIndex;
      location.href = figure.chart.links[row][column];
    });
  }
}

async function load(holder) {
  try {
    const answer = await fetch(holder.dataset.charts);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const { figures } = await answer.json();
    holder.querySelector(".wait")?.remove();
    const extra = [...holder.querySelectorAll("figure")].slice(figures.length);
    extra.forEach((figure) => figure.remove());
    for (const [place, chart] of figures.entries()) await draw(figureElement(holder, place), chart);
    if (figures.length === 0) holder.textContent = "Nothing yet.";
  } catch (error) {
    if (!holder.querySelector("figure")) holder.querySelector(".wait").textContent = `Not shown: ${error.message}`;
  }
  holder.dataset.drawn = "yes";
}

const holders = [...document.querySelectorAll("[data-charts]")];
holders.forEach(load);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const figure of document.querySelectorAll(".charts figure")) if (figure.chart) draw(figure, figure.chart);
});

for (const form of document.querySelectorAll("form[data-for]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const holder = document.getElementById(form.dataset.for);
    const address = new URL(holder.dataset.charts, location.href);
    address.search = new URLSearchParams(new FormData(form));
    holder.dataset.charts = address.pathname + address.search;
    delete holder.dataset.follow;
    load(holder);
  });
}

// --- a live run ---

const live = document.querySelector("[data-live]");

async function follow() {
  if (document.hidden) return;
  const answer = await fetch(live.dataset.live).catch(() => null);
  if (!answer || !answer.ok) return;
  const { version } = await answer.json();
  if (version === live.dataset.version) return;
  live.dataset.version = version;
  const page = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
  const fresh = page.querySelector("[data-live]");
  live.replaceChildren(...fresh.childNodes);
  document.querySelector("h1").replaceChildren(...page.querySelector("h1").childNodes);
  for (const holder of holders) {
    if (holder.dataset.follow) holder.dataset.charts = holder.dataset.follow;
    load(holder);
  }
}

if (live) setInterval(follow, POLL_MS);

// --- keys ---

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.target.classList?.contains("token")) {
    if (step(event.target, event.key)) event.preventDefault();
    if (event.key.startsWith("Arrow")) return;
  }
  const rel = { j: "next", ArrowRight: "next", k: "prev", ArrowLeft: "prev" }[event.key];
  if (rel) document.querySelector(`a[rel=${rel}]`)?.click();
});

// --- tokens: one stop of the Tab key, arrows inside ---

const tokens = [...document.querySelectorAll(".tokens .token")];
const readout = document.getElementById("readout");
const say = (event) => { if (event.target.dataset.say) readout.textContent = event.target.dataset.say; };

function step(token, key) {
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  if (!(key in moves)) return false;
  const place = Math.min(tokens.length - 1, Math.max(0, tokens.indexOf(token) + moves[key]));
  token.tabIndex = -1;
  tokens[place].tabIndex = 0;
  tokens[place].focus();
  return true;
}

if (readout) {
  const box = document.querySelector(".tokens");
  box.addEventListener("focusin", say);
  box.addEventListener("mouseover", say);
}
