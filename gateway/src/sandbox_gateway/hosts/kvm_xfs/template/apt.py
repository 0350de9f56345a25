"""Read the host's own APT configuration, which is used to download the packages of templates."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from sandbox_gateway.command import run_async


def read_host_sources(suite: str, etc_apt: Path = Path("/etc/apt")) -> str:
    """Return the host's APT sources for ``suite``, in deb822 format, or "" if there are none.

    Only entries with the component `main` count, because a vendor's repository may have a suite of the same name. The
    files are parsed here because `apt-get indextargets` omits Signed-By.
    """
    files = [etc_apt / "sources.list", *sorted((etc_apt / "sources.list.d").glob("*"))]
    stanzas: list[dict[str, str]] = []
    for file in files:
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace")
            stanzas += (
                _parse_deb822(text)
                if file.suffix == ".sources"
                else _parse_one_line_style(text)
                if file.suffix == ".list"
                else []
            )
    suite_names = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates"}
    matching_stanzas = []
    for stanza in stanzas:
        suites = [word for word in stanza.get("Suites", "").split() if word in suite_names]
        is_usable = "deb" in stanza.get("Types", "").split() and stanza.get("Enabled", "yes").strip().lower() != "no"
        if suites and is_usable and "main" in stanza.get("Components", "").split():
            matching_stanzas.append({**stanza, "Types": "deb", "Suites": " ".join(suites)})
    if not any(suite in stanza["Suites"].split() for stanza in matching_stanzas):
        return ""
    return "\n".join("".join(f"{key}: {value}\n" for key, value in stanza.items()) for stanza in matching_stanzas)


def _parse_deb822(text: str) -> list[dict[str, str]]:
    stanzas: list[dict[str, str]] = []
    for block in re.split(r"\n[ \t]*\n", text):
        stanza: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line[0] in " \t" and key:
                stanza[key] += f"\n{line}"
            elif ":" in line:
                key, value = line.split(":", 1)
                key = _DEB822_KEYS.get(key.lower(), key)
                stanza[key] = value.strip()
        stanzas.append(stanza)
    return stanzas


_DEB822_KEYS = {
    key.lower(): key for key in ("Types", "URIs", "Suites", "Components", "Enabled", "Signed-By", "Trusted")
}
_SOURCE_LINE_PATTERN = re.compile(
    r"deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>[^#]+)"
)


def _parse_one_line_style(text: str) -> list[dict[str, str]]:
    stanzas = []
    for line in text.splitlines():
        if not (match := _SOURCE_LINE_PATTERN.match(line.strip())):
            continue
        stanza = {"Types": "deb", "URIs": match["uri"], "Suites": match["suite"]}
        stanza["Components"] = match["components"].strip()
        for option in (match["options"] or "").split():
            key, _, value = option.partition("=")
            name = {"signed-by": "Signed-By", "trusted": "Trusted", "check-valid-until": "Check-Valid-Until"}.get(key)
            if name:
                stanza[name] = value.replace(",", " ")
        stanzas.append(stanza)
    return stanzas


async def read_apt_options() -> list[str]:
    """Return the host's APT settings for proxies and date checks."""
    if shutil.which("apt-config") is None:
        return []
    result = await run_async(["apt-config", "dump"], timeout=30, check=False)
    pattern = re.compile(r"^Acquire::((http|https)::Proxy|Check-Valid-Until|Check-Date) ", re.IGNORECASE)
    return [line.rstrip(";") for line in result.stdout.splitlines() if pattern.match(line)]
