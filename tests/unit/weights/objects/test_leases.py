from __future__ import annotations

import msgspec

from astraflow.weights.objects.bucket import Bucket
from astraflow.weights.objects.leases import LEASE_S, MAX_LEASE_S, Note, ReaderLease, Readers


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_lives_while_it_changes_by_the_clock_of_who_looks(base: str) -> None:
    bucket, ours, theirs = Bucket(base), Clock(), Clock()
    theirs.now = -5e6  # clocks of two hosts have nothing in common
    readers, lease = Readers(bucket, ours), ReaderLease(bucket, 7, theirs)
    lease.extend()
    assert readers.live() == {7}
    for _ in range(5):
        ours.now += LEASE_S - 1
        theirs.now += LEASE_S - 1
        lease.extend()
        assert readers.live() == {7}
    ours.now += LEASE_S + 1
    assert readers.live() == set()
    assert bucket.names() == []  # of a reader that died


def test_a_lease_is_not_written_at_every_call_and_ends_when_it_is_given_back(base: str) -> None:
    bucket, clock = Bucket(base), Clock()
    lease = ReaderLease(bucket, 7, clock)
    lease.extend()
    written = bucket.get(bucket.names()[0])
    lease.extend()
    assert bucket.get(bucket.names()[0]) == written
    clock.now += LEASE_S / 2
    lease.extend()
    assert bucket.get(bucket.names()[0]) != written
    lease.release()
    assert Readers(bucket).live() == set()
    lease.release()


def test_a_lease_that_asks_for_too_long_or_says_nothing_ends_too(base: str) -> None:
    bucket, clock = Bucket(base), Clock()
    readers = Readers(bucket, clock)
    bucket.put("readers/1.a.json", msgspec.json.encode(Note(1e9, 0)))
    bucket.put("readers/2.b.json", b"?")
    bucket.put("readers/nonsense.json", msgspec.json.encode(Note(60.0, 0)))
    assert readers.live() == {1, 2}
    clock.now += LEASE_S + 1
    assert readers.live() == {1}
    clock.now += MAX_LEASE_S
    assert readers.live() == set()
    assert bucket.names() == []
