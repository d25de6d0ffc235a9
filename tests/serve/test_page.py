"""The live page in headless Chromium."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.browser import chromium
from helpers.serving import drafting_engine, http, running, wait_for
from windfall.engine.engine import Engine
from windfall.serve.settings import Settings

MESSAGE = "Name a river."
TOKENS = 30
ENDED = "() => document.getElementById('stop').hidden"
OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
FRAME = "() => new Promise((done) => requestAnimationFrame(() => done(true)))"
BACKGROUND = "(each) => getComputedStyle(each).backgroundColor"
ELEMENTS = "() => document.querySelectorAll('*').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("browser")) as context:
        yield context


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(drafting_engine(), Settings(request_policies=("chain",))) as made:
        yield made


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page of the server, ready for a message. Nothing may go wrong in its scripts."""
    with opened(browser, url) as made:
        yield made


@contextmanager
def opened(browser: Any, url: str, failures_are_expected: bool = False) -> Iterator[Any]:
    page, wrong = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.goto(url + "/")
    yield page
    page.close()
    assert failures_are_expected or wrong == []


def until(page: Any, script: str) -> None:
    """Wait until this is true. Playwright's own way needs `eval`, which the page forbids."""
    wait_for(lambda: page.evaluate(script))


LINES_OF_LEVELS = """() => [...document.querySelectorAll("#tree .level")].map((level) =>
    [...level.querySelectorAll("rect")].map((box) => Math.round((box.getAttribute("y") - 4) / 24))
    .sort((a, b) => a - b))
"""


def ask(page: Any, text: str = MESSAGE, tokens: int = TOKENS) -> None:
    """Send a message and wait for the end of the answer."""
    page.locator("#max-tokens").evaluate("(field, value) => { field.value = value; }", str(tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")
    until(page, ENDED)
    until(page, FRAME)


def told(url: str, **more: Any) -> list[dict[str, Any]]:
    """The cycles of the answer to the same message, by the API."""
    body = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": TOKENS, "temperature": 0}
    options = {"stream": True, "stream_options": {"include_speculation": True}}
    with http().stream("POST", f"{url}/v1/chat/completions", json={**body, **options, **more}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [chunk["speculation"] for line in lines[:-1] if "speculation" in (chunk := json.loads(line))]


def test_the_answer_is_the_apis_with_each_token_in_its_colour(page: Any, url: str) -> None:
    ask(page)
    tokens = [token for cycle in told(url) for token in cycle["tokens"] if token["text"]]
    shown = page.locator(".answer .token")
    assert shown.evaluate_all("(all) => all.map((each) => each.textContent)") == [token["text"] for token in tokens]
    kinds = shown.evaluate_all("(all) => all.map((each) => each.classList.contains('drafted'))")
    assert kinds == [token["drafted"] for token in tokens] and {*kinds} == {True, False}
    colours = {page.locator(f".answer .{kind}").first.evaluate(BACKGROUND) for kind in ("drafted", "own")}
    assert len(colours) == 2 and f"{TOKENS} tokens" in page.inner_text(".meta")


def test_the_tree_of_each_cycle_has_the_nodes_that_the_api_says(page: Any, url: str) -> None:
    ask(page)
    cycles = told(url)
    page.evaluate("document.getElementById('cycle').focus()")
    page.keyboard.press("Home")
    for place, cycle in enumerate(cycles):
        summary = page.inner_text("#tree-summary")
        assert summary.startswith(f"Cycle {place + 1} of {len(cycles)}: {cycle['drafted_tokens']} drafted")
        own = [token for token in cycle["tokens"] if not token["drafted"]]
        accepted = sum(node["accepted"] for node in cycle["nodes"]) - 1  # the root is no proposal
        verified = sum(node["verified"] for node in cycle["nodes"]) - 1
        count = {kind: page.locator(f"#tree .node.{kind}").count() for kind in ("root", "accepted", "own", "verified")}
        assert count == {"root": 1, "accepted": accepted, "own": len(own), "verified": verified - accepted}
        assert page.locator("#tree .node").count() == len(cycle["nodes"]) + len(own)
        assert page.locator(".token.current").count() == sum(bool(token["text"]) for token in cycle["tokens"])
        labels = sorted(float(text) for text in page.locator("#tree .chance").all_text_contents())
        assert labels == pytest.approx(sorted(node["path_probability"] for node in cycle["nodes"][1:]), abs=0.0051)
        page.keyboard.press("ArrowRight")
        until(page, FRAME)


def test_a_click_on_a_token_shows_its_cycle(page: Any) -> None:
    ask(page)
    token = page.locator(".answer .token").last
    token.click()
    place = int(token.get_attribute("data-cycle"))
    until(page, FRAME)  # the tree is drawn in the next one
    assert page.inner_text("#tree-summary").startswith(f"Cycle {place + 1} of ")


def test_acceptance_by_depth_is_that_of_the_cycles(page: Any, url: str) -> None:
    ask(page)
    depths: dict[int, list[int]] = {}
    for cycle in told(url):
        own = [0]
        for node in cycle["nodes"][1:]:
            own.append(own[node["parent"]] + 1)
        for depth in {d for d, node in zip(own, cycle["nodes"], strict=True) if d and node["verified"]}:
            hit = any(node["accepted"] for d, node in zip(own, cycle["nodes"], strict=True) if d == depth)
            depths.setdefault(depth, []).append(hit)
    expected = [f"{round(100 * sum(hits) / len(hits))}% of {len(hits)}" for _, hits in sorted(depths.items())]
    assert page.locator("#acceptance output").all_inner_texts() == expected and expected


def test_plain_decoding_is_measured_and_the_texts_are_compared(page: Any) -> None:
    ask(page)
    assert page.inner_text("#plain-speed") == "–"
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#measure")
    body = json.loads(asked.value.post_data)
    assert (body["policy"], body["max_tokens"]) == ("none", TOKENS)
    until(page, "() => document.getElementById('verdict').textContent.includes('equal')")
    assert f"The same text: all {TOKENS} tokens are equal." in page.inner_text("#verdict")
    for name in ("drafts", "plain"):
        assert float(page.inner_text(f"#{name}-speed").split()[0].replace(",", "")) > 0


def test_a_text_that_differs_is_not_called_the_same(page: Any) -> None:
    ask(page)

    def other_seed(route: Any) -> None:
        body = {**json.loads(route.request.post_data), "temperature": 1, "seed": 5}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", other_seed)
    page.click("#measure")
    until(page, "() => document.getElementById('verdict').textContent.includes('differ')")
    assert "same" not in page.inner_text("#verdict")


def test_settings_are_sent_and_a_random_seed_is_shown(page: Any) -> None:
    page.click("summary")
    page.fill("#temperature", "0.8")
    page.select_option("#policy", "chain")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page)
    body = json.loads(asked.value.post_data)
    assert (body["temperature"], body["policy"], body["max_tokens"]) == (0.8, "chain", TOKENS)
    assert f"seed {body['seed']}" in page.inner_text(".meta")
    page.fill("#temperature", "-1")
    page.fill("#message", MESSAGE)
    page.press("#message", "Enter")
    assert page.locator(".question").count() == 1 and page.evaluate("!form.checkValidity()")


def test_the_next_message_has_the_conversation(page: Any) -> None:
    ask(page, tokens=6)
    first = "".join(page.locator(".answer .token").all_text_contents())
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "And a lake?", tokens=6)
    roles = [(each["role"], each["content"]) for each in json.loads(asked.value.post_data)["messages"]]
    assert roles == [("user", MESSAGE), ("assistant", first), ("user", "And a lake?")]
    assert page.locator(".answer").count() == 2


def test_a_model_without_a_chat_template_continues_the_text(browser: Any) -> None:
    with running(drafting_engine(chats=False)) as url, opened(browser, url) as page:
        until(page, "() => document.getElementById('message').placeholder === 'Begin a text'")
        with page.expect_request("**/v1/completions") as asked:
            ask(page, "Once", tokens=8)
        assert json.loads(asked.value.post_data)["prompt"] == "Once"
        text = "".join(page.locator(".answer .token").all_text_contents())
    assert text == drafting_engine(chats=False).generate("Once", max_new_tokens=8).text


# ---- stopping, errors and keys


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine, with passes that take long."""
    made = drafting_engine()
    score = made.target.score

    def late(trees: Any) -> Any:
        time.sleep(0.05)
        return score(trees)

    monkeypatch.setattr(made.target, "score", late)
    return made


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop(page: Any, slow: Engine, way: str) -> None:
    page.fill("#message", MESSAGE)
    page.press("#message", "Enter")
    page.locator(".answer .token").nth(8).wait_for()
    page.click("#stop") if way == "button" else page.keyboard.press("Escape")
    until(page, ENDED)
    assert "stopped" in page.inner_text(".meta")
    wait_for(lambda: slow.running == 0)
    assert 0 < page.locator(".answer .token").count() < 200
    assert page.locator("#measure").is_enabled() and page.locator("#send").is_visible()


def test_an_error_is_shown_and_the_message_can_be_changed(browser: Any, url: str) -> None:
    with opened(browser, url, failures_are_expected=True) as page:
        long = "a" * 600
        ask(page, long)
        error = page.locator("[role=alert]")
        answer = http().post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
        assert error.inner_text() == f"Error: {answer.json()['error']['message']}"
        assert page.input_value("#message") == long and page.locator(".answer").count() == 0
        ask(page)
        assert page.locator(".answer .token").count() > 0


def test_a_server_that_is_gone_is_an_error(browser: Any, url: str) -> None:
    with opened(browser, url, failures_are_expected=True) as page:
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page)
        assert page.inner_text("[role=alert]") == "Error: the server cannot be reached"


def test_the_page_asks_for_the_key(browser: Any) -> None:
    with (
        running(drafting_engine(), Settings(api_keys=("secret",))) as url,
        opened(browser, url, failures_are_expected=True) as page,
    ):
        for key, note in (("wrong", "until this tab is closed"), ("secret", "does not accept this key")):
            page.locator("#key-dialog[open]").wait_for()
            assert note in page.inner_text("#key-note")
            page.fill("#key", key)
            page.press("#key", "Enter")
        until(page, "() => document.getElementById('about').textContent.startsWith('tiny')")
        ask(page)
        assert page.locator(".answer .token").count() > 0
        assert "secret" not in page.content()


# ---- load


def test_the_load_shows_running_and_waiting_texts(page: Any, url: str, slow: Engine) -> None:
    body = {"prompt": "Name a", "max_tokens": 60, "ignore_eos": True, "n": 6}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http().post, f"{url}/v1/completions", json=body)
        until(page, "() => document.querySelector('.figure').textContent === '4 running, 2 waiting'")
        until(
            page, "() => document.getElementById('load-note').textContent.includes('Shared budget of the last round')"
        )
        assert answer.result().status_code == 200
    assert page.locator("#plots .plot").count() == 5


# ---- looks and keys


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_width_scrolls_sideways(page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=scheme)
    ask(page, "a river " * 3 + "w" * 60, tokens=12)
    page.click("summary")
    assert page.evaluate(OVERFLOW) == 0
    ground = page.locator("body").evaluate(BACKGROUND)
    brightness = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert brightness < 40 if scheme == "dark" else brightness > 215


def test_on_a_phone_the_tree_is_seen_without_scrolling(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    ask(page)
    page.evaluate("scrollTo(0, 0)")
    for selector in ("#message", ".answer .text", "#tree-summary", "#tree .node.root"):
        top = page.locator(selector).first.evaluate("(part) => part.getBoundingClientRect().bottom")
        assert 0 < top < 740 - 40, selector
    assert page.evaluate(OVERFLOW) == 0


def test_the_drawing_of_a_tree_has_no_gaps(page: Any) -> None:
    """In each level, a node is just below the one before it, unless its parent is lower. The first line is the path."""
    ask(page)
    lines = page.evaluate(LINES_OF_LEVELS)
    assert max(len(level) for level in lines) > 1
    for above, level in itertools.pairwise(lines):
        assert level == sorted(level) and len({*level}) == len(level)
        assert all(line == before + 1 or line in above for before, line in itertools.pairwise([-1, *level]))
    first = page.locator("#tree .node.accepted rect, #tree .node.own rect")
    assert len({*first.evaluate_all("(all) => all.map((each) => each.getAttribute('y'))")}) == 1


def test_the_keyboard_is_enough(page: Any) -> None:
    focused = "() => document.activeElement.id || document.activeElement.tagName"
    until(page, "() => document.activeElement.id === 'message'")
    page.keyboard.type("Name")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("a river.")
    assert page.input_value("#message") == "Name\na river."
    page.keyboard.press("Enter")
    until(page, ENDED)
    assert page.locator(".question").inner_text() == "Name\na river." and page.evaluate(focused) == "message"
    order = []
    for _ in range(20):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
        if order[-1] == "measure":
            break
    wanted = ["send", "SUMMARY", "previous", "cycle", "next", "tree", "measure"]
    assert [each for each in order if each in wanted] == [each for each in wanted if each in order]
    assert {"send", "SUMMARY", "cycle", "measure"} <= {*order}
    page.keyboard.press("Enter")
    until(page, "() => document.getElementById('verdict').textContent.includes('same text')")
    assert page.inner_text("#status").endswith("are equal.")


def test_every_control_has_a_name(page: Any) -> None:
    page.click("summary")
    unnamed = page.locator("button, input, select, textarea").evaluate_all(
        "(all) => all.filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.id)"
    )
    assert unnamed == []


def test_reduced_motion_shows_trees_at_once(page: Any, slow: Engine) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(
        """() => { window.hid = 0; new MutationObserver(() => {
            window.hid += document.querySelectorAll("#tree .hidden").length;
        }).observe(document.getElementById("tree"), { childList: true, subtree: true, attributes: true }); }"""
    )
    ask(page, tokens=16)
    assert page.locator("#tree svg.judged").count() == 1 and page.evaluate("window.hid") == 0


def test_a_long_answer_with_large_trees_keeps_the_page_small(page: Any) -> None:
    """200 cycles with trees of 60 nodes, all at once."""
    nodes = [{"parent": (n - 1) // 3 if n else -1, "id": n, "text": f" w{n}", "verified": n < 30} for n in range(60)]
    for number, node in enumerate(nodes):
        node |= {"probability": 0.5, "path_probability": 0.9**number, "accepted": number in (0, 1, 4)}
    counts = {"draft_passes": 4, "drafted_tokens": 59, "verified_tokens": 29, "accepted_tokens": 2, "left_out": 0}
    tokens = [{"id": n, "text": f" w{n}", "drafted": n < 2} for n in range(3)]
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": " w0 w1 w2"}, "finish_reason": None}]}
    cycle = {"index": 0, "seconds": {}, "tokens": tokens, "nodes": nodes, "whole_tree": True, **counts}
    lines = [json.dumps({**chunk, "speculation": {**cycle, "at": 0.01 * n}}) for n in range(1, 201)]
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    before = page.evaluate(ELEMENTS)
    page.evaluate(
        "() => { window.drawn = 0; new MutationObserver(() => { drawn += 1; }).observe(tree, { childList: true }); }"
    )
    started = time.monotonic()
    ask(page)
    assert time.monotonic() - started < 5
    assert page.locator(".answer .token").count() == 600
    of_a_tree = 62 * 6 + 20
    assert page.evaluate(ELEMENTS) - before < 600 + of_a_tree + 30
    assert page.evaluate("window.drawn") < 20
    ask(page)
    assert page.evaluate(ELEMENTS) - before < 600 + 400 + of_a_tree + 40  # neighbours of one colour were joined
