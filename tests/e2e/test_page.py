"""The page in a real Chromium, over files with `trainer view`."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from bench.page_run import write_eval, write_run
from tests.e2e.page_view import WAIT_MS, View, open_page
from trainer.page import batches
from trainer.page.batches import Attempt, Group
from trainer.page.report import write_report

ATTACK = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
STEPS = 12
RUN = "#/run/demo/synthetic"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with twelve steps, the newest of which holds an attack."""
    root = tmp_path_factory.mktemp("page")
    run = write_run(root, steps=STEPS - 1, attempts=16, generations=4, tokens=60)
    write_run(root, name="other", steps=3, attempts=8, generations=4, seed=1)
    messages = [
        {"role": "user", "content": ATTACK},
        {"role": "assistant", "content": f"{ATTACK}\x00\x1b[31m", "trained": True},
    ]
    attempts = [
        Attempt(
            **{"number": number, "example": ATTACK, "reward": float(number), "preview": ATTACK},
            conversations=[{"messages": messages}],
            parts={ATTACK: 1.0},
            metadata={"reason/judge": ATTACK},
            finish=ATTACK,
        )
        for number in range(2)
    ]
    path = batches.path_of(run, STEPS, batches.TRAIN)
    batches.write(path, {"step": STEPS}, [Group(attempts, ATTACK)], {}, split=batches.TRAIN)
    line = {"step": STEPS, "train/reward": 0.5, "num_gradient_steps": 1.0, f"train/{ATTACK}": 1.0}
    with (run / "history.jsonl").open("a", encoding="utf-8") as history:
        history.write(json.dumps({**line, "recorded_at": 1.8e9}) + "\nhalf a li")
    return root


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    with View(directory) as address:
        yield address


def test_every_character_of_a_token_is_drawn(page: Page, address: str) -> None:
    page.goto(address)
    unseen = page.evaluate("""async () => {
        const { drawn } = await import("/files/format.js");
        const box = document.body.appendChild(document.createElement("div"));
        box.className = "tokens";
        const texts = Array.from({ length: 0x3001 }, (_, code) => String.fromCodePoint(code));
        const spans = [...texts, "", "\\r\\n", " \\t", "\\u200d\\n"].map((text) => {
            const span = document.createElement("span");
            span.textContent = drawn(text);
            box.append(span, document.createElement("br"));
            return [text, span];
        });
        const isDrawn = ([, span]) => span.getBoundingClientRect().width > 0;
        return spans.filter((one) => !isDrawn(one)).map(([text]) => text);
    }""")
    assert unseen == []


def test_a_reader_goes_from_a_step_to_a_group_to_its_tokens(page: Page, address: str) -> None:
    open_page(page, address, RUN)
    expect(page.locator("#reward figure.large")).to_have_attribute("data-last", str(STEPS))
    bar = page.locator(".stepbar")
    box = bar.bounding_box()
    assert box
    bar.click(position={"x": box["width"] * (4.5 / STEPS), "y": 40})
    expect(page.locator(".batch h3")).to_have_text("Batch of step 5")
    page.locator(".rows .row").nth(1).click()
    first = page.locator(".attempt").first
    expect(first).to_contain_text("look_up")
    expect(first).to_contain_text("It is terse.")
    expect(page.locator(".attempt")).to_have_count(4)
    for card in page.locator(".attempt").all():
        score = card.locator(".score strong").text_content()
        assert score and re.fullmatch(r"[01]\.\d{3}", score)
        expect(card.locator(".part.whole .number")).to_have_text(score)
    first.get_by_role("button", name="Tokens").click()
    tokens = page.locator(".tokens .token")
    expect(tokens).to_have_count(60)
    by_logprob = tokens.last.get_attribute("class")
    assert by_logprob and re.search(r" q\d", by_logprob)
    for name, colour in (
        ("Advantage", r" (z|[np]\d)"),
        ("Mask", " p2"),
        ("Engine", r" (z|[np]\d)"),
    ):
        page.locator(".choice label", has_text=name).last.click()
        expect(tokens.last).to_have_class(re.compile(colour))
    tokens.last.hover()
    expect(page.locator("#tip")).to_contain_text("logprob")
    expect(page.locator("#tip")).to_contain_text("sampled by")
    assert "/step/5/group/" in page.url and "/colour/gap" in page.url
    page.reload()  # the address leads back to the same tokens
    expect(tokens).to_have_count(60)


def test_two_steps_and_two_runs_are_compared(page: Page, address: str) -> None:
    open_page(page, address, RUN)
    page.locator("nav a", has_text="Compare").click()
    result = page.locator("#compare .result")
    expect(result).to_contain_text("20 validation examples that both have, step 10 scores")
    page.locator("#compare select").nth(0).select_option("5")
    expect(result).to_contain_text("against step 5")
    page.locator("#compare select").nth(2).select_option("demo/other")
    page.locator("#compare select").nth(1).select_option("3")
    expect(result).to_contain_text("step 3 of demo/other")


def test_what_a_model_writes_is_text_and_nothing_else(
    page: Page, address: str, directory: Path, tmp_path: Path
) -> None:
    open_page(page, address, f"{RUN}/step/{STEPS}/group/1")
    expect(page.locator(".attempt .message").last).to_contain_text(ATTACK)
    expect(page.locator(".rows .row").first).to_contain_text(ATTACK)
    for panel in ("verdict", "reward", "examples", "attempts", "audit", "compare", "records"):
        page.locator("nav a", has_text=re.compile(f"^{panel}$", re.IGNORECASE)).click()
        expect(page.locator(f"#{panel}")).to_have_attribute("data-ready", re.compile("."))
    expect(page.locator("#examples")).to_contain_text(ATTACK)
    assert "not complete" in (page.locator("#verdict").text_content() or "")
    _assert_harmless(page)
    run = directory / "demo" / "models" / "synthetic"
    page.goto(write_report(run, tmp_path / "report.html").as_uri())
    expect(page.locator("body")).to_contain_text(ATTACK)
    _assert_harmless(page)


def _assert_harmless(page: Page) -> None:
    page.wait_for_timeout(300)  # an image that fails to load would run its `onerror` by now
    assert page.title() != "owned"
    assert page.locator("main img").count() == page.locator("main script").count() == 0


def test_the_page_works_by_keyboard(page: Page, address: str) -> None:
    open_page(page, address, RUN)
    expect(page.locator(".batch h3")).to_have_text(f"Batch of step {STEPS}")
    # Both before the browser says that the address has changed.
    page.evaluate("for (const key of 'kk') dispatchEvent(new KeyboardEvent('keydown', {key}))")
    expect(page.locator(".batch h3")).to_have_text(f"Batch of step {STEPS - 2}")
    page.keyboard.press("j")
    expect(page.locator(".batch h3")).to_have_text(f"Batch of step {STEPS - 1}")
    page.locator(".stepbar").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".batch h3")).to_have_text(f"Batch of step {STEPS - 2}")
    expect(page.locator(".stepbar")).to_have_attribute("aria-valuenow", str(STEPS - 2))
    page.keyboard.press("Enter")
    expect(page.locator(".rows")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".attempt")).to_have_count(4)
    page.locator(".open-tokens").first.focus()
    page.keyboard.press("Enter")
    token = page.locator(".tokens .token").first
    token.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tokens .token").nth(1)).to_be_focused()
    expect(page.locator("#tip")).to_contain_text("id")
    page.keyboard.press("t")
    expect(page.locator("input[value=advantage]")).to_be_checked()
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


def test_every_panel_fits_a_telephone_and_has_names_for_screen_readers(
    browser: Browser, address: str
) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
    page.set_default_timeout(WAIT_MS)
    open_page(page, address, f"{RUN}/step/5/group/2/attempt/6")
    expect(page.locator(".tokens .token")).to_have_count(60)
    for link in page.locator("nav[aria-label=Panels] a").all():
        link.click()
    widths: Any = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    overlapping = page.evaluate(
        """[...document.querySelectorAll(".bar select, .bar .chip, .bar .newest, .bar button")]
        .map((it) => it.getBoundingClientRect())
        .filter((box, at, all) => at && box.left < all[at - 1].right - 0.5).length"""
    )
    assert overlapping == 0
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, select, input, [role=slider], figure, canvas")]
        .filter((it) => it.tagName !== "CANVAS" && !it.ariaLabel && !it.textContent.trim()
          && !it.labels?.length).map((it) => it.outerHTML)"""
    )
    assert nameless == []
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(background) != dark
    page.close()


def test_a_directory_without_runs_says_what_is_missing(page: Page, tmp_path: Path) -> None:
    with View(tmp_path) as address:
        page.goto(address)
        expect(page.locator("#verdict")).to_contain_text("There is no run yet.")
        run = write_run(tmp_path, steps=1, attempts=4, generations=4)
        expect(page.locator("#verdict")).to_contain_text("Step 1")
        shutil.rmtree(run / "batches")
        page.reload()
        expect(page.locator("#verdict")).to_contain_text("thing is missing or damaged")


def test_a_large_group_is_read_page_by_page(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, steps=1, attempts=150, generations=150, tokens=4)
    with View(tmp_path) as address:
        open_page(page, address, f"{RUN}/step/1/group/1")
        for shown in (64, 128, 150):
            expect(page.locator(".attempt")).to_have_count(shown)
            if shown < 150:
                expect(page.locator("#attempts .pager")).to_contain_text(f"{shown} of 150 attempts")
                page.locator(".more-attempts").click()
        expect(page.locator(".more-attempts")).to_have_count(0)


def test_an_evaluation_leads_to_the_attempts_behind_its_numbers(page: Page, tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=1, attempts=4, generations=4)
    write_eval(run, "val", examples=12, generations=2)
    with View(tmp_path) as address:
        open_page(page, address, RUN)
        page.locator("nav a", has_text="Evaluations").click()
        panel = page.locator("#evals")
        expect(panel).to_contain_text("12 examples, each 2 times")
        expect(panel).to_contain_text("By example, the largest differences first")
        panel.locator(".eval-examples tr.opens").first.click()
        expect(panel.locator(".eval-attempts .attempt")).to_have_count(4)
        write_eval(run, "another", examples=3, generations=1)
        page.reload()
        expect(panel.locator("option")).to_have_count(2)
