"""Every page, wide and narrow: nothing for the browser or axe-core to complain about."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from longtake.queue.records import NewJob, WorkerRecord

HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='hurt = 1'> & \"quotes\" {{ 7 * 7 }}"
NARROW = 360
SIZES = ((NARROW, 740), (1280, 800), (2560, 1440))
# five chunks as the receipt of a video of 49 frames lists them, with measurements beside
DRIFT = [
    {"index": k, "frames": 9 if k == 0 else 10, "measurements": {"colour": c, "sharpness": s}}
    for k, (c, s) in enumerate([(0.0, 0.0), (0.1, 0.05), (0.25, 0.2), (0.5, 0.6), (0.45, 1.2)])
]
# what is there once a page has come to rest
READY = {
    "gallery": "video.live",
    "video": "[data-drift]",
    "making": "video.live",
    "failed": ".wrong",
    "compare": "#compare[data-ready]",
    "queue": ".line",
    "batches": "[data-batch]",
    "workers": "[data-worker]",
    "missing": "h1",
    "login": "#key",
}
PROMPTS = (
    "a red ball bouncing over a green meadow",
    "a blue fish moving left in the dark sea",
    "a yellow star spinning over the hills at night",
    "a small purple boat moving right over the sea at sunset",
    "an orange heart growing in the desert",
    "a pink square circling over the snow",
)


def furnish(site: Any, director: Any) -> dict[str, str]:
    """Videos in every state, a batch and workers; returns the pages to look at."""
    store = site.store
    done = []
    for seed, prompt in enumerate(PROMPTS):
        site.submit(prompt=prompt, seed=seed + 20, num_frames=49)
        done.append(director.make(**({"chunks": DRIFT} if seed == 5 else {})))
    client = site.app.state.service.client
    extended = client.submit({"prompt": PROMPTS[0], "seconds": 6, "video": f"job:{done[0].id}"})
    store.submissions.edit(done[2].id, "local", {"starred": True, "tags": ["night", "keep"]})
    director.take().fail("the accelerator ran out of memory at chunk 3")
    running = site.submit(prompt=PROMPTS[1], seed=71, seconds=8)
    take = director.take()
    for _ in range(5):
        take.chunk()
    take.say(2)
    site.submit(prompt=HOSTILE, seed=1)
    waiting = site.submit(prompt=PROMPTS[3], seed=2, prompts=[{"at": 1.0, "prompt": PROMPTS[4]}])
    store.submissions.edit(waiting.id, "local", {"paused": True})
    batch = store.batches.new("local", "colours of the sea <b>", 2, [{"index": 1, "error": "no"}])
    made: NewJob = client.new_job({"prompt": PROMPTS[1], "num_frames": 17, "seed": 5})
    store.submissions.submit([made], {}, batch=batch)
    for name, state in (("studio", "busy"), ("attic", "idle")):
        now = running.created_at
        store.workers.beat(
            WorkerRecord(
                id=f"worker_{name}",
                host=name,
                pid=4321,
                boot_id=name,
                queue="default",
                state=state,
                model="papercut",
                job_id=running.id if state == "busy" else None,
                engine_pid=4400,
                memory_bytes=913_000_000,
                started_at=now,
                seen_at=now,
                step_at=now if state == "busy" else None,
            )
        )
    return {
        "gallery": "/",
        "video": f"/videos/{done[5].id}",
        "making": f"/videos/{running.id}",
        "failed": f"/videos/{extended.id}",
        "compare": f"/compare?ids={done[0].id},{done[1].id},{done[2].id}",
        "queue": "/queue",
        "batches": "/batches",
        "workers": "/workers",
        "missing": "/videos/video_aaaaaaaaaaaaaaaaaaaaaaaa",
        "login": "/login",
    }


def test_pages_are_sound_at_every_width(
    site: Any, director: Any, visitor: Any, check_access: Any, pictures: Path
) -> None:
    paths = furnish(site, director)
    visitor.expected = ["status of 404"]  # of the page that is missing
    page = visitor.open(site.url)

    def look(name: str, checked: tuple[int, ...]) -> None:
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name} is {wide} px wider than {width}"
            page.screenshot(path=pictures / f"{name}-{width}.png", full_page=width == NARROW)
            if width in checked:
                assert check_access(page) == [], f"{name} at {width}"
        assert page.evaluate("() => window.hurt") is None

    for name, path in paths.items():
        page.goto(site.url + path)
        page.locator(READY[name]).first.wait_for(state="attached")
        look(name, (NARROW, 1280) if name in ("gallery", "video", "queue") else (1280,))
    # everything that opens
    visitor.go(page, site.url)
    page.evaluate(
        "() => { for (const one of document.querySelectorAll('details')) one.open = true }"
    )
    page.locator("article.card .pick input").first.check()
    look("open", (NARROW, 1280))
    page.keyboard.press("?")
    look("keys", (1280,))
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Tag", exact=True).click()
    look("ask", (1280,))


def test_a_prompt_is_text_everywhere(site: Any, director: Any, visitor: Any) -> None:
    job = site.submit(prompt=HOSTILE, seed=1)
    page = visitor.open(site.url)
    page.add_init_script("window.hurt = undefined")
    title = " ".join(HOSTILE.split())
    expect(page.locator("article.card h3")).to_have_text(title)
    director.make()
    expect(page.locator("article.card")).to_have_attribute("data-state", "completed")
    page.locator("article.card .pick input").check()
    page.keyboard.press("Escape")
    visitor.go(page, f"{site.url}/?from={job.id}&as=remix")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(HOSTILE)
    expect(page.locator("#plan")).to_contain_text("does not know")
    visitor.go(page, f"{site.url}/videos/{job.id}")
    expect(page.locator("h1")).to_have_text(HOSTILE)
    page.get_by_role("button", name="Extend").click()
    expect(page.locator("#ask").get_by_label("Prompt")).to_have_value(HOSTILE)
    for path in ("/queue", f"/compare?ids={job.id},{site.submit(prompt=HOSTILE).id}"):
        visitor.go(page, site.url + path)
        expect(page.locator("main")).to_contain_text(title)
    assert page.evaluate("() => window.hurt") is None


def test_keyboard_alone(site: Any, director: Any, visitor: Any) -> None:
    jobs = [site.submit(seed=seed) for seed in range(5)]
    for _ in jobs:
        director.make()
    page = visitor.open(site.url)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.locator("body").press("?")
    expect(page.get_by_role("dialog")).to_contain_text("go from card to card")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.evaluate("() => document.activeElement.blur()")

    def focused() -> str:
        found: str = page.evaluate(
            "() => document.activeElement.closest('.card')?.dataset.id ?? ''"
        )
        return found

    page.keyboard.press("ArrowRight")
    assert focused() == jobs[-1].id
    page.keyboard.press("ArrowRight")
    assert focused() == jobs[-2].id
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"
    page.keyboard.press("s")
    expect(page.locator(f"#card-{jobs[-2].id}")).to_have_attribute("data-starred", "")
    assert focused() == jobs[-2].id, "the focus stays where it was"
    page.keyboard.press("Delete")
    expect(page.locator(f"#card-{jobs[-2].id}")).to_have_count(0)
    page.keyboard.press("z")
    expect(page.locator(f"#card-{jobs[-2].id}")).to_be_visible()
    page.locator(f"#card-{jobs[0].id} h3 a").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/videos/{jobs[0].id}")
    page.locator("html[data-ready]").wait_for(state="attached")
    page.locator("body").press("g")
    page.locator("body").press("q")
    page.wait_for_url("**/queue")


def test_plan_says_what_is_legal(site: Any, visitor: Any) -> None:
    # the browser notes each refusal of the plan
    visitor.expected = ["status of 400"]
    page = visitor.open(site.url)
    page.get_by_label("Prompt", exact=True).fill("a red dragon")
    expect(page.locator("#plan")).to_contain_text("81 frames")
    expect(page.locator("#plan")).to_contain_text("papercut does not know: dragon")
    page.get_by_label("Seconds").fill("2")
    expect(page.locator("#plan")).to_contain_text("33 frames")
    page.locator(".options summary").click()
    page.get_by_label("Size").fill("300x200")
    # what is legal stands there once, as a button
    expect(page.locator("#size-error")).to_have_text(
        "size='300x200': papercut makes no such size: 128x80"
    )
    expect(page.get_by_label("Size")).to_have_attribute("aria-invalid", "true")
    page.locator("#size-error button").click()
    expect(page.locator("#plan")).to_contain_text("33 frames")
    page.locator(".words summary").click()
    page.get_by_label("Prompt", exact=True).fill("a red ")
    page.locator(".words").get_by_role("button", name="ball", exact=True).click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("a red ball")
    page.get_by_role("button", name="Another prompt later on").click()
    page.get_by_label("Seconds", exact=True).nth(1).fill("1")
    page.get_by_label("Prompt from then on").fill("a blue star")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("article.card")).to_have_count(1)
    job = site.store.listings.page("local").jobs[0]
    assert job.request["prompts"] == [{"at": 1.0, "prompt": "a blue star"}]
    assert job.request["size"] == "128x80"


def test_numbers_that_are_none_are_refused_unsent(site: Any, visitor: Any) -> None:
    page = visitor.open(site.url)
    sent: list[str] = []
    page.get_by_label("Prompt", exact=True).fill("a red ball")
    expect(page.locator("#plan")).to_contain_text("81 frames")
    page.on("request", lambda request: sent.append(request.method))
    for label, good, words, values in (
        ("Takes", "1", "Takes: a whole number, 1 to 16", ("99", "0", "-1", "2.5", "", "abc")),
        ("Seconds", "", "Seconds: a number of seconds, such as 5", ("abc", "0")),
        ("Seed", "", "Seed: a whole number from 0", ("abc", "-1", "1.5")),
    ):
        field = page.locator(f"#{label.lower()}")
        for value in values:
            field.fill(value)
            page.get_by_role("button", name="Generate").click()
            expect(page.locator(f"#{label.lower()}-error")).to_have_text(words)
            expect(field).to_have_attribute("aria-invalid", "true")
            expect(field).to_be_focused()
        assert "POST" not in sent, label
        field.fill(good)
        expect(page.locator("#plan")).to_contain_text("81 frames")
        sent.clear()
    page.get_by_label("Takes").fill("2")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("article.card")).to_have_count(2)


def test_plan_says_how_long_it_takes_once_one_is_made(
    site: Any, director: Any, visitor: Any
) -> None:
    page = visitor.open(site.url)
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("a red ball")
    expect(page.locator("#plan")).to_contain_text("of memory")
    expect(page.locator("#plan")).not_to_contain_text("to make")
    site.submit(seed=1)
    director.make()
    expect(page.locator("article.card")).to_have_attribute("data-state", "completed")
    prompt.fill("a red ball spinning")
    expect(page.locator("#plan")).to_contain_text("to make")


def test_start_image_by_paste(site: Any, visitor: Any, tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "start.png"
    Image.new("RGB", (128, 80), "teal").save(picture)
    page = visitor.open(site.url)
    page.get_by_label("Prompt", exact=True).fill("a red ball")
    page.evaluate(
        """data => {
            const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0));
            const clipboardData = new DataTransfer();
            clipboardData.items.add(new File([bytes], "start.png", {type: "image/png"}));
            document.dispatchEvent(new ClipboardEvent("paste", {clipboardData, bubbles: true}));
        }""",
        base64.b64encode(picture.read_bytes()).decode(),
    )
    expect(page.locator("[data-given]")).to_contain_text("start.png")
    expect(page.locator("#plan")).to_contain_text("frames")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("article.card")).to_have_count(1)
    job = site.store.listings.page("local").jobs[0]
    assert job.request["image"].startswith("input:")


def test_login_in_a_browser(settings: Any, visitor: Any, make_site: Any) -> None:
    site = make_site(settings.model_copy(update={"require_keys": True}))
    key, secret = site.store.keys.create("Ada")
    visitor.expected = ["status of 401"]
    page = visitor.open(f"{site.url}/queue", started=False)
    page.get_by_label("API key").fill("lt_wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("#wrong")).to_be_visible()
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/queue")
    job = site.submit(owner=key.id)
    expect(page.locator(f"#card-{job.id}")).to_be_visible()
    assert page.evaluate("() => document.cookie") == ""
    page.locator(f"#card-{job.id}").get_by_role("button", name="Cancel it").click()
    expect(page.locator("ol.lines > li")).to_have_count(0)
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()


@pytest.mark.parametrize("touch", [False, True])
def test_scrub_from_the_sheet(site: Any, director: Any, visitor: Any, touch: bool) -> None:
    site.submit(seed=3, num_frames=49)
    director.make()
    page = visitor.open(site.url, has_touch=touch)
    frame = page.locator(".frame")
    box = frame.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    place = frame.locator(".scrub i")
    seen = []
    for share, moment in ((0.01, "0:00.0"), (0.99, "0:03.0")):
        x = box["x"] + share * box["width"]
        if touch:
            kind = {"pointerType": "touch", "clientX": x, "clientY": y, "bubbles": True}
            frame.locator(".shot").dispatch_event("pointermove", kind)
        else:
            page.mouse.move(x, y)
        expect(frame.locator(".scrub span")).to_have_text(moment)
        seen.append(place.evaluate("place => place.style.backgroundPosition"))
    assert seen[0] != seen[1]
