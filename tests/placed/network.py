"""A virtual network: plans, credit and order as they are, over processes, sockets and time that are not real.

``python -m tests.placed.network 10000`` plays so many random pipelines, with faults, and reports.
"""

import heapq
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from asyncmem import InvalidRequest
from asyncmem.distributed.credit import Credit, Inbox, Window, cost, route
from asyncmem.distributed.plan import Edge, Node, Part, Plan, make_plan
from asyncmem.errors import StageLost
from asyncmem.pipeline import Stage

MIB = 1 << 20
META = 300
"""Bytes that describe an item."""


class Stuck(AssertionError):
    """Nothing happens any more, and items are not done."""


async def work(item: object, pool: object) -> object:
    """What stages do; never called."""
    del pool
    return item


@dataclass(eq=False)
class Item:
    """An item on its way, and what gives its memory back."""

    number: int
    name: int
    free: Callable[[], None]


@dataclass
class Tally:
    """What happened.

    Attributes:
        delivered: Names of items in the order in which the consumer had them.
        crossings: How often an item went over an edge.
        control: Messages that were no items.
        epochs: Plans that were made.
    """

    delivered: list[int] = field(default_factory=list)
    crossings: int = 0
    control: int = 0
    epochs: int = 0


class SimulatedPart:
    """A part of a stage at work: its inbox, its memory, and its edges."""

    def __init__(self, network: "Network", number: int, part: Part, before: int, into: int) -> None:
        self.network = network
        self.number = number
        self.part = part
        self.inbox = Inbox[Item](part.at, before, into)
        self.free = part.nbytes
        self.out: list[EdgeInUse] = []
        self.begun: deque[tuple[Item, list[int]]] = deque()  # with the size of what comes out, once it is there
        self.at_work = 0

    def look(self) -> None:
        """Do all that can be done now."""
        if self.part.index < 0:
            self.network.feed(0)
        while self.at_work < self.part.workers and len(self.begun) < 4 * self.part.workers:
            if self.free < self.network.need(self.part):
                break
            item = self.inbox.get()
            if item is None:
                break
            size = self.network.size(self.part)
            self.free -= size
            made: list[int] = []
            self.begun.append((item, made))
            self.at_work += 1
            self.network.later(self.part.node, self.network.random.expovariate(1.0), partial(self.end, made, size))
        while self.begun and self.begun[0][1]:
            item, (size,) = self.begun[0]
            if not route(item.number, self.out).send(item.number, item.name, size, partial(self.give_back, size)):
                break
            self.begun.popleft()
            item.free()  # a stage may pass on its input, so it is held for as long

    def end(self, made: list[int], size: int) -> None:
        """Have finished an item."""
        made.append(size)
        self.at_work -= 1
        self.look()

    def give_back(self, size: int) -> None:
        """Have memory again."""
        self.free += size
        self.look()


class EdgeInUse:
    """An edge: credit at one end, a window at the other, and delays between."""

    def __init__(
        self, network: "Network", edge: Edge, place: int, sender: SimulatedPart, receiver: "SimulatedPart | Results"
    ) -> None:
        self.network = network
        self.edge = edge
        self.place = place  # among the edges of its receiver
        self.sender, self.receiver = sender, receiver
        self.last = 0.0  # when the last item arrives: they do not overtake each other
        shared = network.one_window and edge.kind == "tcp"
        node = network.plan.parts[edge.receiver].node
        own: Callable[[], tuple[Credit, Window]] = lambda: (Credit(edge.window), Window(edge.window))  # noqa: E731
        self.credit, self.window = network.shared.setdefault(node, own()) if shared else own()

    def send(self, number: int, name: int, size: int, sent: Callable[[], None]) -> bool:
        """Send an item where there is credit; `sent` is called once the sender's memory is free."""
        kind = self.edge.kind
        nbytes = {"process": 0, "share": cost([META])}.get(kind, cost([META, size]))
        if not self.credit.take(nbytes):
            return False
        self.network.tally.crossings += 1
        item = Item(number, name, partial(self.freed, nbytes, sent if kind in {"process", "share"} else None))
        delay = 0.0 if kind == "process" else self.network.delay()
        arrives = partial(self.arrive, nbytes, item)
        self.last = self.network.later(self.sender.part.node, delay, arrives, least=self.last)
        if kind == "tcp":
            self.network.later(self.sender.part.node, 0.0, sent)
        return True

    def arrive(self, nbytes: int, item: Item) -> None:
        """Be at the receiver's."""
        self.window.arrive(nbytes)
        self.receiver.inbox.put(self.place, item.number, item)
        self.receiver.look()

    def freed(self, nbytes: int, sent: Callable[[], None] | None) -> None:
        """Tell the sender that the item's memory is free."""
        self.window.give_back(nbytes)
        if self.edge.kind == "process":
            self.returned(nbytes, sent)
            return
        self.network.tally.control += 1
        node = self.network.plan.parts[self.edge.receiver].node
        self.network.later(node, self.network.delay(), partial(self.returned, nbytes, sent))

    def returned(self, nbytes: int, sent: Callable[[], None] | None) -> None:
        """Hear of it."""
        self.credit.give_back(nbytes)
        if sent is not None:
            sent()
        self.sender.look()
        if self.network.one_window:
            for part in self.network.parts:
                part.look()


class Results:
    """The client's end: results in the order of the source, for a consumer that takes its time."""

    def __init__(self, network: "Network", edges: int) -> None:
        self.network = network
        self.inbox = Inbox[Item](0, 1, edges)
        self.busy = False

    def look(self) -> None:
        """Hand out what is next."""
        item = None if self.busy else self.inbox.get()
        if item is not None:
            self.busy = True
            self.network.later(0, self.network.random.expovariate(self.network.pace), partial(self.done, item))

    def done(self, item: Item) -> None:
        """Have the consumer go on."""
        self.busy = False
        self.network.tally.delivered.append(item.name)
        self.network.waiting.discard(item.name)
        item.free()
        self.network.feed()
        self.look()


class Network:
    """Processes, what they send to each other, and time."""

    def __init__(
        self, seed: int, stages: Sequence[Stage[object, object]], nodes: Sequence[Node], *, items: int,
        faults: int = 0, window: int | None = None, one_window: bool = False,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.stages, self.nodes, self.window = stages, list(nodes), window
        self.one_window = one_window
        self.shared: dict[int, tuple[Credit, Window]] = {}
        self.pace = self.random.choice([0.3, 3.0, 100.0])
        self.now = 0.0
        self.numbers = 0
        self.heap: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self.tally = Tally()
        self.all = items
        self.waiting = set(range(items))
        self.in_flight = 4 * sum(stage.workers for stage in stages)
        self.stalled: dict[str, float] = {}
        self.faults = faults
        self.begin()

    def begin(self) -> None:
        """Make a plan, and begin with all that is not done."""
        self.plan: Plan = make_plan(self.stages, self.nodes, window=self.window)
        self.tally.epochs += 1
        into, out = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for number, edge in enumerate(self.plan.edges):
            into[edge.receiver].append(number)
            out[edge.sender].append(number)
        of_stage = defaultdict[int, int](int)
        for part in self.plan.parts:
            of_stage[part.index] += 1
        parts = list(enumerate(self.plan.parts))[:-1]
        self.parts = [SimulatedPart(self, at, part, of_stage[part.index], len(into[at])) for at, part in parts]
        self.results = Results(self, len(into[len(parts)]))
        ends: list[SimulatedPart | Results] = [*self.parts, self.results]
        self.smallest: dict[int, int] = {}
        for at, one in enumerate(self.parts):
            edges = [self.plan.edges[number] for number in out[at]]
            one.out = [EdgeInUse(self, edge, into[edge.receiver].index(n), one, ends[edge.receiver])
                       for n, edge in zip(out[at], edges, strict=True)]  # fmt: skip
            room = min([edge.window - cost([META]) for edge in edges if edge.window], default=MIB)
            index = one.part.index
            self.smallest[index] = min(self.smallest.get(index, 1 << 40), room)
        self.shared.clear()
        self.source = deque(sorted(self.waiting))
        self.under_way = 0
        self.begun = 0
        self.unsent: deque[tuple[int, int]] = deque()
        if self.faults:
            self.faults -= 1
            self.later(0, self.random.expovariate(0.02), self.fault)
        self.feed(0)

    def feed(self, done: int = 1) -> None:
        """Send what the source may."""
        self.under_way -= done
        while self.source and self.under_way < self.in_flight:
            self.unsent.append((self.begun, self.source.popleft()))
            self.begun += 1
            self.under_way += 1
        edges = self.parts[0].out
        while self.unsent and route(self.unsent[0][0], edges).send(
            *self.unsent[0], self.size_at_source(), lambda: None
        ):
            self.unsent.popleft()

    # -- sizes --------------------------------------------------------------------------------------------------------

    def need(self, part: Part) -> int:
        """Bytes that a worker of a part needs to begin."""
        return min(self.stages[part.index].credit or self.unknown(part), self.smallest[part.index])

    def unknown(self, part: Part) -> int:
        """Bytes that an item of a stage has which does not say how many."""
        return 0 if self.stages[part.index].credit == 0 else part.nbytes // (part.workers + 2)

    def size(self, part: Part) -> int:
        """Bytes of one item that a part makes."""
        return self.random.choice([self.need(part), self.random.randint(0, self.need(part))])

    def size_at_source(self) -> int:
        """Bytes of one item of the source."""
        return self.random.randint(0, max(0, self.smallest[-1]))

    # -- time ---------------------------------------------------------------------------------------------------------

    def delay(self) -> float:
        """Return how long a message takes."""
        return self.random.expovariate(20.0)

    def later(self, node: int, seconds: float, call: Callable[[], None], *, least: float = 0.0) -> float:
        """Have something happen that a process does, unless another plan is made meanwhile; return when."""
        at = max(max(self.now, self.stalled.get(self.plan.nodes[node].name, 0.0)) + seconds, least)
        self.numbers += 1
        heapq.heappush(self.heap, (at, self.numbers, self.tally.epochs, node, call))
        return at

    def run(self) -> Tally:
        """Let time pass until all is done."""
        while self.waiting:
            if not self.heap:
                raise Stuck(f"{len(self.waiting)} of {self.all} items are not done\n{self.plan}")
            self.now, _, epoch, _, call = heapq.heappop(self.heap)
            if epoch == self.tally.epochs:
                call()
        return self.tally

    def fault(self) -> None:
        """Have one of the processes stand still, end, or begin anew."""
        victim = self.random.choice(self.nodes[1:])
        what = self.random.choice(["stall", "death", "restart"])
        if what == "stall":
            self.stalled[victim.name] = self.now + self.random.expovariate(0.1)
            if self.faults:
                self.faults -= 1
                self.later(0, self.random.expovariate(0.02), self.fault)
            return
        if what == "death":
            self.nodes.remove(victim)
        self.now += self.random.expovariate(1.0)
        self.heap.clear()
        self.begin()


def random_network(seed: int, *, most_workers: int = 1000, most_stages: int = 100) -> Network:
    """Make a random pipeline on random workers.

    Raises:
        InvalidRequest: Its plan was refused.
        StageLost: A stage has no worker.
    """
    chance = random.Random(seed)
    few = chance.random() < 0.5
    stages = []
    for index in range(chance.randint(1, min(8, most_stages) if few else most_stages)):
        credit = chance.choice([None, 0, chance.randint(1, 4 * MIB)])
        device = chance.choice([None, None, None, "cuda"])
        stages.append(Stage(work, f"s{index}", chance.choice([1, 1, 2, chance.randint(1, 10)]), credit, device))
    hosts = chance.randint(1, 200)
    nodes = [Node(name="client", place="host-0", limits={"host": chance.choice([256, 4096]) * MIB})]
    for number in range(chance.randint(1, min(8, most_workers) if few else most_workers)):
        limits = {"host": chance.choice([64, 256, 4096]) * MIB, f"cuda:{number % 8}": 512 * MIB}
        if chance.random() < 0.3:
            del limits[f"cuda:{number % 8}"]
        place = chance.choice(["", f"host-{number % hosts}"])
        nodes.append(Node(name=f"w{number}", place=place, limits=limits))
    window = chance.choice([None, 4 * MIB + 2048, 4 * MIB + 2048])
    items, faults = chance.randint(1, 80 if few else 40), chance.choice([0, 1, 3])
    return Network(seed, stages, nodes, items=items, faults=faults, window=window)


def play(seeds: Sequence[int]) -> dict[str, int]:
    """Play random pipelines to their ends, and count how they came out.

    Raises:
        Stuck: One did not come to its end.
    """
    counts = defaultdict[str, int](int)
    for seed in seeds:
        try:
            network = random_network(seed)
            tally = network.run()
        except InvalidRequest:
            counts["refused"] += 1
            continue
        except StageLost:
            counts["lost"] += 1
            continue
        except AssertionError as error:
            raise Stuck(f"seed {seed}") from error
        edges = len(network.stages) + 1
        assert tally.delivered == sorted(set(range(network.all))), seed
        assert tally.control <= tally.crossings <= network.all * edges * tally.epochs, seed
        counts["done"] += 1
        counts["crossings"] += tally.crossings
        counts["epochs"] += tally.epochs
        counts["most workers"] = max(counts["most workers"], len(network.plan.nodes) - 1)
        counts["most stages"] = max(counts["most stages"], edges - 1)
    return dict(counts)


if __name__ == "__main__":
    started = time.monotonic()
    first, last = 0, int(sys.argv[1])
    if len(sys.argv) > 2:
        first, last = last, int(sys.argv[2])
    print(play(range(first, last)), f"{time.monotonic() - started:.0f} s")  # noqa: T201
