# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of the decimal numbers within bounds of any size, exactly.

Numbers are written as JSON has them, without an exponent: `-?(0|[1-9][0-9]*)`, and a fraction where numbers need not be
integers. Zero has no sign. A bound leads to one alternative for each digit in which a smaller or larger number can
first differ from it, so the length of an expression is quadratic in the digits of the bounds.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

MAX_ALTERNATIVES = 100  # digits of a bound in which numbers within it can first differ
ANY_INTEGER = "-?(0|[1-9][0-9]*)"
_CONTEXT = Context(prec=5000)  # more digits than the reader of JSON accepts
_NATURAL = "(0|[1-9][0-9]*)"
_FRACTION = r"(\.[0-9]+)?"


class BoundError(ValueError):
    """A bound has too many significant digits."""


def least_integer(bound: Decimal, is_exclusive: bool) -> int:
    """Return the least integer that is at least `bound`, or greater if it is exclusive."""
    least = int(bound.to_integral_value(ROUND_CEILING, _CONTEXT))
    return least + (is_exclusive and least == bound)


def greatest_integer(bound: Decimal, is_exclusive: bool) -> int:
    """Return the greatest integer that is at most `bound`, or less if it is exclusive."""
    most = int(bound.to_integral_value(ROUND_FLOOR, _CONTEXT))
    return most - (is_exclusive and most == bound)


def integers_from(bound: Decimal, is_exclusive: bool) -> str:
    """Return the expression of the integers that are at least `bound`, or greater if it is exclusive."""
    least = least_integer(bound, is_exclusive)
    if least > 0:
        return _above(least - 1)
    return f"({_NATURAL}|-{_below(1 - least, 1)})" if least < 0 else _NATURAL


def integers_to(bound: Decimal, is_exclusive: bool) -> str:
    """Return the expression of the integers that are at most `bound`, or less if it is exclusive."""
    most = greatest_integer(bound, is_exclusive)
    if most < 0:
        return f"-{_above(-most - 1)}"
    return f"(-[1-9][0-9]*|{_below(most + 1, 0)})"


def numbers_from(bound: Decimal, is_exclusive: bool) -> str:
    """Return the expression of the decimal numbers that are at least `bound`, or greater if it is exclusive."""
    if bound >= 0:
        return _sizes_from(bound, is_exclusive)
    return f"({_NATURAL}{_FRACTION}|-{_sizes_to(bound.copy_abs(), is_exclusive)})"


def numbers_to(bound: Decimal, is_exclusive: bool) -> str:
    """Return the expression of the decimal numbers that are at most `bound`, or less if it is exclusive."""
    if bound < 0 or (bound == 0 and is_exclusive):
        return f"-{_sizes_from(bound.copy_abs(), is_exclusive)}"
    return f"(-{_NATURAL}{_FRACTION}|{_sizes_to(bound, is_exclusive)})"


def _sizes_from(bound: Decimal, is_exclusive: bool) -> str:
    """Return the unsigned numbers from a bound on, which is not negative."""
    whole, fraction = _parts(bound)
    return f"({_above(int(whole))}{_FRACTION}|{whole}{_fractions_from(fraction, is_exclusive)})"


def _sizes_to(bound: Decimal, is_exclusive: bool) -> str:
    """Return the unsigned numbers up to a bound, which is not negative; there must be some."""
    whole, fraction = _parts(bound)
    options = [f"{_below(int(whole), 0)}{_FRACTION}"] if int(whole) > 0 else []
    if fraction or not is_exclusive:
        options.append(f"{whole}{_fractions_to(fraction, is_exclusive)}")
    return _one_of(options)


def _parts(bound: Decimal) -> tuple[str, str]:
    """Return the digits of a number before and after its point, without zeros at the end."""
    whole, _, fraction = f"{bound:f}".partition(".")
    return whole, fraction.rstrip("0")


def _above(number: int) -> str:
    """Return the integers greater than one that is not negative."""
    digits = str(number)
    options = [f"[1-9][0-9]{{{len(digits)},}}"]
    for i, digit in enumerate(digits):
        if digit != "9":
            options.append(f"{digits[:i]}[{int(digit) + 1}-9]{_any_digits(len(digits) - i - 1)}")
    return _one_of(options)


def _below(number: int, least: int) -> str:
    """Return the integers from `least`, which is 0 or 1, to below a greater number."""
    digits = str(number)
    options = ["0"] if least == 0 else []
    if len(digits) > 1:
        options.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for i, digit in enumerate(digits):
        lowest = 1 if i == 0 else 0  # there are no leading zeros, and zero itself is above
        if int(digit) > lowest:
            options.append(f"{digits[:i]}[{lowest}-{int(digit) - 1}]{_any_digits(len(digits) - i - 1)}")
    return _one_of(options)


def _fractions_from(digits: str, is_exclusive: bool) -> str:
    """Return the fractions, with their point, that are at least `0.digits`, or greater."""
    rest = "[0-9]*[1-9][0-9]*" if is_exclusive else "[0-9]*"
    if not digits:
        return rf"\.{rest}" if is_exclusive else _FRACTION
    options = [f"{digits[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(digits) if digit != "9"]
    return rf"\.{_one_of([*options, digits + rest])}"


def _fractions_to(digits: str, is_exclusive: bool) -> str:
    """Return the fractions, with their point, or none, that are at most `0.digits`, or less."""
    if not digits:
        return r"(\.0+)?"
    options = [f"{digits[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(digits) if digit != "0"]
    options += [digits[:i] for i in range(1, len(digits))]  # what is cut off is not zero, as the last digit is not
    if not is_exclusive:
        options.append(f"{digits}0*")
    return rf"(\.{_one_of(options)})?"


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _one_of(options: list[str]) -> str:
    if len(options) > MAX_ALTERNATIVES:
        raise BoundError(f"expected a bound with at most {MAX_ALTERNATIVES} significant digits")
    return f"({'|'.join(options)})"
