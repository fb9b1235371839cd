"""negspacy on marked findings; runs in an environment of its own and talks JSON.

Standard input: ``[{"text": ..., "spans": [[start, end], ...]}, ...]``. Standard output: versions, and per
span whether negspacy calls it negated (null: its tokenizer cannot hold the span).
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import spacy
from negspacy.negation import Negex  # noqa: F401 -- registers the pipe
from spacy.util import filter_spans


def main() -> None:
    nlp: Any = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    negex = nlp.add_pipe("negex", config={"ent_types": ["FINDING"]})
    answers = []
    for case in json.load(sys.stdin):
        doc = nlp.get_pipe("sentencizer")(nlp.make_doc(case["text"]))
        spans = [doc.char_span(*span, label="FINDING", alignment_mode="expand") for span in case["spans"]]
        doc.ents = filter_spans([span for span in spans if span is not None])
        doc = negex(doc)
        negated = {(ent.start, ent.end): bool(ent._.negex) for ent in doc.ents}
        answers.append([None if span is None else negated.get((span.start, span.end)) for span in spans])
    json.dump(
        {"versions": {name: version(name) for name in ("negspacy", "spacy")}, "negated": answers}, sys.stdout
    )


if __name__ == "__main__":
    main()
