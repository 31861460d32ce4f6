// Draws one reply of /server_info.

import { $, byteRate, count, element, keyed, percent, rate, setText } from "./dom.js";
import { HISTORY, share } from "./rates.js";

const FLOW = {
  decode: [
    "compiling", "queued", "prefilling", "verifying", "loading", "computing", "arrived", "opening", "ready", "running",
    "saving", "saved", "restoring",
  ],
  prefill: ["compiling", "waiting", "loading", "computing", "sending", "closing"],
};
const TONES = {
  prefilling: "--prefill", computing: "--prefill", loading: "--transfer", sending: "--transfer", verifying: "--transfer",
  arrived: "--transfer", opening: "--transfer", ready: "--decode", running: "--decode", saving: "--bad", saved: "--bad",
  restoring: "--bad", closing: "--bad",
};
const STAGES = {
  queue: "", prefill_queue: "", prefill: "prefill-stage", transfer: "transfer-stage", control: "transfer-stage", admit: "",
  retracted: "bad-stage", decode: "decode-stage",
};
const LEGEND = [["waiting", ""], ["prefill", "prefill-stage"], ["transfer", "transfer-stage"], ["decode", "decode-stage"]];
const SHOWN = 8;

export function draw(info, rates, history) {
  const role = info.disaggregation_mode;
  document.title = `${role} · ${info.served_model_name}`;
  setText($("model"), info.served_model_name);
  setText($("version"), `pdserve ${info.version} · ${location.host}`);
  drawStatus(info.status, info.status === "ready");
  drawSides(info, rates);
  drawTiles(role, rates, history);
  drawStates(role, info.states);
  drawPools(info, rates);
  $("limits-card").hidden = role !== "decode";
  if (role === "decode") drawLimits(info);
  $("recent-card").hidden = role !== "decode";
  $("chat-card").hidden = role !== "decode";
  drawRecent(info.recent);
}

export function drawStatus(text, ok) {
  setText($("status"), text);
  $("status").className = ok ? "pill ok" : "pill bad";
}

function drawSides(info, rates) {
  const role = info.disaggregation_mode;
  const here = { key: "here", role, title: `${role} (this server)`, state: shape(info), detail: load(info), off: false };
  const other = role === "decode" ? "prefill" : "decode";
  const peers = info.peers.map((peer, index) => ({
    key: `${index} ${peer.endpoint}`,
    role: other,
    title: `${other} ${peer.endpoint}${peer.address ? ` at ${peer.address}` : ""}`,
    state: [peer.state, peer.round_trip_ms === null ? "" : `${peer.round_trip_ms.toFixed(1)} ms`,
      [...new Set(Object.values(peer.transports))].join(", ")].filter(Boolean).join(" · "),
    detail: peer.state === "paired" ? "" : peer.detail ?? "",
    off: peer.state !== "paired",
  }));
  if (!peers.length) {
    const none = role === "decode" ? "this server computes prompts itself" : "none is connected";
    peers.push({ key: "none", role: other, title: `no ${other} server`, state: none, detail: "", off: true });
  }
  drawServers($(`${role}-side`), [here]);
  drawServers($(`${other}-side`), peers);
  const bytes = rates?.bytes ?? 0;
  setText($("wire-rate"), byteRate(bytes));
  $("wire").classList.toggle("flowing", bytes > 0);
}

function shape(info) {
  const sizes = [["tp", info.tp_size], ["pp", info.pp_size], ["dp", info.dp_size]].filter(([, size]) => size > 1);
  return [info.ranks?.[0]?.device ?? info.config.device, ...sizes.map(([name, size]) => `${name} ${size}`)].join(" · ");
}

function load(info) {
  const { states, gauges } = info;
  if (info.disaggregation_mode === "decode") return `${count(states.running ?? 0)} running`;
  return `${count(gauges.waiting_tokens ?? 0)} tokens to compute`;
}

function drawServers(side, servers) {
  const make = () => element("div", "", element("strong"), element("span"), element("span"));
  keyed(side, servers.map((server) => server.key), make).forEach((box, index) => {
    const server = servers[index];
    box.className = `server ${server.role}${server.off ? " off" : ""}`;
    [server.title, server.state, server.detail].forEach((text, line) => setText(box.children[line], text));
  });
}

function drawTiles(role, rates, history) {
  const tiles = role === "decode"
    ? [["tokens/s in", "input", rate], ["tokens/s out", "output", rate], ["KV received", "bytes", byteRate]]
    : [["prompt tokens/s", "input", rate], ["tokens to compute", "toCompute", count], ["KV sent", "bytes", byteRate]];
  tiles.push(["prefix hits", "prefixHits", percent]);
  const make = () => {
    const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.setAttribute("viewBox", `0 0 ${HISTORY - 1} 28`);
    chart.setAttribute("preserveAspectRatio", "none");
    chart.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
    return element("div", "tile", element("span"), element("strong"), chart);
  };
  keyed($("tiles"), tiles.map(([title]) => title), make).forEach((tile, index) => {
    const [title, field, format] = tiles[index];
    setText(tile.children[0], title);
    setText(tile.children[1], rates ? format(rates[field]) : "–");
    tile.children[2].firstChild.setAttribute("points", points(history.map((past) => past[field] ?? 0)));
  });
}

// The newest value is at the right edge.
function points(values) {
  const most = Math.max(...values, 1e-9);
  const first = HISTORY - values.length;
  return values.map((value, index) => `${first + index},${(27 - 25 * (value / most)).toFixed(1)}`).join(" ");
}

function drawStates(role, states) {
  const make = () => element("li", "", element("strong"), element("span"));
  keyed($("states"), FLOW[role], make).forEach((box, index) => {
    const name = FLOW[role][index];
    const number = states[name] ?? 0;
    setText(box.children[0], count(number));
    setText(box.children[1], name);
    box.className = number ? "some" : "";
    box.style.setProperty("--tone", `var(${TONES[name] ?? "--wait"})`);
  });
}

function drawPools(info, rates) {
  const { gauges } = info;
  const pools = [];
  if (gauges.kv_pages) {
    pools.push(["KV pool", gauges.kv_pages_held, gauges.kv_pages, "pages", gauges.cached_pages]);
  }
  if (gauges.hot_pages) {
    pools.push(["hot buffers", gauges.hot_pages - gauges.hot_pages_available, gauges.hot_pages, "pages", 0,
      `, hits ${percent(rates?.hotHits ?? null)}`]);
  }
  if (gauges.staging_ring_bytes) {
    const mib = 1 << 20;
    pools.push(["staging ring", gauges.staging_ring_bytes_granted / mib, gauges.staging_ring_bytes / mib, "MiB", 0]);
  }
  drawMeters($("pools"), pools);
}

// Requests since the start that were later than the two limits, and what most of them waited for.
function drawLimits(info) {
  const { counters, gauges } = info;
  const limits = [["first token", "late_first_token_", info.config.slo_ttft_ms]];
  if (gauges.token_gap_limit_seconds) limits.push(["next token", "late_gap_", 1000 * gauges.token_gap_limit_seconds]);
  drawMeters($("limits"), limits.map(([name, prefix, ms]) => {
    const causes = Object.entries(counters).filter(([counter, late]) => counter.startsWith(prefix) && late);
    const late = causes.reduce((sum, [, number]) => sum + number, 0);
    const [most] = causes.sort((one, other) => other[1] - one[1]);
    const cause = most ? `, mostly by ${most[0].slice(prefix.length).replace("_", " ")}` : "";
    return [name, late, counters.requests, `later than ${count(ms)} ms`, 0, cause];
  }));
}

// Rows of name, part, whole, unit, a further part that is only cached, and a note.
function drawMeters(card, meters) {
  const make = () => element("div", "pool", element("span"),
    element("div", "meter", element("i"), element("i", "soft")), element("span"));
  keyed(card, meters.map(([name]) => name), make).forEach((row, index) => {
    const [name, used, total, unit, cached, note] = meters[index];
    const [held, soft] = row.children[1].children;
    setText(row.children[0], name);
    held.style.width = `${100 * share(used, total)}%`;
    soft.style.width = `${100 * Math.min(share(cached, total), 1 - share(used, total))}%`;
    const more = cached ? `, ${count(cached)} cached` : note ?? "";
    setText(row.children[2], `${count(used)} of ${count(total)} ${unit}${more}`);
  });
}

function drawRecent(recent) {
  keyed($("legend"), LEGEND.map(([name]) => name), (name) =>
    element("span", "", element("i", LEGEND.find(([known]) => known === name)[1]), name));
  const newest = recent.slice(-SHOWN).reverse();
  const longest = Math.max(...newest.map((request) => total(request.timeline)), 1e-9);
  const keys = newest.map((request) => `${request.rid} ${request.ended_at}`);
  for (let empty = keys.length; empty < SHOWN; empty += 1) keys.push(`empty ${empty}`); // the height stays
  const make = () => {
    const bar = element("td", "bar-cell", element("div", "stages"));
    const numbers = [0, 1, 2, 3].map(() => element("td", "number"));
    return element("tr", "", element("td", "name"), element("td"), ...numbers, bar);
  };
  keyed($("recent"), keys, make).forEach((row, index) => {
    const request = newest[index];
    const cells = row.children;
    row.className = request ? "" : "empty";
    if (!request) {
      setText(cells[0], newest.length || index ? "" : "none yet");
      return;
    }
    const failed = !total(request.timeline);
    const counts = [request.prompt_tokens, request.cached_tokens, request.completion_tokens];
    const numbers = counts.map((number) => (failed ? "" : count(number)));
    const texts = [request.rid, request.outcome, ...numbers, request.elapsed_s.toFixed(2)];
    texts.forEach((text, column) => setText(cells[column], text));
    cells[0].title = `${request.rid}${request.kv_path ? `, KV: ${request.kv_path}` : ""}`;
    cells[1].className = failed ? "bad-text" : "";
    const bar = cells[6].firstChild;
    const stages = Object.entries(request.timeline);
    const whole = total(request.timeline);
    bar.style.width = `${(100 * whole) / longest}%`;
    if (bar.children.length !== stages.length) bar.replaceChildren(...stages.map(() => element("i")));
    stages.forEach(([stage, seconds], place) => {
      const part = bar.children[place];
      part.className = STAGES[stage] ?? "";
      part.style.width = `${(100 * seconds) / (whole || 1)}%`;
      part.title = `${stage.replace("_", " ")} ${seconds.toFixed(3)} s`;
    });
  });
}

function total(timeline) {
  return Object.values(timeline).reduce((sum, seconds) => sum + seconds, 0);
}
