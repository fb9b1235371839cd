"""medspaCy's ConText on marked findings; runs in an environment of its own (numpy 1) and talks JSON.

Standard input and output are those of ``peer_negspacy.py``, with an assertion in place of negated or not.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import spacy
from medspacy.context import ConText
from spacy.util import filter_spans


def main() -> None:
    nlp: Any = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    context = ConText(nlp, rules="default")
    answers = []
    for case in json.load(sys.stdin):
        doc = nlp.get_pipe("sentencizer")(nlp.make_doc(case["text"]))
        spans = [doc.char_span(*span, label="FINDING", alignment_mode="expand") for span in case["spans"]]
        doc.ents = filter_spans([span for span in spans if span is not None])
        doc = context(doc)
        said = {(ent.start, ent.end): _assertion(ent) for ent in doc.ents}
        answers.append([None if span is None else said.get((span.start, span.end)) for span in spans])
    json.dump(
        {"versions": {name: version(name) for name in ("medspacy", "spacy")}, "assertions": answers},
        sys.stdout,
    )


def _assertion(ent: Any) -> str:
    if ent._.is_negated:
        return "absent"
    if ent._.is_hypothetical or ent._.is_family:
        return "hypothetical"
    if ent._.is_historical:
        return "historical"
    return "uncertain" if ent._.is_uncertain else "present"


if __name__ == "__main__":
    main()
