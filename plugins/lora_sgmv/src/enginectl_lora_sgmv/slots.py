"""Who holds which slot: references, least recently used first, and turns for those that have waited."""

from __future__ import annotations

from dataclasses import dataclass, field

Content = tuple[str, str]
"""Name and version of an adapter."""


@dataclass(slots=True)
class Slot:
    """content: what its weights are, None for nothing. reserved_for: who gets it when its references are gone."""

    content: Content | None = None
    references: int = 0
    last_used: int = 0
    reserved_for: str | None = None


@dataclass(slots=True)
class SlotTable:
    """The ledger of the device's slots. It moves no weights."""

    slots: list[Slot]
    _uses: int = 0
    _waiting_since: dict[str, float] = field(default_factory=dict)

    @property
    def references(self) -> list[int]:
        """By slot."""
        return [slot.references for slot in self.slots]

    def find(self, content: Content) -> int | None:
        """The slot with these weights, unless it is promised to another adapter."""
        for i, slot in enumerate(self.slots):
            if slot.content == content:
                return i if slot.reserved_for in (None, content[0]) else None
        return None

    def is_resident(self, content: Content) -> bool:
        """Whether a slot has these weights."""
        return any(slot.content == content for slot in self.slots)

    def free_slot(self, name: str) -> int | None:
        """A slot without references that this adapter may take: its own reservation, an empty one, the oldest."""
        free = [i for i, slot in enumerate(self.slots) if not slot.references and slot.reserved_for in (None, name)]
        if not free:
            return None
        slots = self.slots
        return min(
            free, key=lambda i: (slots[i].reserved_for != name, slots[i].content is not None, slots[i].last_used)
        )

    def take(self, slot: int) -> None:
        """One reference more."""
        self._uses += 1
        self.slots[slot].references += 1
        self.slots[slot].last_used = self._uses

    def release(self, slot: int) -> None:
        """One reference less."""
        assert self.slots[slot].references > 0, f"slot {slot} is released twice"
        self.slots[slot].references -= 1

    def fill(self, slot: int, content: Content) -> None:
        """The slot has other weights now."""
        assert not self.slots[slot].references, f"slot {slot} is in use"
        self.slots[slot].content = content
        self.stop_waiting(content[0])

    def drop(self, slot: int) -> None:
        """Its weights are of no use any more, once nobody uses them."""
        if not self.slots[slot].references:
            self.slots[slot].content = None

    def clear(self, name: str) -> None:
        """Slots with weights of this adapter that nobody uses hold nothing any more, and it waits for none."""
        for i, slot in enumerate(self.slots):
            if slot.content is not None and slot.content[0] == name:
                self.drop(i)
        self.stop_waiting(name)

    def wait(self, name: str, now: float, patience_s: float) -> None:
        """It asked and got none. After `patience_s` the slot with the fewest references is promised to it."""
        since = self._waiting_since.setdefault(name, now)
        if now - since < patience_s or any(slot.reserved_for == name for slot in self.slots):
            return
        open_slots = [slot for slot in self.slots if slot.reserved_for is None]
        if open_slots:
            min(open_slots, key=lambda slot: slot.references).reserved_for = name

    def stop_waiting(self, name: str) -> None:
        """It has its slot, or wants none any more."""
        self._waiting_since.pop(name, None)
        for slot in self.slots:
            if slot.reserved_for == name:
                slot.reserved_for = None


def make_slots(count: int) -> SlotTable:
    """A table of empty slots."""
    return SlotTable([Slot() for _ in range(count)])
