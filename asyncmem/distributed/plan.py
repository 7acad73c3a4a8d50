"""The plan of a pipeline over workers: which stage runs where, and how items go from one to the next. Without I/O.

Every edge from one process to another has a window, which is kept for it: of the receiver's memory where bytes go by
TCP or UCX, of the sender's where memory is shared. Every stage has memory of its own. All of it is within the limits of
the workers, or there is no plan.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal

from asyncmem.core import GRANULE
from asyncmem.errors import Described, InvalidRequest, StageLost
from asyncmem.figures import format_count, format_size
from asyncmem.pipeline.report import table
from asyncmem.pipeline.stage import RESULTS, granules
from asyncmem.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncmem.pipeline.stage import AnyStage

Kind = Literal["process", "share", "ucx", "tcp"]
"""How items go over an edge: as they are, as descriptors of shared memory, or as bytes."""

SOURCE: Final = "source"
RESULTS_OF: Final = "results"
MOST_WINDOW: Final = 64 << 20
"""The window of an edge where nothing else is said and there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A process that can run stages, and what it has."""

    name: str
    """Dask's address of the worker."""
    pid: int = 0
    """The process."""
    place: str = ""
    """Processes of the same place can share memory; "" can share none."""
    address: str = ""
    """Where its links listen, as "127.0.0.1:4711"."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most bytes that a pipeline may have there, by device."""

    unshared: tuple[str, ...] = ()
    """The devices whose memory other processes cannot open."""
    ucx: bool = False
    """Whether bytes may go by UCX."""
    note: str = ""
    """What the plan says of it."""

    def device(self, wanted: str | None) -> str | None:
        """Return the name of a device that a stage asks for, by its name or its kind; None where there is none."""
        wanted = wanted or "host"
        return next((name for name in self.limits if wanted in {name, name.partition(":")[0]}), None)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a stage that runs in one process; the source and the results are parts of their own."""

    stage: str
    node: int
    device: str
    workers: int
    """How many items it works on at once."""
    nbytes: int
    """What it may hold: all of its items, here and on their way behind it."""
    at: int
    """Which of the stage's parts it is."""
    index: int
    """The stage's number; that of the source is -1."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The way from a part of one stage to a part of the next."""

    sender: int
    receiver: int
    kind: Kind
    window: int
    """Bytes that are kept for items on it, in each of its homes."""


@dataclass(frozen=True)
class Plan:
    """Where the stages of a pipeline run, and how its items go; printed, a table."""

    nodes: tuple[Node, ...]
    """The processes; the first is the client's."""
    parts: tuple[Part, ...]
    """The parts of all stages in their order, the source first and the results last."""
    edges: tuple[Edge, ...]
    """All ways from one part to another, by their numbers."""

    def __str__(self) -> str:
        """Lay it out as a table."""
        head = ("stage", "worker", "device", "at once", "memory", "from", "link", "window")
        rows = [row for part in range(1, len(self.parts)) for row in self._rows(part)]
        notes = [printable(f"{node.name}: {node.note}") for node in self.nodes if node.note]
        return "\n".join([*table([head, *rows], left=3), *notes])

    def _rows(self, number: int) -> list[tuple[str, ...]]:
        part = self.parts[number]
        own = (
            printable(part.stage),
            printable(self.nodes[part.node].name),
            part.device,
            str(part.workers or ""),
            format_size(part.nbytes) if part.nbytes else "",
        )
        rows: list[tuple[str, ...]] = []
        for edge in map(self.edges.__getitem__, self.into(number)):
            sender = self.parts[edge.sender]
            window = format_size(edge.window) if edge.window else ""
            origin = printable(f"{sender.stage}, {self.nodes[sender.node].name}")
            rows.append((*(own if not rows else ("",) * len(own)), origin, edge.kind, window))
        return rows

    def ends_of(self, edge: Edge) -> tuple[int, int]:
        """Return the processes between which an edge is."""
        return self.parts[edge.sender].node, self.parts[edge.receiver].node

    def name_of(self, edge: Edge) -> str:
        """Return what errors call an edge."""
        return f"{self.parts[edge.sender].stage} -> {self.parts[edge.receiver].stage}"

    def out_of(self, part: int) -> list[int]:
        """Return the numbers of the edges that begin at a part, in the order of the parts behind."""
        return self._edges_of[0][part]

    def into(self, part: int) -> list[int]:
        """Return the numbers of the edges that end at a part, in the order of the parts before."""
        return self._edges_of[1][part]

    @cached_property
    def _edges_of(self) -> tuple[list[list[int]], list[list[int]]]:
        """Of each part, the numbers of the edges that begin there, and of those that end there."""
        out: list[list[int]] = [[] for _ in self.parts]
        into: list[list[int]] = [[] for _ in self.parts]
        for number, edge in enumerate(self.edges):
            out[edge.sender].append(number)
            into[edge.receiver].append(number)
        return out, into


def make_plan(stages: Sequence[AnyStage], nodes: Sequence[Node], *, window: int | None = None) -> Plan:
    """Place the stages, and divide the memory of the workers.

    The workers of a stage, as many as it works on items at once, go to the processes that have the least to do so far;
    where there are fewer processes, some get several.

    Args:
        stages: The stages in their order.
        nodes: The client, and the workers.
        window: Bytes to keep for each edge; None for what there is room for, up to 64 MiB.

    Raises:
        InvalidRequest: What stages and edges need is more than a limit; the text has the sums.
        StageLost: No worker has a stage's device.
    """
    parts = [Part(SOURCE, 0, "host", 0, 0, 0, -1)]
    load = [0] * len(nodes)
    for index, stage in enumerate(stages):
        parts += _place(stage, index, nodes, load)
    parts.append(Part(RESULTS_OF, 0, "host", 0, 0, 0, len(stages)))
    by_stage = defaultdict[int, list[int]](list)
    for number, part in enumerate(parts):
        by_stage[part.index].append(number)
    edges = [
        _join(sender, receiver, parts, nodes)
        for index in range(-1, len(stages))
        for sender in by_stage[index]
        for receiver in by_stage[index + 1]
    ]
    return _divide(stages, Plan(tuple(nodes), tuple(parts), tuple(edges)), window)


def _place(stage: AnyStage, index: int, nodes: Sequence[Node], load: list[int]) -> list[Part]:
    able = [(number, device) for number, node in enumerate(nodes) if number and (device := node.device(stage.device))]
    if not able:
        device = stage.device or "host"
        raise StageLost(stage.name, 0, f"no worker has its device {device!r}" if nodes[1:] else "there is no worker")
    chosen = sorted(able, key=lambda one: load[one[0]])[: stage.workers]
    parts = []
    for at, (number, device) in enumerate(chosen):
        workers = len(range(at, stage.workers, len(chosen)))
        load[number] += workers
        parts.append(Part(stage.name, number, device, workers, 0, at, index))
    return parts


def _join(sender: int, receiver: int, parts: Sequence[Part], nodes: Sequence[Node]) -> Edge:
    one, other = parts[sender].node, parts[receiver].node
    if one == other:
        return Edge(sender, receiver, "process", 0)
    shares = nodes[one].place and parts[sender].device not in nodes[one].unshared
    if shares and nodes[one].place == nodes[other].place:
        return Edge(sender, receiver, "share", 0)
    return Edge(sender, receiver, "ucx" if nodes[one].ucx and nodes[other].ucx else "tcp", 0)


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Claim:
    """What a part or an edge wants of a device's memory.

    Attributes:
        what: What the error calls it.
        least: The bytes without which there is no plan.
        most: What it has a use for; None for any number.
    """

    what: str
    least: int
    most: int | None
    given: int = 0


def _divide(stages: Sequence[AnyStage], plan: Plan, window: int | None) -> Plan:
    """Give each part and each edge its bytes: what it needs first, and of the rest an equal part."""
    claims = defaultdict[tuple[int, str], list[_Claim]](list)
    of_parts = [_claim_of_part(stages, part) for part in plan.parts]
    of_edges = [
        {home: _claim_of_edge(stages, plan, edge, window) for home in _homes_of(plan, edge)} for edge in plan.edges
    ]
    for part, claim in zip(plan.parts, of_parts, strict=True):
        if claim.least:
            claims[part.node, part.device].append(claim)
    for homes in of_edges:
        for home, claim in homes.items():
            claims[home].append(claim)
    for (node, device), some in claims.items():
        _share_out(plan.nodes[node], device, some)
    return Plan(
        plan.nodes,
        tuple(
            Part(part.stage, part.node, part.device, part.workers, claim.given, part.at, part.index)
            for part, claim in zip(plan.parts, of_parts, strict=True)
        ),
        tuple(
            Edge(edge.sender, edge.receiver, edge.kind, min((one.given for one in homes.values()), default=0))
            for edge, homes in zip(plan.edges, of_edges, strict=True)
        ),
    )


def _homes_of(plan: Plan, edge: Edge) -> set[tuple[int, str]]:
    """Return whose memory an edge needs, on which devices: arrays of a GPU go over TCP and UCX by the host's memory."""
    sender, receiver = plan.parts[edge.sender], plan.parts[edge.receiver]
    if edge.kind == "process":
        return set()
    if edge.kind == "share":
        return {(sender.node, sender.device)}
    homes = {(receiver.node, "host"), (receiver.node, receiver.device)}
    return homes if sender.device == "host" else homes | {(sender.node, "host")}


def _claim_of_part(stages: Sequence[AnyStage], part: Part) -> _Claim:
    if not part.workers:
        return _Claim(part.stage, 0, 0)
    stage = stages[part.index]
    needs = granules(stage.credit or GRANULE) * (part.workers + RESULTS)
    if stage.pool is not None:
        if stage.pool < needs:
            most = f"at least {format_size(needs)}: {part.workers + RESULTS} x {format_size(stage.credit or GRANULE)}"
            raise InvalidRequest(f"pool of {stage.name}", Described(format_size(stage.pool)), most)
        return _Claim(f"stage {stage.name}", granules(stage.pool), granules(stage.pool))
    return _Claim(f"stage {stage.name}", needs, needs if stage.credit == 0 else None)


def _claim_of_edge(stages: Sequence[AnyStage], plan: Plan, edge: Edge, window: int | None) -> _Claim:
    sender, what = plan.parts[edge.sender], f"edge {plan.name_of(edge)}"
    item = granules(next((one for i in range(sender.index, -1, -1) if (one := stages[i].credit) != 0), None) or GRANULE)
    if window is None:
        return _Claim(what, item + _HEAD, max(item + _HEAD, MOST_WINDOW))
    if window < item:
        raise InvalidRequest(
            "window", Described(format_size(window)), f"at least {format_size(item)}, an item of {what}"
        )
    return _Claim(what, granules(window), granules(window))


_HEAD: Final = 4 * GRANULE
"""What an item takes besides its arrays."""


def _share_out(node: Node, device: str, claims: Sequence[_Claim]) -> None:
    limit = node.limits.get(device, 0) // GRANULE * GRANULE
    needs = sum(claim.least for claim in claims)
    if needs > limit:
        sums = " + ".join(f"{claim.what} {format_size(claim.least)}" for claim in claims[:20])
        sums += f" + {format_count(len(claims) - 20, 'other')}" if len(claims) > 20 else ""
        what = f"limit of {device} on {printable(node.name)}"
        raise InvalidRequest(what, Described(format_size(limit)), f"at least {format_size(needs)}: {sums}")
    rest = limit - needs
    # Those with the least to gain first, so that what they leave goes to the others.
    hungry = sorted(claims, key=lambda claim: limit if claim.most is None else claim.most - claim.least)
    for left, claim in zip(range(len(hungry), 0, -1), hungry, strict=True):
        more = rest // left // GRANULE * GRANULE
        more = more if claim.most is None else min(more, claim.most - claim.least)
        claim.given = claim.least + more
        rest -= more
