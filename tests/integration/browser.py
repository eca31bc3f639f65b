"""A headless Chromium, where Debian's is installed."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from tests.integration.waiting import HANG_SECONDS, until

PROGRAM = shutil.which("chromium")
MISSING = "Debian's package chromium is not installed: make programs, as root"

PHONE = (360, 740)
WIDE = (1280, 900)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start one. Its sandbox is off, which root could not have; it sees nothing but what the tests serve."""
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"], timeout=HANG_SECONDS * 1e3)
        try:
            yield chromium
        finally:
            chromium.close()


class Viewer:
    """A page that is open, and all that it complained of."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        size: tuple[int, int] = WIDE,
        scheme: str = "light",
        password: str | None = None,
    ) -> None:
        self.complaints: list[str] = []
        look: Any = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
        if password is not None:
            look["http_credentials"] = {"username": "", "password": password}
        self._context = browser.new_context(**look)
        self._context.set_default_timeout(HANG_SECONDS * 1e3)
        self.page: Page = self._context.new_page()
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"not loaded: {request.url}"))
        self.page.goto(url)

    def __enter__(self) -> "Viewer":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def wait(self) -> "Viewer":
        """Wait until a document that was made from now on is shown, or the first."""
        before = self.page.evaluate("document.documentElement.dataset.shown ?? ''")
        self.until(f"(document.documentElement.dataset.shown ?? '') > '{before}'")
        return self

    def until(self, condition: str) -> None:
        """Wait until an expression of the page's is true."""
        # Playwright's own wait has the page evaluate a text, which this page's policy forbids.
        until(lambda: self.page.evaluate(condition), condition)

    def text(self, selector: str) -> str:
        """Read what an element says."""
        return self.page.inner_text(selector)

    def legend(self, name: str = "legend") -> dict[str, int]:
        """Read a legend: what is counted, and how much there is."""
        items = self.page.eval_on_selector_all(
            f"#{name} li",
            "found => found.map(one => [one.childNodes[1].textContent, one.querySelector('b').textContent])",
        )
        return {words: int(number.replace(",", "")) for words, number in items}

    def table(self, name: str) -> list[list[str]]:
        """Read a table's body."""
        rows: list[list[str]] = self.page.eval_on_selector_all(
            f"#{name} tbody tr", "rows => rows.map(row => [...row.children].map(cell => cell.textContent))"
        )
        return rows

    def drawn(self) -> str:
        """Take the map as it is drawn, once nothing moves in it."""
        picture: str = self.page.eval_on_selector("#maps canvas", "canvas => canvas.toDataURL()")
        return picture
