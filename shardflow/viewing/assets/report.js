// The report with what it says marked in place; a click on a finding leads to the slices that show it.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// What stands behind the names of evidence: docs/reports.md.
const EVIDENCE = {
  E1: "series and image named", E2: "image named, series left open", E3: "region marked as this finding",
  E4: "region marked in this place", E5: "outline of the organ", E6: "view of the whole part",
  E7: "usual level of this anatomy",
};
const ASSERTIONS = ["present", "absent", "uncertain", "historical", "hypothetical"];

// Spans count characters; strings of the browser count halves of some of them.
export function renderReport(target, study, jump) {
  target.replaceChildren();
  for (const problem of study.problems) target.append(element("p", { class: "problem" }, problem));
  if (study.report === null) {
    // One that is there and cannot be read is among the problems.
    const isThere = study.fields.some(({ name }) => name === "report.txt");
    if (!isThere) target.append(element("p", { class: "faint" }, "This study has no report."));
    return;
  }
  const text = Array.from(study.report);
  const entities = study.content?.entities ?? [];
  const card = element("div", { id: "finding", hidden: "" });
  const aligned = byEntity(study);
  if (entities.length) {
    const legend = ASSERTIONS.filter((how) => entities.some((entity) => entity.assertion === how));
    target.append(
      element("ul", { class: "legend" }, ...legend.map((how) => element("li", {}, element("mark", { class: how }, how)))),
    );
  }
  target.append(card);
  const marks = [];
  for (const section of study.content?.sections ?? []) {
    if (section.header) marks.push({ span: section.header, name: "span", class: "header" });
  }
  entities.forEach((entity, number) => {
    const places = aligned.get(number) ?? [];
    const open = () => show(card, target, text, entity, number, places, study, jump);
    const kind = `${entity.assertion}${places.length ? " aligned" : ""}`;
    marks.push({ span: entity.span, name: "mark", class: kind, number, open });
  });
  for (const mention of study.content?.mentions ?? []) {
    const place = placeOf(study, mention);
    marks.push({ span: mention.span, name: "mark", class: "mention", open: place && (() => jump(...place)) });
  }
  marks.sort((one, other) => one.span[0] - other.span[0] || one.span[1] - other.span[1]);
  const body = element("div", { class: "report" });
  let at = 0;
  for (const mark of marks) {
    const [begin, end] = mark.span;
    if (begin < at) continue;
    body.append(text.slice(at, begin).join(""));
    const made = element(mark.name, { class: mark.class }, text.slice(begin, end).join(""));
    if (mark.number !== undefined) made.dataset.entity = mark.number;
    if (mark.open) {
      made.tabIndex = 0;
      made.addEventListener("click", mark.open);
      made.addEventListener("keydown", (event) => event.key === "Enter" && mark.open());
    }
    body.append(made);
    at = end;
  }
  body.append(text.slice(at).join(""));
  target.append(body);
}

function byEntity(study) {
  const found = new Map();
  for (const place of study.alignment?.entities ?? []) {
    found.set(place.entity, [...(found.get(place.entity) ?? []), place]);
  }
  return found;
}

// The slice that an instance number of the report means, where one series has it.
function placeOf(study, mention) {
  const series = study.study?.series ?? [];
  for (const [number, one] of series.entries()) {
    if (mention.series !== null && one.series_number !== mention.series) continue;
    const index = (one.instance_numbers ?? []).indexOf(mention.first);
    if (index >= 0) return [number, index];
  }
  return null;
}

// A series by the number that the source gave it, which is what a report says; else by its place here.
export function seriesName(series, number) {
  const stated = series[number]?.series_number;
  if (stated == null) return `series #${number}`;
  // One of the source can be several here, such as two acquisitions.
  const isOne = series.every((other, at) => at === number || other.series_number !== stated);
  return isOne ? `series ${stated}` : `series ${stated} (#${number})`;
}

function imagesName(series, slices) {
  const numbers = slices.map((index) => series?.instance_numbers?.[index]);
  const isStated = numbers.every((one) => one != null);
  const [low, high] = isStated ? [Math.min(...numbers), Math.max(...numbers)] : [slices[0], slices.at(-1)];
  const mark = isStated ? "" : "#";
  return low === high ? `image ${mark}${low}` : `images ${mark}${low} to ${mark}${high}`;
}

function show(card, target, text, entity, number, places, study, jump) {
  for (const mark of target.querySelectorAll("mark[aria-current]")) mark.removeAttribute("aria-current");
  target.querySelector(`mark[data-entity="${number}"]`)?.setAttribute("aria-current", "true");
  const facts = [
    entity.assertion,
    entity.anatomy?.name,
    { L: "left", R: "right", B: "both sides" }[entity.laterality],
    entity.size_mm?.length ? `${entity.size_mm.join(" x ")} mm` : "",
    entity.severity,
  ].filter(Boolean);
  card.replaceChildren(element("h3", {}, entity.concept), element("p", { class: "faint" }, facts.join(", ")));
  for (const place of places) {
    const best = place.slices[place.weights.indexOf(Math.max(...place.weights))] ?? place.slices[0];
    const name = `${seriesName(study.study?.series ?? [], place.series)}, ${imagesName(study.study?.series?.[place.series], place.slices)}`;
    const button = element("button", { onclick: () => jump(place.series, best) }, name);
    const evidence = place.evidence.map((one) => [`${one.rule} ${one.confidence.toFixed(2)}`, EVIDENCE[one.rule]].filter(Boolean).join(" ")).join(", ");
    const tail = [...(place.modifiers ?? []).map((one) => one.name ?? String(one)), place.region ? "a region" : ""];
    card.append(
      element("p", {}, button, element("b", {}, place.confidence.toFixed(2)), ` ${evidence} ${tail.filter(Boolean).join(", ")}`),
    );
  }
  const reason = (study.alignment?.unaligned ?? []).find((one) => one.entity === number)?.reason;
  if (!places.length) {
    const why = reason ? `No slices: ${reason}.` : "No slices are aligned with it.";
    card.append(element("p", { class: "faint" }, why));
  }
  card.hidden = false;
  if (places.length) {
    const best = places.reduce((one, other) => (other.confidence > one.confidence ? other : one));
    jump(best.series, best.slices[best.weights.indexOf(Math.max(...best.weights))] ?? best.slices[0]);
  }
}
