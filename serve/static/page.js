// The search page. Whatever comes from the service is put in as text, never as HTML.
"use strict";

const K = 10;
const SHOWN_WORDS = 12;
const FAINT = 0.06; // words that give less than this share of the strongest word are not shown
const at = (id) => document.getElementById(id);
const form = at("form"), box = at("query"), main = document.querySelector("main");
let running = null; // AbortController of the search under way

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Fills `element` with `text`, the spans marked. Spans count code points, JavaScript strings count UTF-16 units.
function marked(element, text, spans) {
  const points = Array.from(text);
  let from = 0;
  for (const { start, end } of spans) {
    element.append(points.slice(from, start).join(""), make("mark", "", points.slice(start, end).join("")));
    from = end;
  }
  element.append(points.slice(from).join(""));
  return element;
}

function milliseconds(value) {
  return `${value < 1 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)} ms`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function number(value) {
  return value === null ? "–" : Math.abs(value) >= 100 ? value.toFixed(1) : value.toFixed(3);
}

function say(kind, title, text, action) {
  const message = at("message");
  message.replaceChildren(make("h2", "", title), make("p", "", text));
  message.className = kind;
  if (action) {
    const button = make("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", action);
    message.append(button);
  }
  message.hidden = false;
}

function scoreRow(hit, best) {
  const row = make("div", "score");
  const track = make("span", "track");
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `score: ${number(hit.dense_part)} from dense, ${number(hit.sparse_part)} from sparse`);
  for (const part of ["dense", "sparse"]) {
    const share = best > 0 ? Math.max(0, hit[`${part}_part`]) / best : 0;
    const piece = make("i", part);
    piece.style.width = `${(100 * Math.min(1, share)).toFixed(2)}%`;
    track.append(piece);
  }
  const numbers = make("span", "numbers");
  numbers.append(make("b", "", number(hit.score)), ` · dense ${number(hit.dense)} · sparse ${number(hit.sparse)}`);
  const docid = make("span", "docid", hit.docid);
  docid.title = "docid";
  row.append(track, numbers, docid);
  return row;
}

// The terms put together to the words of the query that they are pieces of, the strongest first.
function wordsOf(terms) {
  const words = new Map();
  for (const term of terms) {
    const name = term.word || term.token.trim();
    const word = words.get(name) || { name, contribution: 0, kind: "matched", pieces: [] };
    word.contribution += term.contribution;
    if (term.kind === "expanded") word.kind = "expanded";
    word.pieces.push(`${term.token.trim()}: ${number(term.query_weight)} in the query × ${number(term.document_weight)} in the document`);
    words.set(name, word);
  }
  const sorted = [...words.values()].sort((a, b) => b.contribution - a.contribution);
  return sorted.filter((word) => word.contribution >= FAINT * sorted[0].contribution).slice(0, SHOWN_WORDS);
}

function termList(terms) {
  const list = make("ul", "terms");
  list.setAttribute("aria-label", "What the words of the query gave to the sparse score");
  for (const word of wordsOf(terms)) {
    const item = make("li", `term ${word.kind}`, word.name);
    item.append(" ", make("small", "", number(word.contribution)));
    item.title = `${word.kind === "matched" ? "in the text" : "added by the model"}\n${word.pieces.join("\n")}`;
    if (word.kind === "expanded") item.append(make("span", "hidden", " (added by the model)"));
    list.append(item);
  }
  return list;
}

function hitItem(hit, best) {
  const item = make("li");
  const body = make("article");
  body.append(marked(make("h2", "title"), hit.title || hit.docid, hit.title ? hit.title_spans : []));
  if (hit.snippet) body.append(marked(make("p", "snippet"), hit.snippet, hit.snippet_spans));
  body.append(scoreRow(hit, best));
  if (hit.terms && hit.terms.length) body.append(termList(hit.terms));
  if (hit.text && hit.text.length > hit.snippet.length) {
    const whole = make("details");
    whole.append(make("summary", "", "Whole text"), make("p", "", hit.text));
    body.append(whole);
  }
  item.append(make("span", "rank", String(hit.rank)), body);
  return item;
}

function show(answer, roundTrip) {
  const result = answer.results[0];
  const took = answer.took_ms;
  if (result.error) return say("error", "This query cannot be answered", `${sentence(result.error.message)}.`);
  const count = `${result.hits.length} ${result.hits.length === 1 ? "hit" : "hits"}`;
  at("status").textContent =
    `${count} · query looked up in ${milliseconds(took.encode)}, ${answer.index.documents.toLocaleString("en")} documents ` +
    `searched in ${milliseconds(took.search)}, ${milliseconds(roundTrip)} round trip`;
  if (!result.hits.length) return say("none", "Nothing found", `${sentence(result.note || "no document fits this query")}.`);
  const best = Math.max(...result.hits.map((hit) => Math.max(0, hit.dense_part) + Math.max(0, hit.sparse_part)));
  at("hits").replaceChildren(...result.hits.map((hit) => hitItem(hit, best)));
  at("legend").hidden = false;
}

function stop() {
  if (running) running.abort();
  running = null;
}

function clear() {
  at("message").hidden = true;
  at("intro").hidden = true;
  at("status").textContent = "";
  at("hits").replaceChildren();
  at("legend").hidden = true;
  main.removeAttribute("aria-busy");
}

async function search(query, mode) {
  stop();
  const mine = (running = new AbortController());
  main.setAttribute("aria-busy", "true");
  const started = performance.now();
  try {
    const response = await fetch("search", {
      method: "POST", signal: mine.signal, headers: { "content-type": "application/json" },
      body: JSON.stringify({ queries: [query], k: K, mode, explain: true, with_text: true }),
    });
    const answer = await response.json();
    if (mine !== running) return;
    clear();
    if (!response.ok) throw new Error(answer.error ? answer.error.message : `the service answered ${response.status}`);
    show(answer, performance.now() - started);
  } catch (error) {
    if (mine !== running) return; // a newer search, or none, is what the reader wants now
    clear();
    const lost = error instanceof TypeError || error instanceof SyntaxError;
    say("error", "The search did not work", lost ? "The service does not answer." : error.message, () => search(query, mode));
  }
}

// The address bar holds the search, so that it can be shared and the back button works.
function fromAddress() {
  const parameters = new URLSearchParams(location.search);
  const query = parameters.get("q") || "";
  const mode = ["hybrid", "dense", "sparse"].includes(parameters.get("mode")) ? parameters.get("mode") : "hybrid";
  box.value = query;
  form.elements.mode.value = mode;
  document.title = query ? `${query} – Almanac` : "Almanac";
  stop();
  if (query) search(query, mode);
  else {
    clear();
    at("intro").hidden = false;
  }
}

function go() {
  const query = box.value, mode = form.elements.mode.value;
  if (!query.trim()) {
    stop();
    clear();
    say("none", "Nothing to look for", "Type a few words or a question, then press Enter.");
    return;
  }
  if (matchMedia("(pointer: coarse)").matches) box.blur(); // puts the keyboard of a phone away
  history.pushState(null, "", `?${new URLSearchParams(mode === "hybrid" ? { q: query } : { q: query, mode })}`);
  fromAddress();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  go();
});
form.addEventListener("change", (event) => {
  if (event.target.name === "mode" && box.value.trim()) go();
});
window.addEventListener("popstate", fromAddress);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (["INPUT", "TEXTAREA"].includes(document.activeElement.tagName) && document.activeElement.type !== "radio") return;
  event.preventDefault();
  box.focus();
  box.select();
});

fetch("info").then((response) => response.json()).then((info) => {
  at("corpus").textContent = `${info.index.documents.toLocaleString("en")} documents`;
}).catch(() => {}); // the line is an ornament; a search tells what is wrong

fromAddress();
