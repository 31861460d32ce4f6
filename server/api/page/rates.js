// Rates between two replies of /server_info: the leader's counters, by the time at which they were taken.

export const HISTORY = 60;
const WINDOW = 5;

export class Rates {
  constructor() {
    this.reports = [];
    this.history = [];
  }

  // Rates over the last few reports; null until there are two of one leader. `history` has those of each step.
  add(info) {
    const { reports, history } = this;
    const last = reports.at(-1);
    if (last && (last.instance !== info.instance || info.taken_at < last.taken_at)) {
      reports.length = 0;
      history.length = 0;
    } else if (last && info.taken_at > last.taken_at) {
      history.push(between(last, info));
      history.splice(0, history.length - HISTORY);
    }
    if (!reports.length || info.taken_at > last.taken_at) reports.push(info);
    reports.splice(0, reports.length - WINDOW - 1);
    return reports.length > 1 ? between(reports[0], reports.at(-1)) : null;
  }
}

function between(earlier, info) {
  const seconds = info.taken_at - earlier.taken_at;
  const since = (name) => (info.counters[name] ?? 0) - (earlier.counters[name] ?? 0);
  const prompts = since("prompt_tokens");
  const reused = since("prefix_tokens_reused");
  const hits = since("hot_hits");
  const onDecode = info.disaggregation_mode === "decode";
  return {
    input: prompts / seconds,
    output: since("generation_tokens") / seconds,
    bytes: since("transfer_bytes") / seconds,
    // decode counts whole prompts, prefill only tokens that it computes
    prefixHits: share(reused, onDecode ? prompts : prompts + reused),
    toCompute: info.gauges.waiting_tokens ?? 0,
    hotHits: share(hits, hits + since("hot_misses")),
  };
}

export function share(part, whole) {
  return whole > 0 ? part / whole : null;
}
