"""Dataclasses to JSON and back: type checks, and errors with their place."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest

from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import EXTRA, KEY, OPTIONAL, UNSTORED, Size


@dataclasses.dataclass(frozen=True)
class Circle:
    KINDS: ClassVar = ("circle",)

    radius: float


@dataclasses.dataclass(frozen=True)
class Box:
    KINDS: ClassVar = ("box",)

    sides: tuple[Size, ...]


@dataclasses.dataclass(frozen=True)
class Text:
    JSON_FORM: ClassVar = str

    words: tuple[str, ...]

    def to_json_form(self) -> str:
        return " ".join(self.words)

    @classmethod
    def from_json_form(cls, form: str) -> Text:
        return cls(tuple(form.split()))


@dataclasses.dataclass(frozen=True)
class Drawing:
    shapes: tuple[Circle | Box, ...]
    title: Text | None
    by_name: Mapping[str, Size | str]
    mode: Literal["fill", "line"] | None = None
    scale: float = dataclasses.field(default=1.0, metadata={UNSTORED: True})
    note: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    data: Any = None
    num_layers: int = dataclasses.field(default=1, metadata={KEY: "layers"})
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict, metadata={EXTRA: True})


DRAWING = Drawing(
    (Circle(1.5), Box((1, 2)), Circle(math.inf)), Text(("a", "b")), {"x": 3, "y": "z"}, "fill", 2.0
)
FORM: dict[str, Any] = {
    "shapes": [
        {"kind": "circle", "radius": 1.5},
        {"kind": "box", "sides": [1, 2]},
        {"kind": "circle", "radius": {"float": "inf"}},
    ],
    "title": "a b",
    "by_name": {"x": 3, "y": "z"},
    "mode": "fill",
    "data": None,
    "layers": 1,
}


def test_a_value_comes_back_from_its_json() -> None:
    assert json_codec.encode(DRAWING) == FORM
    assert json_codec.decode(Drawing, FORM) == dataclasses.replace(DRAWING, scale=1.0)
    text = json.dumps(json_codec.encode(DRAWING, whole=True), allow_nan=False)
    assert json_codec.decode(Drawing, json.loads(text)) == DRAWING


def test_a_dict_of_all_fields_has_the_keys_of_json() -> None:
    fields = dataclasses.asdict(DRAWING)
    layers = fields.pop("num_layers")
    assert json_codec.as_dict(DRAWING) == {**fields, "layers": layers}


def test_unknown_keys_are_kept_where_there_is_a_field_for_them() -> None:
    later = {**FORM, "color": [1]}
    with pytest.raises(json_codec.MismatchError, match="an object without 'color'"):
        json_codec.decode(Drawing, later)
    drawing = json_codec.decode(Drawing, later, allow_unknown=True)
    assert drawing.more == {"color": [1]}
    assert json_codec.encode(drawing) == later


def test_fields_with_a_default_may_be_missing_if_allowed() -> None:
    form = {"shapes": [{"kind": "circle", "radius": 2}], "title": None, "by_name": {}}
    with pytest.raises(json_codec.MismatchError, match="an object with 'mode'"):
        json_codec.decode(Drawing, form)
    assert json_codec.decode(Drawing, form, allow_missing=True) == Drawing((Circle(2),), None, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": 3}, "top.shapes is 3, expected a list"),
        (
            {"shapes": [{"kind": "line"}]},
            "shapes[0] is {'kind': 'line'}, expected an object whose kind is circle or box",
        ),
        ({"shapes": [{"kind": "box", "sides": [-1]}]}, "top.shapes[0].sides[0] is -1, expected 0"),
        ({"shapes": [{"kind": "box", "sides": [True]}]}, "sides[0] is True, expected an integer"),
        ({"shapes": [{"kind": "circle", "radius": 1}]}, "radius is 1, expected a number"),
        ({"title": 3}, "top.title is 3, expected a string"),
        ({"by_name": {"x": 0.5}}, "top.by_name['x'] is 0.5, expected an integer or a string"),
        ({"mode": "dots"}, "top.mode is 'dots', expected fill or line"),
        ({"layers": "two"}, "top.layers is 'two', expected an integer"),
        ({"num_layers": 2}, "an object without 'num_layers'"),
        ({"note": "x" * 99}, ""),
        ({"by_name": "x" * 99}, f"top.by_name is '{'x' * 56}..., expected an object"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    form = {**FORM, **change}
    if not message:
        assert json_codec.decode(Drawing, form).note == form["note"]
        return
    with pytest.raises(json_codec.MismatchError) as raised:
        json_codec.decode(Drawing, form, "top")
    assert message in str(raised.value)
