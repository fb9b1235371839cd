// What is not a picture: details of a study, inputs that were not packed, samples of a step.

import { element } from "./report.js";

const MOST_DETAILS = 400;

export async function ask(address, values = {}) {
  const kept = Object.entries(values).filter(([, value]) => value !== "" && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  const answer = await fetch(query ? `${address}?${query}` : address);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function table(head, rows) {
  const made = element("table");
  made.append(element("tr", {}, ...head.map((name) => element("th", {}, name))));
  for (const { cells, open } of rows) {
    const row = element("tr", {}, ...cells.map((cell) => element("td", {}, cell ?? "")));
    if (open) {
      row.className = "chooses";
      row.tabIndex = 0;
      row.addEventListener("click", open);
      row.addEventListener("keydown", (event) => event.key === "Enter" && open());
    }
    made.append(row);
  }
  return made;
}

function* details(value, name = "") {
  if (value !== null && typeof value === "object" && !(Array.isArray(value) && value.length > 24)) {
    for (const [key, inner] of Object.entries(value)) yield* details(inner, name ? `${name}.${key}` : key);
  } else {
    yield [name, Array.isArray(value) ? `${value.length} values` : JSON.stringify(value)];
  }
}

export function renderDetails(target, study) {
  target.replaceChildren();
  for (const part of ["study", "conversation", "records", "waveforms", "annotations", "alignment"]) {
    if (!study[part]) continue;
    const rows = [...details(study[part])];
    target.append(element("h2", {}, `${part}.json`));
    target.append(table(["", ""], rows.slice(0, MOST_DETAILS).map(([name, text]) => ({ cells: [name, text] }))));
    if (rows.length > MOST_DETAILS) {
      target.append(element("p", { class: "faint" }, `and ${rows.length - MOST_DETAILS} more`));
    }
  }
  target.append(element("h2", {}, "Fields"));
  const rows = study.fields.map(({ name, num_bytes }) => ({ cells: [name, num_bytes.toLocaleString("en")] }));
  target.append(table(["name", "bytes"], rows));
}

export async function renderInputs(target, openKey) {
  target.replaceChildren(element("p", { class: "faint" }, "reading the ledger"));
  const { inputs } = await ask("api/dataset", { inputs: 1 });
  const list = element("div");
  const show = async (outcome, reason) => {
    const found = await ask("api/inputs", { outcome, reason: reason ?? "", count: 200 });
    const rows = found.inputs.map((one) => ({
      cells: [element("code", {}, one.input), one.kind, one.outcome, one.reason, element("code", {}, one.sample_key ?? "")],
      open: one.sample_key && one.outcome === "packed" ? () => openKey(one.sample_key) : undefined,
    }));
    const shown = `${found.total.toLocaleString("en")} inputs${found.total > rows.length ? `, the first ${rows.length}` : ""}`;
    list.replaceChildren(
      element("h2", {}, `${outcome} ${reason ?? ""}: ${shown}`),
      table(["input", "kind", "outcome", "reason", "sample"], rows),
    );
  };
  const rows = inputs.map((one) => ({
    cells: [one.outcome, one.reason, one.kind, one.num_inputs.toLocaleString("en")],
    open: () => show(one.outcome, one.reason),
  }));
  target.replaceChildren(
    element("h2", {}, "What became of every input"),
    table(["outcome", "reason", "kind", "inputs"], rows),
    list,
  );
}

// Crops of a sample in a step, the one of a slot chosen.
function cropsOf(slots, row, chosen) {
  return slots
    .filter((slot) => slot?.row === row)
    .flatMap((slot) => slot.crops.map((crop) => ({ ...crop, isChosen: slot === chosen })));
}

function describeCrop({ field, series, corners }) {
  const along = [0, 1, 2].map((axis) => corners.map((corner) => corner[axis]));
  const spans = along.map((values) => `${Math.round(Math.min(...values) + 0.5)}:${Math.round(Math.max(...values) + 0.5)}`);
  return `${field}: series ${series}, ${spans.join(", ")}`;
}

export function renderSteps(target, { splits, fields }, openRow) {
  const input = (name, value, label) =>
    element("label", {}, label, element("input", { name, value, type: "number", min: "0", step: "1" }));
  const split = element("select", { name: "split" }, ...splits.map(({ name }) => element("option", {}, name)));
  // The largest one is mostly what is trained on; a small one may not fill a step.
  split.value = splits.reduce((one, other) => (other.num_samples > one.num_samples ? other : one), splits[0])?.name;
  const result = element("div");
  const form = element(
    "form",
    {},
    element("label", {}, "split", split),
    input("seed", "0", "seed"),
    input("epoch", "0", "epoch"),
    input("size", "2", "micro-batch size"),
    input("count", "4", "micro-batches per step"),
    input("step", "0", "step"),
    element("button", {}, "show"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const found = await ask("api/steps", Object.fromEntries(new FormData(form)));
      const slots = found.micro_batches.flat();
      const rows = found.micro_batches.flatMap((micro, number) =>
        micro.map((one) => ({
          cells: one
            ? [number, element("code", {}, one.key), one.weight, one.crops.map(describeCrop).join("; ")]
            : [number, "padding", 0],
          open: one ? () => openRow(one.row, cropsOf(slots, one.row, one)) : undefined,
        })),
      );
      result.replaceChildren(
        element("h2", {}, `of ${found.num_steps.toLocaleString("en")} steps`),
        table(["micro-batch", "sample", "weight", fields.length ? "crops (slices, rows, columns)" : ""], rows),
      );
    } catch (error) {
      result.replaceChildren(element("p", { class: "problem" }, error.message));
    }
  });
  target.replaceChildren(
    element("h2", {}, "The samples of a step: the same for any number of GPUs"),
    form,
    result,
  );
}
