"""The page in a real browser: drawn, usable, quiet, and asking nobody for anything."""

from __future__ import annotations

import json
import shutil

import pytest
from made_runs import make_run
from nnx.store.predictions import save_predictions
from nnx.viz.report import write_report

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if not (CHROMIUM and DRIVER):
        pytest.skip("Chromium and its driver are not installed")
    folder = tmp_path_factory.mktemp("report")
    root = str(folder / "runs")
    one, two = make_run(root, lr=0.05), make_run(root, lr=0.02, seed=2)
    save_predictions(one.id, "test", targets=list("aabbcc"), predicted=list("aabbca"), root=root)
    make_run(root, seed=4, parent=one.id)
    return "file://" + write_report([one.id, two.id], folder / "report.html", root=root)


@pytest.fixture(scope="module")
def browser(page, tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_window_size(1200, 900)
    driver.get(page)
    yield driver
    driver.quit()


def run(browser, script, *args):
    return browser.execute_script(script, *args)


def test_every_chart_is_drawn(browser):
    drawn = run(
        browser,
        "return [...document.querySelectorAll('.chart')].map(c => [c.id,"
        " c.querySelectorAll('.scatterlayer path.js-line, .scatterlayer path.point, .heatmaplayer image').length])",
    )
    assert [id for id, _ in drawn[:2]] == ["chart-loss", "chart-error"]
    assert "chart-matrix-0" in dict(drawn)
    assert all(count > 0 for _, count in drawn), drawn


def test_hovering_shows_the_value(browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    chart = browser.find_element(By.ID, "chart-loss")
    run(browser, "arguments[0].scrollIntoView({block: 'center'})", chart)
    layer = chart.find_element(By.CSS_SELECTOR, ".nsewdrag")
    ActionChains(browser).move_to_element(layer).pause(0.3).move_by_offset(3, 0).pause(
        0.5
    ).perform()
    texts = run(
        browser,
        "return [...document.querySelectorAll('#chart-loss .hoverlayer text')].map(t => t.textContent)",
    )
    assert any("training, per step" in text or "validation" in text for text in texts), texts


def test_a_click_on_the_legend_hides_a_curve(browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    hidden = "return document.getElementById('chart-error').data.filter(t => t.visible === 'legendonly').length"
    assert run(browser, hidden) == 0
    item = browser.find_element(By.CSS_SELECTOR, "#chart-error .legendtoggle")
    run(browser, "arguments[0].scrollIntoView({block: 'center'})", item)
    ActionChains(browser).move_to_element(item).click().perform()
    WebDriverWait(browser, 5).until(lambda b: run(b, hidden) >= 1)


def test_the_axis_can_be_changed_from_the_keyboard(browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    step = browser.find_element(By.CSS_SELECTOR, "[data-axis=step]")
    longest = "return Math.max(...document.getElementById('chart-lr').data[0].x)"
    assert run(browser, longest) == 5
    step.send_keys(Keys.ENTER)
    assert run(browser, longest) == 20
    assert step.get_attribute("aria-pressed") == "true"


def test_only_differences(browser):
    from selenium.webdriver.common.by import By

    same = browser.find_elements(By.CSS_SELECTOR, "#configuration tr.same")
    assert same
    assert same[0].is_displayed()
    browser.find_element(By.ID, "differences").click()
    assert not any(row.is_displayed() for row in same)
    assert browser.find_element(By.CSS_SELECTOR, "#configuration tr.differs").is_displayed()


def test_a_phone_scrolls_in_one_direction_only(browser):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.refresh()
        assert run(browser, "return document.documentElement.scrollWidth") <= 390
        widths = run(
            browser,
            "return [...document.querySelectorAll('.chart')].map(c => c.querySelector('.main-svg').clientWidth)",
        )
        assert max(widths) <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.refresh()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser, scheme):
    from selenium.webdriver.support.ui import WebDriverWait

    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    try:
        names = ("--page", "--panel", "--ink", "--soft", "--link", "--differs", "--good", "--bad")
        colours = run(
            browser,
            "const s = getComputedStyle(document.documentElement);"
            "return Object.fromEntries(arguments[0].map(n => [n, s.getPropertyValue(n).trim()]))",
            list(names),
        )
        for ink in ("--ink", "--soft", "--link", "--good", "--bad"):
            for ground in ("--page", "--panel"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (scheme, ink, ground)
        assert contrast(colours["--ink"], colours["--differs"]) >= 4.5
        paper = "return document.getElementById('chart-loss')._fullLayout.paper_bgcolor"
        # The charts are drawn again when the browser reports the change.
        WebDriverWait(browser, 10).until(lambda b: run(b, paper) == colours["--page"])
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_structure_for_assistive_technology(browser):
    problems = run(
        browser,
        """
        const bad = [];
        if (!document.documentElement.lang) bad.push("no language");
        if (document.querySelectorAll("h1").length !== 1) bad.push("not one h1");
        for (const t of document.querySelectorAll("table"))
          if (!t.caption || !t.querySelector("th[scope]")) bad.push("a table without caption or scope");
        for (const e of document.querySelectorAll("section, [role=region], [role=img], figure"))
          if (!e.getAttribute("aria-label") && !e.getAttribute("aria-labelledby")) bad.push(e.outerHTML.slice(0, 80));
        for (const e of document.querySelectorAll("[aria-labelledby]"))
          if (!document.getElementById(e.getAttribute("aria-labelledby"))) bad.push("dangling label");
        const ids = [...document.querySelectorAll("main [id]")].map(e => e.id).filter(i => !/[0-9a-f]{6}/.test(i));
        if (new Set(ids).size !== ids.length) bad.push("an id twice");
        return bad;
        """,
    )
    assert problems == []


def test_it_prints_on_one_column(browser):
    result = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(result["data"]) > 10_000


def test_the_console_is_silent_and_nothing_is_requested(browser, page):
    assert [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")] == []
    urls = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.add(message["params"]["request"]["url"])
    assert {u for u in urls if not u.startswith(("data:", "blob:", "chrome:"))} <= {page}


def contrast(one: str, two: str) -> float:
    """WCAG 2 contrast ratio of two ``#rrggbb`` colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear))

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
