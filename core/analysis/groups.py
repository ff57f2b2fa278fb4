"""A run group of the store, ready to be compared."""

from __future__ import annotations

from core.analysis.article import ARTICLE
from core.analysis.repeats import RunGroup, group_of
from core.analysis.summary import summarise
from core.storage.records import GroupRecord
from core.store import Store


def load_group(store: Store, group_id: str) -> RunGroup:
    """The group's repeats; warm-up runs are left out, and a repeat's start is what was asked for.

    Raises:
        StoreError: there is no such group.
    """
    if group_id == ARTICLE.group_id:
        return ARTICLE
    return loaded(store, store.groups.get(group_id))


def loaded(store: Store, record: GroupRecord) -> RunGroup:
    """As `load_group`, of a record that is at hand."""
    members = [member for member in record.members if member.purpose == "train"]
    return group_of(
        record.name,
        [summarise(store, member.run_id) for member in members],
        [member.label for member in members],
        [member.start for member in members],
        group_id=record.group_id,
        note=record.note,
    )
