"""The likeliest tokens: in order, lowest ids first among equals, whatever is asked beside them."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.worker.ranking import leading

# Few values, so that equal ones lie on both sides of most cuts.
lines = st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0, 2.0**127]), min_size=7, max_size=7)


@given(st.lists(lines, min_size=1, max_size=4), st.integers(0, 9))
def test_the_leading_values_of_each_line_in_order(values: list[list[float]], count: int) -> None:
    found, ids = leading(torch.tensor(values), count)
    assert found.shape == ids.shape == (len(values), min(count, 7))
    for line, leaders, leader_ids in zip(values, found.tolist(), ids.tolist(), strict=True):
        order = sorted(range(7), key=lambda i: (-line[i], i))[:count]
        assert leaders == [line[i] for i in order]
        # Those that nothing can choose come last, in any order.
        finite = sum(1 for value in leaders if value > -math.inf)
        assert leader_ids[:finite] == order[:finite]
        assert len(set(leader_ids)) == len(leader_ids)


def test_a_line_that_has_no_equals_is_not_disturbed_by_one_that_has() -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 500)
    values[1] = 1.0
    found, ids = leading(values, 40)
    assert ids[1].tolist() == list(range(40))
    for line in (0, 2):
        assert torch.equal(found[line], values[line].topk(40).values)
        assert torch.equal(values[line][ids[line]], found[line])
