"""Which groups may start, and which a training step takes, so that no trained token is too old. Pure.

Step s trains weights of version s and takes P groups. A group that started while the newest weights were of version v
must be taken by step v + staleness, its deadline. Two rules see to that (the proof is in docs/async.md):

- a group starts only while the unconsumed groups, itself included, fit into the slots of the steps up to its deadline;
- a step takes the oldest ready groups, and waits for older ones only if those left could not all meet their deadlines.

    slots = Slots(Window(groups_per_step=16, staleness=1, concurrency=128), range(0, 100))
    if slots.may_start(): slots.started(number)
    slots.finished(number, dropped=False)        # -> True: another group gets its slot
    slots.pick()                                 # -> Pick | None: must wait
    slots.moved(version)
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Window:
    """How far sampling runs ahead of training, and how many groups beside those of a step."""

    groups_per_step: int
    """P: slots of a step, each filled by one group."""
    staleness: int = 0
    """Steps between the weights that started a group and the step that trains on it, at most; 0 is lockstep."""
    concurrency: int
    """Trials alive at once."""
    oversample: int = 0
    """Groups that a lockstep step starts beyond its slots; when enough are done the rest is cut. Not with staleness."""
    refill: int = 0
    """Groups of a step that another replaces when they are dropped; one more leaves its slot empty."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Numbers of the groups that a step takes, and of those that run and that no step will take."""

    taken: tuple[int, ...]
    surplus: tuple[int, ...] = ()


class Slots:
    """The state behind the two rules. A group is unconsumed from its start until a step takes it or it is replaced.

    Cost of a call: a number of comparisons that grows with staleness, not with groups; `pick` pays for what it takes,
    `awaited` for what runs.
    """

    def __init__(self, window: Window, steps: range, ready: Iterable[tuple[int, int]] = ()) -> None:
        """`steps` still to be made; `ready` are number and version of groups that an earlier life of the run finished.

        ValueError if those do not fit into the window.
        """
        assert not (window.oversample and window.staleness), f"{window}: only lockstep oversamples"
        self._window, self._stop = window, steps.stop
        self.step = self.version = steps.start
        self._closed = False
        self._running: dict[int, int] = {}
        self._ready = sorted((version, number) for number, version in ready)
        self._unconsumed_of = Counter(version for version, _ in self._ready)
        self._ready_of = self._unconsumed_of.copy()
        self._renew()
        self._check_restored()

    @property
    def unconsumed(self) -> int:
        """Groups that run or wait for their step."""
        return len(self._running) + len(self._ready)

    @property
    def over(self) -> bool:
        """No group will start any more."""
        return self._closed or self.step >= self._stop

    def moved(self, version: int) -> None:
        """The newest weights are of this version: what starts from now on may be taken later."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version

    def may_start(self) -> bool:
        """Whether one more group may start now."""
        room = self._room()
        return not self._closed and (self.unconsumed < room or (room > 0 and self._extra > 0))

    def started(self, number: int) -> None:
        """Group `number` starts now, by the newest weights; `may_start` must hold."""
        assert self.may_start() and number not in self._running, f"group {number} may not start"
        if self.unconsumed >= self._room():
            self._extra -= 1
        self._running[number] = self.version
        self._unconsumed_of[self.version] += 1

    def finished(self, number: int, *, dropped: bool) -> bool:
        """Group `number` is done; True if it is dropped and its slot is free for another.

        A dropped group costs first an oversampled one, then a refill; when those are spent it fills its slot empty.
        """
        version = self._running.pop(number)
        if dropped and self._replaceable():
            self._unconsumed_of[version] -= 1
            return True
        heapq.heappush(self._ready, (version, number))
        self._ready_of[version] += 1
        return False

    def pick(self) -> Pick | None:
        """The groups that the next step trains on, oldest first; None: it must wait.

        With oversampling it must be asked after each `finished`, so that no more than a step's groups are ever ready.
        """
        wanted = self._wanted()
        if self.step > self.version or not self._suffices(wanted, self._ready_of):
            return None
        taken = tuple(self._take() for _ in range(wanted))
        surplus = self._give_up() if self._window.oversample else ()
        self.step += 1
        self._renew()
        return Pick(taken=taken, surplus=surplus)

    def awaited(self) -> tuple[int, ...]:
        """The fewest oldest running groups that the next step cannot go on without; all of them if it needs more."""
        wanted, ready, out = self._wanted(), self._ready_of.copy(), list[int]()
        for number, version in self._running.items():
            if self._suffices(wanted, ready):
                break
            ready[version] += 1
            out.append(number)
        return tuple(out)

    def hurry(self) -> None:
        """The next step waits no longer than it must: no replacements, no groups beyond its slots."""
        self._extra = self._refills = 0

    def close(self) -> None:
        """There are no more groups to start; the last steps take what is left, in smaller numbers."""
        self._closed = True

    def _room(self) -> int:
        """Slots of the steps that a group which starts now may be taken by."""
        return (min(self.version + self._window.staleness + 1, self._stop) - self.step) * self._window.groups_per_step

    def _wanted(self) -> int:
        slots = self._window.groups_per_step
        return min(slots, self.unconsumed) if self._closed else slots

    def _suffices(self, wanted: int, ready_of: Counter[int]) -> bool:
        """Whether so many of the oldest of `ready_of` can go now, and every group left still meet its deadline."""
        if ready_of.total() < wanted:
            return False
        if self._window.oversample:
            return True
        left = ready = 0
        for version in sorted(self._unconsumed_of):
            left, ready = left + self._unconsumed_of[version], ready + ready_of[version]
            later = version + self._window.staleness - self.step
            if left - min(ready, wanted) > later * self._window.groups_per_step:
                return False
        return True

    def _take(self) -> int:
        version, number = heapq.heappop(self._ready)
        self._ready_of[version] -= 1
        self._unconsumed_of[version] -= 1
        return number

    def _give_up(self) -> tuple[int, ...]:
        """The groups that still run: those beyond the slots of a step in lockstep."""
        assert not self._ready, f"groups {self._ready} were ready before their step was picked"
        surplus = tuple(self._running)
        self._running.clear()
        self._unconsumed_of.clear()
        return surplus

    def _replaceable(self) -> bool:
        """Whether a dropped group need not fill its slot; what pays for it is spent."""
        if self._closed:
            return False
        if self.unconsumed >= self._room():  # without the dropped group, that is: an oversampled one takes its place
            return True
        if self._extra > 0:
            self._extra -= 1
            return True
        if self._refills > 0:
            self._refills -= 1
            return True
        return False

    def _renew(self) -> None:
        """What each step has anew. Versions without groups are forgotten, so that their number stays small."""
        self._extra, self._refills = self._window.oversample, self._window.refill
        self._unconsumed_of = +self._unconsumed_of
        self._ready_of = +self._ready_of

    def _check_restored(self) -> None:
        slots, so_far = self._window.groups_per_step, 0
        for version in sorted(self._unconsumed_of):
            so_far += self._unconsumed_of[version]
            deadline = version + self._window.staleness
            if so_far > max(deadline - self.step + 1, 0) * slots:
                raise ValueError(
                    f"{so_far} finished groups by weights of version {version} or older, wanted {slots} at most for "
                    f"each step from {self.step} to {deadline}"
                )
