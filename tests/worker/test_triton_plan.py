"""How a step's attention is cut into programs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker.attention import PackedStep
from prefixgate.worker.model_runner import Row
from prefixgate.worker.triton_plan import MAX_PARTS, MIN_PART_SLOTS, Plan, plan_decode, plan_step
from tests.worker.attention_cases import CPU, SCOPE, Case, cases

SIZES = (16, 64, 128)
PROCESSORS = 132


def plan_rows(*rows: Row, group: int = 4, kv_heads: int = 8) -> Plan:
    return plan_step(PackedStep(rows, 16, CPU), group, kv_heads, SIZES, PROCESSORS)


def row(length: int, tokens: int = 1, first_block: int = 0) -> Row:
    return Row([0] * tokens, length - tokens, range(first_block, first_block + -(-length // 16)), SCOPE, True)


def programs(plan: Plan) -> list[tuple[int, int, bool]]:
    return [(launch.rows, len(launch.items), launch.final) for launch in plan.launches]


@given(case=cases(), share=st.booleans(), processors=st.sampled_from([1, 100]))
@settings(max_examples=30)
def test_each_part_of_each_token_has_a_record_of_its_own_and_a_token_s_lie_together(
    case: Case, share: bool, processors: int
) -> None:
    step = case.step(share=share)
    plan = plan_step(step, 3, 2, (16, 32), processors)
    records: dict[int, list[int]] = {}
    written: list[int] = []
    for launch in plan.launches:
        for _, _, slots, first, count, part, parts in launch.items.tolist():
            assert 0 <= part < parts <= MAX_PARTS
            assert 0 < count * 3 <= launch.rows
            assert slots > 0
            for entry in range(first, first + count):
                token = int(plan.tokens[entry])
                if launch.final:
                    written.append(token)
                else:
                    records.setdefault(token, []).append(int(plan.records[entry]) + part)
    # Each token is either written by the only program that attends for it, or merged from all of its records.
    assert sorted([*written, *plan.merged.tolist()]) == list(range(len(step.positions)))
    assert sorted(records) == plan.merged.tolist()
    for token, held in records.items():
        assert sorted(held) == list(range(int(plan.starts[token]), int(plan.starts[token + 1])))
    assert sum(map(len, records.values())) == plan.num_records


def test_a_batch_that_fills_the_device_is_not_cut() -> None:
    rows = [row(4000, first_block=300 * i) for i in range(66)]
    assert programs(plan_rows(*rows)) == [(16, 66, True)]


def test_few_rows_are_cut_into_as_many_parts_as_the_device_has_room_for() -> None:
    # 4 × 132 programs for 8 kv heads are 66 parts; none is shorter than the least that is worth a program.
    assert programs(plan_rows(row(66 * 512))) == [(16, 66, False)]
    assert programs(plan_rows(row(4 * MIN_PART_SLOTS))) == [(16, 4, False)]
    assert programs(plan_rows(row(MIN_PART_SLOTS))) == [(16, 1, True)]


def test_a_long_row_gets_more_parts_than_a_short_one_beside_it() -> None:
    plan = plan_rows(row(8192), row(100, first_block=600))
    assert programs(plan) == [(16, 33, False)]
    assert [int(parts) for *_, parts in plan.launches[0].items] == 32 * [32] + [1]


def test_a_long_prompt_is_cut_by_tokens_alone() -> None:
    # 32 tokens of 4 query heads each fill a tile of 128.
    assert programs(plan_rows(row(2048, tokens=2048))) == [(128, 64, True)]


def test_the_programs_of_a_prompt_that_have_most_to_do_start_first() -> None:
    (launch,) = plan_rows(row(2048, tokens=2048)).launches
    firsts = launch.items[:, 3].tolist()
    assert firsts == sorted(firsts, reverse=True)


def test_rows_in_one_batch_of_decode_do_not_depend_on_what_the_tables_hold() -> None:
    plan = plan_decode(4, 70, 16, kv_heads=8, size=16, processors=PROCESSORS, device=CPU)
    assert programs(plan) == [(16, 4 * 5, False)]
    assert plan.num_records == 20
    assert plan.merged.tolist() == [0, 1, 2, 3]
    assert torch.equal(plan.launches[0].items[::5, 0], torch.arange(4, dtype=torch.int32) * 70)
    assert programs(plan_decode(256, 70, 16, 8, 16, PROCESSORS, CPU)) == [(16, 256, True)]
