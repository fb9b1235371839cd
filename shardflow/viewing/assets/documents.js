// Clinical documents of a study: a line each, whose text is asked for when it is opened.

import { element } from "./report.js";
import { ask } from "./tables.js";

export function documentsOf(study) {
  const known = new Map((study.records?.documents ?? []).map((one) => [one.document, one.kind]));
  return study.fields.flatMap(({ name, num_bytes: size }) => {
    const match = /^document\.(\d{3,})\.txt$/.exec(name);
    return match ? [{ number: +match[1], kind: known.get(+match[1]) ?? "", size }] : [];
  });
}

export function renderDocuments(target, study) {
  const made = documentsOf(study).map(({ number, kind, size }) => {
    const facts = (study.records?.facts ?? []).filter((fact) => fact.document === number).length;
    const says = [kind, `${size.toLocaleString("en")} bytes`, facts ? `${facts.toLocaleString("en")} ${facts === 1 ? "fact" : "facts"}` : ""];
    const text = element("div", { class: "report" });
    const part = element(
      "details",
      { class: "document" },
      element("summary", {}, `Document ${number} `, element("span", { class: "faint" }, says.filter(Boolean).join(", "))),
      text,
    );
    part.addEventListener("toggle", async () => {
      if (!part.open || text.textContent) return;
      try {
        text.textContent = (await ask(`api/samples/${study.row}/documents/${number}`)).text || "(empty)";
      } catch (error) {
        text.replaceChildren(element("p", { class: "problem" }, error.message));
      }
    });
    return part;
  });
  target.replaceChildren(...made);
  if (made.length) made[0].open = true;
}
