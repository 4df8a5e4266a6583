"""Only plain values leave a sandbox, each in exactly one spelling, and only well-formed frames are believed."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_core.sandbox.classify import BadFrames, parse_frames
from posttrain_core.sandbox.plain import MAX_DEPTH, MAX_INT_BITS, NotPlain, parse_plain, spell_plain
from posttrain_core.sandbox.seccomp import build_filter

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(database=None, deadline=None)
@given(plain_values)
def test_a_plain_value_survives_the_way_out(value: object) -> None:
    text = spell_plain(value)
    assert text.isascii()
    assert repr(parse_plain(text)) == repr(json.loads(json.dumps(value, sort_keys=True)))


class Int(int):
    pass


class Equal:
    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "value",
    [Int(1), Equal(), [Equal()], {1: 2}, {"a": {2}}, b"x", float("inf"), 1j, 1 << MAX_INT_BITS, "x" * 20_000, range(3)],
)
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(NotPlain):
        spell_plain(value)


def test_depth_and_size_are_capped() -> None:
    value: list[object] = []
    for _ in range(MAX_DEPTH):
        value = [value]
    assert parse_plain(spell_plain(value)) == value
    with pytest.raises(NotPlain, match="nested"):
        spell_plain([value])


@pytest.mark.parametrize(
    "text", ["", "1 ", "01", "1.0e0", "NaN", '{"a":1,"a":1}', '{"b":1,"a":1}', "[" * 10_000, '"\u00e9"', "1" * 5000]
)
def test_other_spellings_are_not_believed(text: str) -> None:
    with pytest.raises(NotPlain):
        parse_plain(text)


def frame(*parts: object) -> bytes:
    text = json.dumps(list(parts)).encode()
    return struct.pack(">I", len(text)) + text


def test_frames_are_ordered_by_case() -> None:
    cases = parse_frames(frame("1", True, "5") + frame("0", False, "boom"), 2, torn=False)
    assert [(case.case_id, case.ok, case.value, case.error) for case in cases] == [
        ("0", False, "", "boom"),
        ("1", True, "5", ""),
    ]


@pytest.mark.parametrize(
    "data",
    [
        frame("0", True, "1") + frame("0", True, "1"),
        frame("2", True, "1"),
        frame("00", True, "1"),
        frame("-1", True, "1"),
        frame("\u0663", True, "1"),
        frame(0, True, "1"),
        frame("0", 1, "1"),
        frame("0", True, 1),
        frame("0", True, "[1, 2]"),
        frame("0", True),
        b"\0\0\0\1{",
        b"\xff\xff\xff\xff",
        b"\0\0",
    ],
)
def test_frames_that_the_driver_does_not_write_spoil_everything(data: bytes) -> None:
    with pytest.raises(BadFrames):
        parse_frames(frame("1", True, "1") + data, 2, torn=False)


def test_the_frame_that_a_kill_cut_is_ignored() -> None:
    whole = frame("0", True, "1")
    assert len(parse_frames(whole + whole[:7], 2, torn=True)) == 1


@pytest.mark.parametrize(("machine", "known"), [("x86_64", True), ("aarch64", True), ("riscv64", False)])
def test_filters_are_whole_bpf_programs(machine: str, known: bool) -> None:
    program = build_filter(machine)
    assert bool(program) is known
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    for position, (code, if_true, if_false, _) in enumerate(instructions):
        if code & 7 == 5:  # a jump lands inside
            assert position + 1 + max(if_true, if_false) < len(instructions)
    assert len(instructions) < 4096
