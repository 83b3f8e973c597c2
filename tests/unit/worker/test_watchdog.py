"""When an engine counts as stuck."""

from services.worker.core.watchdog import Watchdog


def test_no_step_for_too_long_is_stuck_and_a_step_cures() -> None:
    dog = Watchdog(10.0)
    assert not dog.observe(0.0, busy=True, progress=1)
    assert not dog.observe(9.9, busy=True, progress=1)
    assert dog.observe(10.0, busy=True, progress=1)
    assert dog.observe(50.0, busy=True, progress=1)
    assert not dog.observe(51.0, busy=True, progress=2)
    assert not dog.observe(60.9, busy=True, progress=2)


def test_idle_time_does_not_count() -> None:
    dog = Watchdog(10.0)
    assert not dog.observe(0.0, busy=False, progress=7)
    assert not dog.observe(100.0, busy=False, progress=7)
    assert not dog.observe(101.0, busy=True, progress=7)
    assert not dog.observe(109.0, busy=True, progress=7)
    assert dog.observe(110.0, busy=True, progress=7)
    assert not dog.observe(111.0, busy=False, progress=7)


def test_slow_steps_are_progress() -> None:
    dog = Watchdog(10.0)
    assert not any(dog.observe(9.0 * i, busy=True, progress=i) for i in range(20))
