"use strict";
// Everything that comes from the data is written as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const J = data.adapters.length, NOT_A_NUMBER = 4095;
const COLOURS = ["adapter", "entropy", "loss", "forced"];
const SHOWN = { adapter: "adapter", entropy: "entropy", loss: "loss", forced: "forced − routed" };

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name in node && !name.startsWith("aria-")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// ---- data ---------------------------------------------------------------------------------------
const VALUE = new Uint8Array(128);
[..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"].forEach(
  (digit, value) => { VALUE[digit.charCodeAt(0)] = value; });

function unpacked(text) {
  const numbers = new Uint16Array(text.length / 2);
  for (let at = 0; at < numbers.length; at++)
    numbers[at] = 64 * VALUE[text.charCodeAt(2 * at)] + VALUE[text.charCodeAt(2 * at + 1)];
  return numbers;
}

class Router {
  constructor(raw, count) {
    const { choices, gates, probabilities, ...plain } = raw;
    Object.assign(this, plain, { count });
    this.choices = unpacked(choices);
    this.packedGates = unpacked(gates);
    this.packedProbabilities = unpacked(probabilities);
  }
  // The adapters of one token at a layer with their gates, largest gate first; −1 is left out.
  gates(layer, token) {
    const start = (layer * this.count + token) * this.k, [low, high] = this.range, found = [];
    for (let at = start; at < start + this.k; at++)
      if (this.choices[at])
        found.push([this.choices[at] - 1, low + this.packedGates[at] / data.steps * (high - low)]);
    return found.sort((a, b) => b[1] - a[1]);
  }
  top(layer, token) {
    const best = this.gates(layer, token)[0];
    return best ? best : [-1, 0];
  }
  probabilities(layer, token) {
    if (!this.logitLayers) return null;
    const start = (Math.min(layer, this.logitLayers - 1) * this.count + token) * J;
    const here = this.packedProbabilities.subarray(start, start + J);
    return here.includes(NOT_A_NUMBER) ? null : Array.from(here, (each) => each / data.steps);
  }
  entropy(layer, token) {
    const p = this.probabilities(layer, token);
    return p && p.reduce((sum, each) => sum - (each > 0 ? each * Math.log(each) : 0), 0);
  }
  // Over the later half of the layers, as the main adapter is.
  meanEntropy(token) {
    let sum = 0, count = 0;
    for (let layer = this.layers >> 1; layer < this.layers; layer++) {
      const value = this.entropy(layer, token);
      if (value !== null) { sum += value; count++; }
    }
    return count ? sum / count : null;
  }
  // [adapter, strength] that a token is coloured by in the picked layer.
  shown(layer, token) {
    if (typeof layer === "number") return this.top(layer, token);
    if (layer === "word") {
      const word = current.words[token];
      return [word < 0 ? -1 : this.wordMain[word], 1];
    }
    return [this.main[token], 1];
  }
}

const read = data.texts.map(() => null);
let current = null;
function open(index) {
  const raw = data.texts[index];
  read[index] ??= { ...raw, routers: raw.routers.map((each) => new Router(each, raw.pieces.length)) };
  return read[index];
}

// ---- state, which the address holds --------------------------------------------------------------
const TWO = data.texts[0].routers.length > 1;
const state = {};
function index(text, count, otherwise) {
  return /^\d+$/.test(text ?? "") && Number(text) < count ? Number(text) : otherwise;
}
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  state.text = index(given.get("text"), data.texts.length, 0);
  current = open(state.text);
  const layer = given.get("layer"), layers = current.routers[0].layers;
  state.layer = ["main", "word", "all"].includes(layer) ? layer : index(layer, layers, "main");
  state.token = index(given.get("token"), current.pieces.length, null);
  const colour = given.get("colour");
  state.colour = COLOURS.includes(colour) && possible(colour) ? colour : "adapter";
  state.forced = given.get("forced") === "base" ? J : index(given.get("forced"), J, 0);
  const view = given.get("view");
  state.view = !TWO ? "a" : ["a", "b", "both"].includes(view) ? view : "both";
}
function toAddress() {
  const wanted = new URLSearchParams();
  if (data.texts.length > 1) wanted.set("text", state.text);
  wanted.set("layer", state.layer);
  if (state.token !== null) wanted.set("token", state.token);
  wanted.set("colour", state.colour);
  if (state.colour === "forced") wanted.set("forced", state.forced === J ? "base" : state.forced);
  if (TWO) wanted.set("view", state.view);
  history.replaceState(null, "", "#" + wanted);
}
function possible(colour) {
  if (colour === "entropy") return current.routers.some((each) => each.logitLayers > 0);
  if (colour === "loss") return current.pieces.length > 1;
  if (colour === "forced") return current.forced !== null && current.pieces.length > 1;
  return true;
}
function set(changes) {
  const text = state.text, view = state.view;
  Object.assign(state, changes);
  toAddress();
  if (state.text !== text || state.view !== view) build();
  draw();
}
const visible = () => (state.view === "both" ? [0, 1] : [state.view === "b" ? 1 : 0]);
const name = (adapter) => (adapter < 0 ? "base only" : data.adapters[adapter]);
const colorOf = (adapter) => (adapter < 0 ? "#999999" : data.colors[adapter]);
const forcedName = () => (state.forced === J ? "the base alone" : name(state.forced));
const inLayer = () =>
  ({ main: "main adapter", word: "main adapter of the word", all: "main adapter" })[state.layer]
  ?? `layer ${state.layer}`;
const digits = (value, count = 2) => (value === null ? "–" : value.toFixed(count).replace("-", "−"));
const signed = (value, count = 2) =>
  value === null ? "–" : (value > 0 ? "+" : "") + digits(value, count);

// ---- what a token is coloured by -----------------------------------------------------------------
function forcedDifference(router, token, row = state.forced) {
  const routed = router.loss[token];
  return !current.forced || routed === null || current.forced[row][token] === null
    ? null : current.forced[row][token] - routed;
}
function entropyShown(router, token) {
  return typeof state.layer === "number" ? router.entropy(state.layer, token) : router.meanEntropy(token);
}
function upper(values, share, least) {
  const sorted = values.filter((each) => each !== null).sort((a, b) => a - b);
  return Math.max(least, sorted[Math.floor(share * (sorted.length - 1))] ?? 0);
}
function scaleOf() {
  const all = (value) => visible().flatMap((which) =>
    current.pieces.map((_, token) => value(current.routers[which], token)));
  if (state.colour === "entropy") return Math.max(Math.log(J), 0.01);
  if (state.colour === "loss") return upper(all((router, token) => router.loss[token]), 0.97, 1);
  if (state.colour === "forced")
    return upper(all((router, token) => {
      const value = forcedDifference(router, token);
      return value === null ? null : Math.abs(value);
    }), 0.97, 0.25);
  return 1;
}
function paint(node, router, token, scale) {
  const style = node.style;
  let kind = "t", color = "transparent", strength = 1;
  style.removeProperty("--stripes");
  if (state.colour === "adapter") {
    const [adapter, gate] = router.shown(state.layer, token);
    node.dataset.adapter = adapter;
    if (state.layer === "all") {
      kind += " stripes";
      style.setProperty("--stripes", stripes(router, token));
    } else if (adapter >= 0) {
      color = colorOf(adapter);
      strength = 0.25 + 0.75 * Math.min(Math.max(gate, 0), 1);
    }
    if (adapter >= 0) kind += ` u${(adapter + Math.floor(adapter / 7)) % 5}`;
    if (state.layer === "all") color = colorOf(adapter);
  } else {
    delete node.dataset.adapter;
    const value = state.colour === "entropy" ? entropyShown(router, token)
      : state.colour === "loss" ? router.loss[token] : forcedDifference(router, token);
    const share = value === null ? 0 : Math.max(-1, Math.min(1, value / scale));
    color = state.colour !== "forced" ? "var(--ramp)" : share < 0 ? "var(--low)" : "var(--high)";
    strength = Math.abs(share) * 1.6;
    if (value === null) delete node.dataset.value;
    else node.dataset.value = value.toFixed(3);
  }
  if (state.colour === "adapter") delete node.dataset.value;
  style.setProperty("--c", color);
  style.setProperty("--g", strength.toFixed(2));
  if (state.view === "both" && differs(token)) kind += " different";
  node.className = kind;
}
function stripes(router, token) {
  const parts = [];
  let begin = 0;
  for (let layer = 1; layer <= router.layers; layer++) {
    const before = router.top(layer - 1, token)[0];
    if (layer < router.layers && router.top(layer, token)[0] === before) continue;
    const color = before < 0 ? "transparent"
      : `color-mix(in srgb, ${colorOf(before)} calc(var(--strength) * 1.25), transparent)`;
    parts.push(`${color} ${(100 * begin / router.layers).toFixed(1)}% ${(100 * layer / router.layers).toFixed(1)}%`);
    begin = layer;
  }
  return `linear-gradient(to bottom, ${parts.join(", ")})`;
}
function differs(token) {
  const [a, b] = current.routers.map((router) => router.shown(state.layer, token)[0]);
  return a !== b;
}

// ---- drawing -------------------------------------------------------------------------------------
let spans = [];   // one list a visible router
let hovered = null, differing = [];

function build() {
  spans = visible().map((which) => current.pieces.map((piece, token) => {
    const node = make("span", { role: "option", tabIndex: -1 });
    node.dataset.token = token;
    node.dataset.router = which;
    // A token without text of its own (a part of a character) still needs something to point at.
    if (piece === "") node.append(make("s", {}, "·"));
    piece.split("\n").forEach((line, at) => {
      if (at) node.append(make("s", {}, "⏎"), "\n");
      if (line) node.append(line);
    });
    return node;
  }));
  $("panes").className = state.view === "both" ? "both" : "";
  $("panes").replaceChildren(...spans.map((nodes, at) => {
    const router = current.routers[visible()[at]];
    const title = make("h2", {}, make("b", {}, router.name), 
      ` · ${router.decision.replace("_", " ")}` + (router.name === `k = ${router.k}` ? "" : `, k = ${router.k}`));
    const tokens = make("div", { role: "listbox", "aria-label": `Tokens under ${router.name}` }, ...nodes);
    tokens.className = "tokens";
    tokens.dir = "auto";
    return make("section", { className: "pane" }, title, tokens);
  }));
}
function choice(id, entries, picked, pick) {
  const old = document.activeElement?.parentElement?.id === id;
  $(id).replaceChildren(...entries.map(([value, label, off]) => make("button", {
    type: "button", role: "radio", "aria-checked": String(value === picked), disabled: Boolean(off),
    onclick: () => pick(value) }, label)));
  for (const [at, [value]] of entries.entries()) {
    $(id).children[at].dataset.value = value;
    if (old && value === picked) $(id).children[at].focus();
  }
}
function options(id, entries, picked, pick) {
  $(id).replaceChildren(...entries.map(([value, label]) =>
    make("option", { value: String(value), selected: value === picked }, label)));
  $(id).onchange = () => pick(entries[$(id).selectedIndex][0]);
}
function draw() {
  const layers = current.routers[0].layers, numbers = Array.from({ length: layers }, (_, at) => [at, String(at)]);
  $("text-pick").hidden = data.texts.length < 2;
  options("text", data.texts.map((each, at) => [at, `${at + 1}: ${each.pieces.join("").trim().slice(0, 30)}…`]),
    state.text, (text) => { current = open(text); set({ text, token: null, colour: "adapter" }); });
  choice("colour", COLOURS.map((each) => [each, SHOWN[each], !possible(each)]), state.colour,
    (colour) => set({ colour }));
  $("forced-pick").hidden = state.colour !== "forced";
  options("forced", [...data.adapters.map((each, at) => [at, each]), [J, "base only"]], state.forced,
    (forced) => set({ forced }));
  $("view").hidden = !TWO;
  if (TWO) choice("view", [["a", current.routers[0].name], ["b", current.routers[1].name], ["both", "side by side"]],
    state.view, (view) => set({ view }));
  const general = [["main", "main"], ["word", "word"], ["all", "all layers"]];
  options("layer", [...general, ...numbers], state.layer, (layer) => set({ layer }));
  strip(layers);

  differing = TWO ? current.pieces.map((_, token) => token).filter(differs) : [];
  const scale = scaleOf();
  $("panes").classList.toggle("tall", state.colour === "adapter" && state.layer === "all");
  spans.forEach((nodes, at) => nodes.forEach((node, token) =>
    paint(node, current.routers[visible()[at]], token, scale)));
  legend(scale);
  summary();
  point();
}
function strip(layers) {
  const router = current.routers[visible()[0]];
  const columns = Array.from({ length: layers }, (_, layer) => {
    const counts = new Array(J + 1).fill(0);
    for (let token = 0; token < router.count; token++) counts[router.top(layer, token)[0] + 1]++;
    const shares = counts.map((each) => each / router.count);
    const said = shares.map((share, at) => [at - 1, share]).filter(([, share]) => share > 0)
      .sort((a, b) => b[1] - a[1]).map(([adapter, share]) => `${name(adapter)} ${Math.round(100 * share)} %`);
    const button = make("button", { type: "button", title: `layer ${layer}: ${said.join(", ")}`,
      "aria-pressed": String(state.layer === layer), "aria-label": `layer ${layer}: ${said.join(", ")}`,
      onclick: () => set({ layer: state.layer === layer ? "main" : layer }) },
      ...shares.map((share, at) => make("i", { style: { height: `${100 * share}%`, background: at ? colorOf(at - 1) : "transparent" } })));
    button.dataset.layer = layer;
    return button;
  });
  const focused = document.activeElement?.dataset?.layer;
  const inside = $("strip").contains(document.activeElement);
  $("strip").replaceChildren(...columns);
  if (inside) columns[focused]?.focus();
  $("strip-hint").textContent = `Share of tokens by adapter, layer 0 to ${layers - 1}`
    + (TWO ? `, under ${router.name}` : "") + "; press one to colour the text by it.";
}
function legend(scale) {
  if (state.colour === "adapter") {
    $("legend").replaceChildren(...[...data.adapters.keys(), -1].flatMap((adapter) => {
      const shares = visible().map((which) => {
        const router = current.routers[which];
        return current.pieces.filter((_, token) => router.shown(state.layer, token)[0] === adapter).length / router.count;
      });
      if (adapter < 0 && !shares.some((each) => each)) return [];
      const chip = make("span", { style: { "--c": adapter < 0 ? "transparent" : colorOf(adapter) } }, name(adapter));
      chip.className = adapter < 0 ? "t" : `t u${(adapter + Math.floor(adapter / 7)) % 5}`;
      return [make("li", {}, chip, make("b", {}, " " + shares.map((each) => `${Math.round(100 * each)} %`).join(" | ")))];
    }), ...(state.layer === "all" ? [make("li", {}, make("b", {}, "each token: layer 0 at the top; underlined by its main adapter"))] : []));
    return;
  }
  const mix = (color, share) => `color-mix(in srgb, ${color} calc(${share} * var(--strength)), transparent)`;
  const gradient = state.colour === "forced"
    ? `linear-gradient(to right, ${mix("var(--low)", 1.6)}, transparent, ${mix("var(--high)", 1.6)})`
    : `linear-gradient(to right, transparent, ${mix("var(--ramp)", 1.6)})`;
  const ends = state.colour === "forced"
    ? [`−${digits(scale)}: better with ${forcedName()}`, `+${digits(scale)} nats: worse`]
    : [`${SHOWN[state.colour]} 0`, `${digits(scale)} nats` + (state.colour === "entropy" ? ` = ln ${J}` : " or more")];
  const about = { entropy: typeof state.layer === "number" ? "of the router's softmax in this layer" : "mean over the later half of the layers",
    loss: "of predicting the token from those before it",
    forced: `every token at ${forcedName()} in every layer, less the routed loss` }[state.colour];
  $("legend").replaceChildren(make("li", {}, ends[0], make("span", { className: "scale", style: { background: gradient } }), ends[1]),
    make("li", {}, make("b", {}, about)));
}
function mean(values) {
  const known = values.filter((each) => each !== null);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}
function summary() {
  const parts = [`${current.pieces.length} tokens`];
  for (const which of visible()) {
    const router = current.routers[which], label = TWO ? `${router.name}: ` : "";
    let text = `${label}loss ${digits(mean(router.loss), 3)} nats`;
    if (state.colour === "forced")
      text += `, ${signed(mean(current.pieces.map((_, token) => forcedDifference(router, token))), 3)} with ${forcedName()}`;
    parts.push(text);
  }
  const nodes = [parts.join(" · ")];
  if (state.view === "both") {
    const share = Math.round(100 * differing.length / current.pieces.length);
    nodes.push(` · ${differing.length} tokens differ (${share} %, ${inLayer()}), boxed `);
    if (differing.length)
      nodes.push(make("button", { type: "button", onclick: () => nextDifference(-1) }, "‹ previous"), " ",
        make("button", { type: "button", onclick: () => nextDifference(1) }, "next ›"));
  }
  $("summary").dataset.differing = differing.length;
  $("summary").replaceChildren(...nodes);
}
function nextDifference(step) {
  if (!differing.length) return;
  const at = state.token ?? (step > 0 ? -1 : current.pieces.length);
  const found = step > 0 ? differing.find((each) => each > at) : differing.findLast((each) => each < at);
  select(found ?? (step > 0 ? differing[0] : differing[differing.length - 1]), true);
}

// ---- one token -----------------------------------------------------------------------------------
function point() {
  const token = hovered ?? state.token;
  for (const nodes of spans) {
    nodes.forEach((node, at) => {
      const here = at === token, chosen = at === state.token;
      if (here !== node.classList.contains("here")) node.classList.toggle("here", here);
      const wanted = chosen || (state.token === null && at === 0) ? 0 : -1;
      if (node.tabIndex !== wanted) node.tabIndex = wanted;
      if (chosen || node.ariaSelected === "true") node.ariaSelected = String(chosen);
    });
  }
  panel(token);
}
function panel(token) {
  const box = $("panel");
  box.classList.toggle("idle", token === null);
  document.body.classList.toggle("open", token !== null);
  if (token === null) {
    delete box.dataset.token;
    box.replaceChildren(make("p", { className: "empty" }, "Point at a token to see its gates, layer by layer."));
    return;
  }
  box.dataset.token = token;
  const routers = visible().map((which) => current.routers[which]), word = current.words[token];
  const piece = current.pieces[token];
  const said = piece === "" ? "(part of a character)" : piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
  const facts = make("dl", {}, make("dt", {}, "token"), make("dd", {}, `${token}, id ${current.ids[token]}`));
  const fact = (label, ...value) => facts.append(make("dt", {}, label), make("dd", {}, ...value));
  const chip = (adapter) => [make("span", { className: "dot", style: { background: colorOf(adapter) } }), name(adapter)];
  const both = (value) => routers.flatMap((router, at) => [at ? " | " : "", ...value(router)]);
  fact("main", ...both((router) => chip(router.main[token])));
  if (word >= 0) fact("word", `“${current.wordTexts[word]}” `, ...both((router) => chip(router.wordMain[word])));
  fact("loss", both((router) => [digits(router.loss[token], 3)]).join("") + (token ? " nats" : ": nothing stands before it"));
  const close = make("button", { type: "button", className: "close", "aria-label": "Close",
    onclick: () => { hovered = null; set({ token: null }); } }, "×");
  const tables = [layerTable(token, routers), ...forcedTable(token, routers)];
  if (state.colour === "forced") tables.push(tables.shift());
  box.replaceChildren(close, make("h2", {}, said), facts, ...tables);
}
function bar(parts, kind) {
  const total = Math.max(1, parts.reduce((sum, [, value]) => sum + Math.max(value, 0), 0));
  return make("div", { className: kind }, ...parts.map(([adapter, value]) =>
    make("i", { style: { width: `${100 * Math.max(value, 0) / total}%`, background: colorOf(adapter) } })));
}
function layerTable(token, routers) {
  const rows = Array.from({ length: routers[0].layers }, (_, layer) => {
    const row = make("tr", { tabIndex: 0, onclick: () => set({ layer }),
      onkeydown: (event) => { if (event.key === "Enter") set({ layer }); } }, make("th", { scope: "row" }, String(layer)));
    row.dataset.layer = layer;
    const tops = routers.map((router) => {
      const gates = router.gates(layer, token), p = router.probabilities(layer, token);
      const text = gates.length ? gates.map(([adapter, gate]) => `${name(adapter)} ${digits(gate, 3)}`).join(" · ") : "base only";
      const dense = p && p.map((each, at) => [at, each]);
      const title = text + (dense ? ` (softmax ${dense.map(([at, each]) => `${name(at)} ${digits(each, 3)}`).join(", ")})` : "");
      const cell = make("td", { title, "aria-label": title }, bar(gates, "gates"));
      cell.dataset.gates = text;
      if (dense) cell.append(bar(dense, "dense"));
      row.append(cell);
      return gates.length ? gates[0][0] : -1;
    });
    const entropy = routers[0].entropy(layer, token);
    if (routers.length === 1) {
      const [adapter, gate] = routers[0].top(layer, token);
      row.append(make("td", { className: "n" }, adapter < 0 ? "base only" : `${name(adapter)} ${digits(gate, 2)}`));
      if (routers[0].logitLayers) row.append(make("td", { className: "n" }, digits(entropy)));
    }
    if (layer === state.layer) row.classList.add("now");
    if (tops.length > 1 && tops[0] !== tops[1]) row.classList.add("differs");
    return row;
  });
  const header = make("tr", {}, make("th", {}, "layer"), ...routers.map((router) =>
    make("th", {}, routers.length > 1 ? router.name : "gates" + (router.logitLayers ? ", softmax below" : ""))));
  if (routers.length === 1) {
    header.append(make("th", {}, ""));
    if (routers[0].logitLayers) header.append(make("th", { title: "entropy of the softmax, nats" }, "H"));
  }
  return make("div", {}, make("h3", {}, "Gates, layer by layer"),
    make("table", { id: "gates" }, make("thead", {}, header), make("tbody", {}, ...rows)));
}
function forcedTable(token, routers) {
  if (!current.forced || !token) return [];
  const scale = upper(current.forced.flatMap((_, row) => routers.map((router) => Math.abs(forcedDifference(router, token, row) ?? 0))), 1, 0.25);
  const rows = [...data.adapters.keys(), J].map((row) => {
    const adapter = row === J ? -1 : row;
    const line = make("tr", {}, make("th", { scope: "row" }, make("span", { className: "dot", style: { background: colorOf(adapter) } }), name(adapter)));
    line.dataset.forced = row;
    for (const router of routers) {
      const value = forcedDifference(router, token, row);
      const width = 50 * Math.abs(value ?? 0) / scale;
      line.append(make("td", {}, make("div", { className: "delta" }, make("i", { style: {
        width: `${width}%`, left: `${value < 0 ? 50 - width : 50}%`, background: value < 0 ? "var(--low)" : "var(--high)" } }))),
        make("td", { className: "n" }, signed(value, 3)));
    }
    return line;
  });
  return [make("h3", {}, "Loss with every token forced, less the routed one (nats)"),
    make("table", { id: "forced-losses" }, make("tbody", {}, ...rows))];
}
function select(token, focus) {
  hovered = null;
  state.token = token;
  toAddress();
  point();
  const node = spans[0][token];
  if (focus && node) {
    node.focus({ preventScroll: true });
    node.scrollIntoView({ block: "nearest" });
  }
}

// ---- events --------------------------------------------------------------------------------------
const tokenAt = (event) => event.target.closest?.("[data-token]");
$("panes").addEventListener("pointerover", (event) => {
  const node = tokenAt(event);
  if (!node || event.pointerType === "touch") return;
  hovered = Number(node.dataset.token);
  point();
});
$("panes").addEventListener("pointerleave", () => { if (hovered !== null) { hovered = null; point(); } });
$("panes").addEventListener("click", (event) => {
  const node = tokenAt(event);
  if (node) { select(Number(node.dataset.token), false); node.focus({ preventScroll: true }); }
});
$("panes").addEventListener("focusin", (event) => {
  const node = tokenAt(event);
  if (node && Number(node.dataset.token) !== state.token) select(Number(node.dataset.token), false);
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { hovered = null; set({ token: null }); document.activeElement?.blur(); return; }
  if (event.target.closest?.("select, button")) return;
  if (TWO && event.key === "n") return nextDifference(1);
  if (TWO && event.key === "p") return nextDifference(-1);
  const node = tokenAt(event);
  if (!node) return;
  const token = Number(node.dataset.token), last = current.pieces.length - 1;
  const to = { ArrowRight: Math.min(token + 1, last), ArrowLeft: Math.max(token - 1, 0), Home: 0, End: last }[event.key];
  const nodes = spans[Math.max(visible().indexOf(Number(node.dataset.router)), 0)];
  if (to !== undefined) { select(to, false); nodes[to].focus(); event.preventDefault(); return; }
  if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
  const order = ["main", "word", "all", ...Array(current.routers[0].layers).keys()];
  const at = order.indexOf(state.layer) + (event.key === "ArrowDown" ? 1 : -1);
  if (order[at] !== undefined) set({ layer: order[at] });
  event.preventDefault();
});
window.addEventListener("hashchange", () => { fromAddress(); build(); draw(); });

fromAddress();
build();
draw();
if (state.token !== null) spans[0][state.token].scrollIntoView({ block: "nearest" });
document.documentElement.dataset.ready = "yes";
