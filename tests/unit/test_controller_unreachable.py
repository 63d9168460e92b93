# SPDX-License-Identifier: Apache-2.0
"""A switch that stays away: jobs that wait for it are ended, the others go on. It is lost at 100; the lease is 10."""

from __future__ import annotations

from helpers.jobs import JobsRig as Rig

from p4reduce_controller.model import Reason, Report
from p4reduce_controller.states import State


def running(world: int = 2) -> tuple[Rig, int, list[int]]:
    rig = Rig()
    rig.now = 95.0
    epoch, streams = rig.start(world)
    return rig, epoch, streams


def report(rig: Rig, epoch: int, streams: list[int], *counts: tuple[int, int]) -> None:
    for rank, (stream, (submitted, completed)) in enumerate(zip(streams, counts, strict=True)):
        rig.note(rig.jobs.report(stream, Report("train", epoch, rank, submitted, completed), rig.now))


def test_a_job_that_waits_for_it_is_ended() -> None:
    rig, epoch, streams = running()
    rig.now = 95.0
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    rig.now = 104.0
    report(rig, epoch, streams, (4, 3), (5, 3))
    assert rig.jobs.next_deadline() == 110.0
    rig.tick(109.9)
    assert rig.record().state is State.SWITCH
    rig.tick(110.0)
    rig.switch(error="no session")
    for stream in streams:
        (fence,) = rig.fences(stream)
        assert (fence.reason, fence.ranks) == (Reason.SWITCH_LOST, ())
        assert fence.message == (
            "job 'train': the switch has been unreachable for 10 s (connection reset), and no bucket was completed "
            "since: start it again, then restart the job"
        )
    assert rig.record().state is State.FAILED


def test_every_completed_bucket_gives_a_lease_more() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    for now, done in ((100.0, 3), (107.0, 4), (114.0, 5), (121.0, 6)):
        rig.tick(now)
        assert rig.record().state is State.SWITCH
        report(rig, epoch, streams, (done + 2, done), (done + 1, done))
    rig.now = 128.0
    report(rig, epoch, streams, (8, 6), (7, 6))
    assert rig.jobs.next_deadline() == 131.0
    rig.tick(131.0)
    assert rig.record().state is State.FAILED
    assert "unreachable for 31 s" in rig.record().reason


def test_a_job_that_waits_for_a_rank_or_for_nothing_goes_on() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    for now in range(100, 150, 5):
        rig.tick(float(now))
        report(rig, epoch, streams, (4, 3), (3, 3) if now < 130 else (4, 4 if now > 130 else 3))
        if now > 130:
            report(rig, epoch, streams, (4, 4), (4, 4))
    assert rig.record().state is State.SWITCH


def test_the_wait_for_a_rank_does_not_count() -> None:
    rig, epoch, streams = running()
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    for now in range(100, 200, 5):
        rig.tick(float(now))
        report(rig, epoch, streams, (4, 3), (3, 3))
    report(rig, epoch, streams, (4, 3), (4, 3))
    assert rig.jobs.next_deadline() == 205.0
    rig.tick(204.0)
    assert rig.record().state is State.SWITCH, "the switch has a lease's time for the new bucket"
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.tick(205.0)
    assert rig.record().state is State.FAILED


def test_a_switch_that_comes_back_in_time() -> None:
    rig, epoch, streams = running()
    rig.now = 100.0
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    rig.note(rig.jobs.switch_up({epoch}, 109.0))
    rig.now = 109.0
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.tick(111.0)
    assert rig.record().state is State.SWITCH
    rig.note(rig.jobs.switch_down("connection reset", 112.0))
    rig.tick(118.0)
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.tick(121.9)
    assert rig.record().state is State.SWITCH, "time starts anew with every loss"
    rig.tick(122.0)
    assert rig.record().state is State.FAILED


def test_with_the_switch_there_a_stall_is_the_workers_matter() -> None:
    rig, epoch, streams = running()
    for now in range(100, 200, 5):
        rig.tick(float(now))
        report(rig, epoch, streams, (4, 3), (4, 3))
    assert rig.record().state is State.SWITCH


def test_while_ranks_leave() -> None:
    rig, epoch, streams = running(3)
    rig.now = 100.0
    report(rig, epoch, streams, (4, 4), (5, 4), (5, 4))
    rig.leave(epoch, 0, submitted=4)
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    for now in (105.0, 113.0, 121.0):
        rig.tick(now)
        report(rig, epoch, streams, (4, 4), (5, 4), (5, 4))
    assert rig.record().state is State.LEAVING, "bucket 4 is not the switch's fault: rank 0 has left before it"


def test_while_ranks_leave_without_waiting() -> None:
    rig, epoch, streams = running(3)
    rig.now = 100.0
    report(rig, epoch, streams, (5, 4), (5, 4), (5, 4))
    rig.leave(epoch, 0, submitted=5)
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    rig.tick(105.0)
    report(rig, epoch, streams, (5, 4), (5, 4), (5, 4))
    rig.tick(110.0)
    assert rig.record().state is State.FAILED


def test_a_job_with_a_ring_path_falls_back_instead() -> None:
    rig = Rig()
    rig.now = 95.0
    epoch, streams = rig.start(2, ring=True)
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.note(rig.jobs.switch_down("connection reset", 100.0))
    rig.now = 104.0
    report(rig, epoch, streams, (4, 3), (4, 3))
    rig.tick(110.0)
    assert rig.record().state is State.CUTTING
    assert rig.record().fallbacks == {"switch_lost": 1}
    assert "unreachable for 10 s" in rig.record().path_reason
