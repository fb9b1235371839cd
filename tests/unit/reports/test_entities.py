"""Findings: their names, what is said of them, and where they are."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.reports import Entity, EntityFinder, load_lexicon
from shardflow.reports.language import shared_rows, table_rows
from shardflow.reports.lexicon import LEXICONS, Concept, Lexicon, _forms
from shardflow.reports.tokens import fold_words, tokenize

pytestmark = pytest.mark.fast

FINDER = EntityFinder()

WORDS = """
no effusion nodule , . ; ? : or and versus 9 mm left right lower lobe is not seen possible
\u0130 \u00df x T8 L4-L5 "     "history of mass (3:45) to 2.5cm x lymph nodes enlarged but -
"""
words = st.sampled_from([*WORDS.split(), "\n"])
texts = st.one_of(st.text(max_size=200), st.lists(words, max_size=40).map(" ".join))


def found(text: str) -> list[tuple[str, str]]:
    return [(text[slice(*one.span)], one.assertion) for one in FINDER.find(text)]


def only(text: str) -> Entity:
    (entity,) = FINDER.find(text)
    return entity


@given(texts)
@settings(max_examples=200, deadline=None)
def test_everything_found_lies_in_the_text(text: str) -> None:
    end = 0
    for one in FINDER.find(text):
        assert end <= one.span[0] < one.span[1] <= len(text)
        assert text[slice(*one.span)].strip() == text[slice(*one.span)]
        end = one.span[1]
        if one.anatomy:
            assert 0 <= one.anatomy.span[0] < one.anatomy.span[1] <= len(text)
        assert all(size > 0 for size in one.size_mm)


@given(st.text())
@settings(deadline=None)
def test_tokens_are_the_text_without_white_space(text: str) -> None:
    tokens = tokenize(text)
    assert len(tokens.words) == len(tokens.starts) == len(tokens.ends)
    covered = {
        place for start, end in zip(tokens.starts, tokens.ends, strict=True) for place in range(start, end)
    }
    missed = {character for place, character in enumerate(text) if place not in covered}
    assert all(character.isspace() or character in "-\u2010\u2011\u2012\u2013" for character in missed)
    assert [place for first, last in tokens.sentences for place in range(first, last)] == list(
        range(len(tokens))
    )


def test_whole_words_and_the_longest_name() -> None:
    assert found("Pleural effusions; subpleural massive massage.") == [("Pleural effusions", "present")]
    assert only("Pulmonary oedema.").concept == only("Pulmonary edema.").concept
    assert found("Normal bowel gas pattern.") == []


@pytest.mark.parametrize(
    ("text", "anatomy"),
    [
        ("A nodule on the frontal view.", None),
        ("Fracture on the frontal and lateral radiographs.", None),
        ("Mass on the apical lordotic view.", None),
        ("A frontal contusion.", "frontal lobe"),
        ("Apical scarring on the lateral view.", "lung apex"),
        ("A frontal sinus mass on the frontal projection.", "paranasal sinus"),
    ],
)
def test_the_name_of_a_view_is_no_place(text: str, anatomy: str | None) -> None:
    place = only(text).anatomy
    assert (place and place.name) == anatomy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No pneumothorax or effusion is seen.", ["absent", "absent"]),
        ("No pneumothorax, small left effusion.", ["absent", "present"]),
        ("No fracture but swelling.", ["absent", "present"]),
        ("Neither mass, cyst, nor stone.", ["absent"] * 3),
        ("Mass or cyst is not identified.", ["absent"] * 2),
        ("No change in the nodule.", ["present"]),
        ("Without contrast, metastases cannot be assessed.", ["uncertain"]),
        ("Abscess cannot be excluded.", ["uncertain"]),
        (
            "A solid nodule in the right middle lobe (series 3, images 16, 17 and 18) cannot be excluded.",
            ["uncertain"],
        ),
        ("Nodule in the left lung (12 mm, series 3, images 4, 5, 6 and 7) is not seen.", ["absent"]),
        ("No nodule (series 3, image 45) or effusion.", ["absent", "absent"]),
        ("No nodule (formerly 4 mm), mass [3:45], or effusion.", ["absent"] * 3),
        ("No nodule. A cyst (series 3, image 45) or mass.", ["absent", "present", "present"]),
        ("Abscess has been excluded.", ["absent"]),
        ("Opacity, atelectasis versus pneumonia.", ["present", "uncertain", "uncertain"]),
        ("Rule out pneumonia.", ["hypothetical"]),
        ("Mass?", ["hypothetical"]),
        ("Could this be a mass?", ["uncertain"]),
        ("Family history of melanoma.", ["hypothetical"]),
        ("History of melanoma, now with a mass.", ["historical", "present"]),
        ("Pneumonia in 2019.", ["historical"]),
        ("Status post lobectomy.", ["present"]),
        ("Effusion: none.", ["absent"]),
        ("No mass other than the known cyst.", ["absent", "present"]),
        ("The spleen is not enlarged.", ["absent"]),
        ("The heart is not significantly enlarged.", ["absent"]),
        ("No visualized pneumothorax.", ["absent"]),
        ("No effusion, focal consolidation in the left base.", ["absent", "present"]),
        ("A nodule, and the heart is normal.", ["present"]),
        ("The stent appears normal.", ["present"]),
        ("Tortuous calcified aorta.", ["present", "present"]),
        ("The spleen is enlarged without laceration.", ["present", "absent"]),
        ("Subcutaneous emphysema, no emphysema.", ["present", "absent"]),
        ("Edema would be unusual.", ["uncertain"]),
        ("Low probability for pulmonary embolism.", ["uncertain"]),
        ("This may simply represent atelectasis.", ["uncertain"]),
        ("Follow-up to ensure resolution of pneumonia.", ["hypothetical"]),
        ("No evidence to suggest that there is a fracture.", ["absent"]),
        ("Nothing suspicious for malignancy.", ["absent"]),
        ("None of the findings suggest pneumonia.", ["absent"]),
        ("None of the findings indicate acute fracture.", ["absent"]),
        ("There is no high probability of embolism.", ["absent"]),
        ("The nodule is nothing more than a granuloma.", ["present", "present"]),
        ("Nothing explains the pain, edema is present.", ["present", "present"]),
        ("Pleural effusion nil.", ["absent"]),
        ("Nil effusion.", ["absent"]),
        ("Pneumothorax - no", ["absent"]),
        ("Pneumothorax = none.", ["absent"]),
        ("PTX: neg", ["absent"]),
        ("Pneumothorax: no evidence.", ["absent"]),
        ("Pneumothorax (-), effusion (\u2013).", ["absent", "absent"]),
        ("No: pneumothorax, effusion.", ["absent", "absent"]),
        ("Negative for: fracture, dislocation.", ["absent", "absent"]),
        ("Nodule: mass.", ["present", "present"]),
        ("Excluded: pulmonary embolism.", ["absent"]),
        ("Stable w/o pneumothorax.", ["absent"]),
        ("We do not see any evidence of pulmonary embolus.", ["absent"]),
        ("Not only is there a pneumothorax but also an effusion.", ["present", "present"]),
        ("Worrisome for, but not diagnostic of, metastasis.", ["uncertain"]),
        ("Pneumonia is not likely.", ["uncertain"]),
        ("Pneumonia is not likely, effusion is present.", ["uncertain", "present"]),
        ("Not likely pneumonia", ["uncertain"]),
        ("This is not likely pneumonia.", ["uncertain"]),
        ("Opacity is not likely pneumonia but atelectasis.", ["present", "uncertain", "present"]),
        ("Triple neg breast cancer", ["present"]),
        ("Triple negative breast cancer.", ["present"]),
        ("HER2 neg breast cancer.", ["present"]),
        ("Breast cancer, HER2 negative.", ["present"]),
        ("Gram neg pneumonia.", ["present"]),
        ("CT -ve for PE", ["absent"]),
        ("PTX neg.", ["absent"]),
        ("Effusion - no. 2. Edema.", ["absent", "present"]),
        ("Fracture of rib no. 2. Edema.", ["present", "present"]),
        ("Pneumothorax: normal.", ["absent"]),
        ("Pneumothorax: n/a", ["hypothetical"]),
        ("Pneumothorax: not applicable.", ["hypothetical"]),
        ("Nodules: 0", ["absent"]),
        ("Chest tube: normal position.", ["present"]),
        ("Heterogeneously dense breasts, which may obscure small masses.", ["hypothetical"]),
        ("There are scattered areas of fibroglandular density.", []),
        ("There is adequate opacification of the pulmonary arteries.", []),
    ],
)
def test_assertion(text: str, expected: list[str]) -> None:
    assert [assertion for _, assertion in found(text)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No improvement in the effusion.", ["present stable"]),
        ("No significant increase or decrease of the effusion.", ["present stable"]),
        ("The effusion has not improved, edema persists.", ["present stable", "present stable"]),
        ("No change or worsening of the effusion.", ["present stable"]),
        ("No changes of emphysema.", ["absent"]),
        ("Effusion no larger than before.", ["present stable"]),
        ("No worsening edema.", ["present stable"]),
        (
            "No evidence of worsening left pneumonia or a pneumothorax.",
            ["present stable", "absent"],
        ),
        ("No interval worsening of the effusion.", ["present stable"]),
        ("No worsening or new nodule.", ["absent"]),
        ("No new or worsening nodule.", ["absent"]),
        ("No worsening, effusion, or edema.", ["absent", "absent"]),
        ("No evidence of progression of lymphadenopathy or new metastases.", ["present stable", "absent"]),
        ("No evidence of progression of metastatic disease or new fracture.", ["present stable", "absent"]),
        ("No significant worsening of edema or new effusion.", ["present stable", "absent"]),
        ("No worsening of edema, or new effusion.", ["present stable", "absent"]),
        ("No resolution of pneumonia or new effusion.", ["present", "absent"]),
        ("No growth of the nodule (3:45) or new lymphadenopathy.", ["present stable", "absent"]),
        ("No increase in effusion or new pneumothorax.", ["present stable", "absent"]),
        ("No change in edema or any new effusion.", ["present stable", "absent"]),
        ("No change in size or new nodules.", ["absent"]),
        ("No interval growth or new nodules.", ["absent"]),
        (
            "No change in edema, which may be atelectasis or new pneumonia.",
            ["present stable", "uncertain", "uncertain new"],
        ),
        ("No change in the effusion and new edema.", ["present stable", "present new"]),
        ("Effusion without increase", ["present"]),
        ("No increase in heart size.", ["absent"]),
        ("No increase in heart size or pulmonary edema.", ["absent", "absent"]),
        ("No increased interstitial markings.", ["absent"]),
        ("No increased density.", ["absent"]),
        ("No enlarging lymph nodes.", ["absent"]),
        ("No enlarged effusion.", ["absent"]),
        ("No enlarged mediastinal mass.", ["absent"]),
        ("There is no enlarged mass.", ["absent"]),
        ("No enlarged thyroid nodule.", ["absent"]),
        ("No enlarged abdominal aortic aneurysm.", ["absent"]),
        ("No enlarged axillary adenopathy.", ["absent"]),
        ("No enlarged fluid collection.", ["absent"]),
        ("No enlarged cyst, mass, or stone.", ["absent"] * 3),
        ("No increased soft tissue mass.", ["absent"]),
        ("No increased calcification.", ["absent"]),
        ("No increased bowel wall thickening.", ["absent"]),
        ("No increased FDG uptake.", ["absent"]),
        ("No residual or increased pneumothorax.", ["absent"]),
        ("No residual or worsening edema.", ["absent"]),
        ("No obvious or enlarging mass.", ["absent"]),
        ("No appreciable or enlarging lymphadenopathy.", ["absent"]),
        ("No interval increase in heart size.", ["absent"]),
        ("No interval effusion.", ["absent"]),
        ("No interval healing of the fracture.", ["present"]),
        ("No effusion or worsening edema.", ["absent", "absent"]),
        ("No evidence of progressive malignancy.", ["absent"]),
        ("Effusion is no longer identified.", ["absent resolved"]),
        ("Edema is nearly cleared.", ["present better"]),
        ("Nearly complete resolution of the effusion.", ["present better"]),
        ("The effusion has almost completely resolved.", ["present better"]),
        ("The effusion has not yet completely resolved.", ["present"]),
        ("The lungs are essentially clear of effusion.", ["absent"]),
        ("Effusion resolved almost completely.", ["present better"]),
        ("Effusion resolved partially.", ["present better"]),
        ("Effusion resolved, mostly unchanged edema.", ["absent resolved", "present stable"]),
        ("Pneumonia, resolved.", ["absent resolved"]),
        ("Pneumonia resolved.", ["absent resolved"]),
        ("Small effusion, edema resolved.", ["present", "absent resolved"]),
        ("Cardiomegaly, edema resolved.", ["present", "absent resolved"]),
        ("Effusion, edema, and pneumothorax resolved.", ["absent resolved"] * 3),
        ("Small effusion, edema has resolved.", ["present", "absent resolved"]),
        ("Cardiomegaly, edema has completely resolved.", ["present", "absent resolved"]),
        ("Effusion, edema have resolved.", ["absent resolved"] * 2),
        ("Consolidation of pneumonia has resolved.", ["absent", "absent resolved"]),
        ("Small effusion, pneumothorax is not seen.", ["present", "absent"]),
        ("Effusion, pneumothorax are not seen.", ["absent", "absent"]),
        ("Large effusion, pneumothorax are not identified.", ["absent"] * 2),
        ("Severe spinal stenosis, cord compression are not demonstrated.", ["absent"] * 2),
        ("Pulmonary embolism, aortic dissection, pneumothorax has been excluded.", ["absent"] * 3),
        ("Acute hemorrhage, mass effect, midline shift is not seen.", ["absent"] * 3),
        ("Acute fracture, dislocation is not seen.", ["absent"] * 2),
        ("Pneumonia, effusion has been ruled out.", ["absent"] * 2),
        ("Large hematoma, edema have resolved.", ["absent resolved"] * 2),
        ("New infiltrate, effusion are not seen.", ["absent", "absent"]),
        ("Mass, cyst, stone not seen.", ["absent"] * 3),
        ("Stable cardiomegaly, effusion no longer seen.", ["present stable", "absent"]),
        ("Cardiomegaly, edema is possible.", ["present", "uncertain"]),
        ("Pneumonia resolved with residual scarring.", ["absent resolved", "present"]),
        ("Resolved pneumonia, small effusion.", ["absent resolved", "present"]),
        ("Pneumonia, no longer seen.", ["absent resolved"]),
        ("Nodule stable since 2019.", ["present stable"]),
        ("Nodule, known since 2019.", ["present"]),
        ("Nodule unchanged from 2019.", ["present stable"]),
        ("Nodule in 2019.", ["historical"]),
        ("A nodule larger than 4 mm.", ["present"]),
        ("Small effusion on the left, stable.", ["present stable"]),
        ("Nodule in the right upper lobe, 12 mm, new.", ["present new"]),
        ("Nodule in the right upper lobe, measuring 12 mm, unchanged since 2019.", ["present stable"]),
        ("Nodule in the right upper lobe, stable mediastinal contour.", ["present"]),
        ("Nodule, the mediastinum is wide, unchanged.", ["present"]),
        ("New 1.2 x 0.9 cm spiculated left upper lobe nodule.", ["present new"]),
        ("Left chest tube with decrease in size of the pneumothorax.", ["present", "present better"]),
        ("Effusion, increased in size, with consolidation.", ["present worse", "present"]),
        ("Consolidation in both lower lobes, right worse than left.", ["present"]),
        ("Right pleural effusion, larger than left.", ["present"]),
        ("Bilateral opacities, worse on the left.", ["present"]),
        ("Stable effusions, larger on the left.", ["present stable"]),
        ("The consolidation is worse on the left.", ["present worse"]),
        ("Pneumonia is worse in the left lower lobe.", ["present worse"]),
        ("Pneumonia, worse in the left lower lobe.", ["present worse"]),
        ("The effusion has become larger on the left.", ["present worse"]),
        ("Effusion is worse on the left than before.", ["present worse"]),
        ("Effusion, worse on the left than before.", ["present worse"]),
        ("Effusions are larger on the left than on the right.", ["present"]),
        ("Right effusion is larger than that on the left.", ["present"]),
        ("Bilateral opacities (worse on the left).", ["present"]),
        ("Effusion, right larger than left, is worse.", ["present worse"]),
        ("Effusions, right larger than left, new mass.", ["present", "present new"]),
    ],
)
def test_change_and_what_it_says_of_the_finding(text: str, expected: list[str]) -> None:
    assert [f"{one.assertion} {one.change}".strip() for one in FINDER.find(text)] == expected


CHANGES = (
    "worsening", "worsened", "worse", "increasing", "enlarging", "progressing", "progressed",
    "improving", "improved", "decreasing", "resolving",
)  # fmt: skip
ALTERATIONS = ("worsening", "progression", "growth", "deterioration", "improvement", "regression")


@pytest.mark.parametrize("finding", ["edema", "pleural effusion", "pneumonia", "nodule", "pneumothorax"])
def test_a_denied_change_denies_no_finding_whatever_its_form(finding: str) -> None:
    changes = [
        *(f"{one} {finding}" for one in CHANGES),
        *(f"{one} of the {finding}" for one in ALTERATIONS),
        f"increase in {finding}",
        f"interval decrease in the {finding}",
    ]
    for change in changes:
        for denial in (
            "No",
            "No signs of",
            "No evidence of",
            "Without",
            "Negative for",
            "Absence of",
            "No interval",
        ):
            text = f"{denial} {change}."
            assert [(one.assertion, one.change) for one in FINDER.find(text)] == [("present", "stable")], text
    for one in CHANGES:
        for new in (f"No new or {one} {finding}.", f"No {one} or new {finding}.", f"No new {finding}."):
            assert [entity.assertion for entity in FINDER.find(new)] == ["absent"], new


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("No nodule larger than 4 mm.", [()]),
        ("No nodules > 4 mm.", [()]),
        ("A 6 mm nodule, no mass of 1 cm or more.", [(6.0,), ()]),
        ("Scattered nodules, none larger than 4 mm.", [()]),
        ("The 4 mm nodule is no longer seen.", [(4.0,)]),
        ("Nodules up to 4 mm.", [(4.0,)]),
    ],
)
def test_a_limit_is_no_size_of_what_is_denied(text: str, sizes: list[tuple[float, ...]]) -> None:
    assert [one.size_mm for one in FINDER.find(text)] == sizes


def test_place_side_size_and_severity() -> None:
    text = "Mild 2.3 x 1.9 cm mass in the left upper lobe, previously 4 mm."
    one = only(text)
    assert one.anatomy
    assert (text[slice(*one.anatomy.span)], one.laterality, one.size_mm, one.severity) == (
        "left upper lobe",
        "L",
        (23.0, 19.0),
        "mild",
    )
    assert only("RLL nodule.").laterality == "R"
    assert only("Nodules in both lungs.").laterality == "B"
    assert only("Right heart strain.").laterality == ""
    assert only("Small R effusion.").laterality == "R"
    assert only("Effusions, L > R.").laterality == "B"
    assert only("RUL and LLL nodules.").laterality == "B"
    assert only("R/O effusion.").laterality == only("On 3 L of oxygen, effusion.").laterality == ""
    assert only("Dr. L Smith saw a nodule.").laterality == only("Dr R. Jones saw a nodule.").laterality == ""
    assert [(one.assertion, one.laterality) for one in FINDER.find("Nodule, r o cancer.")] == [
        ("present", ""),
        ("hypothetical", ""),
    ]
    assert only("L 5 fracture.").laterality == only("Fracture of the L spine.").laterality == ""
    places = [one.anatomy for one in FINDER.find("Cyst of the left kidney and a small effusion.")]
    assert [place.name if place else "" for place in places] == ["kidney", ""]
    assert only("Lesion of the L3-L4 vertebra, 5 mm above the disc.").size_mm == ()


def test_an_adjective_makes_a_finding_of_anatomy() -> None:
    assert found("No enlarged mediastinal or hilar lymph nodes.") == [
        ("enlarged mediastinal or hilar lymph nodes", "absent")
    ]
    assert found("The lymph nodes are normal.") == []


def test_a_users_lexicon_joins_the_shipped_one(tmp_path: Path) -> None:
    table = tmp_path / "own.csv"
    table.write_text("name,kind,parent,synonyms\nzorblax,disease,mass,zorb|grand zorb\n")
    finder = EntityFinder(load_lexicon([table]))
    (one,) = finder.find("No grand zorbs.")
    assert (one.concept, one.assertion) == ("zorblax", "absent")
    assert finder.lexicon.ancestors(finder.lexicon.concepts["zorblax"]) == ["mass", "lesion", "abnormality"]
    assert EntityFinder().find("No zorb.") == []


def only_zorblax() -> Lexicon:
    """Make a lexicon with one finding."""
    zorblax = Concept(name="zorblax", kind="finding")
    return Lexicon({"zorblax": zorblax}, {"zorblax": zorblax, "zorb": zorblax})


def test_a_package_replaces_the_lexicon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("ours", f"{__name__}:only_zorblax", LEXICONS)
    monkeypatch.setattr("shardflow.reports.lexicon.entry_points", lambda group: [entry])
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: globals()[self.attr])
    lexicon = load_lexicon(name="ours")
    assert [one.concept for one in EntityFinder(lexicon).find("No zorb. Large effusion.")] == ["zorblax"]
    assert lexicon.digest() != load_lexicon().digest()
    table = tmp_path / "own.csv"
    table.write_text("name,kind,parent,synonyms\nfrobnic,disease,zorblax,\n")
    assert {*load_lexicon([table], name="ours").concepts} == {"zorblax", "frobnic"}
    with pytest.raises(ConfigError, match="got 'theirs'; there are: ours"):
        load_lexicon(name="theirs")


def test_codes_and_classes_of_findings() -> None:
    lexicon = load_lexicon()
    assert "emphysema" not in lexicon.ancestors(lexicon.concepts["subcutaneous emphysema"])
    assert "fibrosis" not in lexicon.ancestors(lexicon.concepts["cystic fibrosis"])
    assert lexicon.codes("pneumothorax") == {
        "radlex": "RID5352",
        "snomed_ct": "36118008",
        "chexpert": "Pneumothorax",
        "padchest": "pneumothorax",
    }
    # Classes are inherited, ids are not.
    assert lexicon.codes("skull fracture")["chexpert"] == "Fracture"
    assert lexicon.codes("skull fracture")["snomed_ct"] == ""
    rows = shared_rows("codes.csv")
    assert {row["concept"] for row in rows} <= lexicon.concepts.keys()
    assert all(
        row["radlex"][:3] in ("", "RID") and row["snomed_ct"].isdigit() >= bool(row["snomed_ct"])
        for row in rows
    )
    assert {row["chexpert"] for row in rows} - {""} <= {
        "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture",
        "Lung Lesion", "Lung Opacity", "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax",
        "Support Devices",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "concept"),
    [
        ("Low lung volumes.", "hypoinflation"),
        ("Increased density of the left base.", "opacity"),
        ("Hypoinflated lungs.", "hypoinflation"),
        ("Calcified hilar nodes.", "calcified lymph node"),
        ("Calcified granulomata.", "calcified granuloma"),
        ("Multilevel spondylosis.", "degenerative change"),
        ("Postsurgical changes.", "postoperative change"),
        ("Heart is enlarged.", "cardiomegaly"),
        ("Fractures of the left sixth rib.", "rib fracture"),
        ("No focal air space consolidation.", "consolidation"),
        ("Large effusion.", "pleural effusion"),
        ("Effusion of the knee joint.", "joint effusion"),
        ("The knee joint is normal. No effusion.", "joint effusion"),
        ("Nodule in the right upper lobe.", "pulmonary nodule"),
        ("Steatosis of the liver.", "hepatic steatosis"),
        ("Port-A-Cath in place.", "port a cath"),
        ("Architectural distortion.", "architectural distortion"),
        ("The heart is again mildly enlarged.", "cardiomegaly"),
        ("Left atrium is enlarged.", "atrial enlargement"),
        ("The left hemidiaphragm remains slightly elevated.", "elevated hemidiaphragm"),
        ("Collapse of the left lower lobe.", "atelectasis"),
        ("The thoracic aorta is heavily calcified.", "calcification"),
        ("Calcified bilateral hilar lymph nodes.", "calcification"),
        ("Calcified 4 mm right apical granuloma.", "granuloma"),
        ("Atherosclerotic calcifications of the aortic arch.", "atherosclerosis"),
        ("A 6 mm non-calcified nodule.", "noncalcified nodule"),
        ("Nodular density at the left base.", "nodular density"),
        ("Biapical scarring.", "scar"),
        ("Anterior wedging of T7.", "vertebral wedging"),
        ("Small pleural air collection.", "pneumothorax"),
        ("Crowding of the bronchovascular markings.", "bronchovascular crowding"),
        ("Blunting of the right costophrenic sulcus.", "costophrenic angle blunting"),
        ("Sequela of remote granulomatous infection.", "granulomatous disease"),
        ("Fracture-dislocation of the shoulder.", "fracture"),
        ("Masses.", "mass"),
        ("Pleural plaques.", "pleural plaque"),
        ("Lymph nodes are enlarged.", "lymphadenopathy"),
        ("Mass in the upper outer quadrant.", "breast mass"),
    ],
)
def test_every_form_has_one_concept(text: str, concept: str) -> None:
    assert [one.concept for one in FINDER.find(text)] == [concept]


@pytest.mark.parametrize(
    "content",
    [
        "name,kind\nx,finding\n",
        "name,kind,parent,synonyms\nx,beast,,\n",
        "name,kind,parent,synonyms\n,finding,,x\n",
    ],
)
def test_a_wrong_lexicon_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(ConfigError):
        load_lexicon([tmp_path / "own.csv"])
    with pytest.raises(ConfigError, match="No such file"):
        load_lexicon([tmp_path / "none.csv"])


def test_the_shipped_tables_are_sound() -> None:
    lexicon = load_lexicon()
    for name, concept in lexicon.concepts.items():
        key = f"anatomy:{concept.parent}" if name.startswith("anatomy:") else concept.parent
        assert not concept.parent or key in lexicon.concepts, name
        assert concept.name not in lexicon.ancestors(concept), name
    names = {" ".join(fold_words(name)) for name in lexicon.concepts}
    plurals = {form for name in names for form in _forms(name.split(), "english") if form != name}
    assert sorted(names & plurals) == []
    for name, concept in lexicon.concepts.items():
        if not name.startswith("anatomy:") and concept.kind not in ("normal", "state"):
            assert lexicon.phrases[" ".join(fold_words(name))].name == name
    assert len(lexicon.concepts) > 1000
    cues = [" ".join(fold_words(cue)) for row in table_rows("cues.csv") for cue in row["cues"].split("|")]
    assert sorted({cue for cue in cues if cues.count(cue) > 1}) == []
