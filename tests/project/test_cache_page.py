"""docs/cache.md: its example is run, its arithmetic is done again, its wrong orders go wrong."""

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import waste
from benchmarks.capacity import worked_example
from prefixgate.cache.accounts import Accounts, TenantShare
from prefixgate.cache.copy_plan import Copy
from tests.cache.sequences import OTHER, SCOPE, admit, make_cache, serve, take_plan
from tests.project.cache_example import Example, rows
from tests.project.cache_picture import PICTURE, draw
from tests.project.tree import ROOT

PAGE = (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")
STEPS = list(Example().steps())


def cells(heading: str) -> list[list[str]]:
    """Rows of the page's table whose first column has this heading, and its head."""
    table = re.search(rf"^\| {heading} \|.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    assert table is not None
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()]
    return [lines[0], *lines[2:]]


class TestExample:
    def test_the_page_and_the_picture_show_what_the_cache_does(self) -> None:
        told = "run `python -m tests.project.cache_picture` and put its table into the page"
        assert rows(STEPS) in PAGE, told
        assert PICTURE.read_text(encoding="utf-8") == draw(STEPS), told

    def test_a_prompt_that_parts_inside_a_block_and_a_fork_plan_the_copies_that_the_page_names(self) -> None:
        planned = {number: step.copies for number, step in enumerate(STEPS, 1) if step.copies}
        assert planned == {4: [Copy(2, 4, 8)], 6: [Copy(5, 6, 2)]}
        assert [STEPS[number].refs[source] for number, source in ((3, 2), (4, 2), (5, 5), (6, 5))] == list("2121")

    def test_the_tail_is_kept_and_claimed(self) -> None:
        kept, claimed = STEPS[7], STEPS[8]
        assert ("3~" in kept.tree, "3" in claimed.tree) == (True, False)
        assert claimed.tables["A'"] == [0, 1, 2, 3]
        assert sum(slot is not None for slot in claimed.slots[3]) == 5

    def test_the_twin_lives_for_one_step(self) -> None:
        before, after = STEPS[10].tables, STEPS[11].tables
        assert before["D"][0] == 4
        assert after["D"][0] == after["C"][0] == 6
        assert (STEPS[11].refs[4], STEPS[11].refs[6]) == ("-", "2")

    def test_leaves_go_first_and_in_order_of_use(self) -> None:
        assert [STEPS[9].evictable, STEPS[13].evictable] == [[6, 5], [7, 3]]
        # 7 was free; then 6, 5 and their parent 4. 4 and 5 were free; then 7, its parent 6, and 3.
        assert {*STEPS[10].tables["C"], *STEPS[10].tables["D"]} == {7, 6, 5, 4}
        assert {*STEPS[14].tables["E"]} == {4, 5, 7, 6, 3}


class TestOrder:
    """The page's wrong orders, done by hand on the parts of a real cache."""

    def test_taking_before_holding_hands_out_the_source_itself(self) -> None:
        cache = make_cache(2)
        serve(cache, list(range(16)))
        admit(cache, [99])
        (source,) = cache.match(SCOPE, list(range(17))).blocks
        account = cache.accounts.of(SCOPE.tenant)
        cache.evictor.make_room(1, account, cache.events)
        assert cache.pool.take(1, account) == [source]

    def test_a_source_released_when_planned_is_overwritten_before_it_is_read(self) -> None:
        cache = make_cache(3)
        serve(cache, list(range(16)))
        admit(cache, [*range(5), 99])
        (copy,) = cache.planned_copies()
        assert cache.admit(OTHER, list(range(32)), max_new_tokens=1) is None, (
            "the right order: the source is not to be had"
        )
        account = cache.accounts.of(SCOPE.tenant)
        cache.pool.release((copy.src,), account, published=True)
        cache.evictor.let_go(copy.src, account, queue=True)
        thief = admit(cache, list(range(32)), scope=OTHER).table
        plan = take_plan(cache)
        assert copy in plan.copies
        assert copy.src in plan.fresh
        # And the plan's release took the reference that was the thief's.
        assert copy.src in thief.block_ids
        assert copy.src in cache.pool.free_blocks()

    def test_a_copy_is_dropped_with_the_last_holder_of_its_destination(self) -> None:
        cache = make_cache(3)
        serve(cache, list(range(16)))
        cancelled = admit(cache, [*range(5), 99]).table
        cache.release(cancelled, 0)
        heir = admit(cache, [*range(7), 98]).table
        assert heir.block_ids == cancelled.block_ids
        assert take_plan(cache).copies == [Copy(0, heir.block_ids[0], 7)]

    def test_a_source_outlives_its_owner_until_it_is_read(self) -> None:
        cache = make_cache(3)
        first = admit(cache, [1, 2], new=4, outputs=2).table
        cache.writable(first, 0, 2)
        take_plan(cache)
        cache.publish(first, 2)
        second = cache.fork(first, [1, 2])
        first.token_ids.append(3)
        cache.writable(first, 2, 3)
        (source,) = second.block_ids
        cache.release(second, 2)
        assert source not in cache.pool.free_blocks()
        assert take_plan(cache).copies == [Copy(source, first.block_ids[0], 2)]
        assert source in cache.pool.free_blocks()


def test_the_tenants_figures_add_up() -> None:
    _, *tenants = cells("tenant")
    shares = {name: TenantShare(int(floor), int(cap)) for name, floor, cap, *_ in tenants}
    accounts = Accounts(1000, shares)
    for name, _, _, active, idle, promised, *_ in tenants:
        account = accounts.of(name)
        account.active, account.cached = int(active), int(idle)
        accounts.promise(account, int(promised))
    held = sum(account.held for account in accounts)
    cached = sum(account.cached for account in accounts)
    for name, *_, evictable, missing, ceiling, room in tenants:
        account = accounts.of(name)
        assert (account.evictable, account.missing) == (int(evictable), int(missing)), name
        assert accounts.ceiling(name) == int(ceiling), name
        assert accounts.room(account, free=1000 - held, cached=cached) == int(room), name


def test_the_pool_of_the_page_holds_what_the_page_says() -> None:
    example = worked_example(350)
    assert [f"**{example[how]:,}**" in PAGE for how in ("reserved", "paged", "shared")] == [True] * 3
    assert example == {"reserved": 66, "paged": 384, "shared": 1405}


def write_trace(folder: Path, name: str, records: list[dict[str, object]]) -> None:
    with gzip.open(folder / name, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_the_benchmark_measures_what_can_be_reckoned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 350 slots each; in the second trace with ids, of which the first 16 blocks are one system prompt.
    call: dict[str, object] = {"input_length": 341, "output_length": 10}
    write_trace(tmp_path, "azure2023_conv.lengths.jsonl.gz", [call] * 1600)
    runs: list[dict[str, object]] = [{"conv": n, "blocks": [[0, 16], [16 + 5 * n, 5]]} for n in range(1600)]
    write_trace(tmp_path, "tau_airline_io.b16.jsonl.gz", [call | run for run in runs])
    results, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    files = ["--traces", str(tmp_path), "--json", str(results), "--plot", str(plot)]
    waste.main([*files, "--tokens", "600", "--repeats", "1", "--starts", "3"])
    figures = json.loads(results.read_text())
    assert [figures[f"waste_slots/Azure conversation/{size}"] for size in (1, 16, 256)] == [0, 2, 162]
    assert figures["waste/Azure conversation/256"] == pytest.approx(100 * 162 / 512)
    for trace in ("Azure conversation", "tau airline"):
        assert (figures[f"held/{trace}/paged"], figures[f"held/{trace}/shared"]) == (384, 1405)
    # The first call misses everything; each later one hits the system prompt.
    assert figures["hits/tau airline/16"] == pytest.approx(100 * 1599 * 256 / (1600 * 341))
    assert figures["cost/table/16"] == 38
    assert "| tau airline |" in capsys.readouterr().out
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
