from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector.ladder import (
    LADDER,
    Measured,
    agreement_ap50,
    climb,
    find_all,
    measure,
)
from perception_rt.detector.model import Model
from perception_rt.detector.onnx_backend import OnnxBackend

MS = 1_000_000


def climbed(table, target_ns=0, max_loss=0.01):
    """Chosen precision and what became of each; ``table``: p50 ms, p99 ms, agreements."""

    def attempt(precision: str) -> Measured:
        value = table[precision]
        if isinstance(value, Exception):
            raise value
        p50, p99, *agreement = value
        return Measured(p50 * MS, p99 * MS, tuple(agreement))

    chosen, steps = climb(LADDER, attempt, target_ns, max_loss)
    return chosen, [(step.precision, step.kept, step.why) for step in steps]


def test_the_fastest_within_the_loss_is_kept() -> None:
    chosen, steps = climbed(
        {"fp32": (10, 12, 1.0, 1.0), "fp16": (6, 7, 1.0, 0.999), "int8": (4, 5, 0.97, 1.0)}
    )
    assert chosen == "fp16"
    assert steps == [
        ("fp32", True, "the reference"),
        ("fp16", True, "faster than fp32"),
        ("int8", False, "loses 0.030 AP, 0.01 is allowed"),
    ]


def test_it_stops_at_the_first_precision_that_meets_the_target() -> None:
    table = {"fp32": (10, 12, 1.0), "fp16": (6, 7, 1.0), "int8": AssertionError("not needed")}
    chosen, steps = climbed(table, target_ns=7 * MS)
    assert chosen == "fp16"
    assert steps[-1] == ("fp16", True, "faster than fp32, meets the target of 7 ms")
    assert climbed(table, target_ns=12 * MS)[1] == [
        ("fp32", True, "the reference, meets the target of 12 ms")
    ]


def test_a_precision_that_is_not_faster_is_not_kept_and_the_next_is_compared_with_the_best() -> (
    None
):
    chosen, steps = climbed({"fp32": (10, 12, 1.0), "fp16": (10, 11, 1.0), "int8": (9, 9, 1.0)})
    assert chosen == "int8"
    assert steps[1:] == [
        ("fp16", False, "not faster than fp32"),
        ("int8", True, "faster than fp32"),
    ]


def test_a_precision_that_cannot_be_built_is_a_step_with_the_reason() -> None:
    chosen, steps = climbed(
        {"fp32": (10, 12, 1.0), "fp16": BackendError("no FP16 here"), "int8": (4, 5, 1.0)}
    )
    assert chosen == "int8"
    assert steps[1] == ("fp16", False, "no FP16 here")


def test_the_first_precision_must_work() -> None:
    with pytest.raises(UnavailableError, match="no GPU"):
        climbed({"fp32": UnavailableError("no GPU")})


def test_the_first_precision_is_held_to_the_loss_as_well() -> None:
    with pytest.raises(BackendError, match=r"at fp32 lose 0\.500 AP against ONNX"):
        climbed({"fp32": (10, 12, 1.0, 0.5)})


def rows(*values: tuple[float, ...]):
    return np.array(values, np.float32).reshape(-1, 6)


A = (0, 0, 10, 10, 0.9, 1)
B = (50, 50, 60, 60, 0.5, 2)


@pytest.mark.parametrize(
    ("results", "ap"),
    [
        ([rows(A, B)], 1.0),
        ([rows(A)], 0.5),
        ([rows()], 0.0),
        ([rows((0, 0, 10, 10, 0.9, 2), B)], 0.25),  # wrong class first: precision 1/2 at 1/2
        ([rows(A, (100, 100, 110, 110, 0.1, 1), (50, 50, 60, 60, 0.06, 2))], 0.5 + 0.5 * 2 / 3),
        ([rows(A, (0, 0, 10, 10, 0.8, 1), B)], 0.5 + 0.5 * 2 / 3),  # one truth, one match
        ([rows((0, 0, 10, 5.1, 0.9, 1), B)], 1.0),  # IoU 0.51
        ([rows((0, 0, 10, 4.9, 0.9, 1), B)], 0.25),
    ],
)
def test_agreement_by_hand(results, ap: float) -> None:
    assert agreement_ap50([rows(A, B)], results) == pytest.approx(ap)


def test_agreement_without_anything_to_find() -> None:
    unsure = rows((0, 0, 9, 9, 0.3, 1))  # is no truth
    assert agreement_ap50([unsure], [unsure]) == 1.0
    assert agreement_ap50([unsure], [rows(A)]) == 0.0


boxes = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40), st.integers(1, 40))


@given(st.lists(st.lists(st.tuples(boxes, st.floats(0.05, 1), st.integers(0, 2)), max_size=6)))
def test_agreement_is_a_share_and_whole_with_itself(images) -> None:
    found = []
    for image in images:
        unique = {box[:2]: (*box[:2], box[0] + box[2], box[1] + box[3]) for box, _, _ in image}
        scores = [(score, c) for _, score, c in image]
        values = [(*box, *sc) for box, sc in zip(unique.values(), scores)]
        # What NMS leaves: no two of a class overlap by half. One per image is enough here.
        found.append(rows(*values[:1]))
    assert agreement_ap50(found, found) == pytest.approx(1.0)
    assert 0 <= agreement_ap50(found, [rows(A)] * len(found)) <= 1


def test_a_backend_agrees_with_itself_and_is_timed(tiny: Model) -> None:
    images = [np.full((32, 32, 3), grey, np.uint8) for grey in (0, 40)]
    backend = OnnxBackend(tiny)
    seen: list[tuple[int, int]] = []
    try:
        reference = find_all(backend, tiny, images)
        measured = measure(
            backend, tiny, images, reference, runs=5, progress=lambda *step: seen.append(step)
        )
    finally:
        backend.close()
    assert [len(exits) for exits in reference] == [2, 2, 2]
    assert [len(exits[0]) for exits in reference] == [1, 2, 3]  # exit k finds k + 1 objects
    assert measured.agreement == (1.0, 1.0, 1.0)
    assert 0 < measured.p50_ns <= measured.p99_ns
    assert seen[-1] == (25, 25)


def test_two_networks_that_differ_do_not_agree(tiny: Model) -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    backend = OnnxBackend(tiny)
    try:
        reference = [[rows((0, 0, 1, 1, 0.9, 0))] for _ in range(3)]
        measured = measure(backend, tiny, [image], reference, runs=1)
    finally:
        backend.close()
    assert measured.agreement == (0.0, 0.0, 0.0)
