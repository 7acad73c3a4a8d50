"""The page of plots is a document of its own, whatever was replayed."""

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

from asyncmem.cli.replays import page
from asyncmem.replay import Replay, Trace, replay

from .programs import MIB, MS, Program
from .support import trace_of


class Reader(HTMLParser):
    """Collects what a page refers to, and its figures."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.lines: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "polyline":
            self.lines.append(dict(attrs))


def drawn(*replays: Replay) -> Reader:
    """Read the page about some replays."""
    reader = Reader()
    reader.feed(page(replays))
    return reader


def program() -> Trace:
    """Make a program with a hole."""
    return Program().take("a", 8 * MIB).take("b", 24 * MIB).at(50 * MS).free("a").at(90 * MS).take("c", MIB).trace()


def test_each_replay_has_its_lines() -> None:
    """What was reserved, what was live and the largest hole, each over the whole time and within the figure."""
    one = replay(program(), samples=50)
    reader = drawn(one, one)
    assert [line["class"] for line in reader.lines] == ["reserved", "live", "hole"] * 2
    for line in reader.lines:
        points = [tuple(map(float, pair.split(","))) for pair in (line["points"] or "").split()]
        assert len(points) == len(one.samples)
        assert all(0 <= x <= 1000 and 0 <= y <= 320 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No script, no picture, no style sheet, no address."""
    reader = drawn(replay(program(), samples=50))
    assert not {"script", "img", "link", "iframe"} & set(reader.tags)
    assert "http" not in page([replay(program(), samples=50)])


def test_a_name_is_text() -> None:
    """What a file calls its program cannot become a part of the page."""
    trace = program()
    named = Trace(*trace.columns, name="<script>alert(1)</script>")
    text = page([replay(named, samples=10)])
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_figures_are_well_formed() -> None:
    """Each is XML by itself."""
    text = page([replay(program(), samples=50), replay(trace_of([]), samples=50)])
    for part in text.split("<svg")[1:]:
        ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")  # noqa: S314  # our own


def test_without_samples_there_is_a_figure_all_the_same() -> None:
    """An empty one."""
    assert drawn(replay(program())).tags.count("svg") == 1
