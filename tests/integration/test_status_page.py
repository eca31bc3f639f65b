"""The status page in a browser, in front of real processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from prefixgate.gateway.tenants import digest_api_key
from tests.integration.asking import Stream, prompt
from tests.integration.browser import MISSING, PHONE, PROGRAM, WIDE, Viewer, browser
from tests.integration.scrape import fetch
from tests.integration.sidecar import Program, Sidecar
from tests.integration.waiting import until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

SYSTEM = "You are the keeper of a lighthouse and speak of nothing but the sea. " * 3
EVIL = '<img src=x onerror="document.title=1"><b>bold'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar whose calls take long enough to be looked at."""
    with Sidecar(tmp_path_factory.mktemp("status"), model="witness:step_ms=50", blocks=128) as sidecar:
        sidecar.wait_until_ready()
        # What was there when the gateway first asked its worker is no part of its history.
        until(lambda: told(sidecar)["history"]["total"][-1] == 128, "the worker's first survey")
        yield sidecar
        assert sidecar.stop() == 0
        assert sidecar.complaints() == []


def url(sidecar: Sidecar) -> str:
    return sidecar.gateway_page.removesuffix("/metrics") + "/status"


def told(sidecar: Sidecar) -> dict[str, Any]:
    """Read the document that the page shows."""
    document: dict[str, Any] = json.loads(fetch(url(sidecar) + ".json"))
    return document


def test_what_is_shown_is_what_the_metrics_say(chromium: Browser, served: Sidecar) -> None:
    with served.channel() as channel:
        for question in ("What is a knot?", "What is a fathom?", "What is a league?"):
            for tenant in ("acme", "bolt"):
                assert Stream(channel, prompt(SYSTEM + question, 3), tenant).rest().name == "OK"
    gateway, worker = served.until_idle()
    with Viewer(chromium, url(served)) as viewer:
        # The first document may be a second old.
        viewer.wait().wait()
        queried = int(worker.total("prefixgate_worker_queried_tokens_total"))
        viewer.until(f"document.querySelector('#hit-words').textContent.includes('of {queried:,}')")
        hit = worker.total("prefixgate_worker_hit_tokens_total")
        assert f"{100 * hit / queried:.1f} % of {queried:,}" in viewer.text("#hit-words")
        shown = viewer.legend()
        states = worker.by("state", "prefixgate_worker_pool_blocks")
        assert (shown["free"], shown["cached"]) == (states["free"], states["cached"])
        assert (shown["held by one"], shown["pinned"]) == (0, 0)
        assert int(viewer.text("#live-calls")) == gateway.total("prefixgate_gateway_live_calls") == 0
        assert int(viewer.text("#waiting-calls")) == worker.total("prefixgate_worker_waiting_calls") == 0
        misses = worker.by("reason", "prefixgate_worker_misses_total")
        words = {"never seen": "never_seen", "diverged in a block": "diverged", "evicted": "evicted"}
        document = told(served)
        assert {reason: document["misses"][reason] for reason in words.values()} == {
            reason: misses[reason] for reason in words.values()
        }
        # All of it happened after the page's history began.
        viewer.until(f"document.querySelector('#misses-legend').textContent.includes('{int(misses['diverged'])}')")
        seen = viewer.legend("misses-legend")
        assert {words[name]: count for name, count in seen.items() if name in words} == {
            reason: misses[reason] for reason in words.values()
        }
        by_tenant = {row[0]: row for row in viewer.table("tenants")}
        for tenant in ("acme", "bolt", "crux"):
            cached = worker.total("prefixgate_worker_tenant_blocks", tenant=tenant, state="cached")
            assert int(by_tenant[tenant][3]) == cached
            looked_up = worker.total("prefixgate_worker_queried_tokens_total", tenant=tenant)
            found = worker.total("prefixgate_worker_hit_tokens_total", tenant=tenant)
            assert by_tenant[tenant][7] == (f"{100 * found / looked_up:.1f} %" if looked_up else "–")
        (row,) = viewer.table("workers")
        assert (row[0], row[1]) == ("worker.sock", "serving")
        known = gateway.total("prefixgate_gateway_worker_known_blocks")
        assert int(row[3]) == known > 0
        assert viewer.complaints == []


def test_the_map_changes_when_a_shared_prompt_arrives_and_calls_are_listed(chromium: Browser, served: Sidecar) -> None:
    served.until_idle()
    with served.channel() as channel, Viewer(chromium, url(served)) as viewer:
        viewer.wait()
        viewer.until("document.querySelector('#no-calls').checkVisibility()")
        before, calm = viewer.legend(), viewer.drawn()
        first = prompt(SYSTEM + "What is a buoy?", 1500)
        first.request_id = EVIL[:40]
        streams = [Stream(channel, first, "crux").wait_for_tokens()]
        streams += [
            Stream(channel, prompt(SYSTEM + end, 1500), "crux").wait_for_tokens() for end in ("And tides?", "Eels?")
        ]
        # The blocks of the system prompt have three holders now.
        shared = len(SYSTEM) // 16
        viewer.until(
            "[...document.querySelectorAll('#legend li')].some(one => one.textContent.includes('shared by 3') && "
            f"parseInt(one.querySelector('b').textContent) >= {shared})"
        )
        during = viewer.legend()
        assert during["free"] < before["free"]
        assert "shared by several" in viewer.text("#sharing")
        viewer.until(f"document.querySelector('#maps canvas').toDataURL() !== {json.dumps(calm)}")
        viewer.until("document.querySelectorAll('#calls tbody tr').length === 3")
        rows = viewer.table("calls")
        assert rows[0][0] == EVIL[:40]
        assert {row[1] for row in rows} == {"crux"}
        assert int(rows[0][3]) == len(first.prompt)
        assert "buoy" not in viewer.page.content()
        for stream in streams:
            stream.cancel()
        # With nobody left, nothing is shown as held, though no further call comes.
        viewer.until("document.querySelector('#no-calls').checkVisibility()")
        held = "[...document.querySelectorAll('#legend li')].filter(one => /held|shared|pinned/.test(one.textContent))"
        viewer.until(f"{held}.every(one => one.querySelector('b').textContent === '0')")
        assert viewer.complaints == []


def test_a_block_is_told_of_by_pointer_and_by_key(chromium: Browser, served: Sidecar) -> None:
    with served.channel() as channel:
        Stream(channel, prompt(SYSTEM, 1), "acme").rest()
    served.until_idle()
    with Viewer(chromium, url(served)) as viewer:
        viewer.wait()
        viewer.page.hover("#maps canvas", position={"x": 4, "y": 4})
        assert viewer.text("#tip").splitlines()[0] == "Block 0"
        viewer.page.focus("#maps canvas")
        viewer.page.keyboard.press("ArrowRight")
        assert viewer.text("#tip").splitlines()[0] == "Block 1"
        label = viewer.page.get_attribute("#maps canvas", "aria-label") or ""
        assert f"{viewer.legend()['cached']} cached" in label
        viewer.page.check("input[value=tenant]", force=True)
        assert viewer.legend()["acme"] > 0
        assert viewer.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_it_fits_and_can_be_read_in_both_schemes(
    chromium: Browser, served: Sidecar, size: tuple[int, int], scheme: str
) -> None:
    with served.channel() as channel:
        stream = Stream(channel, prompt(SYSTEM + scheme, 700, n=2), "acme").wait_for_tokens()
        with Viewer(chromium, url(served), size=size, scheme=scheme) as viewer:
            viewer.wait()
            viewer.until("document.querySelectorAll('#calls tbody tr').length === 1")
            assert viewer.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            contrasts = viewer.page.evaluate(_CONTRASTS)
            assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
            dark = viewer.page.evaluate("getComputedStyle(document.body).color") == "rgb(232, 239, 238)"
            assert dark == (scheme == "dark")
            assert viewer.complaints == []
        stream.cancel()


_CONTRASTS = """() => {
  const light = ([r, g, b]) => {
    const part = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.querySelectorAll("h1, h2, h3, p, small, th, td, b, li, label span, .state, a")) {
    if (!element.textContent.trim() || !element.checkVisibility()) continue;
    const [one, two] = [numbers(getComputedStyle(element).color), behind(element)].map(light).sort((a, b) => b - a);
    found[`${element.tagName} ${element.textContent.slice(0, 20)}`] = (one + 0.05) / (two + 0.05);
  }
  return found;
}"""


def test_a_key_opens_the_page_and_a_gateway_that_goes_away_is_told_of(chromium: Browser, tmp_path: Path) -> None:
    arguments = (f"--operator-keys={digest_api_key(b'pg-op')}", f"--workers=unix:{tmp_path}/nobody.sock")
    ports = ("--gateway-listen=127.0.0.1:0", "--gateway-http=0.0.0.0:0")
    with Program(tmp_path / "gateway.log", "prefixgate.gateway", "gateway", *ports, *arguments) as gateway:
        page = gateway.logged(r"Status page on (\S+)").replace("0.0.0.0", "127.0.0.1")
        with Viewer(chromium, page, password="pg-other") as refused:
            assert "the key of the operator is needed" in refused.text("body")
        with Viewer(chromium, page, password="pg-op") as viewer:
            viewer.until("document.querySelector('#state').textContent === 'no worker'")
            assert viewer.complaints == []
            # The page asks on and on, on a connection that is kept; that holds up nothing.
            gateway.process.terminate()
            assert gateway.end() == 0
            viewer.until("document.querySelector('#state').textContent === 'lost'")
            assert "does not tell how it stands" in viewer.text("#problem")
            assert viewer.page.eval_on_selector("#main", "main => main.className") == "stale"
