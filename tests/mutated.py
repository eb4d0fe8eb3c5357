"""What mmjax makes of the inputs that `mutations.py` spoils.

A mutation is accepted where everything is used whole or is what it was before, refused where a
UserError says so in one line; samples that mmjax lists as bad are counted. Anything else is a
fault: a traceback, a minute without an end, a sample that is lost or half used without a word.
"""

from __future__ import annotations

import faulthandler
import signal
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mutated_data import DataSets
from mutated_runs import Runs
from mutations import Mutation
from spoilable import Fault

from mmjax.errors import UserError

SECONDS = 60  # that a mutation may take; nearly all take a tenth of one


class Outcome(NamedTuple):
    """What became of one mutation."""

    way: str  # in which it was spoiled, and what
    verdict: str  # accepted, refused, fault
    listed: int = 0  # samples that are said to be bad
    told: str = ""  # the one line of a refusal, or what is wrong


def tried(mutations: Iterable[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Every mutation with what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        data, runs = DataSets(Path(folder).resolve()), Runs(Path(folder).resolve())
        for one in mutations:
            yield one, outcome_of(one, runs if hasattr(runs, one.kind) else data)


def outcome_of(one: Mutation, things: DataSets | Runs) -> Outcome:
    """Of one mutation: whatever mmjax raises but a UserError of one line is a fault."""
    way = ["?"]
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SECONDS)
    # where it hangs in a library, which no signal reaches
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        listed = getattr(things, one.kind)(one.random(), way)
        return Outcome(way[0], "accepted", listed)
    except UserError as error:
        one_line = bool(str(error).strip()) and "\n" not in str(error)
        return Outcome(way[0], "refused" if one_line else "fault", told=str(error))
    except Fault as fault:
        return Outcome(way[0], "fault", told=str(fault))
    except BaseException as error:  # what a command would end with, and its traceback
        frames = traceback.extract_tb(error.__traceback__)
        last = ([frame for frame in frames if "mmjax" in frame.filename] or frames)[-1]
        told = f"{last.filename}:{last.lineno}: {type(error).__name__}: {str(error)[:500]}"
        return Outcome(way[0], "fault", told=told)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _ring(signum: int, frame: Any) -> None:
    raise Fault(f"no end within {SECONDS} s: {' '.join(traceback.format_stack(frame)[-1].split())}")
