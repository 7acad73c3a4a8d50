"""How much the next segment is: enough, not above the limit, and ahead of demand."""

from hypothesis import given
from hypothesis import strategies as st

from asyncmem.engine.grow import LARGE, SMALL, Growth, Room

MIB = 1 << 20
FREE = Room(limit=None, reserved=0, coming=0)


def growth(*, exact: bool = False) -> Growth:
    """Make the usual settings."""
    return Growth(64 * MIB, MIB, 2 * MIB, exact=exact)


def test_ordinary_request_gets_an_ordinary_segment() -> None:
    """A segment is of the size that was chosen, or of what is needed if that is more, rounded up."""
    assert growth().plan(5 * MIB, LARGE, 0, FREE) == 64 * MIB
    assert growth().plan(99 * MIB, LARGE, 0, FREE) == 100 * MIB


def test_small_requests_start_small_and_double() -> None:
    """A program of few small buffers reserves little, and one of many asks seldom."""
    sizes = [growth().plan(1000, SMALL, already, FREE) for already in (0, 8 * MIB, 64 * MIB, 1024 * MIB)]
    assert sizes == [2 * MIB, 4 * MIB, 32 * MIB, 64 * MIB]


def test_what_has_no_bytes_belongs_in_either_arena() -> None:
    """A batch with an empty buffer among large ones is of one class."""
    assert growth().is_of_one_class([0, MIB, 5 * MIB])
    assert growth().is_of_one_class([0])
    assert not growth().is_of_one_class([1, 0, MIB])


def test_rest_of_the_limit_is_taken() -> None:
    """Near the limit a segment is what is left, and none when that is not enough."""
    assert growth().plan(MIB, LARGE, 0, Room(10 * MIB, 4 * MIB, 0)) == 6 * MIB
    assert growth().plan(MIB, LARGE, 0, Room(10 * MIB, 4 * MIB, 6 * MIB)) is None


def test_direct_pool_gets_what_was_asked() -> None:
    """Without caching nothing is asked for in advance."""
    direct = growth(exact=True)
    assert direct.plan(1000, LARGE, 0, FREE) == 2 * MIB
    direct.observe(0.0, 0, 0.01)
    direct.observe(1.0, 1 << 30, 0.01)
    assert direct.headroom() == 0


def test_headroom_follows_demand() -> None:
    """Twice the bytes a second, or twice the time the device takes, is twice as far ahead."""

    def ahead(rate: int, seconds: float) -> int:
        one = growth()
        for tick in range(20):
            one.observe(float(tick), tick * rate, seconds)
        return one.headroom()

    assert ahead(MIB, 0.5) > 0
    assert abs(ahead(2 * MIB, 0.5) - 2 * ahead(MIB, 0.5)) < 1000
    assert abs(ahead(MIB, 1.0) - 2 * ahead(MIB, 0.5)) < 1000
    assert ahead(1 << 40, 1.0) == 64 * MIB


@given(
    st.integers(1, 1 << 30), st.sampled_from([SMALL, LARGE]), st.integers(0, 1 << 30), st.integers(0, 1 << 31),
    st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.booleans(),
)  # fmt: skip
def test_plan_is_enough_and_within_the_limit(
    need: int, arena: int, in_arena: int, limit: int, reserved: int, coming: int, exact: bool
) -> None:
    """Whatever the figures: the plan holds the need and keeps the limit, and there is one whenever the need fits."""
    room = Room(limit, reserved, coming)
    plan = growth(exact=exact).plan(need, arena, in_arena, room)
    left = room.left()
    assert left is not None
    assert (plan is not None) == (need <= left)
    assert plan is None or need <= plan <= left
