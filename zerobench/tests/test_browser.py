"""The page in a real browser: it fits a phone, asks for nothing, and a hostile one runs nothing. `tox -e browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zerobench.tests.pages import hostile, page, right

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _absent(why: str) -> None:
    if os.environ.get("ZEROBENCH_REQUIRE_BROWSER"):
        pytest.fail(f"a browser is required, and {why}")
    pytest.skip(why)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _absent("playwright is not installed: pip install 'zerobench[browser]'")
    found = os.environ.get("ZEROBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _absent(f"none of {', '.join(NAMES)} is on the PATH, nor does ZEROBENCH_CHROMIUM name one")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@dataclass
class Seen:
    """What a browser did with a page."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


def _open(browser: Any, path: Path, width: int, scheme: str = "light") -> Seen:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    seen = Seen(context.new_page())
    seen.page.on("console", lambda message: seen.said.append(message.text))
    seen.page.on("pageerror", lambda error: seen.said.append(str(error)))
    seen.page.on("dialog", lambda dialog: (seen.said.append(dialog.message), dialog.dismiss()))
    seen.page.on("request", lambda request: seen.asked.append(request.url))
    seen.page.goto(path.as_uri(), wait_until="load")
    return seen


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, text in (("right", page(*right())), ("hostile", hostile())):
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in ("right", "hostile")}


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["right", "hostile"])
def test_a_page_fits_and_asks_for_nothing(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    seen = _open(browser, pages[name], width)
    seen.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert seen.run("document.documentElement.scrollWidth") <= width
    assert seen.run("document.body.scrollWidth") <= width
    assert seen.run("document.querySelectorAll('svg').length") >= 4
    assert seen.said == []
    assert [url for url in seen.asked if not url.startswith("data:")] == [pages[name].as_uri()]


def test_the_first_screen_of_a_phone_has_the_answer(browser: Any, pages: dict[str, Path]) -> None:
    seen = _open(browser, pages["right"], 360)
    box = seen.run("(({top, bottom}) => [top, bottom])(document.querySelector('h1').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] < 300
    assert "keeps its promises" in seen.run("document.querySelector('h1').innerText")


def test_hostile_words_run_nothing_and_make_no_element(browser: Any, pages: dict[str, Path]) -> None:
    seen = _open(browser, pages["hostile"], 1280)
    for event in ("mouseover", "click", "load", "error"):
        seen.run(f"document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('{event}')))")
    assert seen.run("window.stolen") is None
    assert (
        seen.run("document.querySelectorAll('script, img, iframe, object, form, base, [onload], [onerror]').length")
        == 0
    )
    targets = seen.run("[...document.querySelectorAll('[href]')].map(e => e.getAttribute('href'))")
    assert [t for t in targets if not t.startswith(("#", "data:,"))] == []
    assert "<script>window.stolen = 1</script>" in seen.run("document.body.innerText")  # shown, as words
    assert seen.run("document.querySelectorAll('svg').length") == seen.run("document.querySelectorAll('figure').length")


def test_dark_and_light_differ_and_both_can_be_read(browser: Any, pages: dict[str, Path]) -> None:
    def lightness(scheme: str, name: str) -> float:
        seen = _open(browser, pages["right"], 1280, scheme)
        colour = seen.run(f"getComputedStyle(document.body).{name}")
        return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 765

    for scheme in ("light", "dark"):
        assert abs(lightness(scheme, "color") - lightness(scheme, "backgroundColor")) > 0.6
    assert lightness("dark", "backgroundColor") < 0.2 < lightness("light", "backgroundColor")
