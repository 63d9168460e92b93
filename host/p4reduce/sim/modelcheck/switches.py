# SPDX-License-Identifier: Apache-2.0
"""A switch as an automaton: its register contents, numbered, and what each frame does to each of them.

The switch itself runs every step: its registers are loaded, the frame goes in, the registers are read back. The same
registers and the same frame are run once. cells.py does so cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, NoReturn, Protocol

from p4reduce.constants import UDP_PORT
from p4reduce.sim.adapter import EngineSwitch
from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.modelcheck.frames import Frames
from p4reduce.sim.modelcheck.violation import SENT, UNSOUND, Violation
from p4reduce.sim.network import Datagram
from p4reduce.sim.runner import SWITCH_IP, membership
from p4reduce.sim.switch import ReferenceSwitch, SwitchModel, _Cell
from p4reduce.wire import Reason

_STRAY_EVERY = 256
_EPOCH_TO_TAG = 64
"""Of a cell's state the bits above the workers counted: what the cell holds."""


class _Untouchable:
    """What stands in a register's cell that a frame may not use: whatever is done with it raises."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("a frame has used a cell that is not its own")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a frame has used a cell that is not its own")


_OTHERS: Any = _Untouchable()


class SwitchState(Protocol):
    """How to read and set what a switch remembers from frame to frame, but for its counters."""

    switch: SwitchModel

    def save(self) -> Hashable:
        """All of it, as a value."""

    def load(self, saved: Any) -> None:
        """Put it back."""

    def stray(self) -> bool:
        """Whether the switch has written where it should not."""

    def isolate(self, cell: int | None, content: Any) -> None:
        """Fill one cell (None for what it holds at the start), so that a frame which uses another one is found out.

        Without a cell, all are as at the start and may be used.
        """

    def contents(self) -> dict[int, Hashable]:
        """Of the cells that may be used those that are not as at the start. Violation when others were."""

    def identity(self, content: Any) -> tuple[Hashable, int]:
        """What a cell says that it holds (epoch, round, op, words, tag), and the workers counted as a bit mask."""


class _Alone(dict[int, _Cell]):
    """Cells of which a frame may use one. Whatever asks for another or for all of them raises, and is remembered."""

    def __init__(self, own: int, cells: dict[int, _Cell]) -> None:
        super().__init__(cells)
        self._own = own
        self.asked = False

    def _refuse(self) -> NoReturn:
        self.asked = True
        raise Violation(UNSOUND, "a frame has used a cell that is not its own")

    def _mine(self, key: object) -> None:
        if key != self._own:
            self._refuse()

    def __getitem__(self, key: int) -> _Cell:
        self._mine(key)
        return super().__getitem__(key)

    def __setitem__(self, key: int, value: _Cell) -> None:
        self._mine(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self._mine(key)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._mine(key)
        return super().__contains__(key)

    def get(self, key: int, *default: Any) -> Any:
        """As a dict's."""
        self._mine(key)
        return super().get(key, *default)

    def setdefault(self, key: int, *default: Any) -> Any:
        """As a dict's."""
        self._mine(key)
        return super().setdefault(key, *default)

    def pop(self, key: int, *default: Any) -> Any:
        """As a dict's."""
        self._mine(key)
        return super().pop(key, *default)

    def _all(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    __iter__ = __len__ = __reversed__ = __eq__ = __or__ = __ior__ = _all
    keys = values = items = popitem = clear = copy = update = _all
    __hash__ = None


class ReferenceState:
    """A reference switch, or a variant of it that keeps its state in the same cells."""

    def __init__(self, switch: ReferenceSwitch) -> None:
        self.switch: SwitchModel = switch
        self._reference = switch
        self._alone: int | None = None

    def save(self) -> Hashable:
        """The cells."""
        return self._saved()

    def _saved(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(
            sorted(
                (key, c.epoch, c.round, c.tag, c.seen, c.check, c.payload)
                for key, c in dict.items(self._reference._cells)
            )
        )

    def load(self, saved: Any) -> None:
        """Replace the cells."""
        self._reference._cells = {
            key: _Cell(epoch, round_, tag, seen, check, payload)
            for key, epoch, round_, tag, seen, check, payload in saved
        }

    def stray(self) -> bool:
        """All cells are in the saved state anyhow."""
        return False

    def isolate(self, cell: int | None, content: Any) -> None:
        """There are no cells but this one; to ask for others is noticed. None: whichever is used comes into being."""
        self.load([] if cell is None or content is None else [(cell, *content)])
        if cell is not None:
            self._reference._cells = _Alone(cell, self._reference._cells)
        self._alone = cell

    def contents(self) -> dict[int, Hashable]:
        """The cells that there are."""
        saved: dict[int, Hashable] = {key: tuple(rest) for key, *rest in self._saved()}
        cells = self._reference._cells
        others = not saved.keys() <= {self._alone} or not isinstance(cells, _Alone) or cells.asked
        if self._alone is not None and others:
            raise Violation(UNSOUND, "a frame has used a cell that is not its own")
        return saved

    def identity(self, content: Any) -> tuple[Hashable, int]:
        """As the cell has it."""
        epoch, round_, tag, seen, _, _ = content
        return (epoch, round_, tag), seen


class EngineState:
    """An engine that runs the compiled program: the registers' cells of the job's pool; all others must stay 0."""

    def __init__(self, switch: EngineSwitch, bounds: Bounds) -> None:
        self.switch: SwitchModel = switch
        engine: Any = switch.engine
        self._registers: list[list[int]] = [engine.registers[name] for name in sorted(engine.registers)]
        self._state = next(n for n, name in enumerate(sorted(engine.registers)) if name.endswith("slot_state"))
        job = membership(bounds.scenario(0))
        self._pool = slice(2 * job.pool_base, 2 * (job.pool_base + job.pool_size))
        self._isolated = False
        self._alone: int | None = None

    def save(self) -> Hashable:
        """The pool's cells of every register array."""
        return tuple(tuple(register[self._pool]) for register in self._registers)

    def load(self, saved: Any) -> None:
        """Write the pool's cells."""
        for register, cells in zip(self._registers, saved, strict=True):
            register[self._pool] = cells

    def stray(self) -> bool:
        """Whether any other cell is not 0. Nothing resets those, so this finds a write however long ago it was."""
        start, stop = self._pool.start, self._pool.stop
        outside = (cell for register in self._registers for cell in (*register[:start], *register[stop:]))
        return any(cell is not _OTHERS for cell in outside) if self._isolated else any(outside)

    def isolate(self, cell: int | None, content: Any) -> None:
        """Put into all other cells what a program cannot calculate with; the cell at the start holds 0."""
        if not self._isolated:
            self._isolated = True
            for register in self._registers:
                register[:] = [_OTHERS] * len(register)
        width = self._pool.stop - self._pool.start
        for place, register in enumerate(self._registers):
            register[self._pool] = [0 if cell is None else _OTHERS] * width
            if cell is not None:
                register[cell] = 0 if content is None else content[place]
        self._alone = cell

    def contents(self) -> dict[int, Hashable]:
        """The pool's cells: a value of every register array."""
        found: dict[int, Hashable] = {}
        for cell in range(self._pool.start, self._pool.stop):
            values = tuple(register[cell] for register in self._registers)
            others = sum(value is _OTHERS for value in values)
            if others != (0 if self._alone in (None, cell) else len(values)):
                raise Violation(UNSOUND, "a frame has used a cell that is not its own")
            if others == 0 and any(values):
                found[cell] = values
        return found

    def identity(self, content: Any) -> tuple[Hashable, int]:
        """The two parts of the cell's state."""
        state: int = content[self._state]
        return state >> _EPOCH_TO_TAG, state & ((1 << _EPOCH_TO_TAG) - 1)


class Step(NamedTuple):
    """What a frame does: the registers that follow, and the answers, as numbers of frames downwards."""

    after: int
    answers: tuple[int, ...]
    refused: bool
    """The one answer is the nack of an epoch that is over, and nothing has changed."""


class Phases:
    """One switch in three phases: the first epoch admitted; revoked; the second one admitted.

    Every phase has a switch of its own, so that tables need not be changed back; only registers go from one to the
    other.
    """

    def __init__(self, bounds: Bounds, make: Callable[[], SwitchState], frames: Frames, judge: bool) -> None:
        self._frames = frames
        self._judge = judge
        self._members = membership(bounds.scenario(0)).members
        self.states = [make() for _ in range(3 if bounds.change else 1)]
        for phase, state in enumerate(self.states):
            state.switch.admit(membership(bounds.scenario(0)))
            if phase > 0:
                state.switch.revoke(membership(bounds.scenario(0)).epoch)
            if phase > 1:
                state.switch.admit(membership(bounds.scenario(1)))

    def run(self, phase: int, frame: int) -> tuple[int, ...]:
        """Let a contribution arrive; returns the answers. Violation for a wrong one, when they are to be judged."""
        sender = self._members[self._frames.up[frame].rank]
        datagram = Datagram(sender.ip, sender.udp_port, SWITCH_IP, UDP_PORT, self._frames.up[frame].data)
        answers = self.states[phase].switch.process(sender.port, datagram)
        return tuple(self._answer(port, answer) for port, answer in answers)

    def is_refusal(self, answers: tuple[int, ...]) -> bool:
        """Whether the one answer is the nack of an epoch that is over."""
        return len(answers) == 1 and self._frames.is_nack(answers[0], Reason.UNKNOWN_EPOCH)

    def check_stray(self) -> None:
        """Raise when a switch has changed what is not part of the saved state."""
        if any(state.stray() for state in self.states):
            raise Violation(UNSOUND, "the switch has written outside of the job's pool")

    def _answer(self, port: int, datagram: Datagram) -> int:
        to = self._members[port - 1]
        if (datagram.dst, datagram.dst_port) != (to.ip, to.udp_port):
            raise Violation(SENT, f"an answer on port {port} is not addressed to the worker there")
        number = self._frames.answered(to.rank, datagram.data)
        if self._judge:
            self._frames.check_sent(number)
        return number


class Switches:
    """What every frame does to all registers together. Registers that are all 0 have number 0."""

    def __init__(self, bounds: Bounds, make: Callable[[], SwitchState], frames: Frames, judge: bool) -> None:
        self._phases = Phases(bounds, make, frames, judge)
        zero = self._phases.states[0].save()
        self.saved: list[Hashable] = [zero]
        self._numbers: dict[Hashable, int] = {zero: 0}
        self._loaded = [0] * len(self._phases.states)
        self._steps: dict[tuple[int, int, int], Step] = {}

    @property
    def executed(self) -> int:
        """Frames that the switch has run."""
        return len(self._steps)

    def step(self, phase: int, registers: int, frame: int) -> Step:
        """Let a contribution arrive. Raises Violation for a wrong result, when results are to be judged here."""
        key = (phase, registers, frame)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._run(phase, registers, frame)
            if len(self._steps) % _STRAY_EVERY == 0:
                self.check_stray()
        return step

    def check_stray(self) -> None:
        """Raise when a switch has changed what is not part of the saved state."""
        self._phases.check_stray()

    def _run(self, phase: int, registers: int, frame: int) -> Step:
        state = self._phases.states[phase]
        if self._loaded[phase] != registers:
            state.load(self.saved[registers])
        # Should the next lines raise, the registers are loaded anew.
        self._loaded[phase] = -1
        answers = self._phases.run(phase, frame)
        saved = state.save()
        after = self._numbers.setdefault(saved, len(self.saved))
        if after == len(self.saved):
            self.saved.append(saved)
        self._loaded[phase] = after
        return Step(after, answers, after == registers and self._phases.is_refusal(answers))
