"""Test that `./dev docs` builds a site from the guides and the reference."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import session

GUIDE_NAMES = sorted(path.stem for path in (session.REPOSITORY / "docs").glob("*.md"))
REFERENCE_NAMES = [
    *(f"{path.stem}_module" for path in sorted((session.REPOSITORY / "plugins" / "modules").glob("*.py"))),
    *(f"{path.stem}_callback" for path in sorted((session.REPOSITORY / "plugins" / "callback").glob("*.py"))),
    *(f"{path.stem}_connection" for path in sorted((session.REPOSITORY / "plugins" / "connection").glob("*.py"))),
    *(f"{path.stem}_lookup" for path in sorted((session.REPOSITORY / "plugins" / "lookup").glob("*.py"))),
    *(f"{path.stem}_inventory" for path in sorted((session.REPOSITORY / "plugins" / "inventory").glob("*.py"))),
    *(f"{path.name}_role" for path in sorted((session.REPOSITORY / "roles").iterdir())),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Any warning during the build, for example about a broken link, is an error."""
    path = tmp_path_factory.mktemp("docs") / "site"
    argv = [str(session.REPOSITORY / "dev"), "docs", str(path)]
    result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return path


@pytest.mark.parametrize(
    "page", [*(f"guides/{name}" for name in GUIDE_NAMES), *(f"reference/{name}" for name in REFERENCE_NAMES)]
)
def test_every_page_has_a_title_and_a_link(site: Path, page: str) -> None:
    text = (site / f"{page}.html").read_text()
    (title,) = re.findall(r"<h1>(.*?)<a class=", text, re.DOTALL)
    title_text = html.unescape(re.sub("<.*?>", "", title))
    source_file = session.REPOSITORY / "docs" / f"{Path(page).name}.md"
    expected_title = (
        source_file.read_text().splitlines()[0].removeprefix("# ") if page.startswith("guides/") else "grove.sandbox."
    )
    assert title_text.startswith(expected_title.replace("`", ""))
    start_page = (site / "index.html").read_text()
    reference_index = (site / "reference" / "index.html").read_text()
    assert f'href="{page}.html' in start_page or f'href="{Path(page).name}.html' in reference_index


def test_guides_link_to_each_other_within_the_site(site: Path) -> None:
    text = (site / "guides" / "README.html").read_text()
    for name in GUIDE_NAMES:
        assert name == "README" or f'href="{name}.html"' in text, name


def test_options_and_returned_values_are_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "sandbox_fork_module.html").read_text()
    for element_id in ("parameter-name_prefix", "parameter-gateway_url", "return-outcomes", "attribute-check_mode"):
        assert f'id="{element_id}"' in text, element_id


def test_the_site_loads_no_external_resources(site: Path) -> None:
    for page in site.rglob("*.html"):
        urls = re.findall(r'<(?:script|img|link)\b[^>]*?(?:src|href)="([^"]+)"', page.read_text())
        assert not [url for url in urls if re.match(r"(https?:)?//", url)], page
