# SPDX-License-Identifier: Apache-2.0
"""Exhaustive check of small systems: the real worker core against a switch, under every order of events.

What is explored, and why what is left out cannot matter, stands in search.py; the bounds in bounds.py. The switch is
whatever can be put back into an earlier state: the reference switch, or an engine that runs the compiled program.
For larger systems quotient.py searches through classes of states.
"""

from p4reduce.sim.modelcheck.bounds import Bounds
from p4reduce.sim.modelcheck.quotient import Quotient, check
from p4reduce.sim.modelcheck.search import Checker, Report
from p4reduce.sim.modelcheck.switches import EngineState, ReferenceState
from p4reduce.sim.modelcheck.violation import Violation

__all__ = ["Bounds", "Checker", "EngineState", "Quotient", "ReferenceState", "Report", "Violation", "check"]
