"""Findings of a local token classifier: names from the model, and what is said of them from the rules.

The names of its labels decide. A name of the lexicon (``pleural effusion``, ``Pleural_Effusion``) is that
finding; the rules of the sentence's language judge it as they judge words of the lexicon. Behind a colon a
label may say the assertion itself (``nodule:absent``); those of RadGraph (``OBS-DP``, ``OBS-U``, ``OBS-DA``)
do, and name what their words name in the lexicon. Where neither label nor rules say whether it is there, as
in a language without rules, nothing is returned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, cast, get_args

from shardflow.errors import ConfigError, os_reason
from shardflow.reports.assertion import Assertion
from shardflow.reports.detection import detect_languages
from shardflow.reports.findings import Entity, EntityFinder, kind_of
from shardflow.reports.language import ENGLISH, LANGUAGES
from shardflow.reports.lexicon import Concept, Lexicon, load_lexicon
from shardflow.reports.token_classifier import Labeled, TokenClassifier, model_digest
from shardflow.reports.tokens import Match, Tokens, fold_words, tokenize

SETTING: Final = "reports.model"
_RADGRAPH: Final[Mapping[str, Assertion]] = {"obs-dp": "present", "obs-u": "uncertain", "obs-da": "absent"}
_IGNORED: Final = ("anat-dp", "anat-u", "anat-da")
_UNNAMED: Final = "abnormality"
"""Concept of a finding whose label and words name none: a dataset's tables hold no words of reports."""


class ModelExtractor:
    """Extractor of findings (`shardflow.reports.reader.Extractor`) by a model of a local folder.

    Args:
        folder: See `TokenClassifier`.
        device: ``"cpu"``, or a device of torch such as ``"cuda"``.
        batch_size: Windows of 512 tokens at a time.
        cache: Folder of what was found before, by the digest of model and text; it is created. None: none.
        lexicon_of: Returns the lexicon of a language; None: the shipped ones. Labels are named in English.

    Raises:
        ConfigError: The model cannot be used, or a label names no finding of the lexicon.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        batch_size: int = 16,
        cache: Path | None = None,
        lexicon_of: Callable[[str], Lexicon] | None = None,
    ) -> None:
        self._lexicon_of = lexicon_of or (lambda language: load_lexicon(language=language))
        self._lexicon = self._lexicon_of(ENGLISH)
        self._finders = {ENGLISH: EntityFinder(self._lexicon)}
        self._digest, self._cache = model_digest(folder, SETTING), cache
        self._model = TokenClassifier(
            folder, setting=SETTING, extra="report-model", device=device, batch_size=batch_size
        )
        self._meanings = {label: self._meaning(label) for label in self._model.labels}
        if cache is not None:
            try:
                cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"reports.model_cache must be a folder, got {os_reason(error)}; name another."
                ) from None

    def __call__(self, texts: Sequence[str]) -> list[list[Entity]]:
        """Return the findings of each text."""
        known = [self._recall(text) for text in texts]
        missing = [number for number, found in enumerate(known) if found is None]
        if missing:
            for number, found in zip(
                missing, self._model.find([texts[number] for number in missing]), strict=True
            ):
                self._keep(texts[number], found)
                known[number] = found
        return [self._entities(text, found or []) for text, found in zip(texts, known, strict=True)]

    def _meaning(self, label: str) -> tuple[Concept | None, Assertion | None] | None:
        """Return the concept and assertion that a label says; None for a label that is no finding."""
        if label.lower() in _IGNORED:
            return None
        if label.lower() in _RADGRAPH:
            return None, _RADGRAPH[label.lower()]
        name, _, said = label.partition(":")
        concept = self._lexicon.phrases.get(" ".join(fold_words(name.replace("_", " "))))
        if (
            concept is None
            or concept.kind in ("anatomy", "normal", "state")
            or (said and said not in get_args(Assertion))
        ):
            raise ConfigError(
                f"{SETTING} has the label {label!r}, which is no finding of the lexicon; rename it in "
                "id2label, or add its name to the table of reports.findings."
            )
        return concept, cast("Assertion", said) if said else None

    def _finder(self, language: str) -> EntityFinder:
        if language not in self._finders:
            self._finders[language] = EntityFinder(self._lexicon_of(language))
        return self._finders[language]

    def _path(self, text: str) -> Path | None:
        if self._cache is None:
            return None
        digest = hashlib.sha256(f"{self._digest}\n".encode() + text.encode("utf-8", "surrogatepass"))
        name = digest.hexdigest()
        return self._cache / name[:2] / f"{name}.json"

    def _recall(self, text: str) -> list[Labeled] | None:
        path = self._path(text)
        try:
            found = None if path is None else json.loads(path.read_bytes())
            return None if found is None else [(int(a), int(b), str(label)) for a, b, label in found]
        except (OSError, ValueError, TypeError):
            return None  # it is found again

    def _keep(self, text: str, found: Sequence[Labeled]) -> None:
        path = self._path(text)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump(found, file)
            os.replace(file.name, path)  # noqa: PTH105 - the name of a temporary file is a string
        except OSError as error:
            raise ConfigError(
                f"reports.model_cache cannot be written ({os_reason(error)}); make room or name another."
            ) from None

    def _entities(self, text: str, found: Sequence[Labeled]) -> list[Entity]:
        meant = [(start, end, self._meanings.get(label)) for start, end, label in found]
        spans = [(start, end, *one) for start, end, one in meant if one is not None]
        if not spans:
            return []
        detected = detect_languages(text)
        made: list[Entity] = []
        for language in sorted({name for _, _, name in detected.pieces} & {*LANGUAGES}):
            tokens = tokenize(detected.blank(text, language), language)
            finder = self._finder(language)
            named: dict[tuple[int, int], Assertion | None] = {}
            matches: list[Match[Concept]] = []
            for start, end, concept, said in spans:
                place = _tokens_of(tokens, start, end)
                if place is not None:
                    words = finder.lexicon.phrases.get(" ".join(tokens.words[slice(*place)]))
                    concept = concept or words or self._lexicon.concepts[_UNNAMED]
                    matches.append(Match(*place, concept))
                    named[tokens.starts[place[0]], tokens.ends[place[1] - 1]] = said
            for entity in finder.find_in(tokens, matches):
                # Neighbors are one finding, which the last one names.
                inside = [span for span in named if span[0] < entity.span[1] and entity.span[0] < span[1]]
                made += [_said(entity, named[span]) for span in inside[-1:]]
        rest = [(start, end, concept, said) for start, end, concept, said in spans if said is not None]
        done = [one.span for one in made]
        made += [
            Entity(
                span=(start, end),
                concept=(concept or self._lexicon.concepts[_UNNAMED]).name,
                assertion=said,
                kind=kind_of(concept.kind if concept else "finding", said),
            )
            for start, end, concept, said in rest
            if not any(first < end and start < last for first, last in done)
        ]
        return sorted(made, key=lambda one: one.span)


def _said(entity: Entity, assertion: Assertion | None) -> Entity:
    if assertion is None or assertion == entity.assertion:
        return entity
    return replace(entity, assertion=assertion, certainty="", basis="", probability=None)


def _tokens_of(tokens: Tokens, start: int, end: int) -> tuple[int, int] | None:
    inside = [
        number for number in range(len(tokens)) if tokens.starts[number] < end and start < tokens.ends[number]
    ]
    return (inside[0], inside[-1] + 1) if inside else None
