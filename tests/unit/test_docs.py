"""Links of the documentation lead somewhere, in the repository and on the site, and recipes have the pages they should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shared import script

from recipes import RECIPES, find

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def hooks():
    return script("docs/hooks.py")


@pytest.fixture(scope="module")
def made(hooks):
    return hooks.pages()


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text):
    """As GitHub makes them of headings; mkdocs agrees for words."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere_in_the_repository_and_on_the_site(hooks, made, page):
    for link in links(page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists() and file.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(file.read_text()), link
        there = hooks.site_path(file.relative_to(ROOT).as_posix())
        assert there is None or there in made or (ROOT / "docs" / there).is_file(), link


def test_every_page_is_in_the_navigation(hooks):
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in PAGES[2:]} | {"index.md", "modes.md", "benchmarks.md", "reference.md"} == listed


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_of_a_recipe_has_its_lesson_its_keys_and_its_file(made, recipe):
    page, module = made[f"recipes/{recipe}.md"], find(recipe)
    for key in module.Knobs.__dataclass_fields__.keys() - {"name"}:
        (row,) = re.findall(rf"^\| `recipe.{key}` \| `[^`]+` \| \S.* \|$", page, re.MULTILINE)
        assert row
    source = Path(module.__file__).read_text()
    assert source.strip() in page and module.__doc__.split("\n", 2)[2].strip() in page
    assert (ROOT / "conf" / "recipe" / f"{recipe}.yaml").read_text().strip() in page


def test_links_of_a_page_are_turned_to_pages_and_code_is_left_alone(hooks):
    text = "[a](../recipes/gan.py) [b](DOCTOR.md#causes) [c](../tests/x.py) [d](https://x.y)\n```\n[e](../recipes/gan.py)\n```\n"
    turned = hooks.relinked(text, "docs/GALLERY.md", "GALLERY.md", None)
    assert turned == text.replace("../recipes/gan.py", "recipes/gan.md", 1).replace("[c](../tests/x.py)", "c")
    assert hooks.relinked("[f](#recipes) [g](#use)", "README.md", "index.md", None) == "[f](recipes/index.md) [g](#use)"
    linked = hooks.relinked("[c](tests/x.py)", "README.md", "recipes/index.md", "https://h/o/r/")
    assert linked == "[c](https://h/o/r/blob/main/tests/x.py)"
