"""Places in which Python keeps values, read one by one and at once."""

import collections
import os
import types

from shardwright.capture.observed.places import CALLED, MISSING, Entry, GuardedPlace, PlaceReader


class Own(dict):
    def get(self, key, default=None):
        raise AssertionError("a method of the user")


class Slots:
    __slots__ = ("beta", "gamma")


class Model:
    K = 2

    def forward(self):
        return self.K


def closed(value):
    return (lambda: value).__closure__[0]


def places():
    slots = Slots()
    slots.beta = 3.0
    empty = types.CellType()
    owners = [
        ({"beta": 2.0}, "beta"),
        ({}, "beta"),
        (Own(a=1), "a"),
        (collections.OrderedDict(a=1), ("a", 1)),
        (Model, "K"),
        (Model, "forward"),
        (Model, "gone"),
        (Model, "__class__"),  # of its own dict, which has none
        (slots, "beta"),
        (slots, "gamma"),
        (Model.forward, "__code__"),
        (Model.forward, "__kwdefaults__"),
        (closed(5), "value"),
        (empty, "value"),
        (os.environ, Entry("HOME")),
        (os.environ, Entry("SHARDWRIGHT_NO_SUCH_NAME")),
        (lambda: 7, CALLED),
        (int, CALLED),
    ]
    return [GuardedPlace(owner, key, str(key)) for owner, key in owners]


def test_a_reader_reads_what_each_place_gives():
    found = places()
    reader = PlaceReader(found)
    assert len(reader.places) == len(found) and set(reader.places) == set(found)
    assert reader.values() == [place.get() for place in reader.places]
    by_owner = {(id(p.owner), p.key): value for p, value in zip(reader.places, reader.values())}
    assert [by_owner[p.identity] for p in found[:5]] == [2.0, MISSING, 1, MISSING, 2]


def test_a_reader_sees_later_values():
    found = places()
    reader = PlaceReader(found)
    for place in found[:4]:
        place.set("later")
    found[8].set("later")
    found[12].set("later")
    values = dict(zip(reader.places, reader.values()))
    assert [place for place in found if values[place] == "later"] == [*found[:4], found[8], found[12]]
