"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first in text that arrives in pieces.

    Of stop strings complete at the same character the one that begins first wins. Text is held
    back only while it could still be the beginning of a stop string, so a stream never shows part
    of one and never waits longer than it must. How the text is cut into pieces changes nothing.
    After a match further text is ignored.

    Each stop string runs its own Knuth-Morris-Pratt automaton: amortised constant work a character.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._progress = [0] * len(self._stops)  # characters of each stop that the text's end matches
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what is safe to show, and the stop string if one is complete."""
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        seen = len(self._held)
        self._held += text
        for end, char in enumerate(text, seen + 1):
            stop = self._advance(char)
            if stop is not None:
                return self._cut(stop, end)
        safe = len(self._held) - max(self._progress)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, None

    def finish(self) -> str:
        """The text still held, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every automaton; return the longest stop string that it completes."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            matched = self._progress[index]
            while matched and stop[matched] != char:
                matched = self._borders[index][matched - 1]
            if stop[matched] == char:
                matched += 1
            self._progress[index] = matched
            if matched == len(stop) and (complete is None or matched > len(complete)):
                complete = stop
        return complete

    def _cut(self, stop: str, end: int) -> tuple[str, str]:
        shown = self._held[: end if self._include_stop else end - len(stop)]
        self._held, self._matched = "", stop
        return shown, stop


def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that also ends it."""
    borders = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = borders[matched - 1]
        if pattern[matched] == pattern[index]:
            matched += 1
        borders[index] = matched
    return tuple(borders)
