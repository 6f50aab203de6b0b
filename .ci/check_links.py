"""Check that every relative link of the documentation leads to a file, and every fragment to a heading.

Run from anywhere: `python .ci/check_links.py` reads the Markdown files at the top of the repository and in docs/.
Links to other hosts are not followed. Exit code 1, with one line a broken link, when there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`+[^`\n]*`+")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def anchors(text: str) -> set[str]:
    """Fragments of a page's headings, made as GitHub makes them; a repeated heading gets a number."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        count = 0
        while (anchor := f"{slug}-{count}" if count else slug) in found:
            count += 1
        found.add(anchor)
    return found


def links(text: str) -> Iterator[str]:
    """Targets of a page's links and images, but for those inside code and those to other hosts."""
    for target in LINK.findall(INLINE_CODE.sub("", FENCE.sub("", text))):
        if not SCHEME.match(target):
            yield target


def broken_links(page: Path) -> Iterator[str]:
    """One line for every link of `page` that leads nowhere."""
    for target in links(page.read_text(encoding="utf-8")):
        name, _, fragment = target.partition("#")
        path = page.parent / unquote(name) if name else page
        if not path.exists():
            yield f"{page}: {target}: no such file"
        elif fragment and path.suffix == ".md" and fragment not in anchors(path.read_text(encoding="utf-8")):
            yield f"{page}: {target}: no such heading in {path.name}"


def main(root: Path) -> int:
    """Check the pages under `root`; returns the exit code."""
    pages = [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
    broken = [line for page in pages for line in broken_links(page)]
    for line in broken:
        print(line, file=sys.stderr)
    if not broken:
        print(f"{len(pages)} pages, no broken link")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
