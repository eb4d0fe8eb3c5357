"""A Ctrl-C is heeded wherever it arrives."""

import sys

import pytest

from mmjax.training.interrupts import kept_interrupts


class Raises:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_an_interrupt_in_a_destructor_is_raised_at_the_next_check(capsys):
    with kept_interrupts() as check:
        check()
        Raises(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            check()
    assert capsys.readouterr().err == ""


def test_other_errors_in_destructors_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with kept_interrupts() as check:
        Raises(ValueError("something else"))
        check()
    assert [of.exc_type for of in told] == [ValueError]
    assert sys.unraisablehook == told.append
