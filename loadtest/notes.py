"""What a reader has to know beside a result's figures, in a sentence each."""

from __future__ import annotations

from loadtest.judgements import Summary
from loadtest.machine import UNSTEADY, why_uncorrected
from loadtest.quantity import interval, number, share
from loadtest.records import Run, RunKind


def notes_of(run: Run, summary: Summary) -> list[str]:
    return [*summary.notes, *machine_notes(run, summary), *front_end_notes(summary)]


def machine_notes(run: Run, summary: Summary) -> list[str]:
    """Of the machine's speed."""
    if run.kind is RunKind.FAULTS:
        return []
    if why := why_uncorrected(run):
        return [f"Not corrected for the machine's speed: {why}."]
    known = summary.measures
    if "machine_slowest" not in known:
        return []
    slowest, fastest = share(known["machine_slowest"]), share(known["machine_fastest"])
    unsteady = (
        f"of {known['machine_unsteady_levels']:g} levels it is known no better than to {share(UNSTEADY)} (unsteady)"
    )
    found = [f"The machine ran at {slowest} to {fastest} of its mean speed; {unsteady}."]
    if summary.corrected_knee is not None:
        found.append(f"The knee over the machine's speed: {interval(summary.corrected_knee)}.")
    return found


def front_end_notes(summary: Summary) -> list[str]:
    """Of an overhead run."""
    known = summary.measures
    if "frontend_us_a_message" not in known:
        return []
    token, message = (number(known[f"frontend_us_a_{what}"]) for what in ("token", "message"))
    return [
        f"The front end's CPU, by least squares over all loads: {token} us a token and {message} us a message, "
        "whatever is in it. With few tokens a message, as at low load, these mostly pay for the message."
    ]
