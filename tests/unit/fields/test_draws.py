"""What a sample may get, and that it gets the same wherever and whenever it is drawn."""

from __future__ import annotations

import pytest

from shardflow.fields.augmentation import ALLOWED, Draw, draw_sample, names_a_side
from shardflow.training.model_fields import AugmentConfig

MUCH = AugmentConfig(rotate_deg=180, zoom=1.0, shift=1.0, intensity=1.0, mirror=1.0, flip=1.0)
PLACES = [
    (epoch, step, micro, slot)
    for epoch in range(3)
    for step in range(4)
    for micro in (0, 1)
    for slot in (0, 1)
]


def draws(modality: str, settings: AugmentConfig = MUCH, *, sided: bool = False, seed: int = 3) -> list[Draw]:
    return [
        draw_sample(settings, modality=modality, report_names_a_side=sided, seed=seed, place=place)
        for place in PLACES
    ]


@pytest.mark.parametrize("modality", sorted(ALLOWED))
def test_no_draw_exceeds_what_the_modality_allows(modality: str) -> None:
    allowed = ALLOWED[modality]
    for draw in draws(modality):
        assert abs(draw.rotate_deg) <= allowed.rotate_deg
        assert 1 <= draw.zoom <= 1 + allowed.zoom
        assert max(abs(draw.shift_x), abs(draw.shift_y)) <= allowed.shift
        assert abs(draw.gain - 1) <= allowed.intensity
        assert draw.mirror == allowed.mirror
        assert draw.flip == allowed.flip


@pytest.mark.parametrize("modality", ["", "SR", "ct"])
def test_an_unknown_modality_gets_nothing(modality: str) -> None:
    assert set(draws(modality)) == {Draw()}


@pytest.mark.parametrize("modality", ["CT", "PT", "NM"])
def test_measured_intensities_stay_what_they_are(modality: str) -> None:
    assert {(draw.gain, draw.offset, draw.gamma) for draw in draws(modality)} == {(1.0, 0.0, 1.0)}


@pytest.mark.parametrize("modality", ["CT", "MR", "CR", "DX"])
def test_a_body_with_a_heart_is_never_mirrored(modality: str) -> None:
    assert not any(draw.mirror or draw.flip for draw in draws(modality))


def test_a_report_that_names_a_side_keeps_it() -> None:
    assert all(draw.mirror for draw in draws("MG"))
    assert not any(draw.mirror for draw in draws("MG", sided=True))


@pytest.mark.parametrize(
    "text",
    [
        "Left pleural effusion.",
        "opacity in the RLL",
        "Bilaterally clear",
        "the rt breast",
        "LUL nodule",
        "situs inversus",
    ],
)
def test_sides_are_found(text: str) -> None:
    assert names_a_side(text)


@pytest.mark.parametrize(
    "text", ["", "No finding.", "The heart is not enlarged.", "All other organs normal", "start art"]
)
def test_no_side_is_found_where_there_is_none(text: str) -> None:
    assert not names_a_side(text)


def test_settings_bound_what_is_drawn_and_each_number_has_its_own_key() -> None:
    little = AugmentConfig(rotate_deg=2, mirror=0.5)
    drawn = draws("MG", little)
    assert all(abs(draw.rotate_deg) <= 2 for draw in drawn)
    assert {draw.zoom for draw in drawn} == {1.0}
    assert {draw.mirror for draw in drawn} == {True, False}
    # Another setting does not change what the others draw.
    both = draws("MG", AugmentConfig(rotate_deg=2, mirror=0.5, zoom=0.2, intensity=0.1))
    assert [(draw.rotate_deg, draw.mirror) for draw in both] == [(d.rotate_deg, d.mirror) for d in drawn]


def test_draws_depend_on_seed_and_every_part_of_the_place_and_on_nothing_else() -> None:
    settings = AugmentConfig(rotate_deg=10)
    drawn = draws("CT", settings)
    assert len(set(drawn)) == len(PLACES)
    assert draws("CT", settings) == drawn
    assert not set(draws("CT", settings, seed=4)) & set(drawn)


def test_numbers_are_frozen() -> None:
    """A resume with another version must turn the images of the epoch alike."""
    draw = draw_sample(
        AugmentConfig(rotate_deg=10, zoom=0.2, shift=0.1, intensity=0.2, mirror=0.5),
        modality="MG",
        report_names_a_side=False,
        seed=7,
        place=(1, 2, 3, 4),
    )
    assert (round(draw.rotate_deg, 9), round(draw.zoom, 9), draw.mirror) == FROZEN


FROZEN = (4.509702083, 1.121209621, True)
